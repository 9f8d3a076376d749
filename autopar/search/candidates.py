"""The uniform plans that are weighed: sizes of the axes, what is kept split, micro-batches, schedule, recompute."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.cost_models.errors import ConstraintError
from autopar.passes.placement import can_split
from autopar.passes.redistribute import MICROBATCHES
from autopar.plan import RECOMPUTE, Constraints
from autopar.search.first_choice import AxisWish

CHUNKS = 2  # stages that a rank runs under the interleaved schedule
SCHEDULES = (None, "interleaved", "zb")  # None: 1f1b, or gpipe where a step needs all forwards before any backward
MOST_ROWS = 8  # rows of a micro-batch that pipelines are tried with


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A uniform plan: sizes of the axes, what is kept split, how the step is run."""

    dp: int
    tp: int
    zero: int
    sequence_parallel: bool
    pp: int = 1
    microbatches: int = 1
    schedule: str | None = None
    recompute: str = "none"

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

    def text(self) -> str:
        """The plan in one line.

        >>> Candidate(dp=4, tp=2, zero=3, sequence_parallel=True, microbatches=2).text()
        'dp 4 x tp 2, zero 3, sequence parallel, 2 micro-batches'
        """
        sizes = [f"{axis} {getattr(self, axis)}" for axis in ("dp", "tp", "pp") if getattr(self, axis) > 1]
        parts = [" x ".join(sizes) or "one device"]
        parts += [f"zero {self.zero}"] if self.zero else []
        parts += ["sequence parallel"] if self.sequence_parallel else []
        parts += [f"{self.microbatches} micro-batches"] if self.microbatches > 1 else []
        parts += [self.schedule or "1f1b"] if self.pp > 1 else []
        parts += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """All uniform plans that honour the constraints.

    Attributes:
        world_size: ranks.
        constraints: what is fixed.
        rows: sizes of the first dims of the batch inputs.
        neighbours: ranks joined by the innermost links: tensor parallelism is tried up to there.
        blocks: repeated blocks of the model: pipelines are tried with at most as many stages.
        training: whether the step has a backward.
    """

    world_size: int
    constraints: Constraints
    rows: Sequence[int]
    neighbours: int
    blocks: int
    training: bool

    def candidates(self) -> Iterator[Candidate]:
        """Every one of them; what is cheap comes before what saves memory.

        Raises:
            ConstraintError: there is none.
        """
        for dp, tp, pp in self.sizes():
            for zero in self._zeros(dp):
                for split in self._sequence(tp):
                    for schedule in self._schedules(pp):
                        for recompute in self._recomputes():
                            for count in self.microbatches(dp, pp, schedule):
                                yield Candidate(
                                    dp=dp,
                                    tp=tp,
                                    zero=zero,
                                    sequence_parallel=split,
                                    pp=pp,
                                    microbatches=count,
                                    schedule=schedule,
                                    recompute=recompute,
                                )

    def sizes(self) -> list[tuple[int, int, int]]:
        """(dp, tp, pp) with their product the number of ranks.

        Raises:
            ConstraintError: the fixed sizes do not fit the number of ranks.
        """
        wish, world = self.constraints, self.world_size
        divisors = [n for n in range(1, world + 1) if world % n == 0]
        stages = [wish.pp] if wish.pp else [n for n in divisors if n == 1 or self._pipelines(n)]
        found = [
            (world // tp // pp, tp, pp)
            for pp in stages
            for tp in divisors
            if world % (tp * pp) == 0 and wish.tp in (None, tp) and wish.dp in (None, world // tp // pp)
        ]
        near = [sizes for sizes in found if sizes[1] <= self.neighbours]
        found = near if near and wish.tp is None else found
        if not found:
            raise ConstraintError(
                f"dp={wish.dp}, tp={wish.tp}, pp={wish.pp} do not fit {world} ranks: dp * tp * pp must be "
                f"{world}; start {math.prod(x or 1 for x in (wish.dp, wish.tp, wish.pp))} ranks "
                "(torchrun --nproc-per-node) or change the sizes"
            )
        return found

    def _pipelines(self, stages: int) -> bool:
        """Whether a pipeline of so many stages is worth a thought: blocks to put on them, rows to keep them busy."""
        wish = self.constraints
        count = wish.microbatches or max(self.rows, default=1)
        return self.training and stages <= min(self.blocks, count)

    def family(self, candidate: Candidate) -> tuple[object, ...]:
        """What candidates share that differ only in what they give up for memory.

        An axis size that the user fixed is taken literally: what saves memory on it is added where it is needed.
        """
        wish = self.constraints
        return (
            *(candidate.dp, candidate.tp, candidate.pp, candidate.schedule),
            candidate.zero if wish.dp is None else None,
            candidate.microbatches if candidate.pp > 1 else None,
        )

    def _zeros(self, dp: int) -> tuple[int, ...]:
        if self.constraints.zero is not None:
            return (self.constraints.zero,)
        return (0,) if dp == 1 or not self.training else (0, 2, 3)

    def _sequence(self, tp: int) -> tuple[bool, ...]:
        wish = self.constraints
        if wish.sequence_parallel is not None or tp == 1:
            return (bool(wish.sequence_parallel),)
        return (True,) if wish.tp is None else (False, True)

    def _recomputes(self) -> tuple[str, ...]:
        wish = self.constraints.recompute
        return (wish,) if wish is not None else RECOMPUTE if self.training else ("none",)

    def _schedules(self, pp: int) -> tuple[str | None, ...]:
        wish = self.constraints.schedule
        if pp == 1 or wish is not None or self.constraints.pp is not None:
            return (wish,)
        return SCHEDULES if self.training and self.blocks >= CHUNKS * pp else (None,)

    def microbatches(self, dp: int, pp: int, schedule: str | None) -> list[int]:
        """Numbers of micro-batches of a data rank.

        Raises:
            ConstraintError: the batch cannot be cut into as many as are wished for.
        """
        wish = self.constraints.microbatches
        rows = max((r // dp for r in self.rows if r % dp == 0), default=0)
        if wish is not None:
            return [self._wished(wish, rows, dp)]
        if not self.training or rows <= 1:
            return [1]
        powers = [2**i for i in range(rows.bit_length()) if rows % 2**i == 0]
        if pp == 1:
            return powers
        counts = [rows // n for n in powers if n <= MOST_ROWS and rows // n >= pp]
        if schedule == "interleaved":
            counts = [count for count in counts if count % pp == 0]
        return counts or ([] if schedule else [max(powers)])

    def _wished(self, wish: int, rows: int, dp: int) -> int:
        if wish == 1 or can_split(rows, wish):
            return wish
        possible = [m for m in range(1, rows + 1) if can_split(rows, m)]
        if not self.training:  # a forward pass takes what its rows allow
            return max((m for m in possible if m <= wish), default=1)
        have = ", ".join(map(str, sorted(set(self.rows)))) or "no"
        near = sorted(sorted(possible, key=lambda m: (abs(m - wish), m))[:6]) or [1]
        raise ConstraintError(
            f"microbatches={wish} is not possible: the batch inputs have {have} rows on {dp} data ranks, which every "
            f"micro-batch needs at least one of; use one of {', '.join(map(str, near))}, or another batch size"
        )
