"""An event simulator over the programs of the ranks: what runs when, what waits, what is exposed.

Last stage of the cost models.  A program is a list of :class:`Event`; each runs on a stream of its rank, in order,
after the events it waits for.  Communication slows computation of the same rank while both run.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.cost_models.errors import VerificationError

COMPUTE = "compute"
Place = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One computation or communication of one rank.

    Attributes:
        name: shown in the trace.
        stream: ``compute``, or the name of a link level; events of a stream run one after another, in program order.
        seconds: duration when nothing slows it.
        waits: (rank, index) of events that have to end first.
        meets: events of several ranks with the same key start together and last as long as the longest of them.
        allocates_bytes: memory taken when it starts.
        frees_bytes: memory given back when it ends.
        slows_compute: by how much a communication lengthens computation beside it; None: the simulation's slowdown.
        slowed_by_compute: by how much computation lengthens a communication beside it.
    """

    name: str
    stream: str
    seconds: float
    waits: tuple[Place, ...] = ()
    meets: str = ""
    allocates_bytes: float = 0.0
    frees_bytes: float = 0.0
    slows_compute: float | None = None
    slowed_by_compute: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What happened: start and end of every event of every rank, in seconds."""

    programs: tuple[tuple[Event, ...], ...]
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @property
    def step_s(self) -> float:
        """End of the last event."""
        return max((max(e, default=0.0) for e in self.ends), default=0.0)

    def busy_s(self, rank: int, stream: str = COMPUTE) -> float:
        """Time ``stream`` of ``rank`` is occupied."""
        return sum(e - s for ev, s, e in self._rows(rank) if ev.stream == stream)

    def bubble(self, rank: int) -> float:
        """Share of the step in which ``rank`` computes nothing."""
        return 1 - self.busy_s(rank) / self.step_s if self.step_s else 0.0

    def exposed_s(self, rank: int) -> float:
        """Time in which ``rank`` communicates and computes nothing."""
        edges: list[tuple[float, int, int]] = []
        for event, start, end in self._rows(rank):
            which = 0 if event.stream == COMPUTE else 1
            edges += [(start, which, 1), (end, which, -1)]
        active, last, exposed = [0, 0], 0.0, 0.0
        for time, which, change in sorted(edges):
            if active[1] and not active[0]:
                exposed += time - last
            active[which] += change
            last = time
        return exposed

    def memory_curve(self, rank: int, held_bytes: float = 0.0) -> list[tuple[float, float]]:
        """(time, bytes alive) after every change, starting from ``held_bytes``."""
        edges = [(s, ev.allocates_bytes) for ev, s, _ in self._rows(rank) if ev.allocates_bytes]
        edges += [(e, -ev.frees_bytes) for ev, _, e in self._rows(rank) if ev.frees_bytes]
        curve, alive = [(0.0, held_bytes)], held_bytes
        for time, change in sorted(edges):
            alive += change
            curve.append((time, alive))
        return curve

    def peak_bytes(self, rank: int, held_bytes: float = 0.0) -> float:
        """Top of the memory curve."""
        return max(alive for _, alive in self.memory_curve(rank, held_bytes))

    def chrome_trace(self) -> dict[str, Any]:
        """The timeline in the Trace Event Format, which Perfetto and chrome://tracing read.  Times are microseconds."""
        rows: list[dict[str, Any]] = []
        for rank, program in enumerate(self.programs):
            streams = {s: i for i, s in enumerate(dict.fromkeys((COMPUTE, *(e.stream for e in program))))}
            rows.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
            for name, tid in streams.items():
                rows.append({"ph": "M", "pid": rank, "tid": tid, "name": "thread_name", "args": {"name": name}})
            for event, start, end in self._rows(rank):
                span = {"ts": start * 1e6, "dur": (end - start) * 1e6}
                rows.append({"ph": "X", "pid": rank, "tid": streams[event.stream], "name": event.name, **span})
            for time, alive in self.memory_curve(rank):
                rows.append({"ph": "C", "pid": rank, "name": "memory", "ts": time * 1e6, "args": {"bytes": alive}})
        return {"traceEvents": rows, "displayTimeUnit": "ms"}

    def trace_text(self) -> str:
        """The Chrome trace as JSON text."""
        return json.dumps(self.chrome_trace())

    def _rows(self, rank: int) -> list[tuple[Event, float, float]]:
        return list(zip(self.programs[rank], self.starts[rank], self.ends[rank], strict=True))


@dataclass(slots=True)
class _Running:
    """An event that runs: the time that is left at its own pace, and its rate since when."""

    index: int
    left_s: float
    since: float
    rate: float = 1.0
    version: int = 0


@dataclass(slots=True)
class _Rank:
    """State of one rank while simulating."""

    queues: dict[str, list[int]]
    heads: dict[str, int]
    running: dict[str, _Running] = field(default_factory=dict)


class _Simulation:
    """One run of :func:`simulate`.  What runs is a fluid: its rate falls while something runs beside it."""

    def __init__(self, programs: Sequence[Sequence[Event]], slowdown: float) -> None:
        self.programs = programs
        self.slowdown = slowdown
        self.starts = [[0.0] * len(p) for p in programs]
        self.ends = [[-1.0] * len(p) for p in programs]
        self.heap: list[tuple[float, int, int, str, int]] = []
        self.order = 0
        self.ranks: list[_Rank] = []
        self.wanted: dict[str, int] = {}
        self.arrived: dict[str, list[Place]] = {}
        self.blocked: dict[Place, set[int]] = {}
        for program in programs:
            queues: dict[str, list[int]] = {}
            for i, event in enumerate(program):
                queues.setdefault(event.stream, []).append(i)
                if event.meets:
                    self.wanted[event.meets] = self.wanted.get(event.meets, 0) + 1
            self.ranks.append(_Rank(queues=queues, heads=dict.fromkeys(queues, 0)))

    def run(self) -> Timeline:
        for rank in range(len(self.ranks)):
            self.advance(rank, 0.0)
        while self.heap:
            time, version, rank, stream, index = heapq.heappop(self.heap)
            running = self.ranks[rank].running.get(stream)
            if running is not None and running.index == index and running.version == version:
                self.finish(rank, stream, index, time)
        for rank, state in enumerate(self.ranks):
            for stream, queue in state.queues.items():
                if state.heads[stream] < len(queue):
                    event = self.programs[rank][queue[state.heads[stream]]]
                    raise VerificationError(
                        f"deadlock: rank {rank} stops before {event.name!r} on stream {stream!r}; it waits for "
                        f"{event.meets or [self.programs[r][i].name for r, i in event.waits if self.ends[r][i] < 0]}"
                    )
        return Timeline(
            programs=tuple(tuple(p) for p in self.programs),
            starts=tuple(tuple(s) for s in self.starts),
            ends=tuple(tuple(e) for e in self.ends),
        )

    def finish(self, rank: int, stream: str, index: int, time: float) -> None:
        state = self.ranks[rank]
        del state.running[stream]
        self.ends[rank][index] = time
        state.heads[stream] += 1
        self.refresh(rank, time)
        self.advance(rank, time)
        for other in self.blocked.pop((rank, index), ()):
            if other != rank:
                self.advance(other, time)

    def advance(self, rank: int, time: float) -> None:
        """Start what can start on ``rank``."""
        state = self.ranks[rank]
        for stream, queue in state.queues.items():
            head = state.heads[stream]
            if stream in state.running or head >= len(queue):
                continue
            index = queue[head]
            event = self.programs[rank][index]
            waiting = [w for w in event.waits if self.ends[w[0]][w[1]] < 0]
            if waiting:
                for place in waiting:
                    self.blocked.setdefault(place, set()).add(rank)
            elif not event.meets:
                self.start(rank, stream, index, event.seconds, time)
            else:
                self.meet(rank, index, event, time)

    def meet(self, rank: int, index: int, event: Event, time: float) -> None:
        here = self.arrived.setdefault(event.meets, [])
        if (rank, index) not in here:
            here.append((rank, index))
        if len(here) == self.wanted[event.meets]:
            seconds = max(self.programs[r][i].seconds for r, i in here)
            for r, i in here:
                self.start(r, self.programs[r][i].stream, i, seconds, time)

    def start(self, rank: int, stream: str, index: int, seconds: float, time: float) -> None:
        self.starts[rank][index] = time
        self.ranks[rank].running[stream] = _Running(index=index, left_s=seconds, since=time)
        self.schedule(rank, stream, time)
        self.refresh(rank, time)

    def refresh(self, rank: int, time: float) -> None:
        """Account for what was done so far, and change the rates to what the streams in use allow."""
        running = self.ranks[rank].running
        slowest = 1.0
        for stream, item in running.items():
            if stream != COMPUTE:
                event = self.programs[rank][item.index]
                slows = self.slowdown if event.slows_compute is None else event.slows_compute
                slowest = min(slowest, 1 / (1 + slows))
                self.change(rank, stream, 1 / (1 + event.slowed_by_compute * (COMPUTE in running)), time)
        if COMPUTE in running:
            self.change(rank, COMPUTE, slowest, time)

    def change(self, rank: int, stream: str, rate: float, time: float) -> None:
        item = self.ranks[rank].running[stream]
        if rate != item.rate:
            item.left_s -= (time - item.since) * item.rate
            item.since, item.rate = time, rate
            self.schedule(rank, stream, time)

    def schedule(self, rank: int, stream: str, time: float) -> None:
        item = self.ranks[rank].running[stream]
        self.order += 1
        item.version = self.order
        end = time + max(item.left_s, 0.0) / item.rate
        heapq.heappush(self.heap, (end, self.order, rank, stream, item.index))


def simulate(programs: Sequence[Sequence[Event]], *, slowdown: float = 0.0) -> Timeline:
    """Run the programs of the ranks.

    Args:
        programs: events of every rank.
        slowdown: by how much communication lengthens computation that runs at the same time (0.1: by a tenth), where
            the event does not say it.

    Raises:
        VerificationError: the ranks wait for each other for ever; the message names where each stops.

    >>> a = Event(name="matmul", stream="compute", seconds=2.0)
    >>> b = Event(name="gather", stream="nvlink", seconds=1.0)
    >>> round(simulate([[a, b]], slowdown=0.5).step_s, 3)
    2.333
    """
    return _Simulation(programs, slowdown).run()


def summary(timeline: Timeline) -> Mapping[str, float]:
    """Step time, and of the rank that computes longest: computing, exposed communication and bubble, in seconds."""
    ranks = range(len(timeline.programs))
    worst = max(ranks, key=timeline.busy_s)
    return {
        "step_s": timeline.step_s,
        "compute_s": timeline.busy_s(worst),
        "exposed_s": timeline.exposed_s(worst),
        "bubble": timeline.bubble(worst),
    }
