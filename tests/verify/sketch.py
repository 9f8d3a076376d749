"""Steps and programs built by hand: a two-layer MLP, forward and backward, split over dp and tp."""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives  # registers the shapes of communication ops
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
    StepGraph,
)
from autopar.passes.placement import PARTIAL, REPLICATE, Layout, local_shape, make_shard

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
BATCH, WIDTH, HIDDEN, OUT = 8, 7, 12, 4
INPUTS = (
    InputSpec(kind=InputKind.PARAMETER, name="up", trainable=True),
    InputSpec(kind=InputKind.PARAMETER, name="down", trainable=True),
    InputSpec(kind=InputKind.BATCH, name="args[0]", leaf=0),
)
OUTPUTS = (
    OutputSpec(kind=OutputKind.LOSS, name="loss", leaf=0),
    OutputSpec(kind=OutputKind.GRADIENT, name="up"),
    OutputSpec(kind=OutputKind.GRADIENT, name="down"),
)
SHAPES = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, OUT), "args[0]": (BATCH, WIDTH)}


class Sketch:
    """A graph under construction; every node gets its ``meta["val"]`` from the op itself, on meta."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.layer, self.phase = "", Phase.FORWARD

    def input(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
        return node

    def call(self, op, *args, origin: str = "", layout: Layout | None = None, **kwargs) -> fx.Node:
        node = self.graph.create_node("call_function", op, args, kwargs, name=op._schema.name.split("::")[1])
        node.meta |= {"layer": self.layer, "phase": self.phase, "source": f"model.py:{len(self.graph.nodes)}: {op}"}
        values = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        node.meta["val"] = op(*values[0], **{k: "meta" if k == "device" else v for k, v in values[1].items()})
        if origin:
            node.meta["origin"] = origin
        if layout is not None:
            node.meta["layout"] = layout
        return node

    def wait(self, op, *args, **kwargs) -> fx.Node:
        """A communication and its wait."""
        return self.call(c10d.wait_tensor.default, self.call(op, *args), **kwargs)

    def module(self, outputs) -> fx.GraphModule:
        self.graph.output(tuple(outputs))
        self.graph.lint()
        return fx.GraphModule(torch.nn.Module(), self.graph)


def program(sketch: Sketch, outputs, mesh: Mesh, rank: int) -> Program:
    """A program that is run but not compared: its tensors have no layouts."""
    return Program(
        graph_module=sketch.module(outputs),
        inputs=(),
        outputs=tuple(OutputSpec(kind=OutputKind.RESULT, name=f"result[{i}]") for i in range(len(outputs))),
        input_tensors=(),
        output_tensors=(None,) * len(outputs),
        mesh=mesh,
        rank=rank,
    )


def mlp_step() -> StepGraph:
    """One device's step: loss = sum(relu(x up) down)^2 and the gradients of both weights."""
    sketch = Sketch()
    up, down, x = (sketch.input(n.replace("[0]", ""), SHAPES[n]) for n in SHAPES)
    sketch.layer = "mlp.up"
    hidden = sketch.call(aten.mm.default, x, up)
    active = sketch.call(aten.relu.default, hidden)
    sketch.layer = "mlp.down"
    y = sketch.call(aten.mm.default, active, down)
    sketch.layer = ""
    loss = sketch.call(aten.sum.default, sketch.call(aten.mul.Tensor, y, y))
    sketch.phase = Phase.BACKWARD
    grad_y = sketch.call(aten.mul.Tensor, y, 2.0)
    sketch.layer = "mlp.down"
    grad_down = sketch.call(aten.mm.default, sketch.call(aten.t.default, active), grad_y)
    grad_active = sketch.call(aten.mm.default, grad_y, sketch.call(aten.t.default, down))
    sketch.layer = "mlp.up"
    grad_hidden = sketch.call(aten.threshold_backward.default, grad_active, hidden, 0)
    grad_up = sketch.call(aten.mm.default, sketch.call(aten.t.default, x), grad_hidden)
    return StepGraph(
        graph_module=sketch.module((loss, grad_up, grad_down)), inputs=INPUTS, outputs=OUTPUTS, loss_leaf=0
    )


def mlp_program(mesh: Mesh, rank: int, *, zero: bool = False, forget: str = "") -> Program:
    """The step of one rank of a dp x tp mesh: up is split by column, down by row, the batch by dp.

    Args:
        mesh: axes dp and tp.
        rank: this program's rank.
        zero: store ``up`` and its gradient split over dp as well (its rows, unevenly where they do not divide).
        forget: a communication to leave out: "forward" or "gradient".
    """
    (dp, tp), coords = mesh.sizes, mesh.coords(rank)
    batch, column, row = make_shard(0, 1, BATCH, dp), make_shard(1, 1, HIDDEN, tp), make_shard(0, 1, HIDDEN, tp)
    rows = make_shard(0, 1, WIDTH, dp)
    layouts = {
        "up": (rows if zero else REPLICATE, column),
        "down": (REPLICATE, row),
        "args[0]": (batch, REPLICATE),
        "y": (batch, REPLICATE),
    }
    sketch = Sketch()
    up, down, x = (
        sketch.input(n.replace("[0]", ""), local_shape(SHAPES[n], layouts[n], mesh.sizes, coords)) for n in SHAPES
    )
    sketch.layer = "mlp.up"
    whole_up = gather_rows(sketch, up, WIDTH, dp) if zero else up
    hidden = sketch.call(aten.mm.default, x, whole_up, origin="mm", layout=(batch, column))
    active = sketch.call(aten.relu.default, hidden, origin="relu", layout=(batch, column))
    sketch.layer = "mlp.down"
    y = sketch.call(aten.mm.default, active, down, origin="mm_1", layout=(batch, PARTIAL))
    if forget != "forward":
        y = sketch.wait(c10d.all_reduce.default, y, "sum", "tp")
    sketch.layer = ""
    square = sketch.call(aten.mul.Tensor, y, y, origin="mul", layout=layouts["y"])
    loss = sketch.call(aten.sum.default, square, origin="sum_1", layout=(PARTIAL, REPLICATE))
    loss = sketch.wait(c10d.all_reduce.default, loss, "sum", "dp")
    sketch.phase = Phase.BACKWARD
    grad_y = sketch.call(aten.mul.Tensor, y, 2.0, origin="mul_1", layout=layouts["y"])
    sketch.layer = "mlp.down"
    active_t = sketch.call(aten.t.default, active)
    grad_down = sketch.call(aten.mm.default, active_t, grad_y, origin="mm_2", layout=(PARTIAL, row))
    down_t = sketch.call(aten.t.default, down)
    grad_active = sketch.call(aten.mm.default, grad_y, down_t, origin="mm_3", layout=(batch, column))
    if forget != "gradient":
        grad_down = sketch.wait(c10d.all_reduce.default, grad_down, "sum", "dp")
    sketch.layer = "mlp.up"
    grad_hidden = sketch.call(
        aten.threshold_backward.default, grad_active, hidden, 0, origin="threshold_backward", layout=(batch, column)
    )
    x_t = sketch.call(aten.t.default, x)
    grad_up = sketch.call(aten.mm.default, x_t, grad_hidden, origin="mm_4", layout=(PARTIAL, column))
    if zero:
        grad_up = scatter_rows(sketch, grad_up, WIDTH, dp, coords[0])
    else:
        grad_up = sketch.wait(c10d.all_reduce.default, grad_up, "sum", "dp")
    layouts["loss"] = (REPLICATE, REPLICATE)
    tensors = {
        name: ProgramTensor(layout=layouts[name], shape=shape, dtype=torch.float32)
        for name, shape in {**SHAPES, "loss": ()}.items()
    }
    return Program(
        graph_module=sketch.module((loss, grad_up, grad_down)),
        inputs=INPUTS,
        outputs=OUTPUTS,
        input_tensors=tuple(tensors[n] for n in SHAPES),
        output_tensors=tuple(tensors[n] for n in ("loss", "up", "down")),
        mesh=mesh,
        rank=rank,
    )


def gather_rows(sketch: Sketch, part: fx.Node, rows: int, ranks: int) -> fx.Node:
    """All rows of a tensor whose rows are split over dp: padded to equal parts, gathered, cut."""
    step = -(-rows // ranks)
    short = step - part.meta["val"].shape[0]
    padded = sketch.call(aten.constant_pad_nd.default, part, [0, 0, 0, short]) if short else part
    gathered = sketch.wait(c10d.all_gather_into_tensor.default, padded, ranks, "dp")
    return sketch.call(aten.slice.Tensor, gathered, 0, 0, rows)


def scatter_rows(sketch: Sketch, partial: fx.Node, rows: int, ranks: int, index: int) -> fx.Node:
    """This rank's rows of the sum of ``partial`` over dp: padded, reduce-scattered, cut."""
    step = -(-rows // ranks)
    padded = sketch.call(aten.constant_pad_nd.default, partial, [0, 0, 0, step * ranks - rows])
    part = sketch.wait(c10d.reduce_scatter_tensor.default, padded, "sum", ranks, "dp")
    return sketch.call(aten.slice.Tensor, part, 0, 0, min(step, rows - index * step))


def mlp_programs(dp: int, tp: int, **options) -> list[Program]:
    mesh = Mesh(axes=("dp", "tp"), sizes=(dp, tp))
    return [mlp_program(mesh, rank, **options) for rank in range(mesh.size)]
