"""Schedules: text form, validator, activations in flight."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.errors import ConstraintError, PlanError, VerificationError
from autopar.cost_models.schedules import (
    Schedule,
    build,
    gpipe,
    in_flight,
    interleaved,
    one_f_one_b,
    validate,
    zero_bubble,
)


@given(st.sampled_from(["gpipe", "1f1b", "zb"]), st.integers(1, 6), st.integers(1, 9))
def test_built_schedules_are_valid_and_survive_text(name: str, ranks: int, microbatches: int) -> None:
    schedule = build(name, ranks, microbatches)
    validate(schedule)
    assert Schedule.parse(str(schedule)) == schedule


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_interleaved_is_valid(ranks: int, rounds: int, chunks: int) -> None:
    schedule = interleaved(ranks, ranks * rounds, chunks)
    validate(schedule)
    assert schedule.num_stages == ranks * chunks


def test_interleaved_refuses_ragged_rounds_and_offers_others() -> None:
    with pytest.raises(ConstraintError, match="8"):
        interleaved(4, 9, 2)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 8), (4, 8), (4, 2)])
def test_one_f_one_b_bounds_what_is_alive(ranks: int, microbatches: int) -> None:
    assert in_flight(one_f_one_b(ranks, microbatches)) == tuple(min(ranks - r, microbatches) for r in range(ranks))
    assert in_flight(gpipe(ranks, microbatches)) == (microbatches,) * ranks


@given(st.integers(1, 6), st.integers(1, 12))
def test_zero_bubble_keeps_no_more_than_the_worst_rank_of_one_f_one_b(ranks: int, microbatches: int) -> None:
    assert max(in_flight(zero_bubble(ranks, microbatches))) <= ranks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0B0 0F0", "twice"),
        ("0F0\n0B0", "belongs to rank 0"),
        ("0F0\n1F0 1B0", "needs F and B"),
        ("0B0 0F0", "waits for ever for 0F0"),
        ("0F0 0F1 0B1 0B0\n1F0 1B0 1F1 1B1", None),
        ("0F1 0F0 0B0 0B1\n1F0 1B0 1F1 1B1", None),
        ("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0", "waits for ever"),
    ],
)
def test_validator_names_rank_and_shows_the_grid(text: str, message: str | None) -> None:
    schedule = Schedule.parse(text)
    if message is None:
        validate(schedule)
        return
    with pytest.raises(VerificationError, match=message) as error:
        validate(schedule)
    assert "> rank" in str(error.value)


def test_bad_text_and_names_are_refused() -> None:
    with pytest.raises(PlanError, match="0X0"):
        Schedule.parse("0X0")
    with pytest.raises(ConstraintError, match="1f1b"):
        build("dapple", 2, 2)
    with pytest.raises(ConstraintError, match="interleaved"):
        build("1f1b", 2, 2, 2)
    with pytest.raises(ConstraintError, match="at least 1"):
        build("1f1b", 0, 2)
