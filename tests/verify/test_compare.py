import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models.errors import VerificationError
from autopar.passes.base import Mesh
from autopar.passes.placement import REPLICATE, Partial, Shard, chunk, compatible, local_shape, make_shard
from autopar.verify.compare import assemble, difference, magnitude, part_differences, relative, shard_tensor


@st.composite
def placed_tensors(draw):
    """(tensor, layout, mesh): dims of 1 to 3 atoms, every atom split by at most one axis, evenly or not."""
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = draw(st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3), min_size=0, max_size=3))
    free = [(d, a) for d, atoms in enumerate(dims) for a in range(len(atoms))]
    layout = []
    for size in sizes:
        fits = [(d, a) for d, a in free if -(-dims[d][a] // size) * (size - 1) < dims[d][a]]
        kind = draw(st.sampled_from(["R", "P", "max", "S", "S"]))
        if kind == "S" and fits:
            dim, atom = draw(st.sampled_from(fits))
            free.remove((dim, atom))
            layout.append(make_shard(dim, math.prod(dims[dim][:atom]), dims[dim][atom], size))
        else:
            layout.append({"P": Partial(), "max": Partial("max")}.get(kind, REPLICATE))
    shape = tuple(math.prod(atoms) for atoms in dims)
    tensor = torch.arange(1, math.prod(shape) + 1).reshape(shape)
    return tensor, tuple(layout), Mesh(axes=tuple(f"a{i}" for i in range(len(sizes))), sizes=sizes)


@given(placed_tensors())
@settings(deadline=None, max_examples=200)
def test_assembling_the_parts_gives_the_tensor_back(case):
    tensor, layout, mesh = case
    assert compatible(layout, tuple(tensor.shape))
    parts = [shard_tensor(tensor, layout, mesh.sizes, mesh.coords(r)) for r in range(mesh.size)]
    for rank, part in enumerate(parts):
        assert tuple(part.shape) == local_shape(tuple(tensor.shape), layout, mesh.sizes, mesh.coords(rank))
    assert torch.equal(assemble(parts, layout, mesh, tuple(tensor.shape)), tensor)
    apart, drift = part_differences(parts, layout, mesh, tensor)
    assert set(apart.values()) == {0.0}
    assert drift == 0


@given(placed_tensors(), st.data())
@settings(deadline=None, max_examples=200)
def test_one_changed_entry_is_noticed(case, data):
    tensor, layout, mesh = case
    parts = [shard_tensor(tensor, layout, mesh.sizes, mesh.coords(r)).clone() for r in range(mesh.size)]
    rank = data.draw(st.integers(0, mesh.size - 1))
    parts[rank].view(-1)[data.draw(st.integers(0, parts[rank].numel() - 1))] += 1000
    apart, _ = part_differences(parts, layout, mesh, tensor)
    assert apart[rank] == 1000


def test_parts_follow_the_definition():
    packed = torch.arange(12)  # [q q q q | k k k k | v v v v] split in two per part
    mesh = Mesh(axes=("dp", "tp"), sizes=(2, 2))
    layout = (Shard(0, 6, 2), Shard(0, 3, 2))
    assert [shard_tensor(packed, layout, mesh.sizes, mesh.coords(r)).tolist() for r in range(4)] == [
        [0, 4, 8],
        [2, 6, 10],
        [1, 5, 9],
        [3, 7, 11],
    ]
    assert [chunk(7, 3, i)[1] for i in range(3)] == [3, 3, 1]
    assert [shard_tensor(torch.arange(7), (Shard(0, 1, 7),), (3,), (i,)).tolist() for i in range(3)] == [
        [0, 1, 2],
        [3, 4, 5],
        [6],
    ]


def test_only_one_rank_holds_a_partial_sum():
    parts = [shard_tensor(torch.ones(2), (Partial(),), (3,), (i,)) for i in range(3)]
    assert [p.tolist() for p in parts] == [[1, 1], [0, 0], [0, 0]]


def test_different_copies_are_refused_beyond_the_tolerance():
    mesh = Mesh(axes=("dp",), sizes=(2,))
    copies = [torch.ones(3), torch.ones(3) + 1e-6]
    with pytest.raises(VerificationError, match="ranks 0 and 1 hold copies"):
        assemble(copies, (REPLICATE,), mesh, (3,))
    assert torch.equal(assemble(copies, (REPLICATE,), mesh, (3,), tolerance=1e-5), copies[0])


def test_a_part_of_the_wrong_shape_is_named():
    mesh = Mesh(axes=("dp",), sizes=(2,))
    with pytest.raises(VerificationError, match=r"rank 1 holds \[3\].*gives it \[2\]"):
        assemble([torch.ones(2), torch.ones(3)], (Shard(0, 1, 2),), mesh, (4,))
    with pytest.raises(VerificationError, match="parts of 1 ranks"):
        assemble([torch.ones(2)], (Shard(0, 1, 2),), mesh, (4,))


def test_differences_count_nan_and_infinity():
    inf, nan = math.inf, math.nan
    one = torch.tensor([1.0, nan, inf, -inf])
    assert difference(one, one.clone()) == 0
    assert difference(one, torch.tensor([1.5, nan, inf, -inf])) == 0.5
    for other in ([nan, nan, inf, -inf], [1.0, 2.0, inf, -inf], [1.0, nan, -inf, -inf], [1.0, nan, inf, 3.0]):
        assert difference(one, torch.tensor(other)) == inf
        assert difference(torch.tensor(other), one) == inf
    assert difference(torch.ones(2), torch.ones(3)) == inf
    assert difference(torch.tensor([True]), torch.tensor([False])) == 1
    assert difference(torch.tensor([1 + 2j]), torch.tensor([1 + 4j])) == 2
    assert difference(torch.empty(0), torch.empty(0)) == 0
    assert (magnitude(one), magnitude(torch.empty(0))) == (1.0, 0.0)
    assert (relative(0.0, 0.0), relative(1.0, 0.0), relative(1.0, 4.0)) == (0.0, inf, 0.25)
