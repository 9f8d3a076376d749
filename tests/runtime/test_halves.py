"""A program cut where its results leave it."""

import torch
from torch import fx

from autopar.passes.base import InputKind, InputSpec, Mesh, OutputKind, OutputSpec, Phase, Program
from autopar.runtime.halves import split_halves

ATEN = torch.ops.aten


def test_the_backward_half_gets_what_it_reads_and_what_was_made_for_it():
    graph = fx.Graph()
    w, x, seed = (graph.placeholder(name) for name in ("w", "x", "seed"))
    y = graph.call_function(ATEN.mm.default, (x, w))
    result = graph.call_function(ATEN.relu.default, (y,))
    again = graph.call_function(ATEN.clone.default, (w,))  # gathered again for the backward
    turned = graph.call_function(ATEN.t.default, (again,))
    masked = graph.call_function(ATEN.threshold_backward.default, (seed, result, 0))
    into_x = graph.call_function(ATEN.mm.default, (masked, turned))
    x_t = graph.call_function(ATEN.t.default, (x,))
    into_w = graph.call_function(ATEN.mm.default, (x_t, masked))
    late = (again, turned, masked, into_x, x_t, into_w)
    for node in graph.nodes:
        node.meta["phase"] = Phase.BACKWARD if node in late or node is seed else Phase.FORWARD
    graph.output((result, into_w, into_x, None))
    program = Program(
        graph_module=fx.GraphModule({}, graph),
        inputs=(
            InputSpec(kind=InputKind.PARAMETER, name="w", trainable=True),
            InputSpec(kind=InputKind.BATCH, name="args[0]", leaf=0, trainable=True),
            InputSpec(kind=InputKind.SEED, name="seed[0]"),
        ),
        outputs=(
            OutputSpec(kind=OutputKind.RESULT, name="result[0]", leaf=0),
            OutputSpec(kind=OutputKind.GRADIENT, name="w"),
            OutputSpec(kind=OutputKind.INPUT_GRADIENT, name="args[0]"),
            OutputSpec(kind=OutputKind.GRADIENT, name="unused"),
        ),
        input_tensors=(),
        output_tensors=(),
        mesh=Mesh(axes=("dp",), sizes=(1,)),
        rank=0,
    )
    halves = split_halves(program.graph_module, program)
    assert halves.forward_outputs == (0,)
    assert halves.backward_outputs == (1, 2, 3)
    forward = [n.name for n in halves.forward.graph.nodes if n.op == "call_function"]
    assert forward == ["mm_default", "relu_default"]

    w, x = torch.randn(3, 4, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    value = torch.relu(x @ w)
    incoming = torch.randn(2, 4)
    wanted = torch.autograd.grad(value, (w, x), incoming)
    got, *saved = halves.forward(w.detach(), x.detach())
    assert {t.data_ptr() for t in saved} == {w.data_ptr(), x.data_ptr(), got.data_ptr()}
    gradients = halves.backward(*saved, incoming)
    torch.testing.assert_close(got, value.detach())
    torch.testing.assert_close(gradients[0], wanted[0])
    torch.testing.assert_close(gradients[1], wanted[1])
    assert gradients[2] is None
