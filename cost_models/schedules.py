"""Pipeline schedules as text: who runs which stage's forward or backward on which micro-batch, in order.

A schedule has one line a rank.  An action is stage, kind and micro-batch: ``0F1`` is the forward of stage 0 on
micro-batch 1; ``B`` is a whole backward; ``I`` and ``W`` are its halves (gradient of the input, of the weights).
Stage ``s`` runs on rank ``s % num_ranks``.  The timeline prices schedules; the passes turn them into programs.
"""

from __future__ import annotations

import enum
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost_models.errors import ConstraintError, PlanError, VerificationError


class Kind(enum.Enum):
    """What an action computes."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"


@dataclass(frozen=True, slots=True)
class Action:
    """One stage's computation on one micro-batch.

    >>> str(Action(2, Kind.FORWARD, 5))
    '2F5'
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Actions of every rank, in the order each rank runs them."""

    ranks: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """Stages, counting the chunks of an interleaved schedule."""
        return 1 + max((a.stage for line in self.ranks for a in line), default=-1)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches."""
        return 1 + max((a.microbatch for line in self.ranks for a in line), default=-1)

    def __str__(self) -> str:
        return "\n".join(" ".join(str(a) for a in line) for line in self.ranks)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read the text form, one line a rank.

        >>> print(Schedule.parse("0F0 0F1 0B0 0B1"))
        0F0 0F1 0B0 0B1
        """
        return cls(
            ranks=tuple(tuple(_parse_action(word) for word in line.split()) for line in text.strip().split("\n"))
        )


def _parse_action(word: str) -> Action:
    match = re.fullmatch(r"(\d+)([FBIW])(\d+)", word)
    if match is None:
        raise PlanError(f"cannot read the action {word!r}; write stage, one of F B I W, and micro-batch: 0F1")
    return Action(int(match.group(1)), Kind(match.group(2)), int(match.group(3)))


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards.

    >>> print(gpipe(2, 2))
    0F0 0F1 0B0 0B1
    1F0 1F1 1B0 1B1
    """
    _positive(num_ranks, num_microbatches)
    order = [(k, m) for k in (Kind.FORWARD, Kind.BACKWARD) for m in range(num_microbatches)]
    return Schedule(ranks=tuple(tuple(Action(r, k, m) for k, m in order) for r in range(num_ranks)))


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Each rank fills the pipe behind it, then alternates forward and backward (PipeDream-flush).

    >>> print(one_f_one_b(2, 3))
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    """
    return interleaved(num_ranks, num_microbatches, 1)


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """1F1B with ``num_chunks`` stages a rank, dealt out round-robin (Narayanan et al. 2021).

    Raises:
        ConstraintError: with several chunks, the micro-batches do not form whole rounds of at least ``num_ranks``.

    >>> print(interleaved(2, 2, 2).ranks[1][-1])
    1B1
    """
    _positive(num_ranks, num_microbatches, num_chunks)
    rounds = max(1, num_microbatches // num_ranks)
    if num_chunks > 1 and num_microbatches % rounds:
        near = [m for m in range(1, 4 * num_microbatches) if m % max(1, m // num_ranks) == 0]
        good = sorted(sorted(near, key=lambda m: abs(m - num_microbatches))[:4])
        raise ConstraintError(
            f"interleaved: {num_microbatches} micro-batches do not form equal rounds over {num_ranks} ranks; "
            f"{good} would"
        )
    width = num_microbatches // rounds if num_chunks > 1 else num_microbatches
    forwards = _chunk_order(num_chunks, rounds if num_chunks > 1 else 1, width)
    lines = []
    for rank in range(num_ranks):
        ahead = num_ranks - rank - 1
        warmup = ahead if num_chunks == 1 else 2 * ahead + (num_chunks - 1) * width
        line = [Action(c * num_ranks + rank, Kind.FORWARD, m) for c, m in forwards]
        back = [Action((num_chunks - 1 - c) * num_ranks + rank, Kind.BACKWARD, m) for c, m in forwards]
        lines.append(tuple(_alternate(line, back, min(warmup, len(line)))))
    return Schedule(ranks=tuple(lines))


def _chunk_order(num_chunks: int, rounds: int, width: int) -> list[tuple[int, int]]:
    """(chunk, micro-batch) in the order of the forwards: each round passes through all chunks."""
    return [(c, r * width + i) for r in range(rounds) for c in range(num_chunks) for i in range(width)]


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> list[Action]:
    out = list(forwards[:warmup])
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        out += [forward, backward]
    return out + list(backwards[len(forwards) - warmup :])


def zero_bubble(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H1 (Qi et al. 2023): weight gradients fill the bubbles, with no more activations alive than under 1F1B.

    The order is that of 1F1B; rank ``r`` puts each weight gradient off by ``r`` micro-batches, so that ``r`` are
    left for the time when it waits for the last gradients to come back.

    >>> print(zero_bubble(2, 3))
    0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    lines = []
    for rank, line in enumerate(one_f_one_b(num_ranks, num_microbatches).ranks):
        out: list[Action] = []
        inputs = weights = 0
        for action in line:
            if action.kind is Kind.FORWARD:
                out.append(action)
                continue
            out.append(Action(rank, Kind.INPUT_GRADIENT, inputs))
            inputs += 1
            if inputs - weights > rank:
                out.append(Action(rank, Kind.WEIGHT_GRADIENT, weights))
                weights += 1
        out += [Action(rank, Kind.WEIGHT_GRADIENT, m) for m in range(weights, num_microbatches)]
        lines.append(tuple(out))
    return Schedule(ranks=tuple(lines))


def build(name: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """The schedule called ``name``: gpipe, 1f1b, interleaved or zb.

    Raises:
        ConstraintError: no schedule has that name, or it does not take several chunks.
    """
    if name == "interleaved":
        return interleaved(num_ranks, num_microbatches, num_chunks)
    builders = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb": zero_bubble}
    if name not in builders:
        raise ConstraintError(f"no schedule is called {name!r}; known are {sorted((*builders, 'interleaved'))}")
    if num_chunks != 1:
        raise ConstraintError(f"schedule {name!r} has one stage a rank, got {num_chunks} chunks; use 'interleaved'")
    return builders[name](num_ranks, num_microbatches)


def _positive(*values: int) -> None:
    if min(values) < 1:
        raise ConstraintError(f"ranks, micro-batches and chunks need to be at least 1, got {values}")


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the most (stage, micro-batch) activations alive at once.

    >>> in_flight(one_f_one_b(4, 8)), in_flight(gpipe(2, 8))
    ((4, 3, 2, 1), (8, 8))
    """
    peaks = []
    for line in schedule.ranks:
        alive = peak = 0
        for action in line:
            alive += action.kind is Kind.FORWARD
            peak = max(peak, alive)
            alive -= action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)
        peaks.append(peak)
    return tuple(peaks)


def validate(schedule: Schedule) -> None:
    """Check that every stage runs each micro-batch forward and backward once, and that the ranks can finish.

    Raises:
        VerificationError: with the rank, the action and the grid.
    """
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    where: dict[Action, int] = {}
    for rank, line in enumerate(schedule.ranks):
        for action in line:
            if action in where:
                raise _bad(schedule, rank, f"{action} runs twice")
            if action.stage % schedule.num_ranks != rank:
                raise _bad(schedule, rank, f"{action} belongs to rank {action.stage % schedule.num_ranks}")
            where[action] = rank
    for stage in range(stages):
        for m in range(microbatches):
            kinds = {k for k in Kind if Action(stage, k, m) in where}
            if kinds not in ({Kind.FORWARD, Kind.BACKWARD}, {Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT}):
                got = "".join(sorted(k.value for k in kinds)) or "nothing"
                raise _bad(
                    schedule,
                    stage % schedule.num_ranks,
                    f"stage {stage}, micro-batch {m} needs F and B (or F, I, W), has {got}",
                )
    _run(schedule)


def needs(action: Action, num_stages: int) -> tuple[tuple[int, Kind, int], ...]:
    """(stage, kind, micro-batch) that have to be done before ``action``; kind BACKWARD stands for B or I."""
    stage, m = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        return ((stage - 1, Kind.FORWARD, m),) if stage else ()
    if action.kind is Kind.WEIGHT_GRADIENT:
        return ((stage, Kind.BACKWARD, m),)
    after = ((stage + 1, Kind.BACKWARD, m),) if stage + 1 < num_stages else ()
    return ((stage, Kind.FORWARD, m), *after)


def _run(schedule: Schedule) -> None:
    """Run the lines with unlimited buffers; raise where no rank can go on."""
    done: set[tuple[int, Kind, int]] = set()
    lines = [deque(line) for line in schedule.ranks]
    moved = True
    while moved:
        moved = False
        for line in lines:
            while line and all(need in done for need in needs(line[0], schedule.num_stages)):
                action = line.popleft()
                kind = Kind.BACKWARD if action.kind is Kind.INPUT_GRADIENT else action.kind
                done.add((action.stage, kind, action.microbatch))
                moved = True
    for rank, line in enumerate(lines):
        if line:
            missing = [n for n in needs(line[0], schedule.num_stages) if n not in done]
            text = ", ".join(f"{s}{k.value}{m}" for s, k, m in missing)
            raise _bad(schedule, rank, f"{line[0]} waits for ever for {text}")


def _bad(schedule: Schedule, rank: int, what: str) -> VerificationError:
    grid = "\n".join(
        f"{'>' if r == rank else ' '} rank {r}: {' '.join(str(a) for a in line)}"
        for r, line in enumerate(schedule.ranks)
    )
    return VerificationError(f"schedule, rank {rank}: {what}\n{grid}")
