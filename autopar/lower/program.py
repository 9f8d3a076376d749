"""From a plan to programs: the explicit sequence of passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import fx

from autopar.cost_models.errors import PlanError
from autopar.cost_models.schedules import Kind, Schedule, build, validate
from autopar.lower.prepare import Prepared, prepare
from autopar.passes.arrange_stages import Arrangement
from autopar.passes.base import Mesh, Program, StepGraph
from autopar.passes.bucket import Bucket
from autopar.passes.lowering import Memo
from autopar.passes.microbatch import Fold
from autopar.passes.options import Choice, OptionSpace, batch_seeds, replicated
from autopar.passes.overlap import Overlap
from autopar.passes.partition import Assignment, partition
from autopar.passes.placement import REPLICATE
from autopar.passes.recompute import COPY_OF, Recompute
from autopar.passes.rules.table import RuleTable, rows_of
from autopar.passes.split_stages import SplitStages
from autopar.passes.unroll_microbatches import Unroll
from autopar.plan import Plan
from autopar.registry import rule_table

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
        made: the normal form and the choices that the plan was written from, where they are at hand; a plan with
            stages marks the normal form's calls.

    Raises:
        PlanError: the plan names calls or splits that this step does not have.
    """

    def __init__(  # noqa: PLR0913 - all but the step and its plan have defaults, and most go by name
        self,
        step: StepGraph,
        plan: Plan,
        table: RuleTable | None = None,
        *,
        rng: str = "fast",
        reduce_dtype: torch.dtype | None = torch.float32,
        bucket_bytes: int | None = None,
        disable_passes: Sequence[str] = (),
        made: tuple[Prepared, Assignment] | None = None,
    ) -> None:
        self.plan, self.rng = plan, rng
        self._memo: Memo = {}
        table = table or rule_table()
        if made is None:
            prepared = prepare(step, table, split_batch=plan.dp * plan.microbatches > 1)
            assignment = assignment_of(prepared, plan, reduce_dtype)
        else:
            prepared, assignment = made
            assignment = dataclasses.replace(assignment, gather_once=plan.zero in (1, 2), reduce_dtype=reduce_dtype)
        again = Recompute(mode=plan.recompute, layers=plan.recompute_layers)
        self.prepared: Prepared = repeated(prepared, again, table)
        self.assignment = for_copies(assignment, self.prepared.normal)
        self._folded: dict[tuple[int, int], tuple[Fold, Arrangement]] = {}
        if plan.pp > 1:
            SplitStages(stages=plan.stages, num_stages=plan.num_stages)(self.prepared.normal)
        bucket = DEFAULT_BUCKET_BYTES if bucket_bytes is None else bucket_bytes
        passes = (Bucket(max_bytes=bucket), Overlap())
        self.passes = tuple(p for p in passes if type(p).__name__.lower() not in disable_passes)

    def program(self, rank: int) -> Program:
        """The program of ``rank``."""
        plan = self.plan
        program = self._local(rank) if plan.pp == 1 and plan.microbatches == 1 else self._unrolled(rank)
        for rewrite in self.passes:
            program = rewrite(program)
        return program

    def _local(self, rank: int) -> Program:
        """The program of one rank of the mesh over which work is split."""
        return partition(self.prepared.normal, self.prepared.rows, self.assignment, rank, rng=self.rng, memo=self._memo)

    def _unrolled(self, rank: int) -> Program:
        """The program of a rank that runs stages and micro-batches."""
        plan = self.plan
        mesh = plan.mesh
        if plan.pp > 1:
            mesh = Mesh(axes=("pp", *mesh.axes), sizes=(plan.pp, *mesh.sizes))
        dp, tp = mesh.coords(rank)[-2:]
        fold, arrangement = self.folded(dp, tp)
        return Unroll(fold, arrangement, mesh, rank).run()

    def _equal_microbatches(self) -> bool:
        """Whether every call that is split over micro-batches is split evenly."""
        axis, count = self.plan.work_mesh.axes.index("mb"), self.plan.microbatches
        return all(c[axis].factor is None or c[axis].units == count for c in self.assignment.choices.values())

    def folded(self, dp: int, tp: int) -> tuple[Fold, Arrangement]:
        """The micro-batches of one place on the mesh of a stage, and who runs what (kept).

        Raises:
            ConstraintError: the schedule does not allow what couples the micro-batches.
        """
        if (dp, tp) not in self._folded:
            plan = self.plan
            count = plan.microbatches
            alike = count > 3 and self._equal_microbatches()
            pieces = (0, 1, count - 1) if alike else range(count)
            locals_ = [self._local(plan.work_mesh.rank((dp, m, tp))) for m in pieces]
            if any(isinstance(p, Overlap) for p in self.passes):
                locals_ = [Overlap()(p) for p in locals_]
            fold = Fold(locals_, count=count, num_stages=plan.num_stages, regather=plan.zero == 3)
            schedule = schedule_of(plan, coupled=bool(fold.coupled), training=self.prepared.step.training)
            if plan.pp > 1 and plan.schedule not in (None, "gpipe"):
                fold.refuse_coupling(plan.schedule)
            self._folded[dp, tp] = (fold, Arrangement(fold, schedule))
        return self._folded[dp, tp]


def schedule_of(plan: Plan, *, coupled: bool, training: bool) -> Schedule:
    """The actions of every pipeline rank under ``plan``."""
    name = plan.schedule or ("gpipe" if coupled else "1f1b")
    schedule = build(name, plan.pp, plan.microbatches, plan.num_stages // plan.pp)
    if training:
        validate(schedule)
        return schedule
    return Schedule(ranks=tuple(tuple(a for a in line if a.kind is Kind.FORWARD) for line in schedule.ranks))


def assignment_of(prepared: Prepared, plan: Plan, reduce_dtype: torch.dtype | None) -> Assignment:
    """The choices and layouts that ``plan`` names."""
    mesh = plan.work_mesh
    normal = prepared.normal
    seeds = batch_seeds(normal.placeholders, normal.inputs, plan.dp) if "mb" in mesh.axes else None
    space = OptionSpace(normal.graph, prepared.rows, seeds) if plan.choices else None
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
                raise PlanError(
                    f"{name!r} cannot be split as {label!r} on axis {axis} of {size} ranks; it can as {known}"
                )
            found.append(choice)
        choices[name] = tuple(found)
    storage = {spec.name: plan.layout(spec.name) for spec in prepared.normal.inputs}
    if "mb" in mesh.axes:
        storage = {name: (layout[0], REPLICATE, *layout[1:]) for name, layout in storage.items()}
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
