"""Tensors that cross the border of a program: from what callers pass to what it takes, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from autopar.passes.base import Mesh, ProgramTensor
from autopar.passes.placement import REPLICATE, Layout, Shard, local_shape
from autopar.runtime.groups import Groups
from autopar.runtime.layout import dtensor_placements, dtensor_spec, is_replicated, local_part
from autopar.torch_private import dtensor

Reader = Callable[[torch.Tensor], torch.Tensor]


def same_layout(one: Layout, other: Layout, mesh: Mesh) -> bool:
    """Whether a rank holds the same under both: what an axis of one rank does makes no difference."""
    pairs = zip(one, other, mesh.sizes, strict=True)
    return all(size == 1 or here == there for here, there, size in pairs)


def batch_layout(shape: Sequence[int], mesh: Mesh) -> Layout:
    """How a tensor lies whose data ranks each pass their part: dim 0 split over "dp" and nothing else."""
    units = mesh.axis_size("dp") if shape[0] % mesh.axis_size("dp") == 0 else shape[0]
    return tuple(Shard(0, 1, units) if axis == "dp" else REPLICATE for axis in mesh.axes)


def reader(have: Layout, want: ProgramTensor, groups: Groups | None, rank: int) -> Reader | None:
    """How to get a program's input from a plain tensor that lies as ``have`` says; None where it is the same.

    It is called without gradients, by every rank alike: it may communicate.
    """
    if groups is None or same_layout(have, want.layout, groups.mesh):
        return None
    mesh, layout = groups.mesh, want.layout
    if is_replicated(have):
        return lambda tensor: local_part(tensor, layout, mesh, rank).contiguous()
    source = dtensor_spec(have, want.shape, want.dtype, mesh, groups.device_mesh)
    placements = dtensor_placements(layout, want.shape, mesh)
    return lambda tensor: _redistributed(dtensor(tensor.contiguous(), source), placements)


def dtensor_reader(want: ProgramTensor, groups: Groups | None, rank: int) -> Reader:
    """How to get a program's input from a DTensor of any layout, on this mesh or another one of the same ranks."""
    if groups is None:
        return lambda tensor: _as_dtensor(tensor).full_tensor()
    mesh, device_mesh = groups.mesh, groups.device_mesh
    placements = dtensor_placements(want.layout, want.shape, mesh)

    def read(tensor: torch.Tensor) -> torch.Tensor:
        here = _as_dtensor(tensor)
        if here.device_mesh != device_mesh:
            return local_part(here.full_tensor(), want.layout, mesh, rank).contiguous()
        return here.to_local() if tuple(here.placements) == placements else _redistributed(here, placements)

    return read


def writer(
    have: ProgramTensor, want: Layout | Sequence[TorchPlacement], groups: Groups | None, *, plain: bool
) -> Reader | None:
    """How to give out a tensor that a program made: in another layout, as a DTensor or as a plain tensor.

    Args:
        have: how the program returns it.
        want: layout (or DTensor placements) to give it out in.
        groups: the mesh; None alone.
        plain: give out this rank's part as a plain tensor instead of a DTensor.

    Returns:
        None where it is given out as it is.
    """
    if groups is None:
        return None
    mesh = groups.mesh
    placements = _placements(want, have, mesh)
    source = dtensor_spec(have.layout, have.shape, have.dtype, mesh, groups.device_mesh)
    if source.placements == placements:
        return None if plain else lambda tensor: dtensor(tensor, source)
    if plain:
        return lambda tensor: _redistributed(dtensor(tensor, source), placements)
    return lambda tensor: dtensor(tensor, source).redistribute(placements=placements)


def _placements(want: Layout | Sequence[TorchPlacement], have: ProgramTensor, mesh: Mesh) -> tuple[TorchPlacement, ...]:
    if any(isinstance(placement, TorchPlacement) for placement in want):
        return tuple(want)  # type: ignore[arg-type]
    return dtensor_placements(tuple(want), have.shape, mesh)  # type: ignore[arg-type]


def _redistributed(tensor: DTensor, placements: Sequence[TorchPlacement]) -> torch.Tensor:
    return tensor.redistribute(placements=placements).to_local()


def _as_dtensor(tensor: torch.Tensor) -> DTensor:
    if not isinstance(tensor, DTensor):
        raise TypeError(f"a {type(tensor).__name__} is not a DTensor")
    return tensor


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor.  Called without gradients."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_zeros(want: ProgramTensor, groups: Groups | None, rank: int, device: torch.device) -> torch.Tensor:
    """Zeros of the shape that ``rank`` holds of ``want``."""
    shape = want.shape
    if groups is not None:
        shape = local_shape(shape, want.layout, groups.mesh.sizes, groups.mesh.coords(rank))
    return torch.zeros(shape, dtype=want.dtype, device=device)
