"""A small model, captured and made ready to be split; and splits chosen by the label of a factor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from autopar.capture import capture, flatten_call
from autopar.passes.base import Mesh, Phase, Program, StepGraph
from autopar.passes.normalize import Normalize
from autopar.passes.options import Choice, OptionSpace, replicated
from autopar.passes.partition import Assignment, partition
from autopar.passes.placement import Layout
from autopar.passes.rules.row import Row
from autopar.passes.rules.table import RuleTable, op_name, rows_of
from autopar.passes.torch_ops import group_of, is_collective
from autopar.verify import verify_programs
from autopar.verify.values import model_values


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A captured step with its rows, options and the values of its inputs."""

    step: StepGraph
    normal: StepGraph
    rows: dict[fx.Node, Row]
    space: OptionSpace
    values: Mapping[str, Any]

    def node(self, op: str, index: int = 0) -> fx.Node:
        """The ``index``-th call of an operation ("aten::mm")."""
        return [n for n in self.rows if op_name(n.target) == op][index]

    def choice(self, node: fx.Node, label: str, num_ranks: int) -> Choice:
        return next(c for c in self.space.choices(node, num_ranks) if c.label == label)

    def programs(
        self,
        mesh: Mesh,
        labels: Mapping[str, Sequence[str]] | None = None,
        storage: Mapping[str, Layout] | None = None,
        rng: str = "exact",
        **options: object,
    ) -> list[Program]:
        """Programs with the named calls split as told (a label an axis), all others whole."""
        choices = {}
        for node in self.rows:
            wanted = (labels or {}).get(node.name)
            if wanted is not None:
                choices[node.name] = tuple(
                    self.choice(node, label, size) for label, size in zip(wanted, mesh.sizes, strict=True)
                )
            else:
                choices[node.name] = tuple(replicated(self.rows[node]) for _ in mesh.sizes)
        assignment = Assignment(mesh=mesh, choices=choices, storage=storage or {}, **options)
        return [partition(self.normal, self.rows, assignment, rank, rng=rng) for rank in range(mesh.size)]

    def check(self, programs: Sequence[Program]) -> None:
        report = verify_programs(self.step, programs, self.values, normal=self.normal)
        assert report.ok, report.text()


def ready(model: nn.Module, *args: object, split_batch: bool = True, **options: object) -> Ready:
    """Capture one call of ``model``; its output's sum of squares is the loss unless it is a loss already."""
    loss_fn = options.pop("loss_fn", lambda out: out if out.dim() == 0 else out.square().sum())
    step = capture(model, args, loss_fn=loss_fn, **options)
    normal = Normalize(split_batch=split_batch)(step)
    rows, _ = rows_of(normal.graph, RuleTable())
    values = model_values(step, model, flatten_call(args)[0])
    return Ready(step=step, normal=normal, rows=rows, space=OptionSpace(normal.graph, rows), values=values)


def collectives(program: Program, phase: Phase | None = None) -> list[str]:
    """Kinds of the collectives of a program, in order: "all_reduce(x)"."""
    return [
        f"{n.target._schema.name.partition('::')[2]}({group_of(n)})"
        for n in program.graph_module.graph.nodes
        if is_collective(n) and (phase is None or n.meta["phase"] is phase)
    ]


def mesh_of(*sizes: int) -> Mesh:
    return Mesh(axes=tuple("xyz"[: len(sizes)]), sizes=sizes)


class Lambda(nn.Module):
    """A function of parameters and inputs as a module."""

    def __init__(self, function: Callable[..., Any], **parameters: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, *args: object) -> object:
        return self.function(self, *args)
