"""Layers, phases, source lines, checkpoint extents and repeated blocks."""

from __future__ import annotations

import pathlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autopar.capture import capture
from autopar.passes.base import InputKind, Phase
from tests.capture.zoo import Noisy, Tied, batch, square

aten = torch.ops.aten


class Block(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def calls(step):
    return [n for n in step.graph.nodes if n.op == "call_function"]


def test_nine_tenths_of_the_nodes_know_their_layer():
    for phase in Phase:
        nodes = [n for n in calls(capture(Stack(), (batch(),), loss_fn=square)) if n.meta["phase"] is phase]
        assert len([n for n in nodes if n.meta["layer"]]) >= 0.9 * len(nodes)


def test_a_layer_owns_its_forward_and_its_backward():
    step = capture(Stack(), (batch(),), loss_fn=square)
    for path in ("blocks.1.up", "blocks.2.down", "head"):
        nodes = [n for n in calls(step) if n.meta["layer"] == path]
        assert [n.target for n in nodes if n.meta["phase"] is Phase.FORWARD].count(aten.addmm.default) == 1
        assert [n.target for n in nodes if n.meta["phase"] is Phase.BACKWARD].count(aten.mm.default) == 2
    relu = [n for n in calls(step) if n.target in (aten.relu.default, aten.threshold_backward.default)]
    assert [n.meta["layer"] for n in relu] == ["blocks.0", "blocks.1", "blocks.2", "blocks.2", "blocks.1", "blocks.0"]


def test_gradient_accumulation_belongs_to_the_layer_that_was_running():
    step = capture(Stack(2), (batch(),), loss_fn=square)
    adds = [n for n in calls(step) if n.target is aten.add.Tensor and n.meta["phase"] is Phase.BACKWARD]
    assert [n.meta["layer"].split(".")[:2] for n in adds] == [["blocks", "1"]]


def test_the_loss_is_outside_of_any_layer():
    step = capture(Stack(), (batch(),), loss_fn=square)
    (mean,) = [n for n in calls(step) if n.target is aten.mean.default]
    assert mean.meta["layer"] == ""
    assert mean.meta["source"].split(": ")[1] == "return output.square().mean()"


def test_a_line_is_the_innermost_one_of_the_user():
    step = capture(Stack(1), (batch(),), loss_fn=square)
    (relu,) = [n for n in calls(step) if n.target is aten.relu.default]
    where, code = relu.meta["source"].split(": ")
    assert where.startswith("capture/test_labels.py:")
    assert code == "return x + self.down(torch.relu(self.up(self.norm(x))))"
    number = int(where.split(":")[1])
    assert pathlib.Path(__file__).read_text(encoding="utf-8").splitlines()[number - 1].strip() == code
    known = [n for n in calls(step) if n.meta["source"]]
    assert len(known) >= 0.9 * len(calls(step))


def test_a_gradient_taken_inside_forward_is_forward():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 1)

        def forward(self, x):
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.linear(x).tanh().sum(), x, create_graph=True)
            return slope.square().mean()

    step = capture(Inner(), (batch(),))
    (loss,) = [v for s, v in zip(step.outputs, step.results, strict=True) if s.leaf == 0]
    assert loss.meta["phase"] is Phase.FORWARD
    tanh_backward = [n.meta["phase"] for n in calls(step) if n.target is aten.tanh_backward.default]
    assert tanh_backward == [Phase.FORWARD, Phase.BACKWARD] or Phase.FORWARD in tanh_backward


def test_everything_after_a_seed_is_backward():
    step = capture(Stack(), (batch(),), loss_fn=square)
    late = {n for s, n in zip(step.inputs, step.placeholders, strict=True) if s.kind is InputKind.SEED}
    for node in calls(step):
        if late & set(node.all_input_nodes):
            late.add(node)
            assert node.meta["phase"] is Phase.BACKWARD


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_block_is_listed_and_runs_once(use_reentrant):
    step = capture(Noisy(use_reentrant=use_reentrant), (batch(),), loss_fn=square)
    assert step.checkpoints == ("blocks.1",)
    assert len([n for n in calls(step) if n.target is aten.native_dropout.default]) == 4
    inside = {n.meta["layer"] for n in calls(step) if "checkpoint" in n.meta}
    assert inside == {"blocks.1.0", "blocks.1.1"}


def test_a_layer_that_checkpoints_its_whole_body_is_the_extent():
    class Saving(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return checkpoint(lambda y: self.b(self.a(y).relu()), x, use_reentrant=False)

    step = capture(nn.Sequential(Saving(), Saving(), nn.Linear(8, 8)), (batch(),), loss_fn=square)
    assert step.checkpoints == ("0", "1")


def test_a_layer_that_checkpoints_a_part_of_itself_lists_the_part():
    class Saving(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.b(checkpoint(self.a, x, use_reentrant=False))

    assert capture(nn.Sequential(Saving()), (batch(),), loss_fn=square).checkpoints == ("0.a",)


def test_equal_blocks_are_one_group_in_order_of_execution():
    class Backwards(Stack):
        def forward(self, x):
            for block in reversed(self.blocks):
                x = block(x)
            return self.head(x)

    assert capture(Stack(), (batch(),), loss_fn=square).repeated == (("blocks.0", "blocks.1", "blocks.2"),)
    assert capture(Backwards(), (batch(),), loss_fn=square).repeated == (("blocks.2", "blocks.1", "blocks.0"),)
    tokens = torch.randint(0, 20, (2, 3))
    assert capture(Tied(), (tokens, tokens)).repeated == (("blocks.0", "blocks.1", "blocks.2"),)


def test_blocks_of_different_structure_are_different_groups():
    model = nn.Sequential(Block(), Block(), nn.Linear(8, 8), Block().requires_grad_(requires_grad=False))
    assert capture(model, (batch(),), loss_fn=square).repeated == (("0", "1"),)


def test_the_time_is_linear_in_the_depth():
    sizes = [len(calls(capture(Stack(n), (batch(),), loss_fn=square))) for n in (2, 3, 4)]
    assert sizes[1] - sizes[0] == sizes[2] - sizes[1]
