"""Dumps of a rank's program: what each format says, what filters leave, what folding tells once."""

import ast
import dataclasses
import json
import operator
import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from torch import fx

from autopar.cost_models.errors import UsageError
from autopar.passes.base import InputKind, InputSpec, Mesh, OutputKind, OutputSpec, Phase, Program
from autopar.passes.placement import REPLICATE, Partial, Shard
from autopar.report.changes import diff_programs
from autopar.report.dump import FORMATS, dump
from autopar.report.reader import view_program
from autopar.report.rows import Kind
from tests.passes.pipelines import Tied, lowered, tokens
from tests.verify.sketch import Sketch, aten, c10d

MESH = Mesh(axes=("dp", "tp"), sizes=(2, 2))
WIDTH, HIDDEN, ROWS = 8, 16, 4


class Blocks(Sketch):
    """A stack of two-layer blocks under dp 2 x tp 2: one all_reduce each forward, gradients of ``down`` reduced."""

    def make(self, num_blocks, *, tied=False, reduce_group="dp", rank=0):
        specs, states, gradients = [], [], {}
        for i in range(num_blocks):
            for name, shape, full in (("up", (WIDTH, HIDDEN // 2), 1), ("down", (HIDDEN // 2, WIDTH), 0)):
                node = self.input(f"blocks_{i}_{name}_weight", shape)
                node.meta |= {
                    "layout": (REPLICATE, Shard(full, 1, 2)),
                    "global_shape": (WIDTH, HIDDEN)[:: 1 - 2 * (full == 0)],
                }
                aliases = ("head.weight",) if tied and i == 0 else ()
                specs.append(
                    InputSpec(
                        kind=InputKind.PARAMETER, name=f"blocks.{i}.{name}.weight", aliases=aliases, trainable=True
                    )
                )
                states.append(node)
        value = x = self.input("x", (ROWS, WIDTH))
        x.meta |= {"layout": (Shard(0, 1, 2), REPLICATE), "global_shape": (2 * ROWS, WIDTH)}
        specs.append(InputSpec(kind=InputKind.BATCH, name="args[0]", leaf=0))
        hidden = []
        for i in range(num_blocks):
            value, inner = self.forward_of(i, value, *states[2 * i : 2 * i + 2])
            hidden.append(inner)
        self.layer, self.phase = "", Phase.FORWARD
        loss = self.call(aten.sum.default, value)
        for i in reversed(range(num_blocks)):
            self.layer, self.phase = f"blocks.{i}.down", Phase.BACKWARD
            partial = self.call(aten.mm.default, self.call(aten.t.default, hidden[i]), value)
            gradients[i] = self.wait(c10d.all_reduce.default, partial, "sum", reduce_group)
        outputs = [OutputSpec(kind=OutputKind.LOSS, name="loss", leaf=0)]
        outputs += [OutputSpec(kind=OutputKind.GRADIENT, name=f"blocks.{i}.down.weight") for i in gradients]
        return Program(
            graph_module=self.module([loss, *gradients.values()]),
            inputs=tuple(specs),
            outputs=tuple(outputs),
            input_tensors=(),
            output_tensors=(),
            mesh=MESH,
            rank=rank,
        )

    def forward_of(self, i, value, up, down):
        self.layer, self.phase = f"blocks.{i}.up", Phase.FORWARD
        inner = self.call(aten.mm.default, value, up)
        self.layer = f"blocks.{i}"
        inner = self.call(aten.relu.default, inner, layout=(Shard(0, 1, 2), Shard(1, 1, 2)))
        inner.meta["global_shape"] = (2 * ROWS, HIDDEN)
        self.layer = f"blocks.{i}.down"
        partial = self.call(aten.mm.default, inner, down, layout=(Shard(0, 1, 2), Partial("sum")), origin=f"mm_{i}")
        return self.wait(c10d.all_reduce.default, partial, "sum", "tp"), inner


@pytest.fixture
def program():
    return Blocks().make(3)


def test_text_is_python_with_comments(program):
    text = dump(program)
    ast.parse(text)
    assert "# rank 0 of 4 (dp 0/2, tp 0/2): 36 nodes, 6 communications" in text
    (relu,) = [line for line in text.splitlines() if line.startswith("    relu =")]
    assert re.sub(r" +", " ", relu) == " relu = aten.relu(mm) # f32[4, 8] of [8, 16] dp:S(0) tp:S(1)"
    assert "# ---- forward blocks.0.down" in text
    assert "parameter blocks.1.up.weight  f32[8, 8] of [8, 16]  dp:R tp:S(1)" in text
    assert "# model.py:" in text


def test_a_collective_says_its_bytes_its_group_and_what_it_serves(program):
    view = view_program(program)
    first, *_, last = [row.communication for row in view.rows if row.kind is Kind.COMMUNICATION]
    full_bytes = ROWS * WIDTH * 4
    assert (first.op, first.group, first.num_ranks, first.moved_bytes) == ("all_reduce", "tp", 2, full_bytes)
    assert first.serves == ("mm_0 of blocks.0.down",)
    assert (last.group, last.serves) == ("dp", ("gradient of blocks.0.down.weight",))


def test_a_bucket_belongs_to_every_layer_that_it_serves():
    sketch = Sketch()
    values = [sketch.input(f"p{i}", (i + 1, 2)) for i in range(5)]
    gathered = sketch.call(c10d.all_gather_into_tensor_coalesced.default, values, 2, "dp")
    flat = sketch.call(aten.cat.default, [sketch.call(aten.view.default, value, [-1]) for value in values])
    reduced = sketch.wait(c10d.all_reduce.default, flat, "sum", "dp")
    pieces = [sketch.call(aten.slice.Tensor, reduced, 0, i, i + 2) for i in range(5)]
    program = Program(
        graph_module=sketch.module([gathered, *pieces]),
        inputs=tuple(InputSpec(kind=InputKind.PARAMETER, name=f"blocks.{i}.weight") for i in range(5)),
        outputs=(
            OutputSpec(kind=OutputKind.RESULT, name="result[0]"),
            *(OutputSpec(kind=OutputKind.GRADIENT, name=f"blocks.{i}.weight") for i in range(5)),
        ),
        input_tensors=(),
        output_tensors=(),
        mesh=MESH,
        rank=0,
    )
    gather, reduction = (row for row in view_program(program).rows if row.communication)
    assert gather.communication.serves == tuple(f"blocks.{i}.weight" for i in range(5))
    assert gather.communication.moved_bytes == sum((i + 1) * 2 * 4 for i in range(5))
    text = dump(program, only="collectives", layer="blocks.3")
    assert "for blocks.0.weight, blocks.1.weight, blocks.2.weight and 2 more" in text
    assert reduction.name in text
    assert "all_reduce" not in dump(program, only="collectives", layer="blocks.9")


@pytest.mark.parametrize(
    ("call", "shape", "moved"),
    [
        (lambda s, x: s.call(c10d.all_reduce.default, x, "sum", "tp"), (6,), 24),
        (lambda s, x: s.call(c10d.all_gather_into_tensor.default, x, 2, "tp"), (6,), 24),
        (lambda s, x: s.call(c10d.reduce_scatter_tensor.default, x, "sum", 2, "tp"), (6,), 12),
        (lambda s, x: s.call(c10d.all_to_all_single.default, x, [3, 3], [3, 3], "tp"), (6,), 12),
        (lambda s, x: s.call(c10d.all_reduce.default, x, "sum", "dp+tp"), (6,), 36),
    ],
)
def test_moved_bytes_are_those_of_the_ring(call, shape, moved):
    sketch = Sketch()
    node = call(sketch, sketch.input("x", shape))
    outputs = (OutputSpec(kind=OutputKind.RESULT, name="result[0]"),)
    program = Program(
        graph_module=sketch.module([node]),
        inputs=(InputSpec(kind=InputKind.BATCH, name="args[0]"),),
        outputs=outputs,
        input_tensors=(),
        output_tensors=(),
        mesh=MESH,
        rank=0,
    )
    (talk,) = [row.communication for row in view_program(program).rows if row.communication]
    assert talk.moved_bytes == moved


def test_json_is_complete_and_every_producer_exists(program):
    document = json.loads(dump(program, "json"))
    assert (document["format"], document["schema"]) == ("autopar dump", 1)
    assert document["mesh"] == {"axes": ["dp", "tp"], "sizes": [2, 2]}
    names = [node["name"] for node in document["nodes"]]
    assert names == [node.name for node in program.graph_module.graph.nodes]
    before = set()
    for node in document["nodes"]:
        assert set(node["inputs"]) <= before
        assert node["outside"] == []
        before.add(node["name"])
    relu = document["nodes"][names.index("relu")]
    assert relu["layout"] == {"dp": "S(0)", "tp": "S(1)"}
    assert relu["local"] == [{"dtype": "f32", "shape": [4, 8], "bytes": 128}]
    assert (relu["global_shape"], relu["phase"], relu["layer"]) == ([8, 16], "forward", "blocks.0")


def test_a_filtered_json_names_what_it_left_out(program):
    document = json.loads(dump(program, "json", layer="blocks.1"))
    shown = {node["name"] for node in document["nodes"]}
    assert {node["layer"].split(".")[1] for node in document["nodes"]} == {"1"}
    for node in document["nodes"]:
        assert set(node["inputs"]) <= shown
        assert not set(node["outside"]) & shown
    assert any(node["outside"] for node in document["nodes"])


@pytest.mark.parametrize(
    ("only", "kind", "count"),
    [
        ("collectives", "collective", 6),
        ("parameters", "parameter", 6),
        ("inputs", "input", 1),
        ("buffers", "buffer", 0),
        ("computation", "computation", 13),
    ],
)
def test_only_keeps_one_kind(program, only, kind, count):
    nodes = json.loads(dump(program, "json", only=only))["nodes"]
    assert [node["kind"] for node in nodes] == [kind] * count


def test_only_gradients_keeps_what_becomes_a_gradient(program):
    nodes = json.loads(dump(program, "json", only="gradients"))["nodes"]
    assert [node["roles"] for node in nodes] == [[f"gradient of blocks.{i}.down.weight"] for i in (2, 1, 0)]


def test_folding_tells_copies_of_a_block_once(program):
    text = dump(program, folds=True)
    assert text.count("= aten.relu(") == 1
    assert "# ---- forward blocks.{1-2}: as blocks.0" in text
    assert "# ---- backward blocks.{0-1}: as blocks.2" in text
    ast.parse(text)
    assert dump(program, folds=False).count("= aten.relu(") == 3
    assert dump(Blocks().make(60)).count("= aten.relu(") == 1, "big graphs fold by themselves"


def test_a_block_that_differs_is_not_folded():
    program = Blocks().make(3)
    relu = next(n for n in program.graph_module.graph.nodes if n.name == "relu_1")
    relu.meta["layout"] = (REPLICATE, Shard(1, 1, 2))
    text = dump(program, folds=True)
    assert text.count("= aten.relu(") == 2
    assert "forward blocks.2: as blocks.0" in text


def test_what_a_block_does_for_every_microbatch_is_told_once_but_for_its_messages():
    lowering, _ = lowered(Tied(depth=4), tokens(), 2, pp=2, microbatches=4)
    text, whole = (dump(lowering.program(0), folds=folds) for folds in (True, False))
    step = text.split("def stage")[0]
    assert step.count("= aten.add.Tensor(") < whole.split("def stage")[0].count("= aten.add.Tensor(") / 2
    assert ": as blocks.1 of an earlier micro-batch" in step
    for call in ("irecv(", "isend(", "self.stage0_forward(", "self.stage0_backward("):
        assert text.count(call) == whole.count(call) >= 4
    ast.parse(text)


def test_ties_are_named():
    assert "blocks.0.up.weight = head.weight" in dump(Blocks().make(1, tied=True))


def test_dot_has_a_cluster_for_each_layer_and_no_loose_edge(program):
    text = dump(program, "dot")
    assert text.startswith("digraph")
    assert text.count("{") == text.count("}")
    assert 'label="forward blocks.1.down"' in text
    nodes = set(re.findall(r"^ +(\w+) \[label=", text, re.MULTILINE))
    edges = re.findall(r"^ +(\w+) -> (\w+);", text, re.MULTILINE)
    assert edges
    assert {end for edge in edges for end in edge} <= nodes


def svg_texts(text):
    root = ElementTree.fromstring(text)
    return [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]


def test_svg_shows_operations_in_order_and_passes_views_and_waits_through(program):
    texts = svg_texts(dump(program, "svg", layer="blocks.1"))
    operations = [text for text in texts if text in {"mm", "relu", "all_reduce", "t", "wait"}]
    assert operations == ["mm", "relu", "mm", "all_reduce", "mm", "all_reduce"]
    assert any("-> gradient of blocks.1.down.weight" in text or "for gradient of" in text for text in texts)
    assert any("used by blocks.2" in text for text in texts)
    assert any("<- all_reduce of blocks.0.down" in text for text in texts)


def test_svg_boxes_stay_inside_the_picture_and_do_not_overlap(program):
    root = ElementTree.fromstring(dump(program, "svg"))
    width, height = float(root.get("width")), float(root.get("height"))
    rects = [r for r in root.iter("{http://www.w3.org/2000/svg}rect") if r.get("x")]
    bottoms = -1.0
    for rect in rects:
        x, y, w, h = (float(rect.get(key)) for key in ("x", "y", "width", "height"))
        assert x >= 0
        assert x + w <= width
        assert y + h <= height
        assert y >= bottoms
        bottoms = y + h
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        assert float(text.get("x")) + 7.2 * len(text.text) <= width


def test_svg_folds_copies_into_one_box(program):
    texts = svg_texts(dump(program, "svg", folds=True))
    assert "blocks.{1-2}: as blocks.0" in texts
    assert texts.count("relu") == 1


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_survives_names_that_need_escapes(format):
    program = Blocks().make(1)
    for node in program.graph_module.graph.nodes:
        node.meta["layer"] = 'a"<&b'
    text = dump(program, format)
    if format == "svg":
        assert 'forward a"<&b' in svg_texts(text)
    elif format == "dot":
        assert 'a\\"<&b' in text


def test_layouts_name_the_axes_over_which_work_is_split():
    """Stages hold whole layers, and micro-batches are an axis of the work that no rank stands on."""
    program = Blocks().make(1)
    for node in program.graph_module.graph.nodes:
        if "layout" in node.meta:
            dp, tp = node.meta["layout"]
            node.meta["layout"] = (dp, Shard(0, 1, 4), tp)
    program = dataclasses.replace(program, mesh=Mesh(axes=("pp", "dp", "tp"), sizes=(2, 2, 2)), rank=5)
    text = dump(program)
    assert "# rank 5 of 8 (pp 1/2, dp 0/2, tp 1/2)" in text
    (relu,) = [row for row in view_program(program).rows if row.name == "relu"]
    assert relu.layout == ("dp:S(0)", "tp:S(1)")


def test_unknown_format_and_filter_are_refused_with_those_that_exist(program):
    with pytest.raises(UsageError, match="'png' is unknown; use one of text, json, dot, svg"):
        dump(program, "png")
    with pytest.raises(UsageError, match="'weights' is unknown; use one of collectives"):
        dump(program, only="weights")


def test_parts_are_listed_as_functions():
    inner = Sketch()
    inner.layer = "blocks.0"
    inner_module = inner.module([inner.call(aten.relu.default, inner.input("a", (2,)))])
    root = torch.nn.Module()
    root.add_module("stage_0", inner_module)
    graph = fx.Graph(root)
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2)
    graph.output((graph.call_module("stage_0", (x,)),))
    program = Program(
        graph_module=fx.GraphModule(root, graph),
        inputs=(InputSpec(kind=InputKind.BATCH, name="args[0]"),),
        outputs=(OutputSpec(kind=OutputKind.RESULT, name="result[0]"),),
        input_tensors=(),
        output_tensors=(),
        mesh=Mesh(axes=("dp",), sizes=(1,)),
        rank=0,
    )
    text = dump(program)
    ast.parse(text)
    assert "def stage_0(a):" in text
    assert "stage_0 = self.stage_0(x)" in text
    assert json.loads(dump(program, "json"))["parts"]["stage_0"][1]["call"] == "aten.relu"
    assert "part stage_0" in svg_texts(dump(program, "svg"))


def test_differences_are_told_by_layer_and_once_for_copies(program):
    other = Blocks().make(3, reduce_group="dp+tp")
    assert diff_programs(program, program) == ""
    changes = diff_programs(program, other)
    assert changes.splitlines()[0] == "backward blocks.{0-2}.down"
    assert [line.split("  ")[1][:12] for line in changes.splitlines()[1:]] == ["- all_reduce", "+ all_reduce"]
    assert diff_programs(program, other, layer="blocks.*.up") == ""


def test_results_of_a_part_are_named_by_it():
    inner = Sketch()
    a = inner.input("a", (2,))
    inner_module = inner.module([inner.call(aten.relu.default, a), inner.call(aten.neg.default, a), a])
    root = torch.nn.Module()
    root.add_module("stage_0", inner_module)
    graph = fx.Graph(root)
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2)
    call = graph.call_module("stage_0", (x,))
    results = [graph.call_function(operator.getitem, (call, i)) for i in (0, 1, 2)]
    joined = graph.call_function(aten.stack.default, (results[:2],))
    graph.output((joined, results[2]))
    outputs = (
        OutputSpec(kind=OutputKind.LOSS, name="loss"),
        OutputSpec(kind=OutputKind.GRADIENT, name="w"),
    )
    program = Program(
        graph_module=fx.GraphModule(root, graph),
        inputs=(InputSpec(kind=InputKind.BATCH, name="args[0]"),),
        outputs=outputs,
        input_tensors=(),
        output_tensors=(),
        mesh=Mesh(axes=("dp",), sizes=(1,)),
        rank=0,
    )
    text = dump(program)
    ast.parse(text)
    assert "aten.stack([*stage_0[0:2]])" in text
    assert "return (stack_default, stage_0[2])" in text
    nodes = {node["name"]: node for node in json.loads(dump(program, "json"))["nodes"]}
    assert nodes["stack_default"]["inputs"] == ["stage_0"]
    assert nodes["stage_0"]["roles"] == ["gradient of w"]
