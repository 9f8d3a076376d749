"""Operations whose split parts must know where they lie: first places of the best, diagonals, running sums."""

import itertools

import pytest
import torch

from autopar.passes.partition import Assignment, partition
from tests.passes.prepared import Lambda, mesh_of, ready

FEW = torch.randint(0, 3, (4, 6, 5), generator=torch.Generator().manual_seed(0)).float()  # with many equal elements
HOLED = FEW.masked_fill(FEW == 1, float("nan"))
CALLS = {
    "argmax": (lambda x: x.argmax(), FEW),
    "argmin": (lambda x: x.argmin(), FEW),
    "argmax of NaN": (lambda x: x.argmax(), HOLED),
    "argmin, dims kept": (lambda x: torch.argmin(x, keepdim=True), FEW),
    "argmax along a dim": (lambda x: x.argmax(1), FEW),
    "argmin along a dim, kept": (lambda x: x.argmin(-1, keepdim=True), FEW),
    "max": (lambda x: x.max(0), FEW),
    "min of NaN": (lambda x: x.min(1, keepdim=True), HOLED),
    "max of bools": (lambda x: (x > 1).max(2), FEW),
    "max of integers": (lambda x: x.long().max(1), FEW),
    "cumsum": (lambda x: x.cumsum(1), FEW),
    "cumsum of bools": (lambda x: (x > 0).cumsum(2), FEW),
    "prod": (lambda x: x.prod(), FEW + 1),
    "prod along a dim": (lambda x: x.prod(1, keepdim=True), FEW),
    "logsumexp": (lambda x: x.logsumexp((0, 2)), FEW),
    "logsumexp of nothing": (lambda x: (x - float("inf")).logsumexp(1), FEW),
    **{f"diagonal {k}": (lambda x, k=k: x.diagonal(k, 1, 2), FEW) for k in (-5, -2, -1, 0, 1, 3)},
    "diagonal of the first dims": (lambda x: x.diagonal(2, 0, 1), FEW),
    "diagonal, dims swapped": (lambda x: x.diagonal(-1, 1, 0), FEW),
    **{f"diag_embed {k}": (lambda x, k=k: torch.diag_embed(x, k, 0, 2), FEW) for k in (-2, 0, 1)},
    "diagonal_scatter": (lambda x: x.diagonal_scatter(x[:, 0, :], -1, 1, 2), FEW),
}
MESHES = (mesh_of(3), mesh_of(2, 2))


def label_of(prepared, node, factor, num_ranks):
    return next(c.label for c in prepared.space.choices(node, num_ranks) if c.factor == factor)


@pytest.mark.parametrize("name", CALLS)
def test_parts_know_where_they_lie(name):
    function, x = CALLS[name]
    prepared = ready(Lambda(lambda m, t: function(t)), x, loss_fn=None)
    node = list(prepared.rows)[-1]
    split = set()
    for mesh in MESHES:
        for chosen in itertools.product(*(prepared.space.choices(node, size) for size in mesh.sizes)):
            factors = [c.factor for c in chosen if c.factor]
            if len(set(factors)) == len(factors):  # one atom cannot be split twice
                split.update(factors)
                assignment = Assignment(mesh=mesh, choices={node.name: chosen})
                prepared.check(
                    [partition(prepared.normal, prepared.rows, assignment, r, rng="exact") for r in range(mesh.size)]
                )
    assert split


def test_the_gradient_of_a_diagonal_is_split_along_it():
    prepared = ready(Lambda(lambda m, x: x.diagonal(0, 1, 2)), FEW.clone().requires_grad_())
    node = prepared.node("aten::diagonal_backward")
    for mesh in (mesh_of(2), mesh_of(3)):
        prepared.check(prepared.programs(mesh, {node.name: [label_of(prepared, node, "diag", mesh.size)]}))


def test_a_scan_gathers_one_slice_a_rank():
    prepared = ready(Lambda(lambda m, x: x.cumsum(1)), FEW, loss_fn=None)
    (node,) = prepared.rows
    for program in prepared.programs(mesh_of(2), {node.name: [label_of(prepared, node, "d1", 2)]}):
        gathered = [n for n in program.graph_module.graph.nodes if "all_gather" in str(n.target)]
        assert [tuple(n.meta["val"].shape) for n in gathered] == [(8, 1, 5)]
