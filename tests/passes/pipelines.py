"""Small models and their programs for the tests of stages, micro-batches and recompute."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from autopar.capture import capture
from autopar.cost_models.cluster import Cluster
from autopar.lower import Lowering
from autopar.passes.base import Program, StepGraph
from autopar.plan import Constraints, Plan
from autopar.search.planner import Planner


class Block(nn.Module):
    """A residual feed-forward layer."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Tied(nn.Module):
    """A language model whose head is its embedding; the loss leaves out targets of -100."""

    def __init__(self, depth: int = 4, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.table = nn.Embedding(20, width)
        self.blocks = nn.ModuleList([Block(width, dropout) for _ in range(depth)])
        self.head = nn.Linear(width, 20, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Normed(nn.Module):
    """Batch statistics between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x)))).square().mean()


def tokens(rows: int = 8, length: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch in which rows have different numbers of valid targets, one of them none."""
    labels = torch.randint(0, 20, (rows, length))
    for row in range(rows):
        labels[row, : min(row, length)] = -100
    return torch.randint(0, 20, (rows, length)), labels


def values_of(step: StepGraph, model: nn.Module, args: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Values of a step's inputs."""
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    leaves = {s.name: args[s.leaf] for s in step.inputs if s.leaf >= 0}
    return {n: t.detach() for n, t in held.items()} | leaves


def lowered(model: nn.Module, args: Sequence[torch.Tensor], world_size: int, **wishes: object) -> tuple[Lowering, Plan]:
    """The programs of ``model`` under a plan that honours ``wishes``."""
    step = capture(model, args)
    wishes = {"dp": 1, "tp": 1, "pp": 1, **wishes}
    plan = Planner(step, Cluster.local(world_size), Constraints(**wishes)).best(world_size)  # type: ignore[arg-type]
    return Lowering(step, Plan.from_json(plan.to_json()), rng="exact"), plan


def programs_of(lowering: Lowering, plan: Plan) -> list[Program]:
    """One program a rank."""
    return [lowering.program(rank) for rank in range(plan.world_size)]
