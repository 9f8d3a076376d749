"""From a schedule and the costs of its stages to the programs that the timeline runs."""

from __future__ import annotations

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


def step_seconds(
    name: str, num_ranks: int, num_microbatches: int, stages: Sequence[StageCost], *, overlap_sends: bool = True
) -> float:
    """Duration of a pipelined step.

    Long steps are not simulated to the end: once the pipe is full each further round of micro-batches takes equally
    long, so two shorter runs give the rest.
    """
    chunks = len(stages) // num_ranks
    near, far = 3 * num_ranks, 4 * num_ranks
    if num_microbatches <= far + num_ranks:
        return run(build(name, num_ranks, num_microbatches, chunks), stages, overlap_sends=overlap_sends).step_s
    extra = (num_microbatches - near) % num_ranks if chunks == 1 else 0
    times = [
        run(build(name, num_ranks, m + extra, chunks), stages, overlap_sends=overlap_sends).step_s for m in (near, far)
    ]
    rounds = (num_microbatches - near - extra) / num_ranks
    return times[0] + rounds * (times[1] - times[0])
