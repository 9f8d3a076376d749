"""From a model to the report, through capture, planner and lowering."""

import math

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.cost_models.cluster import Cluster
from autopar.cost_models.errors import PlanError
from autopar.passes.base import OutputKind
from autopar.plan import Constraints
from autopar.search.planner import Planner
from autopar.verify.api import verify


class Net(nn.Module):
    """Norm, dropout, a biased MLP with batch statistics, and an unused layer."""

    def __init__(self, width=8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.batch_norm = nn.BatchNorm1d(4 * width)
        self.down = nn.Linear(4 * width, width)
        self.unused = nn.Linear(width, width)

    def forward(self, x):
        hidden = nn.functional.dropout(torch.relu(self.batch_norm(self.up(self.norm(x)))), 0.3)
        return self.down(hidden)


def loss_fn(output, target):
    return nn.functional.mse_loss(output, target)


def plan_for(model, args, targets, **wishes):
    step = capture(model, args, loss_fn=loss_fn, targets=targets)
    constraints = Constraints(**wishes)
    ranks = (constraints.dp or 1) * (constraints.tp or 1)
    return Planner(step, Cluster.parse(f"{ranks}xA100-80GB"), constraints).best(ranks)


@pytest.mark.parametrize("wishes", [{"dp": 2, "tp": 1}, {"dp": 1, "tp": 2}, {"dp": 2, "tp": 2, "zero": 3}])
def test_a_planned_model_equals_one_device(wishes):
    torch.manual_seed(0)
    model, args, targets = Net(), (torch.randn(6, 8),), (torch.randn(6, 8),)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    plan = plan_for(model, args, targets, **wishes)
    report = verify(model, args, plan=plan, loss_fn=loss_fn, targets=targets)
    assert report.ok, report.text()
    kinds = {row.kind for row in report.rows}
    assert kinds >= {OutputKind.LOSS, OutputKind.GRADIENT, OutputKind.MUTATION}
    assert {"batch_norm.running_var", "up.weight"} <= {row.name for row in report.rows}
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


def test_a_model_on_meta_gets_random_values():
    with torch.device("meta"):
        model, args, targets = Net(), (torch.empty(6, 8),), (torch.empty(6, 8),)
    plan = plan_for(model, args, targets, dp=1, tp=2)
    report = verify(model, args, plan=plan, loss_fn=loss_fn, targets=targets)
    assert report.ok, report.text()
    assert all(math.isfinite(row.error) for row in report.rows)


def test_a_plan_for_another_model_is_refused():
    args, targets = (torch.randn(6, 8),), (torch.randn(6, 8),)
    plan = plan_for(Net(), args, targets, dp=2, tp=1)
    with pytest.raises(PlanError):
        verify(nn.Linear(8, 8), args, plan=plan, loss_fn=loss_fn, targets=targets)


def test_too_tight_a_tolerance_names_the_place():
    torch.manual_seed(0)
    model, args, targets = Net(), (torch.randn(6, 8),), (torch.randn(6, 8),)
    plan = plan_for(model, args, targets, dp=2, tp=1)
    report = verify(model, args, plan=plan, loss_fn=loss_fn, targets=targets, rtol=0.0)
    assert not report.ok
    assert report.first_mismatch is not None
