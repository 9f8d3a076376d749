"""Layouts at the border of a program: placements as DTensor placements, and a rank's part of a whole tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from autopar.cost_models.errors import PlanError
from autopar.passes.base import Mesh
from autopar.passes.placement import REPLICATE, Layout, Partial, Replicate, Shard, chunk, shards_of_dim
from autopar.torch_private import DTensorSpec, StridedShard, TensorMeta


def is_replicated(layout: Layout) -> bool:
    """Whether every rank holds the whole tensor."""
    return all(isinstance(placement, Replicate) for placement in layout)


def dtensor_placements(layout: Layout, shape: Sequence[int], mesh: Mesh) -> tuple[TorchPlacement, ...]:
    """The DTensor placements, one a mesh axis, under which a rank's local tensor is what ``layout`` gives it.

    DTensor splits a dim by the mesh axes from left to right; a shard whose blocks are not all split by axes on its left
    is a strided one: ``split_factor`` is the number of blocks that are still whole when its axis has its turn.

    Args:
        layout: one placement a mesh axis.
        shape: global shape.
        mesh: the grid.

    Raises:
        PlanError: DTensor knows no such placement.
    """
    return tuple(_placement(layout, tuple(shape), mesh, axis) for axis in range(len(layout)))


def _placement(layout: Layout, shape: tuple[int, ...], mesh: Mesh, axis: int) -> TorchPlacement:
    placement, ranks = layout[axis], mesh.sizes[axis]
    if isinstance(placement, Replicate) or (isinstance(placement, Shard) and ranks == 1):
        return TorchReplicate()
    if isinstance(placement, Partial):
        return TorchPartial(placement.reduce)
    split_factor = placement.blocks
    for other, shard in shards_of_dim(layout, placement.dim):
        if other < axis and shard.blocks * shard.units <= placement.blocks:
            split_factor //= shard.units
    if placement.units == ranks:
        return (
            TorchShard(placement.dim) if split_factor == 1 else StridedShard(placement.dim, split_factor=split_factor)
        )
    alone = len(shards_of_dim(layout, placement.dim)) == 1
    if alone and placement.blocks == 1 and _cuts_like_torch_chunk(placement, shape[placement.dim], ranks):
        return TorchShard(placement.dim)
    raise PlanError(
        f"a tensor of shape {list(shape)} cannot be stored as {placement} with {placement.units} units on "
        f"{mesh.axes[axis]}={ranks}: DTensor splits unevenly only where no other axis splits the dim and every part "
        "but the last has the same size; keep it replicated on that axis, or use a number of ranks that divides it"
    )


def is_storable(layout: Layout, shape: Sequence[int], mesh: Mesh) -> bool:
    """Whether a DTensor can lie like that and be put together again.

    Where several axes split one dim, DTensor (torch 2.13, 2.14) finds their order only if their atoms fill the dim from
    outside without a gap; a packed dim ([Q|K|V]) that two axes split is put together wrongly.
    """
    for dim in range(len(shape)):
        shards = [shard for axis, shard in shards_of_dim(layout, dim) if mesh.sizes[axis] > 1]
        end = 1
        for shard in shards:
            if len(shards) > 1 and shard.blocks != end:
                return False
            end = shard.blocks * shard.units
    try:
        dtensor_placements(layout, shape, mesh)
    except PlanError:
        return False
    return True


def storable(layout: Layout, shape: Sequence[int], mesh: Mesh) -> Layout:
    """The layout itself where DTensor can hold it, else one that splits as much: the outermost axes move first.

    An axis that cannot go on splitting its dim splits the largest other dim that it divides, or replicates.
    """
    if is_storable(layout, shape, mesh):
        return layout
    for axis, placement in enumerate(layout):
        if not isinstance(placement, Shard):
            continue
        for dim in sorted(range(len(shape)), key=lambda d: -shape[d]):
            if shape[dim] and shape[dim] % mesh.sizes[axis] == 0 and not shards_of_dim(layout, dim):
                moved = (*layout[:axis], Shard(dim, 1, mesh.sizes[axis]), *layout[axis + 1 :])
                if is_storable(moved, shape, mesh):
                    return moved
    axis = next(i for i, placement in enumerate(layout) if isinstance(placement, Shard))
    return storable((*layout[:axis], REPLICATE, *layout[axis + 1 :]), shape, mesh)


def _cuts_like_torch_chunk(shard: Shard, size: int, ranks: int) -> bool:
    rest = size // shard.units
    return all(chunk(size, ranks, index)[1] == chunk(shard.units, ranks, index)[1] * rest for index in range(ranks))


def local_part(tensor: torch.Tensor, layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    """What ``rank`` holds of a whole tensor: a view where that is possible.

    >>> packed = torch.arange(12)  # [Q|K|V], four rows each
    >>> local_part(packed, (Shard(0, 3, 2),), Mesh(axes=("tp",), sizes=(2,)), 1)
    tensor([ 2,  3,  6,  7, 10, 11])
    """
    coords = mesh.coords(rank)
    for dim in range(tensor.dim()):
        shards = shards_of_dim(layout, dim)
        if not shards or not tensor.shape[dim]:
            continue
        sizes: list[int] = []
        seen = 1
        for _, shard in shards:
            sizes += [shard.blocks // seen, shard.units]
            seen = shard.blocks * shard.units
        part = tensor.reshape(*tensor.shape[:dim], *sizes, tensor.shape[dim] // seen, *tensor.shape[dim + 1 :])
        for position, (axis, shard) in enumerate(shards):
            part = part.narrow(dim + 2 * position + 1, *chunk(shard.units, mesh.sizes[axis], coords[axis]))
        tensor = part.flatten(dim, dim + len(sizes))
    return tensor


def dtensor_spec(
    layout: Layout, shape: Sequence[int], dtype: torch.dtype, mesh: Mesh, device_mesh: DeviceMesh
) -> DTensorSpec:
    """What every DTensor of this layout, shape and dtype shares; strides are those of a contiguous global tensor."""
    stride, strides = 1, []
    for size in reversed(tuple(shape)):
        strides.append(stride)
        stride *= max(size, 1)
    meta = TensorMeta(shape=torch.Size(shape), stride=tuple(reversed(strides)), dtype=dtype)
    return DTensorSpec(device_mesh, dtensor_placements(layout, shape, mesh), tensor_meta=meta)
