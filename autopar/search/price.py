"""What a uniform plan costs: its programs through the timeline, or those of shallow steps and the number of blocks.

A plan of a small step is priced as it is: the programs of all stages are emitted and simulated together.  Of a deep
step (:mod:`autopar.search.folding`) those with a few blocks are; the other blocks are counted, and a pipeline is put
together from its stages' blocks by its schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.cost_models.cluster import Cluster
from autopar.cost_models.collectives import Collective, CollectiveModel
from autopar.cost_models.pipeline import StageCost, step_seconds
from autopar.cost_models.schedules import build, in_flight
from autopar.passes.base import InputKind, Phase, Program
from autopar.passes.pricing import tensor_bytes, tensors
from autopar.passes.program_cost import Place, ProgramCost, predict
from autopar.report.text import family
from autopar.search.candidates import CHUNKS, Candidate
from autopar.search.folding import Folds

# Bytes of optimizer state per byte of parameter: torch keeps moments in the parameters' dtype.
STATE_BYTES: Mapping[str, float] = {"sgd": 0.0, "momentum": 1.0, "adam": 2.0, "adamw": 2.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """A plan's figures for the rank that needs most.

    Attributes:
        step_s: seconds a step, optimizer included.
        peak_bytes: most memory in use at once.
        owners: (what, bytes) of the peak, largest first.
        comm_bytes: bytes of full tensors that a rank communicates.
        flops: floating-point operations of a rank.
        parts: seconds by cause: ``compute``, ``communication`` (not hidden), ``bubble``, ``optimizer``.
    """

    step_s: float
    peak_bytes: float
    owners: tuple[tuple[str, float], ...]
    comm_bytes: float
    flops: float
    parts: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def owner(self) -> str:
        """What holds most of the peak."""
        return self.owners[0][0] if self.owners else ""


def state_factor(optimizer: str) -> float:
    """Bytes of optimizer state per byte of parameter; what is not known is taken as Adam."""
    return STATE_BYTES.get(optimizer, STATE_BYTES["adamw"])


def price_programs(programs: Sequence[Program], cluster: Cluster, optimizer: str) -> Price:
    """The price of programs that run together, one of each stage."""
    return _price(predict(programs, cluster, optimizer_bytes_per_parameter_byte=state_factor(optimizer)), programs)


def _price(cost: ProgramCost, programs: Sequence[Program]) -> Price:
    ranks = range(len(programs))
    slowest = max(ranks, key=cost.timeline.busy_s)
    compute_s, exposed_s = cost.timeline.busy_s(slowest), cost.timeline.exposed_s(slowest)
    owners: dict[str, float] = {}
    for layer, kind, size in cost.peak.owners:
        name = _owner(layer, kind)
        owners[name] = owners.get(name, 0.0) + size
    return Price(
        step_s=cost.step_s,
        peak_bytes=cost.peak.bytes,
        owners=tuple(sorted(owners.items(), key=lambda item: -item[1])),
        comm_bytes=sum(cost.sent_bytes.values()),
        flops=cost.flops,
        parts={
            "compute": compute_s,
            "communication": exposed_s,
            "bubble": max(0.0, cost.timeline.step_s - compute_s - exposed_s),
            "optimizer": cost.optimizer_s,
        },
    )


_KINDS = {"parameter": "parameters", "gradient": "gradients", "optimizer": "optimizer state", "input": "inputs"}
_PASSING = {"activation": "activations", "temporary": "temporaries"}


def _owner(layer: str, kind: str) -> str:
    """A buffer's owner in words; copies of a block are one owner, and so are parameters and what belongs to them."""
    if kind in _KINDS:
        return _KINDS[kind]
    what = _PASSING.get(kind, kind)
    return f"{what} of {family(layer)}" if layer else f"{what} outside layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Depth:
    """One shallow program in numbers.

    ``forward_s`` and ``backward_s`` are of one micro-batch, ``rest_s`` of what stands outside of them.
    """

    price: Price
    forward_s: float
    backward_s: float
    rest_s: float
    saved_bytes: float
    state_bytes: float
    peaks: Mapping[Place, float] = field(hash=False)


def _depth(program: Program, cluster: Cluster, optimizer: str) -> _Depth:
    factor = state_factor(optimizer)
    cost = predict([program], cluster, optimizer_bytes_per_parameter_byte=factor)
    # A part lasts until the next one starts: what it waits for in between is its own.
    spans = cost.parts
    ends = [*(s.start_s for s in spans[1:]), *(s.end_s for s in spans[-1:])]
    lasts = [(s.phase, end - s.start_s) for s, end in zip(spans, ends, strict=True)]
    count = max(1, sum(phase is Phase.FORWARD for phase, _ in lasts))
    forward_s = sum(seconds for phase, seconds in lasts if phase is Phase.FORWARD) / count
    backward_s = sum(seconds for phase, seconds in lasts if phase is Phase.BACKWARD) / count
    held = sum(
        float(sum(tensor_bytes(t) for t in tensors(node.meta.get("val"))) * (2 + factor if spec.trainable else 1))
        for node, spec in zip(program.graph_module.graph.find_nodes(op="placeholder"), program.inputs, strict=False)
        if spec.kind is InputKind.PARAMETER
    )
    return _Depth(
        price=_price(cost, [program]),
        forward_s=forward_s,
        backward_s=backward_s,
        rest_s=cost.step_s - count * (forward_s + backward_s),
        saved_bytes=_saved_bytes(program) / count,
        state_bytes=held,
        peaks=cost.peaks,
    )


def _saved_bytes(program: Program) -> float:
    """Bytes that forward sub-programs hand to backward ones."""
    total = 0.0
    for call in program.graph_module.graph.find_nodes(op="call_module"):
        if call.meta.get("phase") is Phase.FORWARD:
            for item in call.users:
                if any(u.op == "call_module" and u.meta.get("phase") is Phase.BACKWARD for u in item.users):
                    total += sum(tensor_bytes(t) for t in tensors(item.meta.get("val")))
    return total


@dataclass(frozen=True, kw_only=True)
class FoldedPrices:
    """Prices of a deep model's plans from those of shallow ones.

    Attributes:
        folds: the shallow steps.
        program: the program of a rank for one of ``folds.steps`` under a candidate with pp = 1.
        cluster: where.
        optimizer: whose state is held.
        boundary_bytes: of the activation between two blocks, for the whole batch.
        early_share: share of the parameters outside blocks that is used before the first block.
    """

    folds: Folds
    program: Callable[[int, Candidate], Program]
    cluster: Cluster
    optimizer: str
    boundary_bytes: float
    early_share: float
    _depths: dict[object, tuple[_Depth, ...]] = field(default_factory=dict)

    def depths(self, candidate: Candidate) -> tuple[_Depth, ...]:
        """The shallow programs of a candidate's stage (kept)."""
        flat = Candidate(
            dp=candidate.dp,
            tp=candidate.tp,
            zero=candidate.zero,
            sequence_parallel=candidate.sequence_parallel,
            microbatches=candidate.microbatches,
            recompute=candidate.recompute,
        )
        if flat not in self._depths:
            self._depths[flat] = tuple(
                _depth(self.program(i, flat), self.cluster, self.optimizer) for i in range(len(self.folds.steps))
            )
        return self._depths[flat]

    def price(self, candidate: Candidate) -> Price:
        """The price of one candidate."""
        found = self.depths(candidate)
        return self._whole(found) if candidate.pp == 1 else self._pipeline(found, candidate)

    def _total(self, found: Sequence[_Depth], figure: Callable[[_Depth], float]) -> float:
        return self.folds.total([figure(d) for d in found])

    def _whole(self, found: Sequence[_Depth]) -> Price:
        held = [dict(d.price.owners) for d in found]
        owners = {
            name: self.folds.total([h.get(name, 0.0) for h in held])
            for name in dict.fromkeys(n for h in held for n in h)
        }
        return Price(
            step_s=self._total(found, lambda d: d.price.step_s),
            peak_bytes=self._peak(found),
            owners=tuple(sorted(owners.items(), key=lambda item: -item[1])),
            comm_bytes=self._total(found, lambda d: d.price.comm_bytes),
            flops=self._total(found, lambda d: d.price.flops),
            parts={p: max(0.0, self.folds.total([d.price.parts[p] for d in found])) for p in found[0].price.parts},
        )

    def _peak(self, found: Sequence[_Depth]) -> float:
        """The most in any place: in each of them it is linear in the number of blocks, but not so the largest."""
        places = set.intersection(*(set(d.peaks) for d in found))
        return max(self.folds.total([d.peaks[place] for d in found]) for place in places)

    def _pipeline(self, found: Sequence[_Depth], candidate: Candidate) -> Price:
        """Blocks dealt out to stages; what is outside of them runs on the last, but for what comes before the first."""
        name = candidate.schedule or "1f1b"
        chunks = CHUNKS if name == "interleaved" else 1
        stages = self._stages(found, candidate.pp * chunks)
        send_s = self._send_seconds(candidate)
        costs = [
            StageCost(
                forward_s=self._stage(found, s, lambda d: d.forward_s),
                backward_s=self._stage(found, s, lambda d: d.backward_s),
                weight_s=self._stage(found, s, lambda d: d.backward_s) / 2,
                send_s=send_s,
            )
            for s in stages
        ]
        piped_s = step_seconds(name, candidate.pp, candidate.microbatches, costs)
        ranks = [stages[r :: candidate.pp] for r in range(candidate.pp)]
        rest_s = max(sum(self._stage(found, s, lambda d: d.rest_s) for s in own) for own in ranks)
        busy_s = max(
            candidate.microbatches * sum(c.forward_s + c.backward_s for c in costs[r :: candidate.pp])
            for r in range(candidate.pp)
        )
        peaks = [self._rank_peak(found, own, candidate, r) for r, own in enumerate(ranks)]
        whole = self._whole(found)
        share = busy_s / max(1e-30, candidate.microbatches * self._total(found, lambda d: d.forward_s + d.backward_s))
        exposed_s = whole.parts["communication"] * share
        return Price(
            step_s=piped_s + rest_s,
            peak_bytes=max(p[0] for p in peaks),
            owners=max(peaks, key=lambda p: p[0])[1],
            comm_bytes=whole.comm_bytes * share + candidate.microbatches * self._sent_bytes(candidate),
            flops=whole.flops * share,
            parts={
                "compute": busy_s - exposed_s,
                "communication": exposed_s,
                "bubble": piped_s - busy_s,
                "optimizer": rest_s,
            },
        )

    def _stages(self, found: Sequence[_Depth], count: int) -> list[tuple[tuple[float, ...], float, float]]:
        """For every stage: blocks of each group, and the shares of what comes before and after all blocks."""
        blocks = [
            (group, self._of_block(found, group, lambda d: d.forward_s + d.backward_s))
            for group, (left, kept) in enumerate(zip(self.folds.left_out, self.folds.kept, strict=True))
            for _ in range(left + kept)
        ]
        extra = self._outside(found, lambda d: d.forward_s + d.backward_s)
        weights = [seconds for _, seconds in blocks]
        cuts = even_cuts([*weights[:-1], weights[-1] + max(0.0, extra)], count)
        stages = []
        for i, (start, end) in enumerate(zip((0, *cuts), (*cuts, len(blocks)), strict=True)):
            numbers = tuple(
                float(sum(group == g for group, _ in blocks[start:end])) for g in range(len(self.folds.left_out))
            )
            stages.append((numbers, float(i == 0), float(i == count - 1)))
        return stages

    def _of_block(self, found: Sequence[_Depth], group: int, figure: Callable[[_Depth], float]) -> float:
        return figure(found[group + 1]) - figure(found[0])

    def _outside(self, found: Sequence[_Depth], figure: Callable[[_Depth], float]) -> float:
        """A figure of what is outside blocks."""
        return figure(found[0]) - sum(n * self._of_block(found, g, figure) for g, n in enumerate(self.folds.kept))

    def _stage(
        self, found: Sequence[_Depth], stage: tuple[tuple[float, ...], float, float], figure: Callable[[_Depth], float]
    ) -> float:
        numbers, _, last = stage
        inside = sum(n * self._of_block(found, g, figure) for g, n in enumerate(numbers))
        return inside + last * max(0.0, self._outside(found, figure))

    def _rank_peak(
        self,
        found: Sequence[_Depth],
        own: Sequence[tuple[tuple[float, ...], float, float]],
        candidate: Candidate,
        rank: int,
    ) -> tuple[float, tuple[tuple[str, float], ...]]:
        """Peak of a pipeline rank and what holds it: state, what is kept in flight, what one micro-batch needs."""
        name = candidate.schedule or "1f1b"
        chunks = CHUNKS if name == "interleaved" else 1
        steady = candidate.microbatches if name == "gpipe" else min(candidate.microbatches, 4 * candidate.pp)
        flying = in_flight(build(name, candidate.pp, steady, chunks))[rank]
        outside = max(0.0, self._outside(found, lambda d: d.state_bytes))
        state = kept = 0.0
        first = any(early for _, early, _ in own)
        last = any(late for _, _, late in own)
        for numbers, _, _ in own:
            state += sum(n * self._of_block(found, g, lambda d: d.state_bytes) for g, n in enumerate(numbers))
            kept += sum(n * self._of_block(found, g, lambda d: d.saved_bytes) for g, n in enumerate(numbers))
        state += outside * (self.early_share * first + (1 - self.early_share) * last)
        kept = kept / len(own) * flying
        passing = self._outside(found, lambda d: d.price.peak_bytes - d.state_bytes) if last else 0.0
        passing = max(passing, self._needed_beside(found))
        owners = {
            "parameters, gradients and optimizer state": state,
            "activations kept": kept,
            "one micro-batch": passing,
        }
        return state + kept + passing, tuple(sorted(owners.items(), key=lambda item: -item[1]))

    def _needed_beside(self, found: Sequence[_Depth]) -> float:
        """What one block needs while it runs, beyond what it keeps."""
        return max(
            0.0,
            max(
                self._of_block(found, g, lambda d: d.price.peak_bytes - d.state_bytes - d.saved_bytes)
                for g in range(len(self.folds.left_out))
            ),
        )

    def _sent_bytes(self, candidate: Candidate) -> float:
        parts = candidate.dp * candidate.microbatches * (candidate.tp if candidate.sequence_parallel else 1)
        return self.boundary_bytes / parts

    def _send_seconds(self, candidate: Candidate) -> float:
        spans = self.cluster.axis_levels({"pp": candidate.pp, "dp": candidate.dp, "tp": candidate.tp})
        model = CollectiveModel(cluster=self.cluster)
        return float(model.seconds(Collective.SEND, self._sent_bytes(candidate), spans["pp"]))


def even_cuts(weights: Sequence[float], count: int) -> tuple[int, ...]:
    """Where to cut a row into ``count`` runs so that the heaviest is lightest; earlier runs are the longer ones.

    >>> even_cuts([1, 1, 1, 1, 2], 3)
    (2, 4)
    >>> even_cuts([1, 1], 3)
    (1, 2)
    """
    sums = np.concatenate(([0.0], np.cumsum(np.asarray(weights, dtype=np.float64))))
    inside = np.where(np.tri(len(sums), k=0, dtype=bool), sums[:, None] - sums[None, :], np.inf)  # [end, start]
    best, came = inside[:, 0], []
    for _ in range(count - 1):
        most = np.maximum(inside, best[None, :])
        start = most.shape[1] - 1 - np.argmin(most[:, ::-1], axis=1)  # the last of equals
        came.append(start)
        best = most[np.arange(len(sums)), start]
    cuts, end = [], len(weights)
    for start in reversed(came):
        end = int(start[end])
        cuts.append(end)
    return tuple(reversed(cuts))
