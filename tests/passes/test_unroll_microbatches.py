"""Steps of several micro-batches and stages compute what one device computes."""

import operator

import pytest
import torch

from autopar.cost_models.errors import ConstraintError
from autopar.cost_models.schedules import Kind, build
from autopar.passes.arrange_stages import linear_order
from autopar.passes.base import OutputKind
from autopar.passes.torch_ops import ALL_REDUCE, IRECV, ISEND
from autopar.verify import check_programs, verify_programs
from tests.passes.pipelines import Normed, Tied, lowered, programs_of, tokens, values_of

PLANS = [
    (1, {"microbatches": 4}),
    (1, {"microbatches": 3}),
    (2, {"dp": 2, "microbatches": 2, "zero": 3}),
    (2, {"pp": 2, "microbatches": 1}),
    (2, {"pp": 2, "microbatches": 4, "schedule": "gpipe"}),
    (2, {"pp": 2, "microbatches": 4, "schedule": "interleaved"}),
    (2, {"pp": 2, "microbatches": 4, "schedule": "zb", "recompute": "full"}),
    (4, {"pp": 4, "microbatches": 2}),
    (4, {"pp": 2, "dp": 2, "microbatches": 2, "zero": 2}),
    (4, {"pp": 2, "tp": 2, "microbatches": 2}),
]


@pytest.mark.parametrize(("world_size", "wishes"), PLANS)
def test_equals_one_device(world_size, wishes):
    model, args = Tied(dropout=0.2), tokens()
    lowering, plan = lowered(model, args, world_size, **wishes)
    programs = programs_of(lowering, plan)
    check_programs(programs)
    step = lowering.prepared.step
    report = verify_programs(step, programs, values_of(step, model, args))
    assert report.ok, report.text()


def test_tied_parameters_lie_on_every_stage_that_uses_them_and_are_summed_once():
    model, args = Tied(), tokens()
    lowering, plan = lowered(model, args, 2, pp=2, microbatches=4)
    programs = programs_of(lowering, plan)
    held = [{s.name for s in p.inputs} for p in programs]
    assert all("table.weight" in names for names in held)
    assert not {n for n in held[0] & held[1] if n.startswith("blocks")}
    size = tuple(model.table.weight.shape)
    moved = [
        n
        for n in programs[1].graph_module.graph.nodes
        if n.target is ISEND and tuple(n.args[0].meta["val"].shape) == size
    ]
    assert len(moved) == 1


def test_sub_programs_are_made_once_and_called_for_every_microbatch():
    lowering, plan = lowered(Tied(), tokens(), 2, pp=2, microbatches=4)
    module = programs_of(lowering, plan)[0].graph_module
    calls = [str(n.target) for n in module.graph.nodes if n.op == "call_module"]
    assert calls.count("stage0_forward") == 4
    assert calls.count("stage0_backward") == 4
    assert sorted(name for name, _ in module.named_children()) == ["stage0_backward", "stage0_forward"]


def test_gradients_are_reduced_over_data_ranks_once():
    lowering, plan = lowered(Tied(), tokens(), 2, dp=2, microbatches=4)
    lowering.passes = ()
    program = programs_of(lowering, plan)[0]
    outer = [n for n in program.graph_module.graph.nodes if n.target is ALL_REDUCE]
    gradients = [s for s in program.outputs if s.kind is OutputKind.GRADIENT]
    assert len(outer) <= len(gradients) + 3  # the loss, the count of valid targets
    inner = [n for _, sub in program.graph_module.named_children() for n in sub.graph.nodes if n.target is ALL_REDUCE]
    assert all(n.meta["val"].dim() == 0 for n in inner)  # the loss at most; never a gradient


@pytest.mark.parametrize(
    "wishes", [{"microbatches": 4}, {"pp": 2, "microbatches": 4}, {"pp": 2, "microbatches": 2, "schedule": "gpipe"}]
)
def test_batch_statistics_are_those_of_the_whole_batch(wishes):
    model, args = Normed(), (torch.randn(8, 6),)
    lowering, plan = lowered(model, args, wishes.get("pp", 1), **wishes)
    step = lowering.prepared.step
    programs = programs_of(lowering, plan)
    report = verify_programs(step, programs, values_of(step, model, args))
    assert report.ok, report.text()


def test_schedules_that_cannot_wait_for_a_whole_batch_are_refused_by_name():
    with pytest.raises(ConstraintError, match=r"norm needs all 4 micro-batches.*gpipe"):
        lowered(Normed(), (torch.randn(8, 6),), 2, pp=2, microbatches=4, schedule="1f1b")


def test_more_microbatches_than_rows_are_refused_with_what_works():
    with pytest.raises(ConstraintError, match=r"microbatches=8 is not possible.*7"):
        lowered(Tied(), tokens(rows=7), 1, microbatches=8)


def test_receives_are_posted_before_they_are_waited_for_and_sends_are_waited_for_later():
    lowering, plan = lowered(Tied(), tokens(), 2, pp=2, microbatches=4)
    nodes = list(programs_of(lowering, plan)[1].graph_module.graph.nodes)
    place = {n: i for i, n in enumerate(nodes)}
    for node in nodes:
        if node.target in (ISEND, IRECV):
            (wait,) = node.users
            assert place[wait] > place[node]
    sends = [n for n in nodes if n.target is ISEND]
    delays = [place[next(iter(n.users))] - place[n] for n in sends]
    assert max(delays) > 3


def test_results_of_a_part_are_picked_by_getitem():
    lowering, plan = lowered(Tied(), tokens(), 1, microbatches=2)
    graph = programs_of(lowering, plan)[0].graph_module.graph
    for node in graph.nodes:
        if node.op == "call_module":
            assert {u.target for u in node.users} == {operator.getitem}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb"])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (3, 5), (4, 8)])
def test_the_common_order_keeps_every_ranks_order_and_every_need(name, stages, microbatches):
    schedule = build(name, stages, microbatches)
    order = linear_order(schedule)
    for rank, line in enumerate(schedule.ranks):
        assert tuple(a for r, a in order if r == rank) == line
    place = {(a.stage, a.kind, a.microbatch): i for i, (_, a) in enumerate(order)}
    for (stage, kind, m), i in place.items():
        if kind is Kind.FORWARD and stage:
            assert place[stage - 1, kind, m] < i
