"""Operations of the user's own: whole on every rank without a rule, split with one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import autopar
from autopar.capture import capture
from autopar.cost_models.cluster import Cluster
from autopar.cost_models.errors import UsageError
from autopar.lower import Lowering
from autopar.passes.rules.table import op_name
from autopar.plan import Constraints
from autopar.registry import USER_RULES
from autopar.search.planner import Planner
from autopar.verify import verify_programs


@torch.library.custom_op("autopar_tests::scale_rows", mutates_args=())
def scale_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * weight * 3


@scale_rows.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def backward(ctx, grad):  # type: ignore[no-untyped-def]
    x, weight = ctx.saved_tensors
    return grad * weight * 3, (grad * x * 3).sum(0)


scale_rows.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
OP = torch.ops.autopar_tests.scale_rows.default


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(6, 6), nn.Parameter(torch.linspace(0.5, 2, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scale_rows(self.linear(x), self.gain).square().mean()


@pytest.fixture
def forgotten() -> Iterator[None]:
    yield
    USER_RULES.forget(op_name(OP))


@pytest.mark.usefixtures("forgotten")
def test_a_custom_operation_is_whole_without_a_rule_and_split_with_one() -> None:
    torch.manual_seed(0)
    step = capture(Model(), (torch.randn(4, 6),))

    def planned() -> tuple[autopar.Plan, bool]:
        plan = Planner(step, Cluster.local(2), Constraints(dp=2, tp=1)).best(2)
        lowering = Lowering(step, plan)
        report = verify_programs(step, [lowering.program(rank) for rank in range(2)])
        assert report.ok, report.text()
        return plan, any("scale_rows" in name for name in plan.choices)

    plan, split = planned()
    assert not split
    assert any("scale_rows" in note for note in plan.notes)
    autopar.register_rule(torch.ops.autopar_tests.scale_rows, "b d, d -> b d")
    plan, split = planned()
    assert split
    assert not any("scale_rows" in note for note in plan.notes)


def test_what_is_no_rule_is_refused() -> None:
    with pytest.raises(UsageError, match="needs an operation"):
        autopar.register_rule(torch.add, "a, a -> a")
    with pytest.raises(UsageError, match="inputs -> outputs"):
        autopar.register_rule(OP, "a b")
