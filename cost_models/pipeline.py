"""From a schedule and the costs of its stages to the programs that the timeline runs."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost_models.schedules import Action, Kind, Schedule, build
from autopar.cost_models.timeline import COMPUTE, Event, Place, Timeline, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """What one stage costs for one micro-batch.

    Attributes:
        forward_s, backward_s: computation, with the communication inside the stage that is not hidden.
        weight_s: the part of ``backward_s`` that computes weight gradients (used by split backwards).
        send_s: time to send its output to the next stage (the gradient comes back at the same cost).
        activation_bytes: kept from its forward to its backward.
    """

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    send_s: float = 0.0
    activation_bytes: float = 0.0

    def seconds(self, kind: Kind) -> float:
        """Duration of an action of ``kind``."""
        return {
            Kind.FORWARD: self.forward_s,
            Kind.BACKWARD: self.backward_s,
            Kind.INPUT_GRADIENT: self.backward_s - self.weight_s,
            Kind.WEIGHT_GRADIENT: self.weight_s,
        }[kind]


def programs(schedule: Schedule, stages: Sequence[StageCost], *, send_stream: str = "send") -> list[list[Event]]:
    """One list of events a rank.

    Args:
        schedule: who does what.
        stages: cost of every stage, chunks included.
        send_stream: stream of the sends; ``compute`` when they are not overlapped.

    Returns:
        Programs for :func:`~autopar.cost_models.timeline.simulate`.
    """
    last = schedule.num_stages - 1
    out: list[list[Event]] = [[] for _ in schedule.ranks]
    waits: list[list[tuple[int, Action]]] = [[] for _ in schedule.ranks]
    sent: dict[tuple[int, bool, int], Place] = {}
    for rank, line in enumerate(schedule.ranks):
        for action in line:
            stage, kind = stages[action.stage], action.kind
            waits[rank].append((len(out[rank]), action))
            done = (rank, len(out[rank]))
            ends = kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)
            out[rank].append(
                Event(
                    name=str(action),
                    stream=COMPUTE,
                    seconds=stage.seconds(kind),
                    allocates_bytes=stage.activation_bytes if kind is Kind.FORWARD else 0.0,
                    frees_bytes=stage.activation_bytes if ends else 0.0,
                )
            )
            forward = kind is Kind.FORWARD
            if kind is Kind.WEIGHT_GRADIENT or action.stage == (last if forward else 0):
                continue
            seconds = stage.send_s if forward else stages[action.stage - 1].send_s
            sent[action.stage, forward, action.microbatch] = done
            if seconds > 0:
                sent[action.stage, forward, action.microbatch] = (rank, len(out[rank]))
                out[rank].append(Event(name=f"send {action}", stream=send_stream, seconds=seconds, waits=(done,)))
    for rank, line_waits in enumerate(waits):
        for index, action in line_waits:
            source = _source(action, last)
            if source is not None:
                event = out[rank][index]
                out[rank][index] = Event(
                    name=event.name,
                    stream=event.stream,
                    seconds=event.seconds,
                    waits=(sent[source],),
                    allocates_bytes=event.allocates_bytes,
                    frees_bytes=event.frees_bytes,
                )
    return out


def _source(action: Action, last: int) -> tuple[int, bool, int] | None:
    """(stage, forward, micro-batch) whose message ``action`` waits for."""
    if action.kind is Kind.FORWARD:
        return (action.stage - 1, True, action.microbatch) if action.stage else None
    if action.kind is Kind.WEIGHT_GRADIENT or action.stage == last:
        return None
    return action.stage + 1, False, action.microbatch


def run(schedule: Schedule, stages: Sequence[StageCost], *, overlap_sends: bool = True) -> Timeline:
    """Simulate ``schedule``."""
    return simulate(programs(schedule, stages, send_stream="send" if overlap_sends else COMPUTE))


@dataclass(frozen=True, slots=True)
class _Order:
    """Actions of a schedule in an order in which all that they need comes first.

    ``before[i]`` is the place of the message that action ``i`` waits for, or -1; ``sends[i]`` the stage whose
    ``send_s`` its own message costs, or -1.
    """

    actions: tuple[tuple[int, int, Kind], ...]
    before: tuple[int, ...]
    sends: tuple[int, ...]


@functools.lru_cache(maxsize=256)
def _order(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> _Order:
    schedule = build(name, num_ranks, num_microbatches, num_chunks)
    last = schedule.num_stages - 1
    lines = [deque(line) for line in schedule.ranks]
    place: dict[tuple[int, bool, int], int] = {}
    actions: list[tuple[int, int, Kind]] = []
    before: list[int] = []
    sends: list[int] = []
    while any(lines):
        for rank, line in enumerate(lines):
            while line:
                action = line[0]
                source = _source(action, last)
                if source is not None and source not in place:
                    break
                line.popleft()
                forward = action.kind is Kind.FORWARD
                if action.kind is not Kind.WEIGHT_GRADIENT:
                    place[action.stage, forward, action.microbatch] = len(actions)
                silent = action.kind is Kind.WEIGHT_GRADIENT or action.stage == (last if forward else 0)
                before.append(-1 if source is None else place[source])
                sends.append(-1 if silent else action.stage if forward else action.stage - 1)
                actions.append((rank, action.stage, action.kind))
    return _Order(tuple(actions), tuple(before), tuple(sends))


def makespan(
    name: str, num_ranks: int, num_microbatches: int, stages: Sequence[StageCost], *, overlap_sends: bool = True
) -> float:
    """Duration of a whole schedule: what :func:`run` simulates, by one pass over the actions."""
    order = _order(name, num_ranks, num_microbatches, len(stages) // num_ranks)
    seconds = [{kind: stage.seconds(kind) for kind in Kind} for stage in stages]
    compute_free, link_free = [0.0] * num_ranks, [0.0] * num_ranks
    arrives = [0.0] * len(order.actions)
    for i, (rank, stage, kind) in enumerate(order.actions):
        source = order.before[i]
        start = compute_free[rank] if source < 0 else max(compute_free[rank], arrives[source])
        end = start + seconds[stage][kind]
        if order.sends[i] >= 0:
            send_s = stages[order.sends[i]].send_s
            if overlap_sends:
                arrives[i] = link_free[rank] = max(end, link_free[rank]) + send_s if send_s > 0 else end
            else:
                arrives[i] = end = end + send_s
        compute_free[rank] = end
    return max(*compute_free, *arrives, 0.0)


def step_seconds(
    name: str, num_ranks: int, num_microbatches: int, stages: Sequence[StageCost], *, overlap_sends: bool = True
) -> float:
    """Duration of a pipelined step.

    Long steps are not run to the end: once the pipe is full each further round of micro-batches takes equally long, so
    two shorter ones give the rest.
    """
    chunks = len(stages) // num_ranks
    if num_ranks == 1 and chunks == 1:
        return num_microbatches * (stages[0].forward_s + stages[0].backward_s)
    near, far = 3 * num_ranks, 4 * num_ranks
    if num_microbatches <= far + num_ranks:
        return makespan(name, num_ranks, num_microbatches, stages, overlap_sends=overlap_sends)
    extra = (num_microbatches - near) % num_ranks if chunks == 1 else 0
    times = [makespan(name, num_ranks, m + extra, stages, overlap_sends=overlap_sends) for m in (near, far)]
    rounds = (num_microbatches - near - extra) / num_ranks
    return times[0] + rounds * (times[1] - times[0])
