import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.errors import PartitionError
from autopar.passes.placement import (
    PARTIAL,
    REPLICATE,
    Partial,
    Shard,
    can_split,
    chunk,
    compatible,
    local_shape,
    local_view,
    make_shard,
    shards_of_dim,
)
from tests.passes.layouts import layouts, meshes, shapes


@given(units=st.integers(1, 40), num_ranks=st.integers(1, 9))
def test_units_are_cut_as_torch_chunk_cuts(units, num_ranks):
    pieces = [len(p) for p in torch.arange(units).chunk(num_ranks)]
    ours = [chunk(units, num_ranks, i) for i in range(num_ranks)]
    assert [n for _, n in ours if n] == pieces
    assert [s for s, n in ours if n] == [sum(pieces[:i]) for i in range(len(pieces))]
    assert can_split(units, num_ranks) == all(n for _, n in ours)


def test_equal_layouts_have_one_form():
    assert make_shard(0, 1, 8, 2) == make_shard(0, 1, 4, 2) == Shard(0, 1, 2)
    assert make_shard(0, 1, 7, 2) == Shard(0, 1, 7)
    assert make_shard(0, 3, 8, 2) != make_shard(0, 1, 8, 2)


def test_a_rank_without_a_unit_is_refused():
    assert not can_split(4, 3)
    assert not can_split(0, 1)
    with pytest.raises(PartitionError, match="4 units cannot be handed out to 3 ranks"):
        make_shard(0, 1, 4, 3)


@pytest.mark.parametrize(
    ("layout", "shape", "fits"),
    [
        ((Shard(0, 1, 2), Shard(0, 2, 2)), (8,), True),
        ((Shard(0, 2, 2), Shard(0, 1, 2)), (8,), True),
        ((Shard(0, 1, 2), Shard(0, 1, 2)), (8,), False),
        ((Shard(0, 1, 2), Shard(0, 4, 2)), (8,), True),
        ((Shard(0, 1, 4), Shard(0, 2, 2)), (8,), False),
        ((Shard(0, 1, 3),), (8,), False),
        ((Shard(0, 1, 2), Shard(1, 1, 2)), (2, 2), True),
        ((Shard(0, 1, 7), Shard(0, 7, 2)), (14,), True),
        ((Shard(0, 1, 7), Shard(0, 3, 2)), (42,), False),
        ((PARTIAL, REPLICATE), (3,), True),
    ],
)
def test_shards_of_one_dim_must_split_disjoint_atoms(layout, shape, fits):
    assert compatible(layout, shape) is fits


def test_outer_atoms_come_first():
    layout = (Shard(0, 4, 2), Shard(1, 1, 2), Shard(0, 1, 4))
    assert [axis for axis, _ in shards_of_dim(layout, 0)] == [2, 0]


@given(st.data())
def test_local_shapes_add_up_to_the_whole(data):
    mesh, shape = data.draw(meshes()), data.draw(shapes())
    layout = data.draw(layouts(shape, mesh))
    held = [math.prod(local_shape(shape, layout, mesh.sizes, mesh.coords(r))) for r in range(mesh.size)]
    copies = math.prod(n for n, p in zip(mesh.sizes, layout, strict=True) if not isinstance(p, Shard))
    assert sum(held) == math.prod(shape) * copies


@given(st.data())
def test_a_local_view_has_the_local_size_once_its_units_are_cut(data):
    mesh, shape = data.draw(meshes()), data.draw(shapes())
    layout = data.draw(layouts(shape, mesh))
    for rank in range(mesh.size):
        coords = mesh.coords(rank)
        held = local_shape(shape, layout, mesh.sizes, coords)
        for axis, placement in enumerate(layout):
            if not isinstance(placement, Shard):
                continue
            dim, blocks, units, rest = local_view(shape, layout, axis, mesh.sizes, coords)
            assert blocks * chunk(units, mesh.sizes[axis], coords[axis])[1] * rest == held[dim]


def test_a_view_around_no_shard_is_refused():
    with pytest.raises(PartitionError, match=r"axis 0 of .* is not a shard"):
        local_view((4,), (REPLICATE,), 0, (2,), (0,))


def test_placements_print_briefly():
    assert [str(p) for p in (REPLICATE, PARTIAL, Partial("max"), Shard(1, 1, 2), Shard(0, 3, 2))] == [
        "R",
        "P(sum)",
        "P(max)",
        "S(1)",
        "S(0,3)",
    ]
