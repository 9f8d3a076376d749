"""Tensors that cross the border of a program: from what callers pass to what it takes, and back.

Each function here is asked once, when a program is bound, and answers with what to do at every call (None: nothing).
What it answers may communicate: all ranks do it alike, without gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from autopar.cost_models.errors import InputError
from autopar.passes.base import Mesh, ProgramTensor
from autopar.passes.placement import REPLICATE, Layout, Shard, chunk, local_shape, local_view
from autopar.runtime.groups import Groups
from autopar.runtime.layout import dtensor_placements, dtensor_spec, is_replicated, is_storable, local_part, storable
from autopar.torch_private import DTensorSpec, dtensor, local_tensor

Relayout = Callable[[torch.Tensor], torch.Tensor]


def same_layout(one: Layout, other: Layout, mesh: Mesh) -> bool:
    """Whether a rank holds the same under both: what an axis of one rank does makes no difference."""
    pairs = zip(one, other, mesh.sizes, strict=True)
    return all(size == 1 or here == there for here, there, size in pairs)


def batch_layout(shape: Sequence[int], mesh: Mesh) -> Layout:
    """How a tensor lies whose data ranks each pass their part: dim 0 split over "dp" and nothing else."""
    units = mesh.axis_size("dp") if shape[0] % mesh.axis_size("dp") == 0 else shape[0]
    return tuple(Shard(0, 1, units) if axis == "dp" else REPLICATE for axis in mesh.axes)


def relayout(have: Layout, want: ProgramTensor, groups: Groups | None) -> Relayout | None:
    """From a rank's part under one layout to its part under another, as plain tensors."""
    if groups is None or same_layout(have, want.layout, groups.mesh):
        return None
    mesh, shape, layout = groups.mesh, want.shape, want.layout
    if is_replicated(have):
        return lambda tensor: local_part(tensor, layout, mesh, groups.rank).contiguous()
    if not (is_storable(have, shape, mesh) and is_storable(layout, shape, mesh)):
        return lambda tensor: local_part(gathered(tensor, have, shape, groups), layout, mesh, groups.rank).contiguous()
    source = dtensor_spec(have, shape, want.dtype, mesh, groups.device_mesh)
    placements = dtensor_placements(layout, shape, mesh)
    return lambda tensor: _redistributed(dtensor(tensor.contiguous(), source), placements)


def gathered(part: torch.Tensor, layout: Layout, shape: tuple[int, ...], groups: Groups) -> torch.Tensor:
    """The whole tensor of which every rank holds a part, for layouts that DTensor does not know.

    Raises:
        InputError: a placement is a partial sum, which is no part.
    """
    mesh, here = groups.mesh, list(layout)
    coords = mesh.coords(groups.rank)
    for axis, placement in enumerate(layout):
        if placement == REPLICATE:
            continue
        if not isinstance(placement, Shard):
            raise InputError(f"a tensor laid out as {layout} cannot be gathered: {placement} is not a part of it")
        dim, blocks, units, rest = local_view(shape, tuple(here), axis, mesh.sizes, coords)
        ranks = mesh.sizes[axis]
        longest = chunk(units, ranks, 0)[1]
        mine = part.movedim(dim, 0).reshape(blocks, -1, rest, *part.movedim(dim, 0).shape[1:]).movedim(1, 0)
        padded = mine.new_zeros(longest, *mine.shape[1:])
        padded[: mine.shape[0]] = mine
        pieces = [torch.empty_like(padded) for _ in range(ranks)]
        dist.all_gather(pieces, padded, group=groups.group(mesh.axes[axis]))
        kept = [piece[: chunk(units, ranks, index)[1]] for index, piece in enumerate(pieces)]
        part = torch.cat(kept).movedim(0, 1).flatten(0, 2).movedim(0, dim)
        here[axis] = REPLICATE
    return part.contiguous()


def dtensor_reader(want: ProgramTensor, groups: Groups | None) -> Relayout:
    """From a DTensor of any layout, on this mesh or another one of the same ranks, to a program's input."""
    if groups is None:
        return lambda tensor: _as_dtensor(tensor).full_tensor()
    mesh, device_mesh = groups.mesh, groups.device_mesh
    known = is_storable(want.layout, want.shape, mesh)
    placements = dtensor_placements(want.layout, want.shape, mesh) if known else ()

    def read(tensor: torch.Tensor) -> torch.Tensor:
        here = _as_dtensor(tensor)
        if not known or here.device_mesh != device_mesh:
            return local_part(here.full_tensor(), want.layout, mesh, groups.rank).contiguous()
        return here.to_local() if tuple(here.placements) == placements else _redistributed(here, placements)

    return read


def dtensor_writer(made: ProgramTensor, groups: Groups | None) -> Relayout | None:
    """From a program's output to the DTensor that callers get."""
    if groups is None:
        return None
    layout = storable(made.layout, made.shape, groups.mesh)
    spec = dtensor_spec(layout, made.shape, made.dtype, groups.mesh, groups.device_mesh)
    move = relayout(made.layout, ProgramTensor(layout=layout, shape=made.shape, dtype=made.dtype), groups)
    if move is None:
        return lambda tensor: dtensor(tensor, spec)
    return lambda tensor: dtensor(move(tensor), spec)


def like_dtensor(made: ProgramTensor, spec: DTensorSpec, groups: Groups | None) -> Relayout | None:
    """From a program's output to the local part of a DTensor that lies as ``spec`` says.

    Raises:
        InputError: that DTensor is on another mesh.
    """
    if groups is None:
        return None
    if spec.mesh != groups.device_mesh:
        raise InputError(
            f"an input that requires a gradient is a DTensor on {spec.mesh}; put it on the module's own mesh "
            f"{groups.device_mesh} (a parameter's .device_mesh), or pass a plain tensor"
        )
    source = dtensor_spec(made.layout, made.shape, made.dtype, groups.mesh, groups.device_mesh)
    if source.placements == spec.placements:
        return None
    return lambda tensor: _redistributed(dtensor(tensor, source), spec.placements)


def _redistributed(tensor: DTensor, placements: Sequence[TorchPlacement]) -> torch.Tensor:
    return tensor.redistribute(placements=placements).to_local()


def _as_dtensor(tensor: torch.Tensor) -> DTensor:
    if not isinstance(tensor, DTensor):
        raise InputError(f"the program was made for a DTensor and was given a {type(tensor).__name__}")
    return tensor


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, without a place in autograd."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def local_zeros(want: ProgramTensor, groups: Groups | None, device: torch.device) -> torch.Tensor:
    """Zeros of the shape that ``rank`` holds of ``want``."""
    shape = want.shape
    if groups is not None:
        shape = local_shape(shape, want.layout, groups.mesh.sizes, groups.mesh.coords(groups.rank))
    return torch.zeros(shape, dtype=want.dtype, device=device)
