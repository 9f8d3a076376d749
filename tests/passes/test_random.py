"""Random draws: ranks with the same part draw the same mask, others other ones, and a repeated draw is the same."""

import pytest
import torch
import torch.nn.functional as F

from autopar.passes.options import replicated
from autopar.passes.partition import Assignment, partition
from autopar.passes.random import SEED_NAME
from autopar.verify import run_lockstep
from tests.passes.prepared import Lambda, mesh_of, ready

ROWS, WIDTH = 6, 400


def draws(prepared, mesh, labels, seed=5):
    """What each rank's program returns under rng="fast": the first result, as the rank holds it."""
    programs = prepared.programs(mesh, labels, rng="fast")
    assert all(p.seed_input == SEED_NAME for p in programs)
    inputs = [[prepared.values[s.name] for s in p.inputs] + [torch.tensor(seed)] for p in programs]
    state = torch.get_rng_state()
    outputs = run_lockstep(programs, inputs)
    assert torch.equal(torch.get_rng_state(), state), "a seeded draw must leave the generator where it was"
    return [out[0] for out in outputs]


def dropped():
    return ready(Lambda(lambda m, x: F.dropout(x)), torch.ones(ROWS, WIDTH), loss_fn=None)


def op_of(prepared, name="aten::native_dropout"):
    return prepared.node(name).name


def test_a_replicated_draw_is_the_same_on_all_ranks():
    prepared = dropped()
    found = draws(prepared, mesh_of(4), {})
    assert all(torch.equal(f, found[0]) for f in found)
    assert 0.4 < float((found[0] != 0).float().mean()) < 0.6


def test_parts_of_a_split_draw_differ():
    prepared = dropped()
    found = draws(prepared, mesh_of(3), {op_of(prepared): ["d0"]})
    assert [tuple(f.shape) for f in found] == [(2, WIDTH)] * 3
    assert len({tuple(f.flatten().tolist()) for f in found}) == 3


def test_ranks_that_hold_the_same_part_draw_the_same():
    prepared = dropped()
    mesh = mesh_of(2, 2)
    found = draws(prepared, mesh, {op_of(prepared): ["R", "d1"]})
    by_part = {mesh.coords(rank)[1]: f for rank, f in enumerate(found)}
    for rank, f in enumerate(found):
        assert torch.equal(f, by_part[mesh.coords(rank)[1]])
    assert not torch.equal(by_part[0], by_part[1])


def test_parts_over_two_axes_are_all_different():
    prepared = dropped()
    found = draws(prepared, mesh_of(2, 2), {op_of(prepared): ["d0", "d1"]})
    assert len({tuple(f.flatten().tolist()) for f in found}) == 4


def test_draws_depend_on_the_seed_and_on_nothing_else():
    prepared = dropped()
    labels = {op_of(prepared): ["d0"]}
    first, again, other = (draws(prepared, mesh_of(2), labels, seed) for seed in (1, 1, 2))
    torch.manual_seed(123)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_two_draws_of_one_step_differ():
    model = Lambda(lambda m, x: torch.stack([F.dropout(x), F.dropout(x)]))
    prepared = ready(model, torch.ones(ROWS, WIDTH), loss_fn=None)
    (found, _) = draws(prepared, mesh_of(2), {})
    assert not torch.equal(found[0], found[1])


def test_the_backward_uses_the_mask_of_the_forward():
    prepared = ready(Lambda(lambda m, x: F.dropout(x)), torch.ones(ROWS, WIDTH, requires_grad=True), loss_fn=None)
    programs = prepared.programs(mesh_of(2), {op_of(prepared): ["d0"]}, rng="fast")
    ones = torch.ones(ROWS, WIDTH)
    for out, gradient in run_lockstep(programs, [[ones, ones, torch.tensor(5)]] * 2):
        rows = out.shape[0]
        assert torch.equal(out, gradient[:rows]) or torch.equal(out, gradient[-rows:])


def test_nothing_of_global_size_is_made():
    prepared = dropped()
    for program in prepared.programs(mesh_of(2), {op_of(prepared): ["d0"]}, rng="fast"):
        nodes = [n for n in program.graph_module.graph.nodes if n.op == "call_function"]
        drawn = [n for n in nodes if isinstance(n.meta["val"], tuple)]
        assert drawn
        assert all(v.shape == (ROWS // 2, WIDTH) for n in drawn for v in n.meta["val"])


def test_without_draws_there_is_no_seed():
    prepared = ready(Lambda(lambda m, x: x * 2), torch.ones(2, 2), loss_fn=None)
    (program,) = prepared.programs(mesh_of(1), rng="fast")
    assert program.seed_input is None


FACTORIES = {
    "rand": lambda x: torch.rand(ROWS, 4) * x,
    "rand_like": lambda x: torch.rand_like(x) * x,
    "rand_like_strided": lambda x: torch.rand_like(x.t()) + x.t(),
    "randn": lambda x: torch.randn(ROWS, 4) + x,
    "randint": lambda x: torch.randint(3, 9, (ROWS, 4)) + x,
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()) + x,
    "bernoulli_strided": lambda x: torch.bernoulli(x.t().sigmoid()) + x.t(),
    "normal": lambda x: torch.normal(0.0, 2.0, (ROWS, 4)) + x,
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout_strided": lambda x: F.dropout(x.t() * 2, 0.3),
    "randperm": lambda x: x[torch.randperm(ROWS)],
    "multinomial": lambda x: x[torch.multinomial(x[:, 0].softmax(0), 3)],
    "uniform": lambda x: torch.zeros(ROWS, 4).uniform_(-1, 1) + x,
    "exponential": lambda x: torch.zeros(ROWS, 4).exponential_() + x,
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu_strided": lambda x: F.rrelu(x.t(), training=True),
    "binomial": lambda x: torch.binomial(torch.full((ROWS, 4), 9.0), x.sigmoid()) + x,
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_exact_draws_are_those_of_one_device(name):
    prepared = ready(Lambda(lambda m, x: FACTORIES[name](x).square().sum()), torch.randn(ROWS, 4))
    sizes = {n: prepared.space.choices(n, 2) for n in prepared.rows}
    for turn in range(max(map(len, sizes.values()))):
        choices = {n.name: (c[turn % len(c)],) for n, c in sizes.items()}
        assignment = Assignment(mesh=mesh_of(2), choices=choices)
        prepared.check([partition(prepared.normal, prepared.rows, assignment, r, rng="exact") for r in range(2)])


@pytest.mark.parametrize("name", FACTORIES)
def test_fast_draws_lie_in_their_range(name):
    """Whatever is split, a fast step runs and gives the same loss on every rank."""
    prepared = ready(Lambda(lambda m, x: FACTORIES[name](x).square().sum()), torch.randn(ROWS, 4))
    choices = {n.name: (prepared.space.choices(n, 2)[-1],) for n in prepared.rows}
    whole = {n.name: (replicated(r),) for n, r in prepared.rows.items()}
    for chosen in (choices, whole):
        assignment = Assignment(mesh=mesh_of(2), choices=chosen)
        programs = [partition(prepared.normal, prepared.rows, assignment, r, rng="fast") for r in range(2)]
        inputs = [prepared.values.get(s.name, torch.tensor(1.0)) for s in programs[0].inputs]
        a, b = run_lockstep(programs, [[*inputs, torch.tensor(3)]] * 2)
        assert torch.equal(a[0], b[0])
        assert a[0].isfinite()
