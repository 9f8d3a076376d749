"""Binding: names become groups, gradients own their memory."""

import operator

import torch
from torch import fx

from autopar.passes.base import (
    InputKind,
    InputSpec,
    Mesh,
    OutputKind,
    OutputSpec,
    Phase,
    Program,
    ProgramTensor,
)
from autopar.passes.placement import REPLICATE
from autopar.runtime.bind import bind, group_names, input_order

ATEN = torch.ops.aten
MESH = Mesh(axes=("dp", "tp"), sizes=(1, 1))


def program(build, outputs, inputs=(("w", InputKind.PARAMETER), ("x", InputKind.BATCH), ("seed[0]", InputKind.SEED))):
    """A program whose graph ``build`` makes from its placeholders; values are 4 x 4 unless a node says otherwise."""
    graph = fx.Graph()
    nodes = []
    for name, _ in inputs:
        node = graph.placeholder(name.replace("[", "").replace("]", ""))
        node.meta = {"val": torch.empty(() if name.startswith("seed") else (4, 4)), "phase": Phase.FORWARD}
        nodes.append(node)
    results = build(graph, *nodes)
    for node in graph.nodes:
        node.meta.setdefault("val", torch.empty(4, 4))
        node.meta.setdefault("phase", Phase.FORWARD)
    graph.output(tuple(results))
    tensor = ProgramTensor(layout=(REPLICATE, REPLICATE), shape=(4, 4), dtype=torch.float32)
    return Program(
        graph_module=fx.GraphModule({}, graph),
        inputs=tuple(InputSpec(kind=kind, name=name, trainable=kind is InputKind.PARAMETER) for name, kind in inputs),
        outputs=tuple(OutputSpec(kind=kind, name=name, leaf=leaf) for kind, name, leaf in outputs),
        input_tensors=tuple(tensor for _ in inputs),
        output_tensors=tuple(None if value is None else tensor for value in results),
        mesh=MESH,
        rank=0,
    )


GRADIENT = (OutputKind.GRADIENT, "w", -1)


def bound(build, outputs=(GRADIENT,), **kwargs):
    return bind(program(build, outputs, **kwargs), lambda name: f"real {name}", torch.device("cpu"))


def memory_of(module, *args):
    return [None if t is None else t.untyped_storage().data_ptr() for t in module(*args)]


W, X, SEED = torch.ones(4, 4), torch.ones(4, 4), torch.ones(())


def test_groups_are_bound_and_listed():
    def build(graph, w, x, seed):
        reduced = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "dp+tp"))
        return (graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (reduced,)),)

    original = program(build, (GRADIENT,))
    assert group_names(original.graph_module) == {"dp+tp"}
    copy = bind(original, lambda name: f"real {name}", torch.device("cpu"))
    assert group_names(copy) == {"real dp+tp"}
    assert group_names(original.graph_module) == {"dp+tp"}


def test_placeholders_follow_the_order_of_the_runtime():
    inputs = (("x", InputKind.BATCH), ("b", InputKind.BUFFER), ("seed[0]", InputKind.SEED), ("w", InputKind.PARAMETER))
    build = lambda graph, x, b, seed, w: (graph.call_function(ATEN.add.Tensor, (w, x)),)  # noqa: E731
    made = program(build, (GRADIENT,), inputs=inputs)
    module = bind(made, str, torch.device("cpu"))
    assert [made.inputs[i].name for i in input_order(made)] == ["w", "b", "x", "seed[0]"]
    assert [n.target for n in module.graph.find_nodes(op="placeholder")] == ["w", "b", "x", "seed0"]


def test_a_gradient_that_is_an_input_is_copied():
    module = bound(lambda graph, w, x, seed: (x,))
    assert memory_of(module, W, X, SEED)[0] != X.untyped_storage().data_ptr()


def test_a_gradient_that_views_a_parameter_is_copied():
    module = bound(lambda graph, w, x, seed: (graph.call_function(ATEN.t.default, (w,)),))
    assert memory_of(module, W, X, SEED)[0] != W.untyped_storage().data_ptr()


def test_an_expanded_gradient_is_made_dense():
    def build(graph, w, x, seed):
        total = graph.call_function(ATEN.sum.default, (x,))
        total.meta = {"val": torch.empty(())}
        wide = graph.call_function(ATEN.expand.default, (total, [4, 4]))
        wide.meta = {"val": torch.empty(()).expand(4, 4)}
        return (wide,)

    assert bound(build)(W, X, SEED)[0].is_contiguous()


def test_two_gradients_that_are_one_value_get_memory_of_their_own():
    def build(graph, w, x, seed):
        value = graph.call_function(ATEN.mul.Tensor, (w, x))
        return value, graph.call_function(ATEN.view.default, (value, [16]))

    places = memory_of(bound(build, (GRADIENT, (OutputKind.INPUT_GRADIENT, "x", -1))), W, X, SEED)
    assert places[0] != places[1]


def test_a_gradient_that_is_a_result_too_is_copied():
    def build(graph, w, x, seed):
        value = graph.call_function(ATEN.mul.Tensor, (w, x))
        return value, value

    places = memory_of(bound(build, ((OutputKind.RESULT, "result[0]", 0), GRADIENT)), W, X, SEED)
    assert places[0] != places[1]


def test_pieces_of_one_bucket_are_not_copied():
    def build(graph, w, x, seed):
        bucket = graph.call_function(ATEN.mul.Tensor, (w, x))
        parts = graph.call_function(ATEN.split.Tensor, (bucket, 2))
        parts.meta = {"val": [torch.empty(2, 4)] * 2}
        return tuple(graph.call_function(operator.getitem, (parts, i)) for i in range(2))

    module = bound(build, (GRADIENT, (OutputKind.INPUT_GRADIENT, "x", -1)))
    first, second = module(W, X, SEED)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert first.data_ptr() != second.data_ptr()


def test_a_result_that_is_a_parameter_is_copied_and_one_that_is_an_input_is_not():
    outputs = ((OutputKind.RESULT, "result[0]", 0), (OutputKind.RESULT, "result[1]", 1))
    places = memory_of(bound(lambda graph, w, x, seed: (w, x), outputs), W, X, SEED)
    assert places[0] != W.untyped_storage().data_ptr()
    assert places[1] == X.untyped_storage().data_ptr()
