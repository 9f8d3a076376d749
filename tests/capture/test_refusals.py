"""What cannot be captured is refused with the line, the expression and the way out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autopar.capture import capture
from autopar.cost_models.errors import AutoparError, CaptureError
from tests.capture.zoo import batch, square


class Model(nn.Module):
    """Calls the method ``mode`` in a submodule, so that there is a layer to name."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.inner = Inner(mode)

    def forward(self, x: torch.Tensor, extra: object = None) -> object:
        return self.inner(x, extra)


class Inner(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.linear = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x: torch.Tensor, extra: object) -> object:
        return getattr(self, self.mode)(x)

    def plain(self, x):
        return self.linear(x)

    def branch(self, x):
        return self.linear(x) if x.mean() > 0 else x

    def loop(self, x):
        while (x.abs() > 1).any():
            x = self.linear(x)
        return x

    def number(self, x):
        return self.linear(x) * x.sum().item()

    def integer(self, x):
        return self.linear(x)[: int(x[0, 0])]

    def mask(self, x):
        return self.linear(x)[x[:, 0] > 0]

    def wrong(self, x):
        raise ValueError("x must have three dims")

    def shapes(self, x):
        return self.linear(x[:, :3])

    def condition(self, x):
        return torch.cond(x.sum() > 0, lambda y: self.linear(y), lambda y: y * 2, (x,))

    def cache(self, x):
        return {"out": self.linear(x), "past": KeyCache()}

    def detached(self, x):
        return self.linear(x).detach()

    def in_place(self, x):
        return self.linear(x.mul_(2))

    def parameter_in_place(self, x):
        self.linear.weight.data.clamp_(-1, 1)
        return self.linear(x)

    def counting(self, x):
        self.calls += 1
        return self.linear(x) * (1.0 if self.calls < 100 else 2.0)

    def collective(self, x):
        hidden = self.linear(x)
        dist.all_reduce(hidden)
        return hidden


class KeyCache:
    pass


class LossModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centre = nn.Parameter(torch.zeros(8))

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        return (output - self.centre).square().mean()


def refused(mode: str, *args: object, loss_fn: Callable[..., object] | None = square) -> str:
    with pytest.raises(CaptureError) as caught:
        capture(Model(mode), args or (batch(),), loss_fn=loss_fn)
    assert issubclass(CaptureError, AutoparError)
    return str(caught.value)


@pytest.mark.parametrize(
    ("mode", "parts"),
    [
        ("branch", ["`return self.linear(x) if x.mean() > 0 else x`", "expression `x.mean() > 0`", "torch.where"]),
        ("loop", ["`while (x.abs() > 1).any():`", "torch.where"]),
        ("number", ["x.sum().item()", "keep the number as a tensor"]),
        ("integer", ["int(x[0, 0])", "outside the model"]),
        ("mask", ["nonzero", "`return self.linear(x)[x[:, 0] > 0]`", "masked_fill"]),
        ("wrong", ["ValueError", "x must have three dims", '`raise ValueError("x must have three dims")`']),
        ("shapes", ["RuntimeError", "`return self.linear(x[:, :3])`", "layer inner.linear"]),
        ("condition", ["torch.cond", "torch.where"]),
        ("collective", ["communicates by itself", "`dist.all_reduce(hidden)`", "one device"]),
    ],
)
def test_a_line_that_cannot_be_traced_is_named(mode, parts):
    text = refused(mode)
    assert "\n" not in text
    assert "capture/test_refusals.py:" in text
    assert "layer inner" in text
    for part in parts:
        assert part in text


def test_the_models_own_error_is_the_cause():
    with pytest.raises(CaptureError) as caught:
        capture(Model("wrong"), (batch(),), loss_fn=square)
    assert isinstance(caught.value.__cause__, ValueError)


def test_collectives_are_refused_where_a_process_group_exists(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        text = refused("collective")
    finally:
        dist.destroy_process_group()
    assert "communicates by itself (c10d.allreduce_.default)" in text
    assert "dist.all_reduce(hidden)" in text


@pytest.mark.parametrize(
    ("mode", "parts"),
    [
        ("detached", ["2 trainable parameters", "inner.linear.weight", "none of them gets a gradient"]),
        ("in_place", ["batch args[0] in place", "clone"]),
        ("parameter_in_place", ["parameter inner.linear.weight in place", "outside forward"]),
        ("counting", ["attribute inner.calls", "buffer"]),
    ],
)
def test_what_would_be_captured_wrongly_is_refused(mode, parts):
    text = refused(mode)
    for part in parts:
        assert part in text


def test_an_object_in_the_result_is_named_with_the_way_out():
    text = refused("cache", loss_fn=None)
    assert "result['past'] is an object of type KeyCache" in text
    assert "use_cache=False" in text


def test_an_object_among_the_inputs_is_named():
    text = refused("plain", batch(), KeyCache())
    assert "args[1] is an object of type KeyCache" in text


@pytest.mark.parametrize(
    ("loss_fn", "part"), [(lambda out: out, "(6, 8)"), (lambda _: 3.0, "3.0"), (lambda _: (), "None")]
)
def test_a_loss_must_be_a_float_without_dims(loss_fn, part):
    text = refused("plain", loss_fn=loss_fn)
    assert part in text
    assert ".mean()" in text


def test_parameters_of_the_loss_must_belong_to_the_model():
    text = refused("plain", loss_fn=LossModule())
    assert "requires grad and is not part of the model" in text
    assert "LossModule" not in text
    assert "(output - self.centre)" in text


def test_a_teacher_outside_the_model_is_a_constant_under_no_grad():
    teacher = nn.Linear(8, 8)

    def distance(output):
        with torch.no_grad():
            wanted = teacher(output)
        return (output - wanted).square().mean()

    step = capture(Model("plain"), (batch(),), loss_fn=distance)
    constants = [getattr(step.graph_module, n.target) for n in step.graph.nodes if n.op == "get_attr"]
    assert {t.data_ptr() for t in constants} == {p.data_ptr() for p in teacher.parameters()}
    assert not any(t.requires_grad for t in constants)


def test_a_buffer_may_not_change_its_shape():
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(2))

        def forward(self, x):
            self.seen = torch.cat([self.seen, x.mean()[None]])
            return x.sum()

    with pytest.raises(CaptureError, match=r"replaced seen \(shape \(2,\)\) by a tensor of shape \(3,\)"):
        capture(Grows(), (batch(),))


def test_a_lazy_module_is_named():
    with pytest.raises(CaptureError, match="0 is a LazyLinear whose parameters have no shapes yet"):
        capture(nn.Sequential(nn.LazyLinear(4)), (batch(),), loss_fn=square)


def test_a_wrapped_model_is_refused():
    with pytest.raises(CaptureError, match="the model is a DataParallel: give the plain module"):
        capture(nn.DataParallel(nn.Linear(8, 8)), (batch(),), loss_fn=square)


def test_what_is_no_module_is_refused():
    with pytest.raises(CaptureError, match=r"must be a torch\.nn\.Module"):
        capture(lambda x: x, (batch(),))


def test_an_unregistered_tensor_on_meta_has_no_value():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.ones(8)

        def forward(self, x):
            return (x * self.table).sum()

    with torch.device("meta"), pytest.raises(CaptureError, match="register it as a buffer"):
        capture(Plain(), (batch(),))
