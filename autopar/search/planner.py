"""From wishes to a plan: sizes of the mesh axes, then the first choice on that mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from autopar.cost_models.cluster import Cluster
from autopar.cost_models.compute import KernelModel
from autopar.cost_models.errors import ConstraintError
from autopar.lower import Lowering
from autopar.lower.prepare import Prepared, prepare
from autopar.passes.base import InputKind, StepGraph
from autopar.passes.options import batch_inputs, shape_of
from autopar.passes.partition import Assignment
from autopar.passes.pricing import price_graph, saved
from autopar.passes.redistribute import MICROBATCHES
from autopar.passes.rules.table import RuleTable
from autopar.passes.split_stages import layer_runs
from autopar.plan import Certificate, Constraints, LayerConstraints, Plan, Prediction, format_placement, layer_matches
from autopar.registry import rule_table
from autopar.search.candidates import CHUNKS, Candidate, Space
from autopar.search.first_choice import choose, no_wishes
from autopar.search.folding import Folds, fold
from autopar.search.price import FoldedPrices, Price, price_programs
from autopar.search.stages import boundary_bytes, chosen_stages, early_share, held_bytes, run_costs
from autopar.search.uniform import Ranking, Sketch, rank

SPACE = (
    "uniform plans (dp x tp x pp, ZeRO, sequence parallel, micro-batches, schedule, recompute), first choice per axis"
)
NO_PREDICTION = Prediction(step_time_s=0.0, peak_bytes=0, comm_bytes=0, flops=0)
DIRECT = 8  # plans of a step that is not folded that are priced: each is emitted as it is
FOLDED = 16  # the same of a folded step
SEARCH_S = 30.0  # how long the search may take where nobody says


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
        self._prepared: dict[tuple[int, bool], Prepared] = {}
        self._assigned: dict[tuple[int, object], tuple[Assignment, list[str]]] = {}
        self._wishes: dict[str, LayerConstraints] = {}
        self.constraints.check_layers(layer_paths(step))

    def batch_rows(self) -> list[int]:
        """Sizes of the first dims of the batch inputs."""
        nodes = batch_inputs(self.step.placeholders, self.step.inputs)
        return [shape[0] for n in nodes if (shape := shape_of((n, 0)))]

    def space(self, world_size: int) -> Space:
        """The uniform plans that honour the constraints."""
        return Space(
            world_size=world_size,
            constraints=self.constraints,
            rows=self.batch_rows(),
            neighbours=self.cluster.levels[0].fanout,
            blocks=sum(len(group) for group in self.step.repeated),
            training=self.step.training,
        )

    def prepared(self, step: StepGraph, *, split_batch: bool) -> Prepared:
        """A step in normal form (kept)."""
        key = id(step), split_batch
        if key not in self._prepared:
            self._prepared[key] = prepare(step, self.table, split_batch=split_batch)
        return self._prepared[key]

    def assign(self, candidate: Candidate, step: StepGraph | None = None) -> tuple[Assignment, list[str]]:
        """The first choice on the candidate's mesh (kept)."""
        step = step or self.step
        key = id(step), candidate.wishes()
        if key not in self._assigned:
            prepared = self.prepared(step, split_batch=candidate.dp * candidate.microbatches > 1)
            layers = self._layers if self.constraints.layers else no_wishes
            self._assigned[key] = choose(prepared.normal, prepared.rows, candidate.wishes(), layers)
        return self._assigned[key]

    def _layers(self, path: str) -> LayerConstraints:
        """What the constraints say of one layer."""
        if path not in self._wishes:
            self._wishes[path] = self.constraints.layer(path)
        return self._wishes[path]

    def best(self, world_size: int, *, time_limit_s: float | None = None) -> Plan:
        """The fastest plan that fits, else the one that needs least memory, with a note that says so.

        Raises:
            ConstraintError: no plan honours the constraints.
        """
        return self.plan(self.rank(world_size, time_limit_s=time_limit_s))

    def rank(self, world_size: int, *, time_limit_s: float | None = None) -> Ranking:
        """The uniform plans, priced and put into order.

        Raises:
            ConstraintError: no plan honours the constraints.
        """
        space = self.space(world_size)
        folds = fold(self.step)
        if folds is None:
            price, most = self._price_whole, DIRECT
        else:
            price, most = self._folded(folds).price, FOLDED
        return rank(
            space,
            self._sketch(folds),
            price,
            self.budget_bytes,
            most=most,
            time_limit_s=SEARCH_S if time_limit_s is None else time_limit_s,
        )

    @property
    def budget_bytes(self) -> float:
        """What a rank may use."""
        return self.constraints.memory_bytes or self.cluster.device.memory_bytes

    def _price_whole(self, candidate: Candidate) -> Price:
        """The programs of all stages, simulated together."""
        lowering = self._lowering(candidate, self.step)
        size = candidate.dp * candidate.tp
        programs = [lowering.program(stage * size) for stage in range(candidate.pp)]
        return price_programs(programs, self.cluster, self.optimizer)

    def _folded(self, folds: Folds) -> FoldedPrices:
        prepared = self.prepared(folds.base, split_batch=False)
        runs = layer_runs(prepared.normal)
        return FoldedPrices(
            folds=folds,
            program=lambda index, candidate: self._lowering(candidate, folds.steps[index]).program(0),
            cluster=self.cluster,
            optimizer=self.optimizer,
            boundary_bytes=boundary_bytes(prepared, runs),
            early_share=early_share(prepared, runs),
        )

    def _lowering(self, candidate: Candidate, step: StepGraph) -> Lowering:
        """The programs of a candidate, to be priced."""
        assignment, _ = self.assign(candidate, step)
        plan = self._plan(candidate, step, assignment, [], NO_PREDICTION)
        prepared = self.prepared(step, split_batch=candidate.dp * candidate.microbatches > 1)
        return Lowering(step, plan, self.table, made=(prepared, assignment) if candidate.pp == 1 else None)

    def _sketch(self, folds: Folds | None) -> Sketch:
        steps = folds.steps if folds else (self.step,)
        kernels = KernelModel(device=self.cluster.device)
        prepared = self.prepared(steps[0], split_batch=False)
        figures = [
            (
                kernels.total_seconds(price_graph(step.graph).ops()),
                float(sum(saved(step.graph).values())),
                held_bytes(step),
            )
            for step in steps
        ]
        compute_s, kept_bytes, total_bytes = (
            folds.total(column) if folds else column[0] for column in zip(*figures, strict=True)
        )
        return Sketch(
            compute_s=compute_s,
            parameter_bytes=total_bytes,
            saved_bytes=kept_bytes,
            boundary_bytes=boundary_bytes(prepared, layer_runs(prepared.normal)),
            blocks=sum(len(group) for group in self.step.repeated) or 1,
            cluster=self.cluster,
            optimizer=self.optimizer,
        )

    def stages(self, candidate: Candidate, step: StepGraph | None = None) -> dict[str, int]:
        """Stage of every run of a layer."""
        if candidate.pp == 1:
            return {}
        prepared = self.prepared(step or self.step, split_batch=candidate.dp * candidate.microbatches > 1)
        chunks = CHUNKS if candidate.schedule == "interleaved" else 1
        pieces = candidate.dp * candidate.tp * candidate.microbatches
        costs = run_costs(prepared, self.cluster, self.constraints, self.placed, pieces=pieces)
        return chosen_stages(costs, candidate.pp * chunks, candidate.pp)

    def recompute_layers(self, candidate: Candidate, step: StepGraph) -> dict[str, str]:
        """What the constraints say of single layers, for the layers that differ from the rest."""
        if not self.constraints.layers:
            return {}
        layers = dict.fromkeys(n.meta.get("layer", "") for n in step.graph.nodes if n.op == "call_function")
        wishes = {layer: self.constraints.layer(layer) for layer in layers if layer}
        said = {pattern: w for pattern, w in self.constraints.layers.items() if w.get("recompute") is not None}
        found = {
            layer: wish.recompute or "none"
            for layer, wish in wishes.items()
            if any(layer_matches(pattern, layer) for pattern in said)
        }
        return {layer: mode for layer, mode in found.items() if mode != candidate.recompute}

    def plan(self, ranking: Ranking) -> Plan:
        """The best plan of a ranking, in full."""
        best, budget = ranking.best, ranking.budget_bytes
        price = best.price
        if price is None:
            raise ConstraintError("no plan was priced")
        assignment, notes = self.assign(best.candidate)
        if not best.fits:
            notes = [
                *notes,
                f"predicted peak of {price.peak_bytes / 1e9:.2f} GB is over the {budget / 1e9:.2f} GB of a device; "
                f"most of it {price.owner}",
            ]
        predicted = Prediction(
            step_time_s=price.step_s,
            peak_bytes=int(price.peak_bytes),
            comm_bytes=int(price.comm_bytes),
            flops=int(price.flops),
        )
        return self._plan(best.candidate, self.step, assignment, notes, predicted)

    def _plan(
        self, candidate: Candidate, step: StepGraph, assignment: Assignment, notes: Sequence[str], predicted: Prediction
    ) -> Plan:
        """The plan that says what ``assignment`` says."""
        prepared = self.prepared(step, split_batch=candidate.dp * candidate.microbatches > 1)
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
            step,
            dp=candidate.dp,
            tp=candidate.tp,
            pp=candidate.pp,
            zero=candidate.zero,
            sequence_parallel=candidate.sequence_parallel,
            recompute=candidate.recompute,
            recompute_layers=self.recompute_layers(candidate, step),
            microbatches=candidate.microbatches,
            schedule=candidate.schedule if candidate.pp > 1 else None,
            stages=self.stages(candidate, step),
            choices=choices,
            storage=storage,
            notes=(*notes, *unknown_notes(prepared.unknown), *tie_notes(step)),
            predicted=predicted,
            certificate=Certificate(gap=None, space=SPACE),
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
