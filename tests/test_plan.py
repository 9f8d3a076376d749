"""Constraints refuse what cannot be; plans survive a file and name the model they belong to."""

import dataclasses
import json
import os
import pickle
import string
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

from autopar.cost_models.errors import ConstraintError, PlanError
from autopar.fingerprint import fingerprint
from autopar.passes.base import InputKind, InputSpec, OutputKind, OutputSpec, StepGraph
from autopar.passes.placement import Partial, Replicate, Shard
from autopar.plan import (
    RECOMPUTE,
    SCHEDULES,
    Certificate,
    Constraints,
    Plan,
    Prediction,
    TensorInfo,
    describe_tensors,
    format_placement,
    layer_matches,
    parse_placement,
)

PREDICTED = Prediction(step_time_s=0.0123, peak_bytes=3_200_000, comm_bytes=4096, flops=10**12)


def make_step(width=4, *, bias=True):
    """A step graph made by hand: x @ w (+ b)."""
    graph = fx.Graph()
    w, x = graph.placeholder("w"), graph.placeholder("x")
    w.meta["val"], x.meta["val"] = torch.empty(3, width), torch.empty(2, 3)
    if bias:
        b = graph.placeholder("b")
        b.meta["val"] = torch.empty(width)
    result = graph.call_function(torch.ops.aten.mm.default, (x, w))
    result.meta["val"] = torch.empty(2, width)
    if bias:
        result = graph.call_function(torch.ops.aten.add.Tensor, (result, b))
        result.meta["val"] = torch.empty(2, width)
    graph.output((result,))
    graph_module = fx.GraphModule(nn.Module(), graph)
    inputs = [InputSpec(kind=InputKind.PARAMETER, name="w", aliases=("head.w",), trainable=True)]
    inputs.append(InputSpec(kind=InputKind.BATCH, name="args[0]", leaf=0))
    if bias:
        inputs.append(InputSpec(kind=InputKind.PARAMETER, name="b", trainable=True))
    outputs = (OutputSpec(kind=OutputKind.RESULT, name="result[0]", leaf=0),)
    return StepGraph(graph_module=graph_module, inputs=tuple(inputs), outputs=outputs, training=False)


def make_plan(**changes):
    fields = {"dp": 2, "tp": 2, "zero": 3, "storage": {"w": ("R", "S(1)"), "args[0]": ("S(0)", "R")}}
    return Plan.for_step(make_step(), predicted=PREDICTED, **{**fields, **changes})


# ---- constraints


@pytest.mark.parametrize(
    ("wish", "working"),
    [
        ({"dp": 0}, "at least 1"),
        ({"tp": True}, "at least 1"),
        ({"tp": 2.0}, "at least 1"),
        ({"zero": 4}, "0, 1, 2, 3"),
        ({"zero": True}, "0, 1, 2, 3"),
        ({"recompute": "all"}, "'none', 'selective', 'full'"),
        ({"schedule": "dualpipe"}, "'gpipe', '1f1b', 'interleaved', 'zb'"),
        ({"sequence_parallel": 1}, "True, False"),
        ({"memory_bytes": -1}, "at least 1"),
        ({"microbatches": "4"}, "at least 1"),
        ({"layers": {"mlp": {"width": 4}}}, "tp, zero, recompute, sequence_parallel, stage"),
        ({"layers": {"mlp": {"zero": 7}}}, "0, 1, 2, 3"),
        ({"tp": 4, "layers": {"mlp": {"tp": 3}}}, "1, 4"),
        ({"pp": 2, "layers": {"mlp": {"stage": 2}}}, "0 to 1"),
    ],
)
def test_an_impossible_wish_is_refused_with_what_was_got_and_what_works(wish, working):
    with pytest.raises(ConstraintError) as caught:
        Constraints(**wish)
    assert working in str(caught.value)
    (value,) = wish["layers"]["mlp"].values() if "layers" in wish else wish.values()
    assert repr(value) in str(caught.value) or "width" in str(caught.value)


def test_fields_are_given_by_name_and_cannot_be_changed():
    with pytest.raises(TypeError):
        Constraints(2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Constraints(dp=2).dp = 3


def test_later_patterns_win_and_fields_that_they_leave_open_stay():
    wishes = Constraints(zero=1, layers={"blocks.*": {"tp": 1, "recompute": "full"}, "**.mlp": {"recompute": "none"}})
    layer = wishes.layer("blocks.3.mlp.up")
    assert (layer.tp, layer.recompute, layer.zero) == (1, "none", 1)
    assert wishes.layer("head").tp is None


@pytest.mark.parametrize(
    ("pattern", "path", "fits"),
    [
        ("blocks.*.mlp", "blocks.0.mlp", True),
        ("blocks.*.mlp", "blocks.0.attn.mlp", False),
        ("blocks.**.mlp", "blocks.0.attn.mlp", True),
        ("blocks.1*", "blocks.12", True),
        ("blocks.1", "blocks.12", False),
        ("**", "anything.at.all", True),
        ("**.mlp", "mlp", True),
        ("a+b", "aab", False),
    ],
)
def test_patterns_match_components(pattern, path, fits):
    assert layer_matches(pattern, path) == fits


def test_a_pattern_that_fits_no_layer_is_refused():
    wishes = Constraints(layers={"block.*": {"tp": 1}})
    with pytest.raises(ConstraintError, match=r"fits no layer.*'blocks\.0'"):
        wishes.check_layers(["blocks.0", "blocks.1"])
    wishes.check_layers(["block.0.mlp"])


# ---- plans

names = st.text(string.ascii_lowercase + "._0123456789[]", min_size=1, max_size=12)
placements = st.one_of(
    st.just(Replicate()),
    st.sampled_from(["sum", "max", "min"]).map(Partial),
    st.builds(Shard, st.integers(0, 3), st.integers(1, 6), st.integers(1, 9)),
)


@st.composite
def stored_tensors(draw, kind, sizes):
    """(TensorInfo, texts of its layout): each mesh axis replicates the tensor or splits a dim of its own."""
    layout, shape = [], []
    for num_ranks in sizes:
        blocks, rest = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        units = draw(st.sampled_from([num_ranks, num_ranks + 1]))
        layout.append(draw(st.sampled_from([Replicate(), Shard(len(shape), blocks, units)])))
        shape.append(blocks * units * rest)
    dtype = draw(st.sampled_from(["float32", "bfloat16", "int64"]))
    info = TensorInfo(kind=kind, shape=tuple(shape), dtype=dtype, aliases=draw(st.sampled_from([(), ("other.name",)])))
    return info, tuple(map(format_placement, layout, sizes))


@st.composite
def plans(draw):
    dp, tp, pp, microbatches = (draw(st.integers(1, 4)) for _ in range(4))
    labels = st.tuples(*[st.text(max_size=5)] * (2 if pp * microbatches == 1 else 3))
    stored = st.sampled_from([k.value for k in InputKind]).flatmap(lambda kind: stored_tensors(kind, (dp, tp)))
    tensors = draw(st.dictionaries(names, stored, max_size=3))
    figures = st.integers(0, 10**18)
    return Plan(
        fingerprint=draw(names),
        dp=dp,
        tp=tp,
        pp=pp,
        zero=draw(st.integers(0, 3)),
        sequence_parallel=draw(st.booleans()),
        recompute=draw(st.sampled_from(RECOMPUTE)),
        recompute_layers=draw(st.dictionaries(names, st.sampled_from(RECOMPUTE), max_size=2)),
        microbatches=microbatches,
        schedule=draw(st.sampled_from([None, *SCHEDULES])),
        stages=draw(st.dictionaries(names, st.integers(0, pp - 1), max_size=3)),
        choices=draw(st.dictionaries(names, labels, max_size=3)),
        storage={name: texts for name, (_, texts) in tensors.items()},
        tensors={name: info for name, (info, _) in tensors.items()},
        notes=draw(st.lists(st.text(max_size=8), max_size=2).map(tuple)),
        predicted=draw(
            st.builds(Prediction, step_time_s=st.floats(0, 1e9), peak_bytes=figures, comm_bytes=figures, flops=figures)
        ),
        certificate=draw(
            st.builds(Certificate, gap=st.none() | st.floats(0, 1), bound_s=st.none() | st.floats(0, 1e9), space=names)
        ),
    )


@given(plans())
def test_a_plan_survives_a_file(tmp_path_factory, plan):
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plan.save(path)
    loaded = Plan.load(path)
    assert loaded == plan
    assert loaded.hash() == plan.hash()
    assert hash(loaded) == hash(plan)
    assert pickle.loads(pickle.dumps(plan)) == plan


@given(plans())
def test_any_plan_can_be_explained_and_differs_from_itself_in_nothing(plan):
    assert f"dp {plan.dp} x tp {plan.tp} x pp {plan.pp}" in plan.explain()
    assert plan.diff(plan) == ""


@given(placements, st.integers(1, 9))
def test_placements_survive_their_text(placement, num_ranks):
    assert parse_placement(format_placement(placement, num_ranks), num_ranks) == placement


@pytest.mark.parametrize("text", ["S", "S()", "S(-1)", "P(mean)", "r", "S(0,1,2,3)", ""])
def test_a_text_that_is_no_placement_is_refused(text):
    with pytest.raises(PlanError, match="is not one of R"):
        parse_placement(text, 2)


def test_layout_of_stored_tensors():
    plan = make_plan()
    assert plan.layout("w") == (Replicate(), Shard(1, 1, 2))
    assert plan.layout("b") == (Replicate(), Replicate())
    assert plan.world_size == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zero": 5}, "zero=5"),
        ({"stages": {"head": 1}}, "stage of 'head'=1"),
        ({"recompute_layers": {"head": "some"}}, "recompute of 'head'='some'"),
        ({"storage": {"w": ("R",)}}, "one text for each of"),
        ({"storage": {"w": ("R", "Q")}}, "placement 'Q'"),
        ({"storage": {"w": ("R", "S(2)")}}, r"'w' has shape \[3, 4\]"),
        ({"storage": {"w": ("S(0)", "R")}}, r"cannot be stored as S\(0\) R"),
        ({"schema": 2}, "schema=2"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(PlanError, match=message):
        make_plan(**changes)


@pytest.mark.parametrize("figure", [float("nan"), float("inf"), -1.0, "1"])
def test_predictions_are_numbers(figure):
    with pytest.raises(PlanError, match=r"predicted\.step_time_s"):
        dataclasses.replace(PREDICTED, step_time_s=figure)


def broken(change):
    document = json.loads(make_plan().to_json())
    change(document)
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a plan of schema 1"),
        ("[]", 'no "format": "autopar plan"'),
        ('{"nodes": []}', 'no "format": "autopar plan"'),
        (broken(lambda d: d.update(schema=7)), "has schema 7 and this version reads 1"),
        (broken(lambda d: d.pop("zero")), "missing or unknown: zero"),
        (broken(lambda d: d.update(extra=1)), "missing or unknown: extra"),
        (broken(lambda d: d["predicted"].pop("flops")), "flops"),
        (broken(lambda d: d["tensors"]["w"].update(kind="weight")), "weight"),
        (broken(lambda d: d.update(storage=3)), "not a plan of schema 1"),
    ],
)
def test_a_file_that_is_no_plan_is_refused_with_its_name(tmp_path, text, message):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=message) as caught:
        Plan.load(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_and_a_binary_file_are_refused(tmp_path):
    with pytest.raises(PlanError, match="cannot be read"):
        Plan.load(tmp_path / "none.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="cannot be read"):
        Plan.load(tmp_path / "binary")


def test_a_plan_of_another_model_is_refused_by_what_differs():
    plan = make_plan()
    plan.check(make_step(), world_size=4)
    with pytest.raises(PlanError, match=r"'w' is float32\[3, 8\] and was float32\[3, 4\]"):
        plan.check(make_step(width=8))
    with pytest.raises(PlanError, match="it has no parameter 'b'"):
        plan.check(make_step(bias=False))
    with pytest.raises(PlanError, match=r"for 4 ranks \(dp 2 x tp 2 x pp 1\) and 3 are running"):
        plan.check(make_step(), world_size=3)


def test_the_fingerprint_sees_operations_arguments_and_names():
    step = make_step()
    assert fingerprint(step) == fingerprint(make_step())
    other = make_step()
    add = next(n for n in other.graph.nodes if n.name == "add_tensor")
    add.kwargs = {"alpha": 2}
    changed = fingerprint(other)
    add.kwargs = {}
    add.target = torch.ops.aten.sub.Tensor
    renamed = dataclasses.replace(step, inputs=(dataclasses.replace(step.inputs[0], name="v"), *step.inputs[1:]))
    assert len({fingerprint(step), changed, fingerprint(other), fingerprint(renamed)}) == 4


FINGERPRINT_PROGRAM = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("t", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.fingerprint(module.make_step()), module.make_plan().hash())
"""


@pytest.mark.parametrize("seed", ["0", "1"])
def test_fingerprint_and_hash_do_not_depend_on_the_process(seed):
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", FINGERPRINT_PROGRAM, __file__]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.split() == [fingerprint(make_step()), make_plan().hash()]


def test_explain_folds_repeated_layers_and_counts_bytes():
    infos = {f"blocks.{i}.up.weight": TensorInfo(kind="parameter", shape=(64, 32), dtype="float32") for i in range(12)}
    infos["tok.weight"] = TensorInfo(kind="parameter", shape=(10, 4), dtype="bfloat16", aliases=("head.weight",))
    plan = make_plan(
        pp=2,
        stages={f"blocks.{i}": i // 6 for i in range(12)},
        choices={"mm": ("b", "b", "n"), "mm_1": ("b", "b", "k")},
        notes=("head.weight is tied to tok.weight",),
        storage={name: ("R", "S(0)") for name in infos if name != "tok.weight"},
    )
    text = dataclasses.replace(plan, tensors=infos).explain()
    (row,) = [line.split() for line in text.splitlines() if line.startswith("  blocks.{0-11}.up.weight")]
    assert row[1:] == ["12", "float32", "64x32", "R", "S(0)", "98.3", "kB", "49.2", "kB"]
    assert "tok.weight = head.weight" in text
    assert "0: blocks.{0-5}" in text
    assert "1: blocks.{6-11}" in text
    assert [line.split() for line in text.splitlines() if line.startswith("  mm ")] == [
        ["mm", "1", "b", "b", "k"],
        ["mm", "1", "b", "b", "n"],
    ]
    assert "is tied to" in text


def test_diff_names_what_changed():
    old = make_plan(notes=("old",))
    new = make_plan(zero=1, notes=("new",), storage={"w": ("S(1)", "R")})
    assert old.diff(new).splitlines() == [
        "zero: 3 -> 1",
        "storage w: R S(1) -> S(1) R",
        "storage args[0]: S(0) R -> -",
        "notes: - old",
        "notes: + new",
    ]


def test_tensors_are_described_in_the_order_of_the_inputs():
    described = describe_tensors(make_step())
    assert list(described) == ["w", "args[0]", "b"]
    assert described["w"] == TensorInfo(kind="parameter", shape=(3, 4), dtype="float32", aliases=("head.w",))
    assert described["w"].num_bytes == 48
