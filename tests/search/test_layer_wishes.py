"""Wishes for single layers: tensor parallelism left out, ZeRO and sequence parallelism per layer."""

from __future__ import annotations

import torch
from torch import nn

from autopar.capture import capture
from autopar.cost_models.cluster import Cluster
from autopar.lower import Lowering
from autopar.passes.torch_ops import is_collective
from autopar.plan import Constraints, Plan
from autopar.search.planner import Planner
from autopar.verify import verify_programs


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def planned(constraints: Constraints, ranks: int) -> tuple[Plan, Lowering]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(16) for _ in range(3)))
    step = capture(model, (torch.randn(4, 6, 16),), loss_fn=lambda y: y.square().mean())
    plan = Planner(step, Cluster.local(ranks), constraints).best(ranks)
    lowering = Lowering(step, plan)
    report = verify_programs(step, [lowering.program(rank) for rank in range(ranks)])
    assert report.ok, report.text()
    return plan, lowering


def test_a_layer_without_tensor_parallelism_stays_whole() -> None:
    plan, lowering = planned(Constraints(dp=1, tp=2, layers={"1": {"tp": 1}}), 2)
    assert plan.storage["1.up.weight"] == ("R", "R")
    assert plan.storage["0.up.weight"] == ("R", "S(0)")
    nodes = lowering.program(0).graph_module.graph.nodes
    communicating = {n.meta["layer"].split(".")[0] for n in nodes if is_collective(n)}
    assert "1" not in communicating
    assert {"0", "2"} <= communicating


def test_zero_per_layer() -> None:
    plan, _ = planned(Constraints(dp=2, tp=1, zero=3, layers={"0": {"zero": 0}}), 2)
    assert plan.storage["0.up.weight"] == ("R", "R")
    assert plan.storage["1.up.weight"] == ("S(0)", "R")


def test_sequence_parallel_per_layer() -> None:
    _, without = planned(Constraints(dp=1, tp=2), 2)
    _, with_one = planned(Constraints(dp=1, tp=2, layers={"1": {"sequence_parallel": True}}), 2)

    def scatters(lowering: Lowering) -> set[str]:
        nodes = lowering.program(0).graph_module.graph.nodes
        return {n.meta["layer"].split(".")[0] for n in nodes if is_collective(n) and "reduce_scatter" in n.name}

    assert scatters(without) == set()
    assert scatters(with_one) <= {"1"}
