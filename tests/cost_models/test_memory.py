"""Memory: liveness, state per parameter, plans whose order is known."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.errors import ConstraintError
from autopar.cost_models.memory import Buffer, LayerMemory, peak, state_bytes, step_memory
from autopar.cost_models.stack import StackProfile
from autopar.cost_models.step import UniformPlan

STACK = StackProfile(name="ours")
BLOCK = LayerMemory(
    name="block", num_parameters=12e6, saved_bytes=34e6, attention_bytes=10e6, input_bytes=2e6, passing_bytes=8e6
)
HEAD = LayerMemory(name="head", num_parameters=50e6, saved_bytes=4e6, passing_bytes=600e6)


def brute_force(buffers: list[Buffer]) -> float:
    moments = {t for b in buffers for t in (b.born, b.dies)}
    return max(sum(b.bytes for b in buffers if b.born <= t <= b.dies) for t in moments)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 100)), min_size=1, max_size=12))
def test_peak_equals_brute_force(rows: list[tuple[int, int, int]]) -> None:
    buffers = [Buffer(name=str(i), bytes=s, born=min(a, b), dies=max(a, b)) for i, (a, b, s) in enumerate(rows)]
    assert peak(buffers).bytes == brute_force(buffers)
    assert sum(size for _, _, size in peak(buffers).owners) == peak(buffers).bytes


def test_peak_names_its_owner() -> None:
    buffers = [
        Buffer(name="x", layer="blocks.0", bytes=5, born=0, dies=9),
        Buffer(name="y", layer="head", kind="temporary", bytes=50, born=4, dies=5),
    ]
    assert peak(buffers).owners[0] == ("head", "temporary", 50)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"optimizer": "sgd"}, 8.0),
        ({"optimizer": "adamw"}, 16.0),
        ({"optimizer": "adam8bit"}, 10.0),
        ({"optimizer": "adamw", "parameter_bytes": 2, "gradient_bytes": 2, "master": True}, 16.0),
        ({"optimizer": "adamw", "zero": 1, "shard_ranks": 8}, 9.0),
        ({"optimizer": "adamw", "zero": 3, "shard_ranks": 16}, 1.0),
    ],
)
def test_state_bytes_per_parameter(options: dict[str, object], expected: float) -> None:
    assert state_bytes(**options).total == expected  # type: ignore[arg-type]


def test_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ConstraintError, match="lion"):
        state_bytes(optimizer="lion")


@given(st.integers(1, 64), st.booleans())
def test_more_zero_never_needs_more(ranks: int, master: bool) -> None:
    totals = [state_bytes(zero=z, shard_ranks=ranks, master=master).total for z in (3, 2, 1, 0)]
    assert totals == sorted(totals)


def cost(plan: UniformPlan, layers: int = 8) -> list[float]:
    per = layers // (plan.pp * plan.num_chunks)
    stages = [[(BLOCK, per)] for _ in range(plan.pp * plan.num_chunks)]
    stages[-1] = [*stages[-1], (HEAD, 1)]
    state = state_bytes(zero=plan.zero, shard_ranks=plan.dp)
    return [c.bytes for c in step_memory(stages, plan, STACK, state)]


def test_earlier_stages_hold_more_micro_batches() -> None:
    plan = UniformPlan(pp=4, num_microbatches=8)
    state = 16 * 2 * BLOCK.num_parameters
    first, second, third, _ = cost(plan)
    assert first == pytest.approx(state + 4 * 2 * BLOCK.saved_bytes + BLOCK.passing_bytes)
    assert first - second == pytest.approx(2 * BLOCK.saved_bytes)
    assert second - third == pytest.approx(2 * BLOCK.saved_bytes)
    assert cost(dataclasses.replace(plan, schedule="gpipe"))[0] > first


def test_the_head_owns_the_peak_of_the_last_stage() -> None:
    stages = [[(BLOCK, 2), (HEAD, 1)]]
    (last,) = step_memory(
        stages, UniformPlan(), STACK, state_bytes(optimizer="sgd", parameter_bytes=2, gradient_bytes=2)
    )
    assert last.parts["passing"] == HEAD.passing_bytes
    assert last.owner == "passing"


@given(st.sampled_from([1, 2, 4]), st.integers(1, 8), st.sampled_from(["gpipe", "1f1b"]))
def test_recompute_never_needs_more(pp: int, microbatches: int, schedule: str) -> None:
    plans = [
        UniformPlan(pp=pp, num_microbatches=microbatches, schedule=schedule, recompute=r) for r in ("none", "selective")
    ]
    none, selective = (cost(p) for p in plans)
    assert all(s <= n for s, n in zip(selective, none, strict=True))
    full = cost(dataclasses.replace(plans[0], recompute="full"))
    if microbatches * 8 // pp > 2:
        assert full[0] <= none[0]
