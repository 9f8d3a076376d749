"""Who runs what of a step with stages and micro-batches, and in which order.

The step is a list of *events* in one order that all ranks share: what is done once, the actions of the schedule, what
is done once at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autopar.cost_models.errors import PartitionError
from autopar.cost_models.schedules import Action, Kind, Schedule, needs
from autopar.passes.microbatch import Fold

ONCE = -1  # in place of a micro-batch
ACTION = "action"  # node.meta of a sub-program's call: the schedule's action that it is (of)
SECONDS = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUT_GRADIENT: 1.0, Kind.WEIGHT_GRADIENT: 1.0}


@dataclass(frozen=True, slots=True)
class Event:
    """Something that one rank does: a part on one micro-batch, or one call that is done once (``part`` is -1)."""

    rank: int
    stage: int
    microbatch: int
    part: int = -1
    call: int = -1


@dataclass(slots=True, kw_only=True)
class Part:
    """Calls of one stage that are run together, once for each micro-batch.

    Attributes:
        name: name of the sub-program.
        stage: who runs it; -1: every stage that needs it.
        kind: what of its stage it computes; None for what is counted over the inputs.
        calls: positions in the fold, in order; those that are cheap to repeat included.
        inputs: positions of what it takes.
        outputs: positions of what it gives.
    """

    name: str
    stage: int
    kind: Kind | None = None
    calls: list[int]
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)


def linear_order(schedule: Schedule) -> list[tuple[int, Action]]:
    """All actions with their ranks, in the order in which they end when a forward takes 1 s and a backward 2 s."""
    lines = [deque(line) for line in schedule.ranks]
    free = [0.0] * len(lines)
    done: dict[tuple[int, Kind, int], float] = {}
    ended: list[tuple[float, int, Action]] = []
    while any(lines):
        moved = False
        for rank, line in enumerate(lines):
            while line and all(need in done for need in needs(line[0], schedule.num_stages)):
                action = line.popleft()
                start = max([free[rank], *(done[n] for n in needs(action, schedule.num_stages))])
                free[rank] = start + SECONDS[action.kind]
                kind = Kind.BACKWARD if action.kind is Kind.INPUT_GRADIENT else action.kind
                done[action.stage, kind, action.microbatch] = free[rank]
                ended.append((free[rank], rank, action))
                moved = True
        if not moved:
            raise PartitionError("the schedule cannot be run to its end")
    return [(rank, action) for _, rank, action in sorted(ended, key=lambda e: e[:2])]


class Arrangement:
    """Who runs what: the parts of the fold, and the events of all ranks in their common order."""

    def __init__(self, fold: Fold, schedule: Schedule) -> None:
        self.fold, self.schedule = fold, schedule
        self.num_ranks = schedule.num_ranks
        self.parts: list[Part] = []
        self.part_of: dict[int, int] = {}
        self.counts: list[int] = []
        self.split = any(a.kind is Kind.WEIGHT_GRADIENT for line in schedule.ranks for a in line)
        self.levels = sorted({fold.level[i] for i in self._owned() if fold.each[i]})
        self.keys: dict[tuple[int, int, Kind], int] = {}
        self._make_parts()
        self._connect()
        self.events = self._events()

    def _owned(self) -> list[int]:
        """Live calls that belong to one stage."""
        fold = self.fold
        return [
            i
            for i, n in enumerate(fold.nodes)
            if fold.live[i] and fold.stage[i] >= 0 and fold.alias[i] == i and n.op == "call_function"
        ]

    def rank_of(self, stage: int) -> int:
        """The rank along the pipeline that runs a stage."""
        return stage % self.num_ranks

    # parts

    def _make_parts(self) -> None:
        fold = self.fold
        owned = [i for i in self._owned() if fold.each[i]]
        weights = self._weight_calls(owned) if self.split else set()
        groups: dict[tuple[int, int, Kind], list[int]] = {}
        for i in owned:
            back = Kind.INPUT_GRADIENT if self.split else Kind.BACKWARD
            kind = (Kind.WEIGHT_GRADIENT if i in weights else back) if fold.backward[i] else Kind.FORWARD
            groups.setdefault((fold.level[i], fold.stage[i], kind), []).append(i)
        names = {
            Kind.FORWARD: "forward",
            Kind.BACKWARD: "backward",
            Kind.INPUT_GRADIENT: "backward",
            Kind.WEIGHT_GRADIENT: "weights",
        }
        for key in sorted(groups, key=lambda k: (k[0], k[1], k[2].value)):
            level = f"_{key[0]}" if len(self.levels) > 1 else ""
            self.keys[key] = len(self.parts)
            name = f"stage{key[1]}_{names[key[2]]}{level}"
            self._add(Part(name=name, stage=key[1], kind=key[2], calls=groups[key]))
        counted = [j for j, n in enumerate(fold.nodes) if fold.join[j] and fold.live[j] and fold.from_inputs[j]]
        for depth in sorted({fold.depth[j] for j in counted}):
            sources = [fold.inputs[j][0] for j in counted if fold.depth[j] == depth]
            self.counts.append(len(self.parts))
            name = "count" if depth == 1 else f"count_{depth}"
            self.parts.append(
                Part(name=name, stage=-1, calls=[], outputs=[s for s in dict.fromkeys(sources) if fold.each[s]])
            )

    def _add(self, part: Part) -> None:
        for i in part.calls:
            self.part_of[i] = len(self.parts)
        self.parts.append(part)

    def _weight_calls(self, owned: Sequence[int]) -> set[int]:
        """Backward calls that no other stage waits for."""
        fold = self.fold
        needed: set[int] = set()
        for i in reversed(range(len(fold.nodes))):
            for s in fold.inputs[i]:
                elsewhere = fold.stage[i] >= 0 and fold.stage[s] != fold.stage[i] and fold.each[i]
                if fold.live[i] and (i in needed or elsewhere):
                    needed.add(s)
        return {i for i in owned if fold.backward[i] and i not in needed}

    def _connect(self) -> None:
        """Inputs and outputs of every part, with the cheap calls that it repeats."""
        fold = self.fold
        outputs: list[dict[int, None]] = [dict.fromkeys(p.outputs) for p in self.parts]
        for number, part in enumerate(self.parts):
            inside, queue = set(part.calls), list(part.calls) or list(part.outputs)
            inside |= set(queue)
            inputs: dict[int, None] = {}
            while queue:
                for s in fold.inputs[queue.pop()]:
                    if s in inside:
                        continue
                    if fold.each[s] and fold.cheap[s] and fold.nodes[s].op == "call_function":
                        inside.add(s)
                        queue.append(s)
                    else:
                        inputs[s] = None
            part.calls, part.inputs = sorted(inside), sorted(inputs)
            for s in part.inputs:
                if s in self.part_of and self.part_of[s] != number:
                    outputs[self.part_of[s]][s] = None
        for i, node in enumerate(fold.nodes):
            read = fold.results if node.op == "output" else fold.inputs[i] if self._outside(i) else []
            for s in read:
                if isinstance(s, int) and s in self.part_of:
                    outputs[self.part_of[s]][s] = None
        for part, found in zip(self.parts, outputs, strict=True):
            part.outputs = sorted(found)

    def _outside(self, i: int) -> bool:
        """Whether a call stands in no part: a join, or something done once."""
        return self.fold.live[i] and i not in self.part_of and self.fold.alias[i] == i and not self.fold.each[i]

    # events

    def _events(self) -> list[Event]:
        once = [i for i in self._owned() if not self.fold.each[i]]
        events: list[Event] = []
        highest = max([0, *self.levels, *(self.fold.level[i] for i in once)])
        for level in range(highest + 1):
            events += [self._once(i) for i in once if self.fold.level[i] == level]
            events += self._scheduled() if level == 0 and not self.fold.coupled else self._round(level)
        return events

    def _once(self, i: int) -> Event:
        stage = self.fold.stage[i]
        return Event(self.rank_of(stage), stage, ONCE, call=i)

    def _scheduled(self) -> list[Event]:
        found = []
        for rank, action in linear_order(self.schedule):
            part = self.keys.get((0, action.stage, action.kind))
            if part is not None:
                found.append(Event(rank, action.stage, action.microbatch, part=part))
        return found

    def _round(self, level: int) -> list[Event]:
        """All micro-batches pass through the parts of one level: the forward ones, then the backward ones."""
        found = []
        for kinds in ((Kind.FORWARD,), (Kind.BACKWARD, Kind.INPUT_GRADIENT), (Kind.WEIGHT_GRADIENT,)):
            parts = [(k[1], p) for k, p in self.keys.items() if k[0] == level and k[2] in kinds]
            last = max((s for s, _ in parts), default=0)
            at = {s: s if Kind.FORWARD in kinds else last - s for s, _ in parts}
            order = sorted((at[s] + m, at[s], s, p, m) for s, p in parts for m in range(self.fold.count))
            found += [Event(self.rank_of(s), s, m, part=p) for _, _, s, p, m in order]
        return found

    # who needs what

    def made_by(self, event: Event) -> list[int]:
        """Positions of what an event makes."""
        return [event.call] if event.part < 0 else self.parts[event.part].outputs

    def needed_by(self, event: Event) -> list[int]:
        """Positions of what an event reads, cheap calls that it repeats seen through."""
        if event.part >= 0:
            return self.owned(self.parts[event.part].inputs)
        return [] if self.fold.join[event.call] else self.owned(self.fold.inputs[event.call])

    def owned(self, start: Iterable[int]) -> list[int]:
        """The values that belong to a stage among ``start`` and what its cheap calls are made from."""
        fold, found, queue = self.fold, dict[int, None](), list(start)
        seen = set(queue)
        while queue:
            i = queue.pop()
            if fold.stage[i] >= 0:
                found[i] = None
                continue
            for s in fold.inputs[i]:
                if s not in seen:
                    seen.add(s)
                    queue.append(s)
        return sorted(found)
