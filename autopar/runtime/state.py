"""The parameters and buffers of a compiled module: laid out on the mesh under the names the model gave them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.capture.state import Held, held_tensors
from autopar.cost_models.errors import InputError, RuntimeStateError
from autopar.passes.placement import Layout, local_shape
from autopar.runtime.groups import Groups
from autopar.runtime.layout import dtensor_spec, is_replicated, local_part
from autopar.runtime.world import World
from autopar.torch_private import DTensorSpec, dtensor

Pair = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(slots=True, kw_only=True)
class Stored:
    """One distinct parameter or buffer of the compiled module.

    Attributes:
        names: dotted names, the canonical one first.
        slots: the dicts and keys of the modules that hold it.
        is_parameter: whether it is a parameter.
        tensor: the object that the modules hold: a DTensor under several ranks (a plain tensor for a replicated
            buffer), a plain tensor alone.
        layout: its placements on the mesh of the rank's pipeline stage.
        present: whether this rank's stage holds it; if not, ``tensor`` is a meta tensor and the modules hold None.
        holders: pipeline stages that hold it.
        spec: what every DTensor of this layout shares (its gradients do); None alone.
    """

    names: tuple[str, ...]
    slots: list[tuple[dict[str, Any], str]]
    is_parameter: bool
    tensor: torch.Tensor
    layout: Layout
    present: bool = True
    holders: int = 1
    spec: DTensorSpec | None = None

    @property
    def name(self) -> str:
        """The canonical name."""
        return self.names[0]

    def give_up(self) -> None:
        """Another pipeline stage holds it: keep what capture needs to know."""
        kept = torch.empty_strided(self.tensor.shape, self.tensor.stride(), dtype=self.tensor.dtype, device="meta")
        wanted = self.is_parameter and self.tensor.requires_grad
        self.tensor = nn.Parameter(kept, requires_grad=wanted) if self.is_parameter else kept
        self.present, self.holders = False, 0
        for table, key in self.slots:
            table[key] = None

    def local(self) -> torch.Tensor:
        """This rank's part, as a plain tensor without a place in autograd."""
        with torch.no_grad():
            return self.tensor.to_local() if isinstance(self.tensor, DTensor) else self.tensor.detach()


class ModelState:
    """The distinct tensors of a model, before and after they are laid out.

    Attributes:
        stored: parameters, then buffers, in the order in which the model registered them.
        uninitialised: canonical names of tensors that were on meta and hold no values yet.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters, buffers = held_tensors(model)
        self.model = model
        self.stored = [_stored(held) for held in parameters + buffers]
        self.uninitialised: set[str] = set()
        self._groups: Groups | None = None
        self._by_name = {name: entry for entry in self.stored for name in entry.names}

    def __getitem__(self, name: str) -> Stored:
        return self._by_name[name]

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    @property
    def parameters(self) -> list[Stored]:
        """The distinct parameters."""
        return [entry for entry in self.stored if entry.is_parameter]

    def describe(self) -> list[tuple[object, ...]]:
        """What must be equal on all ranks: names, shapes, dtypes and flags of every tensor."""
        return [
            (e.names, tuple(e.tensor.shape), str(e.tensor.dtype), e.is_parameter and e.tensor.requires_grad)
            for e in self.stored
        ]

    def place(self, world: World, groups: Groups | None, layouts: Callable[[str], Layout | None]) -> list[Pair]:
        """Lay every tensor out; rank 0's values are given to all.

        A rank needs room for one whole tensor at a time beside what it keeps.  Tensors that rank 0 holds on meta are
        allocated and left without values.

        Args:
            world: the processes.
            groups: the mesh they form; None for a world of one.
            layouts: the layout of a tensor by its canonical name; None where another pipeline stage holds it.

        Returns:
            (old, new) for every tensor that was replaced; new is None where another stage holds it.
        """
        self._groups = groups
        on_meta = world.from_first([entry.tensor.is_meta for entry in self.stored])
        replaced: list[Pair] = []
        for entry, empty in zip(self.stored, on_meta, strict=True):
            old = entry.tensor
            layout = layouts(entry.name)
            if groups is None and not old.is_meta:
                entry.layout = layout or ()
                continue
            whole = None if groups is None or empty else _whole(old, world)
            if layout is None:
                replaced.append((old, None))
                entry.give_up()
                continue
            entry.layout = layout
            if groups is not None:
                entry.spec = dtensor_spec(entry.layout, old.shape, old.dtype, groups.mesh, groups.device_mesh)
            local = _allocated(entry, world, groups) if groups is None or whole is None else _cut(whole, layout, groups)
            new = _as_stored(entry, local)
            if entry.is_parameter and old.grad is not None and groups is not None:
                new.grad = _as_dtensor(entry, _cut(old.grad, layout, groups))
            if empty:
                self.uninitialised.add(entry.name)
            entry.tensor = new
            for table, key in entry.slots:
                table[key] = new
            replaced.append((old, new))
        _rebind(self.model, {id(old): new for old, new in replaced})
        if groups is not None:
            self._count_holders(world, groups)
        return replaced

    def _count_holders(self, world: World, groups: Groups) -> None:
        held = [name for names in world.exchange([e.name for e in self.stored if e.present]) for name in names]
        for entry in self.stored:
            entry.holders = held.count(entry.name) // groups.mesh.size

    @contextlib.contextmanager
    def complete(self) -> Iterator[None]:
        """Let the modules hold meta tensors in place of what other stages hold, so that the model can be captured."""
        absent = [(table, key, e.tensor) for e in self.stored if not e.present for table, key in e.slots]
        for table, key, tensor in absent:
            table[key] = tensor
        try:
            yield
        finally:
            for table, key, _ in absent:
                table[key] = None

    def stale(self) -> str | None:
        """The name of a tensor that was replaced in a module after it was laid out, or None."""
        for entry in self.stored:
            held = entry.tensor if entry.present else None
            if any(table.get(key) is not held for table, key in entry.slots):
                return entry.name
        return None

    def fill(self, name: str, whole: torch.Tensor) -> None:
        """Write this rank's part of a ``whole`` tensor that every rank has."""
        entry, groups = self[name], self._groups
        if not entry.present:
            return
        with torch.no_grad():
            entry.local().copy_(whole if groups is None else local_part(whole, entry.layout, groups.mesh, groups.rank))
        self.uninitialised.discard(entry.name)

    def laid_out_like(self, like: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """A ``whole`` tensor, equal on all ranks, in the layout of the parameter or buffer ``like``."""
        groups = self._groups
        if not isinstance(like, DTensor) or groups is None:
            return whole
        entry = next(e for e in self.stored if e.tensor is like)
        part = local_part(whole.to(like.device), entry.layout, groups.mesh, groups.rank)
        spec = dtensor_spec(entry.layout, whole.shape, whole.dtype, groups.mesh, groups.device_mesh)
        return dtensor(part.clone(memory_format=torch.contiguous_format), spec)

    def loaded(self, names: Collection[str]) -> None:
        """Note that the tensors of these names have got their values."""
        self.uninitialised -= {self[name].name for name in names if name in self}


def _stored(held: Held) -> Stored:
    return Stored(
        names=tuple(held.names), slots=list(held.slots), is_parameter=held.is_parameter, tensor=held.tensor, layout=()
    )


def _whole(old: torch.Tensor, world: World) -> torch.Tensor:
    """Rank 0's values on every rank."""
    if isinstance(old, DTensor):  # compiled before, perhaps with another plan
        with torch.no_grad():
            return old.full_tensor()
    whole = torch.empty(old.shape, dtype=old.dtype, device=world.device) if old.is_meta else old.detach().contiguous()
    dist.broadcast(whole.reshape(-1).view(torch.uint8), src=0)  # as bytes: gloo does not know every dtype
    return whole


def _allocated(entry: Stored, world: World, groups: Groups | None) -> torch.Tensor:
    """Memory for this rank's part."""
    shape = tuple(entry.tensor.shape)
    if groups is not None:
        shape = local_shape(shape, entry.layout, groups.mesh.sizes, groups.mesh.coords(groups.rank))
    return torch.empty(shape, dtype=entry.tensor.dtype, device=world.device)


def _cut(whole: torch.Tensor, layout: Layout, groups: Groups) -> torch.Tensor:
    """This rank's part of ``whole``, in memory of its own unless it is the whole."""
    part = local_part(whole, layout, groups.mesh, groups.rank)
    return part if is_replicated(layout) else part.clone(memory_format=torch.contiguous_format)


def _as_stored(entry: Stored, local: torch.Tensor) -> torch.Tensor:
    if entry.spec is None or (not entry.is_parameter and is_replicated(entry.layout)):
        new = local
    else:
        new = _as_dtensor(entry, local)
    if not entry.is_parameter:
        return new
    parameter = nn.Parameter(new, requires_grad=entry.tensor.requires_grad)
    parameter.__dict__.update(vars(entry.tensor))  # marks that users put on their parameters
    return parameter


def _as_dtensor(entry: Stored, local: torch.Tensor) -> torch.Tensor:
    if entry.spec is None:
        raise RuntimeStateError(f"{entry.name} has no layout yet")
    return dtensor(local, entry.spec)


def _rebind(model: nn.Module, replaced: Mapping[int, torch.Tensor | None]) -> None:
    """Replace the tensors that modules hold beside their tables: an RNN's flat weights, a list of ties."""
    if not replaced:
        return
    for module in model.modules():
        for key, value in list(vars(module).items()):
            if key not in ("_parameters", "_buffers", "_modules"):
                vars(module)[key] = _replace(value, replaced)
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()


def _replace(value: object, replaced: Mapping[int, torch.Tensor | None]) -> object:
    if isinstance(value, torch.Tensor):
        return replaced.get(id(value), value)
    if type(value) in (list, tuple) and any(id(v) in replaced for v in value):  # type: ignore[attr-defined]
        return type(value)(replaced.get(id(v), v) for v in value)  # type: ignore[call-arg,attr-defined]
    if type(value) is dict and any(id(v) in replaced for v in value.values()):
        return {key: replaced.get(id(v), v) for key, v in value.items()}
    return value


def check_same_model(state: ModelState, world: World) -> None:
    """Refuse ranks that hold different models.

    Raises:
        InputError: naming the first tensor that differs.
    """
    mine = state.describe()
    for rank, theirs in enumerate(world.exchange(mine)):
        if theirs == mine:
            continue
        for here, there in itertools.zip_longest(mine, theirs):
            if here != there:
                raise InputError(
                    f"rank {world.rank} holds {_said(here)} where rank {rank} holds {_said(there)}: every rank must "
                    "build the same model"
                )


def _said(row: tuple[object, ...] | None) -> str:
    if row is None:
        return "nothing"
    names, shape, dtype, trained = row
    flag = "trainable" if trained else "not trainable"
    return f"{names[0]} ({dtype}{list(shape)}, {flag})"  # type: ignore[index,call-overload]


def device_of(model: nn.Module, inputs: Collection[torch.Tensor]) -> torch.device:
    """Where the model computes: the device of its tensors, for models on meta that of the inputs, else the CPU.

    Raises:
        InputError: its tensors are on several devices.
    """
    held = [h for group in held_tensors(model) for h in group if not h.tensor.is_meta]
    devices = {h.tensor.device: h.names[0] for h in held}
    if len(devices) > 1:
        said = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise InputError(f"the model is on several devices ({said}); move it to one with .to(device) before compiling")
    for device in devices:
        return device
    return next((t.device for t in inputs if not t.is_meta), torch.device("cpu"))
