"""The captured step computes what eager mode computes: results, gradients, buffers."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

from autopar.capture import capture, rebuild_result
from autopar.passes.base import InputKind, OutputKind, Phase, StepGraph
from tests.capture.replay import eager, in_dtype, replay
from tests.capture.zoo import Case, Nested, Structured, Tied, batch, cases, square

CASES = cases()


def make(name: str, dtype: torch.dtype = torch.float32) -> Case:
    torch.manual_seed(0)
    return in_dtype(CASES[name](), dtype)


@functools.cache
def captured(name: str, dtype: torch.dtype = torch.float32) -> tuple[Case, StepGraph]:
    """A case and its step, captured once for all the tests that only look."""
    case = make(name, dtype)
    return case, capture_case(case)


def capture_case(case: Case, **options):
    return capture(case.model, case.args, case.kwargs, loss_fn=case.loss_fn, targets=case.targets, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_eager(name, dtype):
    case, step = captured(name, dtype)
    got, _ = replay(step, case)
    want = eager(case, step.loss_leaf)
    exact = dtype is torch.float64 and name != "autocast"
    tolerance = {"rtol": 1e-12, "atol": 1e-13} if exact else {"rtol": 1e-5, "atol": 1e-6}
    assert got.results.keys() == want.results.keys()
    assert got.gradients.keys() == want.gradients.keys()
    assert got.mutations.keys() >= want.mutations.keys()
    for mine, theirs in ((got.results, want.results), (got.gradients, want.gradients)):
        for key, value in theirs.items():
            torch.testing.assert_close(mine[key], value, **tolerance, msg=lambda text, key=key: f"{key}: {text}")
    buffers = dict(case.model.named_buffers())
    for key, value in got.mutations.items():
        torch.testing.assert_close(value, want.mutations.get(key, buffers[key]), **tolerance)


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("gradient_penalty", "dropout_reentrant")])
def test_a_forward_only_step_equals_no_grad(name):
    case = make(name)
    step = capture_case(case, training=False)
    got, _ = replay(step, case)
    want = eager(case, step.loss_leaf, training=False)
    assert not step.training
    assert not got.gradients
    assert not [spec for spec in step.inputs if spec.kind is InputKind.SEED or spec.trainable]
    assert {n.meta["phase"] for n in step.graph.nodes if n.op == "call_function"} <= {Phase.FORWARD}
    for key, value in want.results.items():
        torch.testing.assert_close(got.results[key], value)
    for key, value in want.mutations.items():
        torch.testing.assert_close(got.mutations[key], value)


@pytest.mark.parametrize("name", CASES)
def test_a_graph_is_in_the_agreed_form(name):
    _, step = captured(name)
    step.graph.lint()
    assert len(step.placeholders) == len(step.inputs)
    assert len(step.results) == len(step.outputs)
    assert list(step.graph.nodes)[: len(step.inputs)] == step.placeholders
    kinds = [spec.kind for spec in step.inputs]
    assert kinds == sorted(kinds, key=list(InputKind).index)
    order = {kind: i for i, kind in enumerate(OutputKind)} | {OutputKind.LOSS: 0, OutputKind.RESULT: 0}
    groups = [order[spec.kind] for spec in step.outputs]
    assert groups == sorted(groups)
    for node in step.graph.nodes:
        assert {"layer", "phase", "source"} <= node.meta.keys()
        if node.op == "output":
            continue
        assert "val" in node.meta
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            assert not node.target._schema.is_mutable
            assert node.target not in (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
        if node.op == "get_attr":
            value = getattr(step.graph_module, node.target)
            assert type(value) is torch.Tensor
            assert value.device.type == "cpu"
    late = {n for n in step.graph.nodes if n.op == "call_function" and n.meta["phase"] is Phase.BACKWARD}
    assert not [n for n in step.graph.nodes if n.meta["phase"] is Phase.FORWARD and late & set(n.all_input_nodes)]


@pytest.mark.parametrize("name", CASES)
def test_every_used_trainable_parameter_has_a_gradient(name):
    case, step = captured(name)
    gradient = {s.name: v for s, v in zip(step.outputs, step.results, strict=True) if s.kind is OutputKind.GRADIENT}
    wanted = eager(case, step.loss_leaf).gradients
    for spec in step.inputs:
        if spec.kind is InputKind.PARAMETER and spec.trainable:
            assert (gradient[spec.name] is None) == (wanted[spec.name] is None), spec.name


@pytest.mark.parametrize("name", CASES)
def test_the_model_is_left_as_it_was(name):
    case = make(name)
    held = {n: (t, t.clone()) for n, t in [*case.model.named_parameters(), *case.model.named_buffers()]}
    attributes = {n: dict(m.__dict__) for n, m in case.model.named_modules()}
    random_state = torch.get_rng_state()
    capture_case(case)
    for name_now, tensor in [*case.model.named_parameters(), *case.model.named_buffers()]:
        assert tensor is held[name_now][0]
        assert torch.equal(tensor, held[name_now][1])
        assert tensor.grad is None
    assert {n: dict(m.__dict__) for n, m in case.model.named_modules()} == attributes
    assert torch.equal(random_state, torch.get_rng_state())
    assert not torch.compiler.is_compiling()


def test_the_model_is_left_as_it_was_after_an_error():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.seen = []

        def forward(self, x):
            self.last = self.linear(x)
            self.seen.append(self.last)
            raise KeyError("no such thing")

    model = Fails()
    weight, hooks = model.linear.weight, dict(model.linear._forward_hooks)
    with pytest.raises(Exception, match="no such thing"):
        capture(model, (torch.randn(2, 4),))
    assert model.linear.weight is weight
    assert model.seen == []
    assert not hasattr(model, "last")
    assert dict(model.linear._forward_hooks) == hooks
    assert not torch.compiler.is_compiling()


def test_ties_are_one_input_under_their_first_name():
    case = make("tied")
    step = capture_case(case)
    (spec,) = [s for s in step.inputs if s.name == "embed.weight"]
    assert spec.aliases == ("out.weight",)
    names = [s.name for s in step.inputs if s.kind is InputKind.PARAMETER]
    assert names == [n for n, _ in case.model.named_parameters()]
    assert len([s for s in step.outputs if s.name == "embed.weight"]) == 1


def test_a_meta_model_gives_the_same_graph():
    case = make("tied")
    with torch.device("meta"):
        model = Tied()
        args = tuple(torch.empty(a.shape, dtype=a.dtype) for a in case.args)
        step = capture(model, args)
    real = capture_case(case)
    assert [(n.op, str(n.target)) for n in step.graph.nodes] == [(n.op, str(n.target)) for n in real.graph.nodes]
    assert all(p.is_meta for p in model.parameters())
    assert all(n.meta["val"].device.type == "cpu" for n in step.placeholders)
    got, _ = replay(step, case)
    torch.testing.assert_close(got.gradients, eager(case, 0).gradients)


def test_autocast_of_an_accelerator_is_captured_on_meta():
    class Amp(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                hidden = self.linear(x) + torch.arange(4, device="cuda")
                return hidden.cuda().softmax(-1)

    with torch.device("meta"):
        step = capture(Amp(), (torch.randn(2, 4),), loss_fn=lambda out: out.float().mean())
    (product,) = [n for n in step.graph.nodes if n.target is torch.ops.aten.addmm.default]
    (softmax,) = [n for n in step.graph.nodes if n.target is torch.ops.aten._softmax.default]
    assert product.meta["val"].dtype is torch.bfloat16
    assert softmax.meta["val"].dtype is torch.float32


def test_the_backward_is_not_under_the_ambient_autocast():
    case = make("autocast")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step = capture_case(case)
    products = [n for n in step.graph.nodes if n.target is torch.ops.aten.mm.default and n.meta["layer"] == "island"]
    assert {n.meta["val"].dtype for n in products} == {torch.float32}


def test_dead_random_draws_stay_so_that_the_stream_is_the_same():
    class Draws(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            torch.randn(5)
            return self.linear(x) + torch.randn_like(x)

    case = Case(model=Draws(), args=(batch(2, 4),), loss_fn=square)
    got, _ = replay(capture_case(case), case)
    torch.testing.assert_close(got.results, eager(case, 0).results)


def test_a_result_is_rebuilt_in_its_own_structure():
    case = make("no_loss")
    step = capture_case(case)
    _, outputs = replay(step, case)
    result = rebuild_result(step, outputs)
    assert isinstance(result, Structured)
    assert result.note == "kept"
    assert result.extra is None
    torch.manual_seed(0)
    torch.testing.assert_close(result.scores, case.model(*case.args).scores)
    assert step.loss_leaf == -1
    assert [s.name for s in step.inputs if s.kind is InputKind.SEED] == ["seed[0]", "seed[1]", "seed[2]"]


def test_with_a_loss_only_the_loss_has_a_seed():
    step = capture_case(make("experts"))
    assert [s.name for s in step.inputs if s.kind is InputKind.SEED] == [f"seed[{step.loss_leaf}]"]
    assert [s.kind for s in step.outputs[:2]] == [OutputKind.LOSS, OutputKind.RESULT]


def test_grad_mode_decides_by_default():
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    with torch.no_grad():
        assert not capture(model, (x,), loss_fn=square).training
    assert capture(model, (x,), loss_fn=square).training
    assert not capture(copy.deepcopy(model).requires_grad_(requires_grad=False), (x,), loss_fn=square).training


def test_a_model_that_was_compiled_by_torch_runs_eagerly():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].compile(backend="eager")
    step = capture(model, (torch.randn(2, 4),), loss_fn=square)
    assert [s.name for s in step.inputs][:2] == ["0.weight", "0.bias"]


def test_keyword_order_does_not_matter():
    x = batch()
    calls = [{"mask": torch.rand(6), "keep": True}, {"keep": True, "mask": torch.rand(6)}]
    args = ({"x": x, "more": {"shift": x}}, [1.0, 1.0])
    first, second = (capture(Nested(), args, kwargs) for kwargs in calls)
    assert [s.name for s in first.inputs] == [s.name for s in second.inputs]
