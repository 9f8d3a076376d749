"""Architectures of transformers and of plain torch: every plan equals one device, and the work is really split."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture import capture
from tests.models.architectures import outcomes, table, work
from tests.models.recipes import PLAIN, RECIPES, TRANSFORMERS, Call, Recipe

pytestmark = pytest.mark.filterwarnings("ignore")

QUICK = {"GPT-2, dropout 0.1", "Llama", "T5", "BERT", "ViT", "ResNet", "U-Net (torch)", "nn.LSTM language model"}
MORE_PLANS = {"GPT-2", "Llama", "Llama, 3 heads", "Qwen3", "T5", "BERT", "ViT", "ResNet", "nn.TransformerEncoder"}
MOST = 0.9  # share of a standard transformer's contractions that has to be split


def listed(recipes: tuple[Recipe, ...], quick: set[str]) -> list[object]:
    return [
        pytest.param(r, id=r.name.replace(" ", "-"), marks=() if r.name in quick else pytest.mark.slow) for r in recipes
    ]


def check(recipe: Recipe, plan: str) -> None:
    if recipe in TRANSFORMERS:
        pytest.importorskip("transformers")
    (row,) = outcomes(recipe, [plan])
    if recipe.refused:
        assert row.result.startswith("refused: ")
        assert recipe.refused in row.result
        return
    assert row.result == "equal"
    if recipe.standard:
        assert row.split >= MOST, "\n".join(row.unsplit)


@pytest.mark.parametrize("plan", ["tp2", "zero3.dp2"])
@pytest.mark.parametrize("recipe", listed(RECIPES, QUICK))
def test_two_ranks_equal_one_device(recipe, plan):
    check(recipe, plan)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tp2.sp", "dp2.tp2", "dp2.tp2.zero3.sp"])
@pytest.mark.parametrize("recipe", [r for r in RECIPES if r.name in MORE_PLANS], ids=lambda r: r.name.replace(" ", "-"))
def test_more_plans_equal_one_device(recipe, plan):
    check(recipe, plan)


def test_the_list_is_as_long_as_it_has_to_be():
    assert sum(not r.refused for r in TRANSFORMERS) >= 20
    assert len({r.name for r in RECIPES}) == len(RECIPES)
    assert {r.name for r in RECIPES} >= QUICK | MORE_PLANS
    assert len(PLAIN) >= 5


def test_work_is_counted_by_shapes():
    step = capture(nn.Linear(5, 7), (torch.randn(3, 5),), loss_fn=torch.sum)
    # Forward, and the gradient of the weight; the input wants none.
    assert work(step.graph) == 2 * (2 * 3 * 5 * 7)


def test_what_cannot_be_captured_is_a_row_that_says_why():
    class Branches(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).sum() if x.sum() > 0 else x.sum()

    recipe = Recipe(name="branching", make=lambda: Call(model=Branches(2, 2), args=(torch.randn(4, 2),)))
    (row,) = outcomes(recipe, ["tp2"])
    assert row.result.startswith("refused: ")
    assert "depends on tensor data" in row.result
    assert row.result in table([row])
