"""From wishes to a plan: sizes of the mesh axes, then the first choice on that mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from torch import fx

from autopar.cost_models.cluster import Cluster
from autopar.cost_models.errors import ConstraintError
from autopar.lower.prepare import Prepared, prepare
from autopar.passes.base import InputKind, StepGraph
from autopar.passes.options import batch_inputs, shape_of
from autopar.passes.partition import Assignment
from autopar.passes.placement import can_split
from autopar.passes.redistribute import MICROBATCHES
from autopar.passes.rules.table import RuleTable
from autopar.plan import Certificate, Constraints, LayerConstraints, Plan, Prediction, format_placement
from autopar.registry import rule_table
from autopar.search.estimate import Estimate, Pipeline, estimate
from autopar.search.first_choice import AxisWish, choose, no_wishes
from autopar.search.stages import balanced_stages, run_costs

CHUNKS = 2  # stages that a rank runs under the interleaved schedule


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A uniform plan: sizes of the axes and what is kept split."""

    dp: int
    tp: int
    zero: int
    sequence_parallel: bool
    pp: int = 1
    microbatches: int = 1
    schedule: str | None = None

    def wishes(self) -> tuple[AxisWish, ...]:
        """The axes, data outermost: tensor-parallel ranks are neighbours; micro-batches split each data rank's rows."""
        rows = (
            (AxisWish(name=MICROBATCHES, size=self.microbatches, role="micro", blocks=self.dp),)
            if self.pp > 1 or self.microbatches > 1
            else ()
        )
        return (
            AxisWish(name="dp", size=self.dp, role="data", zero=self.zero),
            *rows,
            AxisWish(name="tp", size=self.tp, role="tensor", sequence_parallel=self.sequence_parallel),
        )


class Planner:
    """Makes plans for one captured step on one cluster.

    Args:
        step: the captured step.
        cluster: where it will run; its number of devices is the number of ranks.
        constraints: what the user fixed.
        optimizer: name of the optimizer, for its state's memory.
        table: the rules.
        placed: stage of layers' runs by name, where an earlier plan has put their parameters.
    """

    def __init__(
        self,
        step: StepGraph,
        cluster: Cluster,
        constraints: Constraints | None = None,
        optimizer: str = "adamw",
        table: RuleTable | None = None,
        placed: Mapping[str, int] | None = None,
    ) -> None:
        self.placed = dict(placed or {})
        self.step, self.cluster, self.optimizer = step, cluster, optimizer
        self.constraints = constraints or Constraints()
        self.table = table or rule_table()
        self._prepared: dict[bool, Prepared] = {}
        self._wishes: dict[str, LayerConstraints] = {}
        self.constraints.check_layers(layer_paths(step))

    def candidates(self, world_size: int) -> Iterator[Candidate]:
        """Uniform plans that honour the constraints.

        Raises:
            ConstraintError: none does.
        """
        wish = self.constraints
        pp = wish.pp or 1
        sizes = [
            (dp, world_size // dp // pp)
            for dp in range(1, world_size + 1)
            if world_size % (dp * pp) == 0 and wish.dp in (None, dp) and wish.tp in (None, world_size // dp // pp)
        ]
        if not sizes:
            raise ConstraintError(
                f"dp={wish.dp}, tp={wish.tp}, pp={wish.pp} do not fit {world_size} ranks: dp * tp * pp must be "
                f"{world_size}; start {math.prod(x or 1 for x in (wish.dp, wish.tp, wish.pp))} ranks "
                "(torchrun --nproc-per-node) or change the sizes"
            )
        for dp, tp in sizes:
            for zero in (0, 3) if wish.zero is None else (wish.zero,):
                if zero and dp == 1 and wish.zero is None:
                    continue
                yield Candidate(
                    dp=dp,
                    tp=tp,
                    zero=zero,
                    sequence_parallel=bool(wish.sequence_parallel),
                    pp=pp,
                    microbatches=self.microbatches(dp),
                    schedule=wish.schedule,
                )

    def microbatches(self, dp: int) -> int:
        """Micro-batches of a data rank: as wished; a forward pass without backward takes what its rows allow.

        Raises:
            ConstraintError: the batch cannot be cut into as many.
        """
        wish = self.constraints.microbatches or 1
        rows = max((r // dp for r in self.batch_rows() if r % dp == 0), default=0)
        if wish == 1 or can_split(rows, wish):
            return wish
        possible = [m for m in range(1, rows + 1) if can_split(rows, m)]
        if not self.step.training:
            return max((m for m in possible if m <= wish), default=1)
        have = ", ".join(map(str, sorted(set(self.batch_rows())))) or "no"
        near = sorted(sorted(possible, key=lambda m: (abs(m - wish), m))[:6]) or [1]
        raise ConstraintError(
            f"microbatches={wish} is not possible: the batch inputs have {have} rows on {dp} data ranks, which every "
            f"micro-batch needs at least one of; use one of {', '.join(map(str, near))}, or another batch size"
        )

    def batch_rows(self) -> list[int]:
        """Sizes of the first dims of the batch inputs."""
        nodes = batch_inputs(self.step.placeholders, self.step.inputs)
        return [shape[0] for n in nodes if (shape := shape_of((n, 0)))]

    def prepared(self, *, split_batch: bool) -> Prepared:
        """The step in normal form (kept)."""
        if split_batch not in self._prepared:
            self._prepared[split_batch] = prepare(self.step, self.table, split_batch=split_batch)
        return self._prepared[split_batch]

    def assign(self, candidate: Candidate) -> tuple[Assignment, list[str]]:
        """The first choice on the candidate's mesh."""
        prepared = self.prepared(split_batch=candidate.dp * candidate.microbatches > 1)
        return choose(
            prepared.normal, prepared.rows, candidate.wishes(), self._layers if self.constraints.layers else no_wishes
        )

    def _layers(self, path: str) -> LayerConstraints:
        """What the constraints say of one layer."""
        if path not in self._wishes:
            self._wishes[path] = self.constraints.layer(path)
        return self._wishes[path]

    def best(self, world_size: int) -> Plan:
        """The fastest candidate, by the estimate, among those that fit, else the one that needs least memory."""
        found = []
        for candidate in self.candidates(world_size):
            assignment, notes = self.assign(candidate)
            prepared = self.prepared(split_batch=candidate.dp * candidate.microbatches > 1)
            pipeline = Pipeline(
                stages=candidate.pp, microbatches=candidate.microbatches, all_forward=candidate.schedule == "gpipe"
            )
            figures = estimate(prepared, assignment, self.cluster, self.optimizer, candidate.zero, pipeline)
            found.append((figures, candidate, assignment, notes))
        budget = self.constraints.memory_bytes or self.cluster.device.memory_bytes
        fitting = [f for f in found if f[0].peak_bytes <= budget]
        if fitting:
            chosen = min(fitting, key=lambda f: (f[0].step_time_s, f[1].zero, f[1].tp))
        else:
            chosen = min(found, key=lambda f: f[0].peak_bytes)
        figures, candidate, assignment, notes = chosen
        if not fitting:
            notes = [
                *notes,
                f"predicted peak of {figures.peak_bytes / 1e9:.2f} GB is over the {budget / 1e9:.2f} GB of a device",
            ]
        return self.plan(candidate, assignment, notes, figures)

    def stages(self, candidate: Candidate) -> dict[str, int]:
        """Stage of every run of a layer."""
        if candidate.pp == 1:
            return {}
        prepared = self.prepared(split_batch=candidate.dp * candidate.microbatches > 1)
        costs = run_costs(prepared, self.cluster, self.constraints, self.placed)
        chunks = CHUNKS if candidate.schedule == "interleaved" else 1
        return balanced_stages(costs, candidate.pp * chunks, candidate.pp)

    def recompute_layers(self) -> dict[str, str]:
        """What the constraints say of single layers, for the layers that differ from the rest."""
        general = self.constraints.recompute or "none"
        layers = dict.fromkeys(n.meta.get("layer", "") for n in self.step.graph.nodes if n.op == "call_function")
        found = {layer: self.constraints.layer(layer).recompute or "none" for layer in layers if layer}
        return {layer: mode for layer, mode in found.items() if mode != general}

    def plan(self, candidate: Candidate, assignment: Assignment, notes: list[str], figures: Estimate) -> Plan:
        """The plan that says what ``assignment`` says."""
        prepared = self.prepared(split_batch=candidate.dp * candidate.microbatches > 1)
        kept = [a for a, axis in enumerate(assignment.mesh.axes) if axis != MICROBATCHES]
        sizes = [assignment.mesh.sizes[a] for a in kept]
        choices = {
            name: tuple(c.label for c in per_axis)
            for name, per_axis in assignment.choices.items()
            if any(c.label != "R" for c in per_axis)
        }
        storage = {
            name: tuple(format_placement(layout[a], n) for a, n in zip(kept, sizes, strict=True))
            for name, layout in assignment.storage.items()
        }
        return Plan.for_step(
            self.step,
            dp=candidate.dp,
            tp=candidate.tp,
            pp=candidate.pp,
            zero=candidate.zero,
            sequence_parallel=candidate.sequence_parallel,
            recompute=self.constraints.recompute or "none",
            recompute_layers=self.recompute_layers(),
            microbatches=candidate.microbatches,
            schedule=candidate.schedule if candidate.pp > 1 else None,
            stages=self.stages(candidate),
            choices=choices,
            storage=storage,
            notes=(*notes, *unknown_notes(prepared.unknown), *tie_notes(self.step)),
            predicted=Prediction(
                step_time_s=figures.step_time_s,
                peak_bytes=int(figures.peak_bytes),
                comm_bytes=int(figures.comm_bytes),
                flops=int(figures.flops),
            ),
            certificate=Certificate(gap=None, space="uniform plans: dp x tp x ZeRO, first choice per axis"),
        )


def layer_paths(step: StepGraph) -> set[str]:
    """Every layer of the model that computes or holds something, and the layers around it."""
    leaves = {str(n.meta.get("layer", "")) for n in step.graph.nodes}
    leaves |= {spec.name.rpartition(".")[0] for spec in step.inputs if spec.kind is InputKind.PARAMETER}
    paths = set()
    for leaf in leaves:
        parts = leaf.split(".")
        paths |= {".".join(parts[: i + 1]) for i in range(len(parts))}
    return paths - {""}


def unknown_notes(unknown: tuple[fx.Node, ...]) -> list[str]:
    """One line per operation without a rule."""
    names: dict[str, int] = {}
    for node in unknown:
        names[str(node.target)] = names.get(str(node.target), 0) + 1
    return [f"{name} has no rule: its {n} calls run whole on every rank" for name, n in sorted(names.items())]


def tie_notes(step: StepGraph) -> list[str]:
    """One line per tied parameter."""
    return [
        f"{spec.name} is tied: also {', '.join(spec.aliases)}"
        for spec in step.inputs
        if spec.kind is InputKind.PARAMETER and spec.aliases
    ]
