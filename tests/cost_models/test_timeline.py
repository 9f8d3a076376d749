"""The simulator against closed forms, brute force and broken programs."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.errors import VerificationError
from autopar.cost_models.pipeline import StageCost, makespan, run, step_seconds
from autopar.cost_models.schedules import Kind, Schedule, build, needs
from autopar.cost_models.timeline import Event, simulate, summary


def equal_stages(n: int, send_s: float = 0.0) -> list[StageCost]:
    return [StageCost(forward_s=1.0, backward_s=2.0, weight_s=1.0, send_s=send_s, activation_bytes=10.0)] * n


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (4, 8), (3, 7), (8, 4)])
def test_bubble_of_a_flat_pipeline(name: str, p: int, m: int) -> None:
    timeline = run(build(name, p, m), equal_stages(p))
    assert timeline.step_s == pytest.approx(3 * (m + p - 1))
    for rank in range(p):
        assert timeline.bubble(rank) == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize(("p", "rounds", "chunks"), [(2, 2, 2), (4, 2, 2), (4, 3, 3)])
def test_interleaving_divides_the_bubble(p: int, rounds: int, chunks: int) -> None:
    m = p * rounds
    stages = [StageCost(forward_s=1 / chunks, backward_s=2 / chunks)] * (p * chunks)
    assert run(build("interleaved", p, m, chunks), stages).step_s == pytest.approx(3 * m + 3 * (p - 1) / chunks)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 12)])
def test_zero_bubble_beats_one_f_one_b(p: int, m: int) -> None:
    stages = equal_stages(p)
    split = run(build("zb", p, m), stages).step_s
    assert split <= run(build("1f1b", p, m), stages).step_s - (p - 1)
    assert split == pytest.approx(3 * m + p - 1)


def brute_force(schedule: Schedule, stages: list[StageCost]) -> float:
    """Longest path through order and messages, by repeated relaxation."""
    ends: dict[tuple[int, Kind, int], float] = {}
    for _ in range(schedule.num_stages * schedule.num_microbatches * 3):
        for line in schedule.ranks:
            free = 0.0
            for a in line:
                start = free
                for stage, kind, m in needs(a, schedule.num_stages):
                    cost = stages[min(stage, a.stage)].send_s if stage != a.stage else 0.0
                    start = max(start, ends.get((stage, kind, m), 0.0) + cost)
                free = start + stages[a.stage].seconds(a.kind)
                ends[a.stage, Kind.BACKWARD if a.kind is Kind.INPUT_GRADIENT else a.kind, a.microbatch] = free
    return max(ends.values())


@given(st.sampled_from(["gpipe", "1f1b", "zb"]), st.integers(1, 3), st.integers(1, 4), st.data())
def test_simulator_equals_brute_force(name: str, p: int, m: int, data: st.DataObject) -> None:
    def draw_s() -> float:
        return data.draw(st.integers(1, 9))

    stages = [StageCost(forward_s=draw_s(), backward_s=5 + draw_s(), weight_s=draw_s() / 2) for _ in range(p)]
    schedule = build(name, p, m)
    assert run(schedule, stages).step_s == pytest.approx(brute_force(schedule, stages))


def test_sends_delay_the_next_stage() -> None:
    schedule = build("1f1b", 2, 1)
    assert run(schedule, equal_stages(2, send_s=0.5)).step_s == pytest.approx(1 + 0.5 + 1 + 2 + 0.5 + 2)


@given(
    st.sampled_from(["gpipe", "1f1b", "zb", "interleaved"]),
    st.integers(1, 4),
    st.integers(1, 6),
    st.booleans(),
    st.data(),
)
def test_makespan_equals_the_simulator(name: str, p: int, m: int, overlap: bool, data: st.DataObject) -> None:
    chunks = 2 if name == "interleaved" else 1
    m = m * p if chunks > 1 else m
    stages = [
        StageCost(
            forward_s=data.draw(st.integers(1, 9)),
            backward_s=data.draw(st.integers(5, 14)),
            weight_s=data.draw(st.integers(1, 4)),
            send_s=data.draw(st.sampled_from([0, 0.5, 3])),
        )
        for _ in range(p * chunks)
    ]
    simulated = run(build(name, p, m, chunks), stages, overlap_sends=overlap).step_s
    assert makespan(name, p, m, stages, overlap_sends=overlap) == pytest.approx(simulated)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)])
def test_long_steps_are_extended_exactly(name: str, chunks: int) -> None:
    p, m = 4, 48
    stages = [StageCost(forward_s=1 + 0.1 * s, backward_s=2.0, send_s=0.05) for s in range(p * chunks)]
    exact = run(build(name, p, m, chunks), stages).step_s
    assert step_seconds(name, p, m, stages) == pytest.approx(exact, rel=1e-6)


def test_memory_curve_follows_the_activations_in_flight() -> None:
    timeline = run(build("1f1b", 4, 8), equal_stages(4))
    assert [timeline.peak_bytes(r, held_bytes=5.0) for r in range(4)] == [45.0, 35.0, 25.0, 15.0]
    assert timeline.memory_curve(0)[-1][1] == 0.0


def test_collectives_start_when_all_ranks_are_there() -> None:
    slow = [
        Event(name="a", stream="compute", seconds=3.0),
        Event(name="r", stream="net", seconds=1.0, waits=((0, 0),), meets="k"),
    ]
    fast = [
        Event(name="a", stream="compute", seconds=1.0),
        Event(name="r", stream="net", seconds=2.0, waits=((1, 0),), meets="k"),
    ]
    timeline = simulate([slow, fast])
    assert timeline.step_s == 5.0
    assert timeline.exposed_s(1) == 2.0


def test_communication_slows_computation_only_while_it_runs() -> None:
    program = [
        Event(name="m1", stream="compute", seconds=2.0),
        Event(name="g", stream="net", seconds=3.0, waits=((0, 0),)),
        Event(name="m2", stream="compute", seconds=4.0),
    ]
    timeline = simulate([program], slowdown=0.5)
    # m2 runs 3 s at 2/3 speed (2 s of work), then 2 s at full speed.
    assert timeline.step_s == pytest.approx(7.0)
    assert timeline.exposed_s(0) == 0.0


def test_computation_and_communication_slow_each_other_while_they_overlap() -> None:
    program = [
        Event(name="send", stream="link", seconds=2.0, slows_compute=1.0, slowed_by_compute=1.0),
        Event(name="matmul", stream="compute", seconds=1.0),
    ]
    timeline = simulate([program], slowdown=7.0)
    # Both at half pace until the matmul ends at 2; then the second half of the transfer at its own pace.
    assert timeline.ends[0] == pytest.approx((3.0, 2.0))
    assert timeline.exposed_s(0) == pytest.approx(1.0)


def test_a_deadlock_names_who_waits_for_what() -> None:
    a = [Event(name="x", stream="net", seconds=1, meets="one"), Event(name="y", stream="net", seconds=1, meets="two")]
    b = [Event(name="y", stream="net", seconds=1, meets="two"), Event(name="x", stream="net", seconds=1, meets="one")]
    with pytest.raises(VerificationError, match="rank 0 stops before 'x'"):
        simulate([a, b])


def test_chrome_trace_is_json_with_every_event() -> None:
    timeline = run(build("1f1b", 2, 2), equal_stages(2, send_s=0.1))
    rows = json.loads(timeline.trace_text())["traceEvents"]
    assert sum(r["ph"] == "X" for r in rows) == sum(len(p) for p in timeline.programs)
    assert summary(timeline)["step_s"] == timeline.step_s
