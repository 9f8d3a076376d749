"""Runs of layers, balanced cuts, and the stage of every call."""

import dataclasses

import pytest

from autopar.capture import capture
from autopar.cost_models.cluster import Cluster
from autopar.cost_models.compute import KernelModel
from autopar.cost_models.errors import ConstraintError, PartitionError
from autopar.lower import prepare
from autopar.passes.base import Phase
from autopar.passes.rules.table import RuleTable
from autopar.passes.split_stages import SplitStages, layer_runs, stage_of_input
from autopar.plan import Constraints
from autopar.search.stages import RunCost, balanced_stages, chosen_stages, piece_seconds, run_costs
from tests.passes.pipelines import Tied, lowered, tokens


def test_runs_follow_the_forward_and_number_what_repeats():
    names = [run.name for run in layer_runs(capture(Tied(depth=1), tokens()))]
    assert names[0] == "table"
    assert (
        names.index("blocks.0.norm") < names.index("blocks.0.up") < names.index("blocks.0.down") < names.index("head")
    )
    assert "blocks.0#2" in names


def test_backward_calls_follow_their_layer_and_never_go_back_up():
    step = capture(Tied(), tokens())
    runs = layer_runs(step)
    cut = next(i for i, run in enumerate(runs) if run.layer.startswith("blocks.2"))
    SplitStages(stages={run.name: int(i >= cut) for i, run in enumerate(runs)}, num_stages=2)(step)
    for node in step.graph.nodes:
        if node.op != "call_function":
            continue
        layer = node.meta["layer"]
        if layer.startswith("blocks."):
            assert node.meta["stage"] == int(layer.split(".")[1] >= "2")
        if node.meta["phase"] is Phase.BACKWARD:
            sources = [s for s in node.all_input_nodes if s.op == "call_function" and s.meta["phase"] is Phase.BACKWARD]
            assert all(s.meta["stage"] >= node.meta["stage"] for s in sources) or layer.startswith("blocks.")


def test_stages_that_go_backwards_are_refused():
    step = capture(Tied(), tokens())
    with pytest.raises(PartitionError, match="stages follow the order"):
        SplitStages(stages={"table": 1, "blocks.0.norm": 0}, num_stages=2)(step)


@pytest.mark.parametrize("num_stages", [2, 3, 4, 8])
def test_cuts_are_balanced_by_cost_and_cover_everything(num_stages):
    step = capture(Tied(depth=8), tokens())
    prepared = prepare(step, RuleTable(), split_batch=False)
    costs = run_costs(prepared, Cluster.local(num_stages), Constraints())
    stages = balanced_stages(costs, num_stages)
    assert set(stages) == {run.name for run in layer_runs(prepared.normal)}
    loads = [sum(c.weight for c in costs if stages[c.run.name] == s) for s in range(num_stages)]
    assert max(loads) <= 1 / num_stages + max(c.weight for c in costs) + 0.15
    blocks = {n.split("#")[0].split(".")[1]: s for n, s in stages.items() if n.startswith("blocks.")}
    for name, stage in stages.items():
        if name.startswith("blocks.") and num_stages < 5:
            assert (
                stage == blocks[name.split("#")[0].split(".")[1]]
            )  # a block is not cut where there are enough of them


def test_a_block_is_cut_where_nothing_more_crosses_and_the_stages_become_more_even():
    run = layer_runs(capture(Tied(depth=1), tokens()))[0]

    def cost(weight, crossing_bytes, *, inside_block):
        return RunCost(
            run=dataclasses.replace(run, name=f"{len(costs)}"),
            weight=weight,
            crossing_bytes=crossing_bytes,
            stage=None,
            inside_block=inside_block,
        )

    def cuts(head):
        costs.clear()
        for _ in range(4):  # a block: attention, then a wide layer whose middle is expensive to send
            costs.append(cost(1.0, 1.0, inside_block=True))
            costs.append(cost(1.0, 4.0, inside_block=True))
            costs.append(cost(1.0, 1.0, inside_block=False))
        costs.append(cost(head, 0.0, inside_block=False))
        stages = balanced_stages(costs, 2)
        return sum(stage == 0 for stage in stages.values())

    costs = []
    assert cuts(head=0.1) == 6  # between blocks
    assert cuts(head=3.0) == 7  # behind the attention of the third
    assert cuts(head=4.5) == 9  # behind its expensive middle would be as even


def test_wished_stages_are_honoured_or_refused():
    _, plan = lowered(Tied(), tokens(), 2, pp=2, layers={"blocks.0": {"stage": 0}, "blocks.1": {"stage": 1}})
    assert {s for n, s in plan.stages.items() if n.startswith("blocks.1.")} == {1}
    assert {s for n, s in plan.stages.items() if n.startswith("blocks.0.")} == {0}
    with pytest.raises(ConstraintError, match="do not fit 2 stages"):
        lowered(Tied(), tokens(), 2, pp=2, layers={"blocks.0": {"stage": 1}, "blocks.1": {"stage": 0}})


def test_more_stages_than_runs_leave_some_empty():
    runs = layer_runs(capture(Tied(depth=1), tokens()))[:2]
    costs = [RunCost(run=r, weight=0.5, crossing_bytes=1.0, stage=None, inside_block=False) for r in runs]
    stages = balanced_stages(costs, 4)
    assert sorted(stages.values()) == sorted(set(stages.values()))


def test_unused_parameters_stay_with_their_neighbours():
    assert stage_of_input("blocks.3.extra.weight", [("blocks.0.up", 0), ("blocks.3.up", 2)]) == 2
    assert stage_of_input("other", [("blocks.0.up", 0)]) == 0


@pytest.mark.parametrize(("table", "on_first"), [(0.5, {3, 4}), (0.8, {1, 2})])
def test_stages_are_even_in_time_unless_one_rank_would_hold_most_parameters(table, on_first):
    run = layer_runs(capture(Tied(depth=1), tokens()))[0]
    runs = [(0.0, table), *[(0.2, (1 - table) / 6)] * 4, (0.2, (1 - table) / 3)]  # a table, four blocks, a head

    costs = [
        RunCost(
            run=dataclasses.replace(run, name=f"{i}"),
            weight=0.0,
            crossing_bytes=1.0,
            stage=None,
            inside_block=False,
            seconds=seconds,
            first_used=parameters,
            used=parameters,
        )
        for i, (seconds, parameters) in enumerate(runs)
    ]
    stages = chosen_stages(costs, 2, 2)
    assert sum(stage == 0 for stage in stages.values()) in on_first


def test_a_call_on_a_small_piece_takes_as_long_as_its_launch():
    model = KernelModel(device=Cluster.parse("1xH100").device)
    prepared = prepare(capture(Tied(), tokens()), RuleTable(), split_batch=False)
    for node in prepared.normal.graph.nodes:
        one, eight, many = (piece_seconds(node, model, pieces) for pieces in (1, 8, 10**9))
        assert one >= eight >= many
        assert many == 0.0 or many >= model.device.dispatch_s
