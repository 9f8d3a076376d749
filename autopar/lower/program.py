"""From a plan to programs: the explicit sequence of passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import fx

from autopar.cost_models.errors import PlanError
from autopar.lower.prepare import Prepared, prepare
from autopar.passes.base import Program, StepGraph
from autopar.passes.bucket import Bucket
from autopar.passes.lowering import Memo
from autopar.passes.options import Choice, OptionSpace, replicated
from autopar.passes.overlap import Overlap
from autopar.passes.partition import Assignment, partition
from autopar.passes.recompute import COPY_OF, Recompute
from autopar.passes.rules.table import RuleTable, rows_of
from autopar.plan import Plan

DEFAULT_BUCKET_BYTES = 25_000_000  # as DistributedDataParallel's 25 MB: large enough to hide latency


class Lowering:
    """Programs of a plan for one step; what ranks share is made once.

    Args:
        step: the captured step that the plan was made for.
        plan: what to split how.
        table: the rules.
        rng: "fast" or "exact".
        reduce_dtype: dtype in which low-precision gradients are summed; None: their own.
        bucket_bytes: gradients are reduced in buckets of about this size; 0: one by one.
        disable_passes: names of optional passes to leave out ("bucket", "overlap").

    Raises:
        PlanError: the plan names calls or splits that this step does not have.
    """

    def __init__(
        self,
        step: StepGraph,
        plan: Plan,
        table: RuleTable | None = None,
        *,
        rng: str = "fast",
        reduce_dtype: torch.dtype | None = torch.float32,
        bucket_bytes: int | None = None,
        disable_passes: Sequence[str] = (),
    ) -> None:
        self.plan, self.rng = plan, rng
        self._memo: Memo = {}
        table = table or RuleTable()
        prepared = prepare(step, table, split_batch=plan.dp > 1)
        assignment = assignment_of(prepared, plan, reduce_dtype)
        again = Recompute(mode=plan.recompute, layers=plan.recompute_layers)
        self.prepared: Prepared = repeated(prepared, again, table)
        self.assignment = for_copies(assignment, self.prepared.normal)
        bucket = DEFAULT_BUCKET_BYTES if bucket_bytes is None else bucket_bytes
        passes = (Bucket(max_bytes=bucket), Overlap())
        self.passes = tuple(p for p in passes if type(p).__name__.lower() not in disable_passes)

    def program(self, rank: int) -> Program:
        """The program of ``rank``."""
        program = partition(
            self.prepared.normal, self.prepared.rows, self.assignment, rank, rng=self.rng, memo=self._memo
        )
        for rewrite in self.passes:
            program = rewrite(program)
        return program


def assignment_of(prepared: Prepared, plan: Plan, reduce_dtype: torch.dtype | None) -> Assignment:
    """The choices and layouts that ``plan`` names."""
    mesh = plan.mesh
    space = OptionSpace(prepared.normal.graph, prepared.rows) if plan.choices else None
    by_name: dict[str, fx.Node] = {n.name: n for n in prepared.rows}
    choices: dict[str, tuple[Choice, ...]] = {}
    for name, labels in plan.choices.items():
        node = by_name.get(name)
        if node is None or space is None:
            raise PlanError(f"the plan splits a call {name!r} that this step does not have; make the plan again")
        found = []
        for axis, size, label in zip(mesh.axes, mesh.sizes, labels, strict=True):
            choice = replicated(prepared.rows[node]) if label == "R" else prepared.choice(space, node, label, size)
            if choice is None:
                known = sorted(c.label for c in space.choices(node, size))
                raise PlanError(f"{name!r} cannot be split as {label!r} on axis {axis} of {size} ranks; it can as {known}")
            found.append(choice)
        choices[name] = tuple(found)
    storage = {spec.name: plan.layout(spec.name) for spec in prepared.normal.inputs}
    return Assignment(
        mesh=mesh, choices=choices, storage=storage, gather_once=plan.zero in (1, 2), reduce_dtype=reduce_dtype
    )


def repeated(prepared: Prepared, recompute: Recompute, table: RuleTable) -> Prepared:
    """``prepared`` with parts of its forward repeated in the backward."""
    normal = recompute(prepared.normal)
    if normal is prepared.normal:
        return prepared
    rows, unknown = rows_of(normal.graph, table)
    return dataclasses.replace(prepared, normal=normal, rows=rows, unknown=tuple(unknown))


def for_copies(assignment: Assignment, normal: StepGraph) -> Assignment:
    """``assignment`` with every repeated call split as the call it repeats."""
    choices = dict(assignment.choices)
    for node in normal.graph.nodes:
        if COPY_OF in node.meta and node.meta[COPY_OF] in choices:
            choices[node.name] = choices[node.meta[COPY_OF]]
    return dataclasses.replace(assignment, choices=choices)


def lower(step: StepGraph, plan: Plan, rank: int, *, rng: str = "fast") -> Program:
    """The program of ``rank`` under ``plan``; to make several, keep a :class:`Lowering`."""
    return Lowering(step, plan, rng=rng).program(rank)
