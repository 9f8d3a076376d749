"""The gradient seed and what it does about overflow."""

import math

import pytest
import torch

from autopar.runtime.seed import GradientSeed, poisoned, pressure

CPU = torch.device("cpu")


def test_the_seed_follows_what_arrives():
    seed = GradientSeed(CPU)
    used = seed.tensor(torch.float32)
    assert used.item() == 1.0
    assert seed.is_one
    assert seed.arrived(torch.tensor(8.0), used) == 8.0
    assert not seed.is_one
    used = seed.tensor(torch.float32)
    assert used.item() == 8.0
    assert seed.tensor(torch.float32) is used
    assert seed.arrived(torch.tensor(2.0), used) == 0.25


@pytest.mark.parametrize("arrived", [0.0, math.inf, math.nan])
def test_what_cannot_be_divided_by_does_not_become_the_seed(arrived):
    seed = GradientSeed(CPU)
    used = seed.tensor(torch.float32)
    factor = seed.arrived(torch.tensor(arrived), used)
    assert factor == arrived or math.isnan(factor)
    assert seed.is_one


def test_pressure_is_the_share_of_the_largest_number_of_any_dtype():
    half = torch.tensor([0.5, -2.0], dtype=torch.float16)
    single = torch.tensor([1e3])
    near = pressure([half, single, torch.empty(0), torch.tensor([7])], None, CPU)
    assert near.item() == pytest.approx(2.0 / torch.finfo(torch.float16).max)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_anything_that_is_not_finite_is_all_the_pressure_there_is(bad):
    assert pressure([torch.tensor([0.0, bad])], None, CPU).item() == math.inf
    assert poisoned(1.0, torch.tensor(math.inf)) == math.inf


def test_a_factor_that_lifts_a_gradient_over_the_top_becomes_infinite():
    near = torch.tensor(0.25)
    assert poisoned(3.0, near) == 3.0
    assert poisoned(-4.0, near) == -4.0
    assert poisoned(4.5, near) == math.inf
    assert poisoned(torch.tensor(2.0), near).item() == 2.0
    assert poisoned(torch.tensor(8.0), near).item() == math.inf
