"""Random models x a random legal choice at every call x random meshes, all ranks in lockstep against one device."""

from __future__ import annotations

import copy
from collections import Counter
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torch import nn

from autopar.capture import capture, flatten_call
from autopar.passes.bucket import Bucket
from autopar.passes.normalize import Normalize
from autopar.passes.options import OptionSpace
from autopar.passes.overlap import Overlap
from autopar.passes.partition import Assignment, partition
from autopar.passes.rules.table import RuleTable, rows_of
from autopar.verify import Report, check_programs, verify_programs
from autopar.verify.values import model_values
from tests.passes.placements import pairs_met, random_assignment
from tests.passes.random_models import random_model

MESHES = ((2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (4, 2))
RUNS_PER_MODEL = 4  # capturing costs more than splitting: every model is split in several ways


def check_model(seed: int) -> Counter[tuple[str, str]]:
    """Make a model, split it in several ways, compare; returns the (operation, kind of choice) pairs met.

    The seed alone decides: a failure is repeated with ``check_model(seed)``.
    """
    rnd = Random(seed)
    model, args = random_model(rnd)
    step = capture(model, args)
    split_batch = rnd.random() < 0.8
    normal = Normalize(split_batch=split_batch)(step)
    rows, _ = rows_of(normal.graph, RuleTable())
    space = OptionSpace(normal.graph, rows)
    values = model_values(step, model, flatten_call(args)[0])
    met: Counter[tuple[str, str]] = Counter()
    memo: dict[object, object] = {}
    for _ in range(RUNS_PER_MODEL):
        assignment = random_assignment(rnd, normal, space, rnd.choice(MESHES))
        programs = [
            partition(normal, rows, assignment, rank, rng="exact", memo=memo) for rank in range(assignment.mesh.size)
        ]
        if rnd.random() < 0.5:
            bucket, overlap = Bucket(max_bytes=rnd.choice((100, 10_000))), Overlap()
            programs = [overlap(bucket(p)) for p in programs]
        check_programs(programs)
        report = verify_programs(step, programs, values, normal=normal)
        if not report.ok and low_precision(model):
            # A sum that cancels loses digits in float32, whatever its order: float64 tells that from a wrong split.
            report = report_in_double(model, args, split_batch, assignment)
        assert report.ok, f"seed {seed}, mesh {assignment.mesh.sizes}\n{report.text()}"
        met += pairs_met(space, assignment)
    return met


def low_precision(model: nn.Module) -> bool:
    return any(p.dtype is torch.float32 for p in model.parameters())


def report_in_double(model: nn.Module, args: tuple[Any, ...], split_batch: bool, assignment: Assignment) -> Report:
    """The same model and split in float64."""

    def widened(value: object) -> object:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    model, args = copy.deepcopy(model).double(), tuple(widened(a) for a in args)
    step = capture(model, args)
    normal = Normalize(split_batch=split_batch)(step)
    rows, _ = rows_of(normal.graph, RuleTable())
    programs = [partition(normal, rows, assignment, rank, rng="exact") for rank in range(assignment.mesh.size)]
    return verify_programs(step, programs, model_values(step, model, flatten_call(args)[0]), normal=normal)


def log(met: Counter[tuple[str, str]], runs: int) -> None:
    print(f"\n{runs} runs met {len(met)} (operation, choice) pairs in {len({op for op, _ in met})} operations")


@settings(max_examples=25, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_any_legal_placement_gives_the_numbers_of_one_device(seed):
    note(f"check_model({seed})")
    met = check_model(seed)
    assert met


def test_what_follows_a_wait_stays_behind_it():
    assert check_model(306)  # a wait and the slice of its result wanted the same place


def test_what_a_rounding_of_the_inputs_makes_of_a_gradient_is_no_difference():
    assert check_model(398)  # every row alike: the loss is log(4), and all gradients are zero but for rounding


@pytest.mark.slow
def test_two_thousand_placements_give_the_numbers_of_one_device():
    met: Counter[tuple[str, str]] = Counter()
    models = 2000 // RUNS_PER_MODEL
    for seed in range(models):
        met += check_model(seed)
    log(met, models * RUNS_PER_MODEL)
    assert len(met) > 500
