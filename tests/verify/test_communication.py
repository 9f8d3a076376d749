"""Faults in the communication are found by the static check and by the lockstep run alike."""

import dataclasses
import operator

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import fx

from autopar.cost_models.errors import VerificationError
from autopar.passes.base import Mesh
from autopar.verify import check_programs, run_lockstep
from tests.verify.sequences import ROWS, Step, build
from tests.verify.sketch import Sketch, aten, c10d, mlp_programs, program

MESH = Mesh(axes=("dp", "tp"), sizes=(2, 2))
OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
STEPS = (
    Step(op="all_reduce", group="tp", source=0),
    Step(op="all_gather", group="tp", source=1, late=True),
    Step(op="all_reduce", group="dp", source=2),
    Step(op="reduce_scatter", group="dp", source=3, late=True),
    Step(op="all_to_all", group="tp", source=4),
    Step(op="broadcast", group="dp+tp", source=5),
    Step(op="all_reduce", group="tp", source=6),
)


def change(steps, position, **fields):
    return tuple(dataclasses.replace(s, **fields) if i == position else s for i, s in enumerate(steps))


def swapped(steps, one, other):
    steps = list(steps)
    steps[one], steps[other] = steps[other], steps[one]
    return tuple(steps)


FAULTS = {
    "dropped": STEPS[:2] + STEPS[3:],
    "dropped last": STEPS[:-1],
    "doubled": STEPS + STEPS[-1:],
    "swapped alike": swapped(STEPS, 0, 6),
    "swapped unlike": swapped(STEPS, 0, 1),
    "other group": change(STEPS, 2, group="tp"),
    "wider group": change(STEPS, 0, group="dp+tp"),
    "other dtype": change(STEPS, 1, dtype=torch.float64),
    "other shape": change(STEPS, 4, columns=3),
    "other reduction": change(STEPS, 3, reduce_op="max"),
    "other op": change(STEPS, 0, op="broadcast"),
}


def run(programs):
    return run_lockstep(programs, [[torch.full((ROWS, 1), float(p.rank + 1))] for p in programs])


def programs_of(steps_by_rank, mesh=MESH):
    return [build(mesh, rank, steps) for rank, steps in enumerate(steps_by_rank)]


def verdict(check, programs):
    try:
        check(programs)
    except VerificationError as error:
        return str(error)
    return ""


def test_right_sequences_pass_and_give_the_numbers():
    programs = programs_of([STEPS] * 4)
    check_programs(programs)
    results = run(programs)
    assert results[0][0].unique().tolist() == [1 + 2]
    assert results[2][0].unique().tolist() == [3 + 4]
    assert results[3][2].unique().tolist() == [3 * (2 + 4)]
    assert results[1][1][:, 0].tolist() == [2.0] * ROWS + [4.0] * ROWS
    assert results[1][3].shape == (ROWS // 2, 2)
    assert results[2][5].unique().tolist() == [6 * 1]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rank", [0, 3])
def test_every_fault_is_found_both_ways(fault, rank):
    programs = programs_of([FAULTS[fault] if r == rank else STEPS for r in range(4)])
    for check in (check_programs, run):
        message = verdict(check, programs)
        assert f"rank {rank}" in message, message
        assert "layer" in message


def test_an_unknown_axis_is_named():
    programs = programs_of([STEPS] * 4)
    node = next(n for n in programs[1].graph_module.graph.nodes if "all_reduce" in n.name)
    node.args = (*node.args[:2], "pp")
    for check in (check_programs, run):
        assert "rank 1: group 'pp' names no axis of the mesh ('dp', 'tp')" in verdict(check, programs)


@pytest.mark.parametrize("fault", ["dropped", "other group", "other dtype", "swapped alike"])
def test_messages_name_both_sides(fault):
    message = verdict(check_programs, programs_of([STEPS, FAULTS[fault], STEPS, STEPS]))
    assert "rank 1: " in message
    assert any(f"rank {r}: " in message for r in (0, 3)), message
    assert message.count("model.py:") >= 2, message


def test_a_difference_names_its_place():
    programs = programs_of([STEPS, FAULTS["other dtype"], STEPS, STEPS])
    with pytest.raises(VerificationError, match=r"collective 1 of group 'tp' \(ranks 0, 1\) .* dtypes differ"):
        check_programs(programs)


def test_a_cycle_of_waits_is_a_deadlock_not_a_hang():
    tp, dp = Step(op="all_reduce", group="tp"), Step(op="all_reduce", group="dp")
    order = [(tp, dp), (dp, tp), (dp, tp), (tp, dp)]
    crossed = programs_of(order)
    for check in (check_programs, run):
        message = verdict(check, crossed)
        assert message.startswith("deadlock"), message
        assert "for rank 1, which waits at rank 1: all_reduce" in message
    late = [tuple(dataclasses.replace(s, late=True) for s in steps) for steps in order]
    check_programs(programs_of(late))
    run(programs_of(late))


def test_a_rank_that_finished_is_named():
    one = Step(op="all_reduce", group="tp")
    message = verdict(run, programs_of([(one,), ()], Mesh(axes=("tp",), sizes=(2,))))
    assert "for rank 1, which has finished" in message


def test_a_communication_nobody_waits_for_must_still_be_met():
    mesh = Mesh(axes=("tp",), sizes=(2,))
    sketch = Sketch()
    sketch.call(c10d.all_reduce.default, sketch.input("x", (ROWS, 1)), "sum", "tp")
    programs = [program(sketch, (), mesh, 0), build(mesh, 1, ())]
    for check in (check_programs, run):
        assert "never comes" in verdict(check, programs)


@st.composite
def sequences(draw):
    make = st.builds(
        Step,
        op=st.sampled_from(OPS),
        group=st.sampled_from(["dp", "tp", "dp+tp"]),
        source=st.integers(0, 2),
        columns=st.integers(1, 3),
        late=st.booleans(),
    )
    return tuple(draw(st.lists(make, min_size=1, max_size=8)))


@given(sequences())
@settings(deadline=None, max_examples=25)
def test_what_all_ranks_do_alike_is_right(steps):
    programs = programs_of([steps] * 4)
    check_programs(programs)
    run(programs)


def spoil(steps, data):
    """``steps`` with a random change, which may be none that others can see."""
    position, other = (data.draw(st.integers(0, len(steps) - 1)) for _ in range(2))
    return {
        "drop": steps[:position] + steps[position + 1 :],
        "double": steps[: position + 1] + steps[position:],
        "swap": swapped(steps, position, other),
        "group": change(steps, position, group=data.draw(st.sampled_from(["dp", "tp", "dp+tp"]))),
        "shape": change(steps, position, columns=4),
        "dtype": change(steps, position, dtype=torch.float64),
        "op": change(steps, position, op=data.draw(st.sampled_from(OPS))),
    }[data.draw(st.sampled_from(["drop", "swap", "double", "group", "shape", "dtype", "op"]))]


def seen(steps, group):
    """What other ranks can see."""
    return [dataclasses.replace(s, late=False) for s in steps if s.group == group]


@given(sequences(), st.data())
@settings(deadline=None, max_examples=60)
def test_static_check_and_lockstep_agree_on_random_faults(steps, data):
    rank, spoilt = data.draw(st.integers(0, 3)), spoil(steps, data)
    differs = any(seen(spoilt, g) != seen(steps, g) for g in ("dp", "tp", "dp+tp"))
    programs = programs_of([spoilt if r == rank else steps for r in range(4)])
    static, lockstep = verdict(check_programs, programs), verdict(run, programs)
    assert static == lockstep
    assume(differs)
    assert static, "a fault that others can see was not found"


@given(sequences(), st.data())
@settings(deadline=None, max_examples=60)
def test_ranks_that_stand_for_others_find_what_all_find(steps, data):
    """Ranks along one axis are alike, so that the static check looks at one of them; the lockstep run has them all."""
    axis, spoilt = data.draw(st.integers(0, 1)), spoil(steps, data)
    shared = MESH.axes[axis]
    differs = any(seen(spoilt, g) != seen(steps, g) for g in (shared, "dp+tp"))
    programs = programs_of([spoilt if MESH.coords(r)[axis] else steps for r in range(4)])
    static, lockstep = verdict(check_programs, programs), verdict(run, programs)
    assert bool(static) == bool(lockstep)
    assert bool(static) or not differs, "a fault that others can see was not found"


def transfer_programs(first, second):
    """Two ranks of a pipeline, each a list of ("isend" | "irecv", columns, tag); waits follow in the given order."""
    mesh = Mesh(axes=("pp",), sizes=(2,))
    made = []
    for rank, actions in enumerate((first, second)):
        sketch = Sketch()
        x = sketch.input("x", (ROWS, 1))
        results = []
        for op, columns, tag, wait in actions:
            wide = sketch.call(aten.mul.Tensor, sketch.call(aten.repeat.default, x, [1, columns]), 1.0)
            buffer = wide if op == "isend" else sketch.call(aten.empty.memory_format, [ROWS, columns], device="cpu")
            handle = sketch.call(getattr(c10d, op).default, buffer, 1 - rank, tag, "pp")
            results.append((handle, wait))
        done = [sketch.call(c10d.wait_tensor.default, h) for h, wait in results if wait]
        made.append(program(sketch, done, mesh, rank))
    return made


def test_sends_meet_receives():
    first, second = [("isend", 1, 0, True), ("irecv", 2, 1, True)], [("irecv", 1, 0, True), ("isend", 2, 1, True)]
    programs = transfer_programs(first, second)
    check_programs(programs)
    (sent, received), (got, _) = run(programs)
    assert sent.shape == (0,)
    assert received.shape == (ROWS, 2)
    assert received.unique().tolist() == [2.0]
    assert got.unique().tolist() == [1.0]


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ([("irecv", 2, 0, True)], "transfer 0 from rank 0 to rank 1 .* shapes differ"),
        ([("irecv", 1, 5, True)], "tag differ"),
        ([("isend", 1, 0, True)], "deadlock"),
        ([], "deadlock"),
        ([("irecv", 1, 0, True), ("irecv", 1, 0, True)], "deadlock"),
    ],
)
def test_transfers_that_do_not_fit_are_found(second, expected):
    programs = transfer_programs([("isend", 1, 0, True)], second)
    for check in (check_programs, run):
        with pytest.raises(VerificationError, match=expected):
            check(programs)


def test_messages_that_pass_each_other_are_refused_by_the_static_check_alone():
    """Both ranks send before they receive, and wait for neither in between.

    Where the messages of a pair of ranks run one after another (NCCL), both sends wait for receives that stand behind
    them.  In the lockstep run they do not, so that it ends.
    """
    first, second = [("isend", 1, 0, True), ("irecv", 2, 1, True)], [("isend", 2, 1, True), ("irecv", 1, 0, True)]
    programs = transfer_programs(first, second)
    assert [r[1].unique().item() for r in run(programs)] == [2.0, 1.0]
    with pytest.raises(VerificationError, match="deadlock: where a send blocks until it is received"):
        check_programs(programs)


def test_batched_transfers():
    mesh = Mesh(axes=("pp",), sizes=(2,))
    programs = []
    for rank in range(2):
        sketch = Sketch()
        x = sketch.input("x", (ROWS, 1))
        buffer = sketch.call(aten.clone.default, x)
        both = sketch.call(c10d.batch_p2p_ops.default, ["isend", "irecv"], [1 - rank] * 2, [0, 0], [x, buffer], "pp")
        got = sketch.graph.call_function(operator.getitem, (both, 1))
        got.meta["val"] = x.meta["val"]
        programs.append(program(sketch, [sketch.call(c10d.wait_tensor.default, got)], mesh, rank))
    check_programs(programs)
    assert [r[0].unique().item() for r in run(programs)] == [2.0, 1.0]


def test_uneven_all_to_all():
    mesh = Mesh(axes=("tp",), sizes=(2,))

    def make(splits):
        programs = []
        for rank, (sends, receives) in enumerate(splits):
            sketch = Sketch()
            x = sketch.input("x", (ROWS, 1))
            index = sketch.call(aten.cumsum.default, sketch.call(aten.ones_like.default, x), 0)
            tensor = sketch.call(aten.mul.Tensor, x, index)
            result = sketch.wait(c10d.all_to_all_single.default, tensor, receives, sends, "tp")
            programs.append(program(sketch, [result], mesh, rank))
        return programs

    good = make([([5, 7], [5, 2]), ([2, 10], [7, 10])])
    check_programs(good)
    first, second = run(good)
    assert first[0][:, 0].tolist() == [1.0, 2, 3, 4, 5, 2, 4]
    assert second[0].shape == (17, 1)
    for splits, expected in (
        ([([5, 7], [5, 3]), ([2, 10], [7, 10])], "rank 1 sends 2 rows, rank 0 expects 3"),
        ([([5, 6], [5, 2]), ([2, 10], [7, 10])], "11 rows of a tensor that has 12"),
        ([([12], [5, 2]), ([2, 10], [7, 10])], "for a group of 2 ranks"),
    ):
        for check in (check_programs, run):
            with pytest.raises(VerificationError, match=expected):
                check(make(splits))


def test_coalesced_forms():
    mesh = Mesh(axes=("tp",), sizes=(2,))
    programs = []
    for rank in range(2):
        sketch = Sketch()
        x = sketch.input("x", (ROWS, 1))
        y = sketch.call(aten.mul.Tensor, x, 10.0)
        results = []
        for op, args in (
            (c10d.all_reduce_coalesced.default, ("sum", "tp")),
            (c10d.all_gather_into_tensor_coalesced.default, (2, "tp")),
            (c10d.reduce_scatter_tensor_coalesced.default, ("max", 2, "tp")),
        ):
            both = sketch.call(op, [x, y], *args)
            for i in range(2):
                part = sketch.graph.call_function(operator.getitem, (both, i))
                part.meta["val"] = both.meta["val"][i]
                results.append(sketch.call(c10d.wait_tensor.default, part))
        programs.append(program(sketch, results, mesh, rank))
    check_programs(programs)
    results = run(programs)
    assert [r.unique().tolist() for r in results[1]] == [[3.0], [30.0], [1.0, 2.0], [10.0, 20.0], [2.0], [20.0]]


def test_values_must_be_waited_for():
    mesh = Mesh(axes=("tp",), sizes=(1,))
    for use in ("compute", "list", "return", "communicate"):
        sketch = Sketch()
        x = sketch.input("x", (ROWS, 1))
        handle = sketch.call(c10d.all_reduce.default, x, "sum", "tp")
        results = {
            "compute": lambda h=handle, s=sketch: s.call(aten.mul.Tensor, h, 2.0),
            "list": lambda h=handle, s=sketch: s.call(aten.cat.default, [h, h]),
            "return": lambda h=handle: h,
            "communicate": lambda h=handle, s=sketch: s.wait(c10d.all_reduce.default, h, "sum", "tp"),
        }[use]()
        programs = [program(sketch, [results], mesh, 0)]
        for check in (check_programs, run):
            with pytest.raises(VerificationError, match="never waited for"):
                check(programs)


def test_communication_inside_called_graphs():
    mesh = Mesh(axes=("tp",), sizes=(2,))
    inner = Sketch()
    doubled = inner.call(aten.mul.Tensor, inner.input("y", (ROWS, 1)), 2.0)
    part = inner.module([inner.call(c10d.all_reduce.default, doubled, "sum", "tp")])
    programs = []
    for rank in range(2):
        graph = fx.Graph()
        x = graph.placeholder("x")
        once = graph.call_module("stage", (x,))
        first = graph.call_function(operator.getitem, (once, 0))
        waited = graph.call_function(c10d.wait_tensor.default, (first,))
        twice = graph.call_module("stage", (waited,))
        second = graph.call_function(operator.getitem, (twice, 0))
        graph.output((graph.call_function(c10d.wait_tensor.default, (second,)),))
        made = program(Sketch(), (), mesh, rank)
        programs.append(dataclasses.replace(made, graph_module=fx.GraphModule({"stage": part}, graph)))
    check_programs(programs)
    assert [r[0].unique().item() for r in run(programs)] == [24.0, 24.0]
    programs[1] = dataclasses.replace(programs[1], graph_module=build(mesh, 1, ()).graph_module)
    for check in (check_programs, run):
        assert "rank 1" in verdict(check, programs)


def test_a_failing_node_names_rank_layer_and_source():
    programs = mlp_programs(1, 2)
    node = next(n for n in programs[1].graph_module.graph.nodes if n.meta.get("origin") == "mm_1")
    node.args = (node.args[1], node.args[0])
    graphs = [p.graph_module.graph for p in programs]
    inputs = [[torch.ones(n.meta["val"].shape) for n in g.find_nodes(op="placeholder")] for g in graphs]
    with pytest.raises(VerificationError, match=r"rank 1: aten.mm.default failed on .*layer mlp.down, model.py"):
        run_lockstep(programs, inputs)


def test_wrong_number_of_inputs():
    with pytest.raises(VerificationError, match="got 0 inputs for a graph of 1 placeholders"):
        run_lockstep(programs_of([()] * 4), [[]] * 4)
