"""Cuts of a pipeline: stages of about equal predicted cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import fx

from autopar.cost_models.cluster import Cluster
from autopar.cost_models.compute import KernelModel, Op
from autopar.cost_models.errors import ConstraintError
from autopar.lower.prepare import Prepared
from autopar.passes.base import InputKind, StepGraph
from autopar.passes.options import shape_of, value_of
from autopar.passes.partition import fake_of
from autopar.passes.pricing import price_node, tensor_bytes
from autopar.passes.split_stages import Run, layer_runs
from autopar.plan import Constraints, layer_matches

BACKWARD_WORK = 3.0  # forward and backward together, in forwards
# Share of the balance that goes to the bytes of parameters, the rest to time; first choice first.
STATES = (0.05, 0.5, 0.95)
MOST = 0.75  # the largest share of the parameters that a rank may hold where another balance avoids it
WORTH = 0.97  # a block is cut where that brings the heaviest stage below this share of what it would be


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """One run of a layer, and the stage it must be on.

    Attributes:
        run: the run.
        weight: what is to be even over the stages.
        crossing_bytes: forward values that are needed behind it.
        stage: the stage that it is tied to, or None.
        inside_block: whether the next run belongs to the same block.
        seconds: its share of the step's time.
        first_used: share of the parameters that it is the first to use.
        used: share of the parameters that it uses.
    """

    run: Run
    weight: float
    crossing_bytes: float
    stage: int | None
    inside_block: bool
    seconds: float = 0.0
    first_used: float = 0.0
    used: float = 0.0

    def leaning(self, state: float) -> RunCost:
        """The same with ``state`` of its weight from the bytes of parameters, the rest from time."""
        return dataclasses.replace(self, weight=(1 - state) * self.seconds + state * self.first_used)


def chosen_stages(costs: Sequence[RunCost], num_stages: int, num_ranks: int) -> dict[str, int]:
    """Stage of every run: even in time, and in the bytes of parameters too where one rank would hold most of them.

    Args:
        costs: the runs' costs; their weights are made here.
        num_stages: number of stages.
        num_ranks: number of pipeline ranks, which run ``num_stages / num_ranks`` stages each.

    Raises:
        ConstraintError: wished stages go against the order in which the layers run.
    """
    for state in STATES:
        stages = balanced_stages([cost.leaning(state) for cost in costs], num_stages, num_ranks)
        held = [0.0] * num_ranks
        for cost in costs:
            held[stages[cost.run.name] % num_ranks] += cost.used
        if max(held) <= MOST:
            break
    return stages


def run_costs(
    prepared: Prepared,
    cluster: Cluster,
    constraints: Constraints,
    placed: Mapping[str, int] | None = None,
    *,
    pieces: int = 1,
) -> list[RunCost]:
    """The runs of the forward with what they cost, and the stages they are tied to by wishes or an earlier plan.

    ``pieces`` is the number of ranks and micro-batches that a call is split over.
    """
    runs = layer_runs(prepared.normal)
    model = KernelModel(device=cluster.device)
    times = [sum(piece_seconds(n, model, pieces) for n in run.nodes) for run in runs]
    held = parameter_bytes(prepared, runs)
    used = parameter_bytes(prepared, runs, again=True)
    total_s, total_bytes = sum(times) or 1.0, sum(held) or 1.0
    crossing = crossing_bytes(runs)
    blocks = [path for group in prepared.step.repeated for path in group]
    found = []
    for i, run in enumerate(runs):
        after = runs[i + 1].layer if i + 1 < len(runs) else ""
        inside = any(within(run.layer, b) and within(after, b) for b in blocks)
        cost = RunCost(
            run=run,
            weight=0.0,
            crossing_bytes=crossing[i],
            stage=(placed or {}).get(run.name, wished_stage(constraints, run)),
            inside_block=inside,
            seconds=times[i] / total_s,
            first_used=held[i] / total_bytes,
            used=used[i] / total_bytes,
        )
        found.append(cost.leaning(STATES[0]))
    return found


def within(layer: str, block: str) -> bool:
    """Whether a layer is a block or lies inside it."""
    return layer == block or layer.startswith(block + ".")


def wished_stage(constraints: Constraints, run: Run) -> int | None:
    """The stage that the constraints give to a run."""
    found, layer = None, run.layer
    for pattern, wishes in constraints.layers.items():
        if wishes.get("stage") is not None and layer_matches(pattern, layer):
            found = int(wishes["stage"])
    return found


def piece_seconds(node: fx.Node, model: KernelModel, pieces: int) -> float:
    """Time of one call on one of ``pieces`` equal parts of it, of which each has its launch."""
    priced = price_node(node)
    if priced is None or not isinstance(priced.cost, Op):
        return 0.0
    launches = priced.cost.num_kernels
    device, launch_s = model.device, launches * model.device.kernel_s
    work_s = max(0.0, model.total_seconds([priced.cost]) - launch_s)
    return max(work_s / pieces + launch_s, launches * device.dispatch_s)


def parameter_bytes(prepared: Prepared, runs: Sequence[Run], *, again: bool = False) -> list[float]:
    """Bytes of the parameters that each run is the first to use, or (``again``) that it uses."""
    step = prepared.normal
    parameters = {n for n, s in zip(step.placeholders, step.inputs, strict=True) if s.kind is InputKind.PARAMETER}
    found = []
    for run in runs:
        used = {s for n in run.nodes for s in n.all_input_nodes if s in parameters}
        if not again:
            parameters -= used
        found.append(float(sum(math.prod(shape_of((p, 0))) * fake_of((p, 0)).dtype.itemsize for p in used)))
    return found


def crossing_bytes(runs: Sequence[Run]) -> list[float]:
    """Bytes of the forward values that are needed after each run."""
    place = {n: i for i, run in enumerate(runs) for n in run.nodes}
    last: dict[fx.Node, int] = {}
    for node, i in place.items():
        for source in node.all_input_nodes:
            if source in place:
                last[source] = max(last.get(source, 0), i)
    out = [0.0] * len(runs)
    for node, until in last.items():
        fake = node.meta.get("val")
        if isinstance(fake, torch.Tensor):
            size = float(fake.numel() * fake_of(value_of(node)).dtype.itemsize)
            for i in range(place[node], until):
                out[i] += size
    return out


def boundary_bytes(prepared: Prepared, runs: Sequence[Run]) -> float:
    """Bytes of what is needed behind a block, for the whole batch; without blocks, the mean over all layers."""
    crossing = crossing_bytes(runs)
    groups = [group for group in prepared.step.repeated if len(group) > 1]
    ends = [
        crossing[i]
        for i, run in enumerate(runs[:-1])
        for group in groups
        for block, following in pairwise(group)
        if within(run.layer, block) and within(runs[i + 1].layer, following)
    ]
    found = ends or crossing[:-1]
    return sum(found) / len(found) if found else 0.0


def early_share(prepared: Prepared, runs: Sequence[Run]) -> float:
    """Share of the parameters outside blocks that is used before the first block."""
    blocks = [path for group in prepared.step.repeated for path in group]
    held = parameter_bytes(prepared, runs)
    inside = [any(within(run.layer, block) for block in blocks) for run in runs]
    first = inside.index(True) if True in inside else len(runs)
    outside = sum(size for size, is_inside in zip(held, inside, strict=True) if not is_inside)
    return sum(held[:first]) / outside if outside else 0.0


def held_bytes(step: StepGraph) -> float:
    """Bytes of a step's parameters."""
    pairs = zip(step.placeholders, step.inputs, strict=True)
    return float(sum(tensor_bytes(node.meta["val"]) for node, spec in pairs if spec.kind is InputKind.PARAMETER))


def balanced_stages(costs: Sequence[RunCost], num_stages: int, num_ranks: int | None = None) -> dict[str, int]:
    """Stage of every run: the cut with the smallest largest stage; among nearly equal ones that with the least to send.

    minimise  max over stages of (sum of weights)  +  a little of the bytes that cross the cuts

    Cuts stand between blocks; inside a block only where no more is sent than between blocks and the stages become
    clearly more even.  Where a rank runs several stages (``num_ranks`` is smaller), cuts are then moved while the
    largest rank's sum falls.

    Raises:
        ConstraintError: wished stages go against the order in which the layers run.
    """
    n = len(costs)
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost.weight)
    outside = [i + 1 for i, c in enumerate(costs[:-1]) if not c.inside_block]
    forced = any(c.stage is not None for c in costs)
    if len(outside) < 2 * num_stages or forced:
        ends = list(range(n + 1))
        most, chosen = best_cuts(costs, before, ends, num_stages)
    else:
        ends = [0, *outside, n]
        most, chosen = best_cuts(costs, before, ends, num_stages)
        usual = max(costs[e - 1].crossing_bytes for e in outside)
        cheap = [0, *(i + 1 for i, c in enumerate(costs[:-1]) if not c.inside_block or c.crossing_bytes <= usual), n]
        finer, other = best_cuts(costs, before, cheap, num_stages)
        if finer < WORTH * most:
            ends, chosen = cheap, other
    if num_ranks is not None and num_ranks < num_stages:
        chosen = balanced_ranks(costs, before, ends, chosen, num_ranks)
    return stages_of(costs, chosen)


def best_cuts(
    costs: Sequence[RunCost], before: Sequence[float], ends: Sequence[int], num_stages: int
) -> tuple[float, tuple[int, ...]]:
    """The largest stage's weight and the ends of all stages, where stages may end at ``ends``.

    Raises:
        ConstraintError: wished stages go against the order in which the layers run.
    """
    n = len(costs)
    largest = max((c.crossing_bytes for c in costs), default=0.0) or 1.0
    price = {e: 0.02 * costs[e - 1].crossing_bytes / largest / num_stages if 0 < e < n else 0.0 for e in ends}
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(num_stages):
        misplaced = [0, *accumulate(c.stage not in (None, stage) for c in costs)]
        new: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in ends:
            options = []
            for start, (most, extra, at) in best.items():
                if start <= end and misplaced[start] == misplaced[end]:
                    load = before[end] - before[start]
                    added = price[end] if start < end else 0.0
                    options.append((max(most, load), extra + added, (*at, end)))
            if options:
                new[end] = min(options, key=lambda o: (o[0] + o[1], len(set(o[2]))))
        best = new
    if n not in best:
        wished = [f"{c.run.name}: {c.stage}" for c in costs if c.stage is not None]
        raise ConstraintError(
            f"the stages wished for ({', '.join(wished[:6])}) do not fit {num_stages} stages in the order in which the "
            f"layers run ({', '.join(c.run.name or 'code outside layers' for c in costs[:6])}, ...)"
        )
    return best[n][0], best[n][2]


def balanced_ranks(
    costs: Sequence[RunCost], before: Sequence[float], ends: Sequence[int], chosen: tuple[int, ...], num_ranks: int
) -> tuple[int, ...]:
    """``chosen`` ends of stages, moved one at a time as long as the largest rank's sum of weights falls."""

    def largest(at: tuple[int, ...]) -> tuple[float, float]:
        loads = [before[end] - before[start] for start, end in zip((0, *at), at, strict=False)]
        return max(sum(loads[r::num_ranks]) for r in range(num_ranks)), max(loads)

    def allowed(at: tuple[int, ...]) -> bool:
        return all(
            cost.stage in (None, stage)
            for stage, (a, b) in enumerate(zip((0, *at), at, strict=False))
            for cost in costs[a:b]
        )

    while True:
        moved = [
            (*chosen[:k], end, *chosen[k + 1 :])
            for k in range(len(chosen) - 1)
            for end in ends
            if (chosen[k - 1] if k else 0) <= end <= chosen[k + 1]
        ]
        better = min((m for m in moved if allowed(m)), key=largest, default=chosen)
        if largest(better) >= largest(chosen):
            return chosen
        chosen = better


def stages_of(costs: Sequence[RunCost], ends: Sequence[int]) -> dict[str, int]:
    """Stage of every run, given where each stage ends."""
    found, start = {}, 0
    for stage, end in enumerate(ends):
        found.update({cost.run.name: stage for cost in costs[start:end]})
        start = end
    return found


def uneven(costs: Sequence[RunCost], stages: Mapping[str, int], num_stages: int) -> float:
    """Share of the step that the heaviest stage has."""
    loads = [0.0] * num_stages
    for cost in costs:
        loads[stages[cost.run.name]] += cost.weight
    return max(loads)
