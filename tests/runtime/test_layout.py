"""Layouts against DTensor: every rank's local part, put together by DTensor, is the whole tensor again."""

import itertools

import pytest
import torch
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from autopar.errors import PlanError
from autopar.passes.base import Mesh
from autopar.passes.placement import REPLICATE, Shard, compatible, local_shape
from autopar.runtime.layout import dtensor_placements, local_part
from autopar.torch_private import StridedShard

MESH = Mesh(axes=("dp", "tp"), sizes=(2, 2))


def glued(shape, layout, mesh, whole):
    """The whole tensor, rebuilt from the parts the way DTensor does: by mesh axis, from right to left."""
    parts = {mesh.coords(r): local_part(whole, layout, mesh, r) for r in range(mesh.size)}
    for axis in reversed(range(len(mesh.axes))):
        placement = dtensor_placements(layout, shape, mesh)[axis]
        merged = {}
        for key, pieces in itertools.groupby(sorted(parts), key=lambda c: c[:axis]):
            pieces = [parts[p] for p in pieces]
            if isinstance(placement, TorchReplicate):
                merged[key] = pieces[0]
            elif isinstance(placement, StridedShard):
                cut = [p.chunk(placement.split_factor, placement.dim) for p in pieces]
                merged[key] = torch.cat([block for blocks in zip(*cut, strict=True) for block in blocks], placement.dim)
            else:
                merged[key] = torch.cat(pieces, placement.dim)
        parts = merged
    return parts[()]


LAYOUTS = [
    (REPLICATE, REPLICATE),
    (Shard(0, 1, 2), REPLICATE),
    (REPLICATE, Shard(1, 1, 2)),
    (Shard(0, 1, 2), Shard(1, 1, 2)),
    (Shard(0, 1, 2), Shard(0, 2, 2)),  # dp outside tp
    (Shard(0, 2, 2), Shard(0, 1, 2)),  # tp outside dp
    (REPLICATE, Shard(0, 3, 2)),  # [Q|K|V] over tp
    (Shard(0, 6, 2), Shard(0, 3, 2)),  # [Q|K|V] over tp, ZeRO inside
    (Shard(0, 1, 2), Shard(0, 6, 2)),  # a packed dim inside the dp shard
    (Shard(0, 3, 2), Shard(0, 6, 2)),
    (Shard(0, 3, 2), Shard(0, 12, 2)),  # a gap between the atoms
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout)))
def test_dtensor_glues_the_parts_together(layout):
    whole = torch.arange(48 * 4).reshape(48, 4)
    assert compatible(layout, (48, 4))
    assert torch.equal(glued((48, 4), layout, MESH, whole), whole)
    for rank in range(4):
        assert local_part(whole, layout, MESH, rank).shape == local_shape((48, 4), layout, (2, 2), MESH.coords(rank))


@pytest.mark.parametrize("size", [5, 7, 9])
def test_uneven_rows_are_cut_as_torch_chunk_cuts(size):
    mesh = Mesh(axes=("dp",), sizes=(4,))
    layout = (Shard(0, 1, size),)
    whole = torch.arange(size * 2).reshape(size, 2)
    if size == 5:  # 2, 2, 1 and nothing: never offered, but the cut is the same
        assert dtensor_placements(layout, (size, 2), mesh) == (TorchShard(0),)
    parts = [local_part(whole, layout, mesh, r) for r in range(4)]
    for part, want in zip(parts, whole.chunk(4), strict=False):
        assert torch.equal(part, want)


def test_uneven_heads_cannot_be_stored():
    mesh = Mesh(axes=("tp",), sizes=(4,))
    with pytest.raises(PlanError, match="number of ranks that divides"):
        dtensor_placements((Shard(0, 1, 7),), (28, 3), Mesh(axes=("tp",), sizes=(3,)))
    with pytest.raises(PlanError, match="cannot be stored"):
        dtensor_placements((Shard(0, 3, 5),), (15, 2), mesh)


def test_axes_of_one_rank_replicate():
    mesh = Mesh(axes=("dp", "tp"), sizes=(1, 2))
    assert dtensor_placements((Shard(0, 1, 1), Shard(0, 1, 2)), (4,), mesh) == (TorchReplicate(), TorchShard(0))
