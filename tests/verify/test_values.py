import dataclasses

import pytest
import torch
from torch import nn

from autopar.cost_models.errors import VerificationError
from autopar.passes.base import InputKind, InputSpec
from autopar.verify.values import input_values, model_values, random_value
from tests.verify.sketch import BATCH, HIDDEN, OUT, WIDTH, mlp_step


class Weights(nn.Module):
    def __init__(self, device="cpu"):
        super().__init__()
        self.up = nn.Parameter(torch.ones(WIDTH, HIDDEN, device=device))
        self.down = nn.Parameter(torch.ones(HIDDEN, OUT, device=device))


def test_a_models_own_values_are_taken():
    values = model_values(mlp_step(), Weights(), [torch.full((BATCH, WIDTH), 2.0)])
    assert values["up"].unique().tolist() == [1.0]
    assert values["args[0]"].unique().tolist() == [2.0]
    assert not values["up"].requires_grad


def test_meta_tensors_get_random_values_that_a_seed_decides():
    leaves = [torch.empty(BATCH, WIDTH, device="meta")]
    one, same, other = (model_values(mlp_step(), Weights("meta"), leaves, seed=s) for s in (1, 1, 2))
    assert one["up"].shape == (WIDTH, HIDDEN)
    assert torch.equal(one["up"], same["up"])
    assert not torch.equal(one["args[0]"], other["args[0]"])


def test_aliases_serve_as_names():
    step = mlp_step()
    inputs = (dataclasses.replace(step.inputs[0], aliases=("head",)), *step.inputs[1:])
    values = input_values(step, 0)
    values["head"] = values.pop("up")
    with pytest.raises(VerificationError, match="no value for the parameter 'up'"):
        input_values(step, values)
    assert input_values(dataclasses.replace(step, inputs=inputs), values)["up"] is values["head"]


def test_random_values_suit_their_kind():
    generator = torch.Generator().manual_seed(0)

    def draw(kind, *shape, dtype=torch.float32):
        return random_value(InputSpec(kind=kind, name="x"), torch.empty(shape, dtype=dtype, device="meta"), generator)

    assert draw(InputKind.SEED).item() == 1
    assert draw(InputKind.BATCH, 99, dtype=torch.int64).unique().tolist() == [0, 1]
    assert draw(InputKind.BATCH, 99, dtype=torch.bool).dtype == torch.bool
    assert draw(InputKind.BUFFER, 99).min() >= 0.5
    assert draw(InputKind.PARAMETER, 99, 400).std() < 0.1
    assert draw(InputKind.PARAMETER, 99, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert draw(InputKind.BUFFER, 3, dtype=torch.complex64).dtype == torch.complex64
    assert random_value(InputSpec(kind=InputKind.BATCH, name="x"), 3, generator) == 3
