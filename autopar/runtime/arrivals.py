"""A kind of call that is new: what every rank passed, whether it fits together, and the global call behind it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from autopar.capture import flatten_call
from autopar.cost_models.errors import InputError
from autopar.passes.base import Mesh
from autopar.passes.placement import REPLICATE, Layout, Placement, chunk, make_shard
from autopar.runtime.border import batch_layout
from autopar.runtime.groups import Groups
from autopar.runtime.layout import dtensor_placements, is_storable
from autopar.runtime.outputs import LeafLayouts
from autopar.runtime.world import World
from autopar.torch_private import DTensorSpec, pytree


@dataclass(frozen=True, kw_only=True)
class GlobalCall:
    """What one device would be called with, where ranks pass parts of it.

    Attributes:
        args: positional arguments; tensors of which ranks hold parts are meta tensors.
        kwargs: keyword arguments.
        targets: targets.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    targets: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """One call as this rank passed it.

    Attributes:
        leaves: its flattened leaves.
        names: a name for each, such as ``args[0]``.
        spec: pytree spec of ``(args, kwargs, targets)``.
    """

    leaves: list[Any]
    names: tuple[str, ...]
    spec: Any

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[Any]) -> Arrival:
        """Flatten a call."""
        leaves, spec, names = flatten_call(args, kwargs, targets)
        return cls(leaves=leaves, names=names, spec=spec)

    @property
    def tensors(self) -> list[tuple[int, torch.Tensor]]:
        """The tensor leaves with their positions."""
        return [(i, leaf) for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]

    def check_devices(self, device: torch.device, *, example: bool) -> None:
        """Refuse inputs on another device than the module's.

        Args:
            device: the module's.
            example: whether this is a call to compile for, whose inputs may be on meta.

        Raises:
            InputError: naming the input.
        """
        for i, tensor in self.tensors:
            if tensor.device != device and not (example and tensor.is_meta):
                raise InputError(
                    f"{self.names[i]} is on {tensor.device} and the model is on {device}: move it there with "
                    f".to({str(device)!r})"
                )

    def describe(self) -> list[tuple[str, str]]:
        """(name, what it is) of every leaf, to be compared between ranks."""
        return [(name, _kind(leaf)) for name, leaf in zip(self.names, self.leaves, strict=True)]

    def outline(self) -> list[tuple[str, str]]:
        """(name, kind) of every leaf without the sizes of tensors, to be compared between ranks that pass parts."""
        kinds = [f"{leaf.dtype} {leaf.dim()}" if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in self.leaves]
        return list(zip(self.names, kinds, strict=True))

    def differences(self, names: Sequence[str]) -> str:
        """In words, which inputs this call has that another one with ``names`` has not, and the other way round."""
        added = [name for name in self.names if name not in names]
        missing = [name for name in names if name not in self.names]
        parts = [f"has {', '.join(added)}"] * bool(added) + [f"lacks {', '.join(missing)}"] * bool(missing)
        return " and ".join(parts)

    def as_global(self, layouts: LeafLayouts, shapes: Mapping[int, tuple[int, ...]]) -> GlobalCall:
        """The global call: tensors that are not whole here become meta ones.

        Args:
            layouts: how the leaves lie that are not whole.
            shapes: global shapes of those that are plain tensors.
        """
        leaves = list(self.leaves)
        for i, tensor in self.tensors:
            if i in shapes or i in layouts:
                shape = shapes.get(i, tuple(tensor.shape))
                leaves[i] = torch.empty(shape, dtype=tensor.dtype, device="meta").requires_grad_(tensor.requires_grad)
        args, kwargs, targets = pytree.tree_unflatten(leaves, self.spec)
        return GlobalCall(args=args, kwargs=kwargs, targets=targets)


def _kind(leaf: Any) -> str:  # noqa: ANN401 - whatever users pass
    if isinstance(leaf, torch.Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return repr(leaf)


def check_equal(arrival: Arrival, world: World) -> None:
    """Every rank must pass the same global batch, as far as shapes, dtypes and constants go.

    Raises:
        InputError: on all ranks, naming the first input that differs.
    """
    mine = arrival.describe()
    everyone = world.exchange(mine)
    for rank, theirs in enumerate(everyone):
        for here, there in zip(everyone[0], theirs, strict=False):
            if here != there:
                raise InputError(
                    f"rank {rank} passes {there[0]} = {there[1]} where rank 0 passes {here[0]} = {here[1]}: with "
                    'batch="global" every rank passes the same global batch; use batch="local" to pass parts'
                )
        if len(theirs) != len(everyone[0]):
            raise InputError(f"rank {rank} passes {len(theirs)} inputs where rank 0 passes {len(everyone[0])}")


def dtensor_layouts(arrival: Arrival) -> dict[int, DTensorSpec]:
    """The layouts of the inputs that are DTensors."""
    return {i: tensor._spec for i, tensor in arrival.tensors if isinstance(tensor, DTensor)}


def input_layouts(arrival: Arrival, layouts: LeafLayouts, groups: Groups | None) -> dict[str, Layout]:
    """How the inputs lie that are parts, by name, for the plan to take them as they come.

    A DTensor on another mesh, or one that is split in a way of its own, is left to be redistributed at every call.
    """
    found: dict[str, Layout] = {}
    for i, layout in layouts.items():
        known = layout if not isinstance(layout, DTensorSpec) else _layout_of(layout, groups)
        if known is not None:
            found[arrival.names[i]] = known
    return found


def _layout_of(spec: DTensorSpec, groups: Groups | None) -> Layout | None:
    if groups is None or spec.mesh != groups.device_mesh:
        return None
    found: list[Placement] = []
    for placement, ranks in zip(spec.placements, groups.mesh.sizes, strict=True):
        if isinstance(placement, TorchShard):
            found.append(make_shard(placement.dim, 1, spec.shape[placement.dim], ranks) if ranks > 1 else REPLICATE)
        elif isinstance(placement, TorchReplicate):
            found.append(REPLICATE)
        else:
            return None
    layout = tuple(found)
    same = is_storable(layout, spec.shape, groups.mesh)
    return layout if same and dtensor_placements(layout, spec.shape, groups.mesh) == spec.placements else None


def local_batch(arrival: Arrival, world: World, mesh: Mesh) -> tuple[dict[int, Layout], dict[int, tuple[int, ...]]]:
    """The global call behind parts of a batch.

    Args:
        arrival: what this rank passed.
        world: the processes.
        mesh: the grid; ranks with the same place on "dp" pass the same part.

    Returns:
        the layout of every input that looks like a part (it has as many rows as the first tensor that has rows), and
        the global shape of each, by position.

    Raises:
        InputError: on all ranks, where the parts do not fit together.
    """
    plain = {i: tuple(t.shape) for i, t in arrival.tensors if not isinstance(t, DTensor)}
    everyone = world.exchange((arrival.outline(), plain))
    by_part = [everyone[mesh.rank(_first_at(mesh, index))] for index in range(mesh.axis_size("dp"))]
    for rank, theirs in enumerate(everyone):
        if theirs[0] != everyone[0][0]:
            raise InputError(f"rank {rank} passes inputs of another structure or dtype than rank 0")
        part = by_part[mesh.coords(rank)[mesh.axes.index("dp")]]
        if theirs != part:
            raise InputError(f"rank {rank} passes inputs of shapes {theirs[1]} where its data rank passes {part[1]}")
    parts = [shapes for _, shapes in by_part]
    first = next((i for i, shape in plain.items() if shape), -1)
    layouts: dict[int, Layout] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    for i, shape in plain.items():
        rows = [part[i][0] if part[i] else -1 for part in parts]
        if first < 0 or rows != [part[first][0] for part in parts]:
            continue
        total = sum(rows)
        wanted = [chunk(total, len(rows), index)[1] for index in range(len(rows))]
        if rows != wanted:
            raise InputError(
                f"the data ranks pass {rows} rows of {arrival.names[i]}; {total} rows are split as {wanted}: give "
                "every data rank that many, or drop the last incomplete batch"
            )
        shapes[i] = (total, *shape[1:])
        layouts[i] = batch_layout(shapes[i], mesh)
    return layouts, shapes


def _first_at(mesh: Mesh, index: int) -> tuple[int, ...]:
    return tuple(index if axis == "dp" else 0 for axis in mesh.axes)


def digest(tensor: torch.Tensor) -> str:
    """A checksum of a tensor's values."""
    if isinstance(tensor, DTensor) or tensor.is_meta:
        return ""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(raw.tobytes(), digest_size=16).hexdigest()


def equal_everywhere(arrival: Arrival, world: World) -> list[int]:
    """Positions of the tensors whose values are known and equal on all ranks."""
    everyone = world.exchange([(i, digest(t)) for i, t in arrival.tensors])
    return [i for n, (i, one) in enumerate(everyone[0]) if one and all(other[n][1] == one for other in everyone)]


def check_values(arrival: Arrival, world: World, mesh: Mesh | None, parts: Sequence[int]) -> None:
    """Inputs that ranks must share are equal on them.

    Args:
        arrival: what this rank passed.
        world: the processes.
        mesh: the grid.
        parts: positions of inputs that are parts: only ranks of one data rank share them.

    Raises:
        InputError: on all ranks, naming the input.
    """
    if mesh is None:
        return
    everyone = world.exchange([digest(t) for _, t in arrival.tensors])
    axis = mesh.axes.index("dp") if "dp" in mesh.axes else -1
    for n, (i, _) in enumerate(arrival.tensors):
        for rank, theirs in enumerate(everyone):
            like = mesh.rank(_first_at(mesh, mesh.coords(rank)[axis])) if i in parts else 0
            if theirs[n] != everyone[like][n]:
                raise InputError(
                    f"the values of {arrival.names[i]} differ between rank {like} and rank {rank}: with "
                    'batch="global" every rank passes the same global batch (seed the data loader alike on all ranks), '
                    'with batch="local" every data rank passes its part'
                )
