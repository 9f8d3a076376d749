"""The normal form: other operations, the same numbers."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from autopar.passes.base import InputKind
from autopar.passes.normalize import Normalize
from autopar.passes.rules.table import op_name
from autopar.verify.parity import run_single
from autopar.verify.values import input_values
from tests.passes.prepared import Lambda, mesh_of, ready

GENERATOR = torch.Generator().manual_seed(0)
A, W = torch.randn(4, 5, 6, generator=GENERATOR), torch.rand(7, generator=GENERATOR) + 0.5
LABELS = torch.randint(0, 7, (4, 5), generator=GENERATOR)
LABELS[0, 1] = LABELS[2, 3] = -100

REWRITTEN = {
    "mean": lambda x: x.mean(),
    "mean_dims": lambda x: x.mean((0, -1), keepdim=True),
    "mean_dtype": lambda x: x.mean(1, dtype=torch.float64),
    "var": lambda x: x.var(1),
    "var_all": lambda x: x.var(),
    "var_correction": lambda x: x.var((0, 2), correction=3, keepdim=True),
    "std": lambda x: x.std(0, correction=0),
    "var_mean": lambda x: sum(torch.var_mean(x, (1, 2))),
    "std_mean": lambda x: sum(torch.std_mean(x, 2, keepdim=True)),
    "norm_2": lambda x: torch.linalg.vector_norm(x, dim=1),
    "norm_1": lambda x: torch.linalg.vector_norm(x, 1, (0, 2)),
    "norm_0": lambda x: torch.linalg.vector_norm(torch.relu(x), 0, 2),
    "norm_3": lambda x: torch.linalg.vector_norm(x, 3),
    "norm_half": lambda x: torch.linalg.vector_norm(x, 0.5, 1, keepdim=True),
    "norm_inf": lambda x: torch.linalg.vector_norm(x, math.inf, 1),
    "norm_minus_inf": lambda x: torch.linalg.vector_norm(x, -math.inf, 0),
    "nll": lambda x: F.nll_loss(x.log_softmax(1)[:, :, 0], LABELS[:, 0].clamp(min=0) % 5),
    "nll_weight_ignore": lambda x: F.cross_entropy(x.flatten(0, 1) @ torch.ones(6, 7).to(x), LABELS.flatten(), W.to(x)),
    "mse": lambda x: F.mse_loss(x, torch.ones_like(x)),
    "mse_broadcast": lambda x: (x - 1).square().mean(),
    "huber": lambda x: F.huber_loss(x, x.detach() * 0.5),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, torch.zeros_like(x)),
    "soft_margin": lambda x: F.soft_margin_loss(x, torch.ones_like(x)),
    "bce": lambda x: F.binary_cross_entropy(x.sigmoid(), torch.full_like(x, 0.3)),
    "bce_weight": lambda x: F.binary_cross_entropy(x.sigmoid(), torch.full_like(x, 0.3), x.detach().abs()[0]),
    "bce_logits": lambda x: F.binary_cross_entropy_with_logits(x, torch.full_like(x, 0.3)),
    "bce_logits_weights": lambda x: F.binary_cross_entropy_with_logits(
        x, torch.full_like(x, 0.3), x.detach().abs()[:1], pos_weight=torch.arange(6.0)
    ),
    "filled": lambda x: x * torch.full_like(x, 2.0) + torch.ones_like(x) + x.new_zeros(6) + x.new_full((5, 1), 3.0),
    "batch_norm": lambda x: F.batch_norm(x, *torch.ones(2, 5).to(x).clone(), training=True),
    "batch_norm_no_stats": lambda x: F.batch_norm(x, None, None, training=True),
    "instance_norm": lambda x: F.instance_norm(x),
}


def calls(graph):
    return [n for n in graph.nodes if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", REWRITTEN)
def test_rewritten_calls_give_the_same_numbers(name, dtype):
    function = REWRITTEN[name]

    def cube(model, x):
        return (function(x.to(dtype)).double() - 5).pow(3).sum() + 0 * x.sum()

    def exact_cube(model, x):
        return (function(x.to(dtype).double()) - 5).pow(3).sum() + 0 * x.sum()

    prepared = ready(Lambda(cube), A.double().requires_grad_())
    truth = ready(Lambda(exact_cube), A.double().requires_grad_()).step
    values = input_values(prepared.step, 1)
    tolerance = 1e-10 if dtype is torch.float64 else 32 * torch.finfo(dtype).eps
    runs = (run_single(step, values) for step in (prepared.step, prepared.normal, truth))
    for spec, want, got, exact in zip(prepared.step.outputs, *runs, strict=True):
        assert got.dtype == want.dtype
        # In low precision torch's own kernel may be the one that rounds: no further from the truth than it is.
        allowed = tolerance * float(exact.abs().max()) + float((want - exact).abs().max())
        assert float((got - exact).abs().max()) <= allowed, spec.name


def test_a_mean_is_split_into_a_partial_sum_and_a_global_count():
    prepared = ready(Lambda(lambda m, x: x.mean(0)), A)
    ops = [op_name(n.target) for n in calls(prepared.normal.graph)]
    assert ops[:2] == ["aten::sum.dim_IntList", "aten::div.Scalar"]
    prepared.check(prepared.programs(mesh_of(2), {prepared.node("aten::sum.dim_IntList").name: ["d0"]}))


def test_large_means_of_half_precision_do_not_overflow():
    prepared = ready(Lambda(lambda m, x: x.mean().float().square()), torch.zeros(400, 400).half())
    full = torch.full((400, 400), 2.0).half()
    seeds = {s.name: torch.tensor(1.0) for s in prepared.step.inputs if s.kind is InputKind.SEED}
    (got, *_) = run_single(prepared.normal, {"args[0]": full} | seeds)
    assert float(got) == 4.0


def test_more_degrees_of_freedom_than_elements_is_what_torch_says():
    prepared = ready(Lambda(lambda m, x: x.var(0, correction=4)), A.requires_grad_(False))
    values = input_values(prepared.step, 3)
    want, got = run_single(prepared.step, values)[1:2], run_single(prepared.normal, values)[1:2]
    assert [t.isinf().all() for t in want] == [t.isinf().all() for t in got]


def test_batch_norms_stay_fused_where_the_batch_is_not_split():
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
    fused = ready(model, torch.randn(8, 6), split_batch=False)
    apart = ready(model, torch.randn(8, 6), split_batch=True)
    names = [{op_name(n.target) for n in calls(p.normal.graph)} for p in (fused, apart)]
    assert "aten::native_batch_norm_backward" in names[0] - names[1]
    assert not any("batch_norm" in name for name in names[1])
    for prepared in (fused, apart):
        prepared.check(prepared.programs(mesh_of(2)))


def test_an_evaluating_batch_norm_is_left_alone():
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5).eval())
    prepared = ready(model, torch.randn(8, 6))
    assert prepared.node("aten::_native_batch_norm_legit_no_training")
    prepared.check(prepared.programs(mesh_of(2)))


def test_unused_draws_stay_and_unused_work_goes():
    def model(m, x):
        torch.rand(3)
        x.exp()
        return F.dropout(x)

    normal = ready(Lambda(model), A).normal
    names = [op_name(n.target) for n in calls(normal.graph)]
    assert "aten::rand" in names
    assert "aten::exp" not in names


def test_the_step_itself_is_not_changed():
    prepared = ready(Lambda(lambda m, x: x.mean(0)), A)
    before = str(prepared.step.graph)
    Normalize()(prepared.step)
    assert str(prepared.step.graph) == before


def test_new_nodes_say_where_they_come_from():
    normal = ready(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 5), nn.BatchNorm1d(5)), torch.randn(8, 6)).normal
    for node in normal.graph.nodes:
        if node.op == "call_function":
            assert {"val", "layer", "phase", "source"} <= set(node.meta)
    made = [n for n in calls(normal.graph) if op_name(n.target) == "aten::rsqrt"]
    assert [n.meta["layer"] for n in made] == ["2"]
    assert isinstance(normal.graph, fx.Graph)
