"""Recompute changes no number and keeps less."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autopar.capture import capture
from autopar.passes.base import Phase
from autopar.passes.recompute import COPY_OF, Recompute
from autopar.passes.torch_ops import ALL_REDUCE
from autopar.verify import verify_programs
from tests.passes.pipelines import Tied, lowered, programs_of, tokens, values_of


def saved_bytes(step):
    """Bytes of the forward's values that the backward reads, views of one memory counted once."""
    found = {}
    for node in step.graph.nodes:
        value = node.meta.get("val")
        forward = node.op == "call_function" and node.meta["phase"] is Phase.FORWARD
        read = any(u.op == "call_function" and u.meta["phase"] is Phase.BACKWARD for u in node.users)
        if forward and read and isinstance(value, torch.Tensor):
            source = node
            while source.target in (
                torch.ops.aten.view.default,
                torch.ops.aten.reshape.default,
                torch.ops.aten.t.default,
            ):
                source = source.args[0]
            if source.op != "placeholder":
                found[source] = value.numel() * value.dtype.itemsize
    return sum(found.values())


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("wishes", [{}, {"dp": 2}, {"tp": 2}])
def test_numbers_do_not_change(mode, wishes):
    model, args = Tied(dropout=0.3), tokens()
    size = wishes.get("dp", 1) * wishes.get("tp", 1)
    lowering, plan = lowered(model, args, size, recompute=mode, **wishes)
    step = lowering.prepared.step
    report = verify_programs(step, programs_of(lowering, plan), values_of(step, model, args))
    assert report.ok, report.text()


def test_full_keeps_little_and_selective_something():
    step = capture(Tied(depth=6, width=16), tokens())
    plain, selective, full = (saved_bytes(Recompute(mode=m)(step)) for m in ("none", "selective", "full"))
    assert full < 0.45 * plain
    assert full < selective < plain


def test_copies_stand_in_the_backward_of_their_layer():
    step = Recompute(mode="full")(capture(Tied(), tokens()))
    copies = [n for n in step.graph.nodes if COPY_OF in n.meta]
    assert copies
    by_name = {n.name: n for n in step.graph.nodes}
    for node in copies:
        assert node.meta["phase"] is Phase.BACKWARD
        assert by_name[node.meta[COPY_OF]].target is node.target
        assert by_name[node.meta[COPY_OF]].meta["layer"] == node.meta["layer"]


def test_single_layers_may_differ():
    step = Recompute(mode="none", layers={"blocks.1": "full"})(capture(Tied(), tokens()))
    layers = {n.meta["layer"] for n in step.graph.nodes if COPY_OF in n.meta}
    assert layers
    assert all(layer.startswith("blocks.1") for layer in layers)


def test_random_draws_are_not_repeated():
    step = Recompute(mode="full")(capture(Tied(dropout=0.5), tokens()))
    draws = [n for n in step.graph.nodes if n.target is torch.ops.aten.native_dropout.default]
    assert all(COPY_OF not in n.meta for n in draws)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4)), nn.Linear(4, 1)

    def forward(self, x):
        return self.out(checkpoint(self.inner, x, use_reentrant=False)).sum()


def test_checkpoints_of_the_user_are_honoured():
    step = capture(Checkpointed(), (torch.randn(3, 4),))
    again = Recompute(mode="none")(step)
    assert saved_bytes(again) < saved_bytes(step)
    lowering, plan = lowered(Checkpointed(), (torch.randn(3, 4),), 1)
    assert any(COPY_OF in n.meta for n in lowering.prepared.normal.graph.nodes)
    assert not [n for n in programs_of(lowering, plan)[0].graph_module.graph.nodes if n.target is ALL_REDUCE]
