"""A compiled module on one device: every habit of a training loop keeps working."""

import copy
import dataclasses
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import CaptureError, ConstraintError, InputError, RuntimeStateError, UsageError


class Net(nn.Module):
    def __init__(self, *, dropout=0.0):
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(dropout)
        self.outer = nn.Linear(8, 3)
        self.tied = self.outer
        self.note = "mine"

    def forward(self, x, scale=1.0, *, mask=None):
        h = self.drop(self.norm(torch.tanh(self.inner(x))))
        if mask is not None:
            h = h * mask
        return self.outer(h) * scale


def mse(output, target):
    return F.mse_loss(output, target)


X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), torch.ones(6, 3)


def pair(**kwargs):
    """(plain, compiled) with equal weights."""
    torch.manual_seed(3)
    plain = Net()
    return plain, autopar.compile(copy.deepcopy(plain), (X,), loss_fn=mse, targets=(Y,), **kwargs)


def grads(module):
    return {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters(remove_duplicate=False)}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], msg=lambda m, n=name: f"{n}: {m}")


# training -------------------------------------------------------------------------------------------------------------


def test_loss_gradients_and_buffers_are_those_of_the_plain_model():
    plain, compiled = pair()
    expected = mse(plain(X), Y)
    expected.backward()
    loss = compiled(X, targets=(Y,))
    loss.backward()
    torch.testing.assert_close(loss, expected)
    assert_same(grads(compiled), grads(plain))
    assert_same(dict(compiled.named_buffers()), dict(plain.named_buffers()))


def test_names_keys_and_ties_stay():
    plain, compiled = pair()
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    assert [n for n, _ in compiled.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in compiled.named_modules()] == [n for n, _ in plain.named_modules()]
    assert compiled.tied is compiled.outer
    assert isinstance(compiled.inner.weight, nn.Parameter)
    plain.load_state_dict(compiled.state_dict(), strict=True)


def test_parameters_are_the_objects_they_were():
    model = Net()
    before = list(model.parameters())
    compiled = autopar.compile(model, (X,), loss_fn=mse, targets=(Y,))
    assert all(a is b for a, b in zip(before, compiled.parameters(), strict=True))


@pytest.mark.parametrize("factor", [0.25, 1 / 3, -2.0, 65536.0])
def test_gradients_scale_with_what_is_done_to_the_loss(factor):
    plain, compiled = pair()
    for _ in range(3):  # the seed follows what arrives
        plain.zero_grad()
        compiled.zero_grad()
        (mse(plain(X), Y) * factor).backward()
        (compiled(X, targets=(Y,)) * factor).backward()
        assert_same(grads(compiled), grads(plain))


def test_a_loss_that_arrives_with_zero_or_nothing_finite_does_no_lasting_harm():
    plain, compiled = pair()
    (compiled(X, targets=(Y,)) * 0.0).backward()
    assert all(not g.any() for g in grads(compiled).values())
    compiled.zero_grad()
    (compiled(X, targets=(Y,)) * float("inf")).backward()
    compiled.zero_grad()
    compiled.load_state_dict(plain.state_dict())
    compiled(X, targets=(Y,)).backward()
    mse(plain(X), Y).backward()
    assert_same(grads(compiled), grads(plain))


def test_gradients_accumulate():
    plain, compiled = pair()
    for rows in X.chunk(2):
        (mse(plain(rows), Y[:3]) / 2).backward()
        with compiled.no_sync():
            (compiled(rows, targets=(Y[:3],)) / 2).backward()
    assert_same(grads(compiled), grads(plain))


def test_two_forwards_before_a_backward():
    plain, compiled = pair()
    (mse(plain(X), Y) + 2 * mse(plain(-X), Y)).backward()
    first = compiled(X, targets=(Y,))
    second = compiled(-X, targets=(Y,))
    (first + 2 * second).backward()
    assert_same(grads(compiled), grads(plain))
    assert_same(dict(compiled.named_buffers()), dict(plain.named_buffers()))


def test_a_second_backward_is_refused():
    _, compiled = pair()
    loss = compiled(X, targets=(Y,))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeStateError, match="backward ran twice"):
        loss.backward()


def test_autograd_grad_and_parameter_hooks_work():
    plain, compiled = pair()
    wanted = torch.autograd.grad(mse(plain(X), Y), [plain.inner.weight, plain.outer.bias])
    got = torch.autograd.grad(compiled(X, targets=(Y,)), [compiled.inner.weight, compiled.outer.bias])
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)
    seen = []
    compiled.outer.bias.register_hook(lambda g: seen.append(g.clone()))
    compiled(X, targets=(Y,)).backward()
    torch.testing.assert_close(seen[0], wanted[1])


def test_inputs_that_require_grad_get_theirs():
    plain, compiled = pair()
    x, other = X.clone().requires_grad_(), X.clone().requires_grad_()
    mse(plain(x), Y).backward()
    compiled(other, targets=(Y,)).backward()
    torch.testing.assert_close(other.grad, x.grad)


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), lambda p: torch.optim.AdamW(p, 0.1)])
def test_training_follows_the_plain_model(make):
    plain, compiled = pair()
    ours, theirs = make(compiled.parameters()), make(plain.parameters())
    for step in range(5):
        x = X + step
        for module, optimizer, loss in (
            (plain, theirs, lambda x=x: mse(plain(x), Y)),
            (compiled, ours, lambda x=x: compiled(x, targets=(Y,))),
        ):
            optimizer.zero_grad()
            loss().backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
    assert_same(dict(compiled.named_parameters()), dict(plain.named_parameters()))
    assert_same(dict(compiled.named_buffers()), dict(plain.named_buffers()))


def test_frozen_and_unused_parameters_get_none():
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen, self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return self.used(self.frozen(x)).sum()

    compiled = autopar.compile(Partly(), (X,))
    compiled(X).backward()
    assert [n for n, g in grads(compiled).items() if g is None] == [
        f"{m}.{p}" for m in ("frozen", "unused") for p in ("weight", "bias")
    ]


def test_a_parameter_can_be_frozen_later():
    plain, compiled = pair()
    for module in (plain, compiled):
        module.inner.requires_grad_(False)
    mse(plain(X), Y).backward()
    compiled(X, targets=(Y,)).backward()
    assert_same(grads(compiled), grads(plain))


def test_nothing_to_train_gives_a_loss_without_grad():
    model = Net().requires_grad_(False)
    compiled = autopar.compile(model, (X,), loss_fn=mse, targets=(Y,))
    assert not compiled(X, targets=(Y,)).requires_grad


def test_a_gradient_scaler_finds_its_scale_and_skips_overflow():
    plain, compiled = pair()
    made = []
    for module, loss in ((plain, lambda: mse(plain(X), Y)), (compiled, lambda: compiled(X, targets=(Y,)))):
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(loss()).backward()
            if step == 1:
                module.inner.bias.grad[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        made.append(scaler.get_scale())
    assert made[0] == made[1]
    assert_same(dict(compiled.named_parameters()), dict(plain.named_parameters()))


# modes ----------------------------------------------------------------------------------------------------------------


def test_evaluation_between_steps():
    plain, compiled = pair()
    for module, loss in ((plain, lambda: mse(plain(X), Y)), (compiled, lambda: compiled(X, targets=(Y,)))):
        loss().backward()
        module.zero_grad()
        module.eval()
        assert not module.training
        assert not module.norm.training
        with torch.no_grad():
            assert not loss().requires_grad
        module.train()
        loss().backward()
    assert_same(grads(compiled), grads(plain))
    assert_same(dict(compiled.named_buffers()), dict(plain.named_buffers()))


def test_inference_gives_what_eval_gives():
    plain, compiled = pair()
    plain.eval()
    compiled.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(X[:2], targets=(Y[:2],)), mse(plain(X[:2]), Y[:2]))


def test_ambient_autocast_is_captured_and_does_not_act_twice():
    plain, compiled = pair()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, loss = mse(plain(X), Y), compiled(X, targets=(Y,))
    expected.backward()
    loss.backward()
    torch.testing.assert_close(loss, expected)
    assert_same(grads(compiled), grads(plain))
    compiled.zero_grad()
    plain.zero_grad()
    compiled(X, targets=(Y,)).backward()
    mse(plain(X), Y).backward()
    assert_same(grads(compiled), grads(plain))


def test_dropout_repeats_after_the_same_seed():
    compiled = autopar.compile(Net(dropout=0.5), (X,), loss_fn=mse, targets=(Y,))
    losses = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        losses.append(compiled(X, targets=(Y,)).item())
    assert losses[0] == losses[1] != losses[2]


def test_programs_are_made_once_for_each_kind_of_call():
    _, compiled = pair()
    for _ in range(3):
        for rows in (6, 4):
            compiled(X[:rows], targets=(Y[:rows],))
    assert len(compiled.engine.entries) == 2
    compiled(X, targets=(Y,), scale=2.0)
    assert len(compiled.engine.entries) == 3


def test_the_cache_is_bounded():
    compiled = autopar.compile(nn.Linear(4, 1), (X,), loss_fn=lambda y: y.sum())
    for rows in range(1, 20):
        compiled(torch.ones(rows, 4))
    assert len(compiled.engine.entries) == 16


# structure ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor
    extra: object = None


class Rich(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, batch, flags=(True, None), **options):
        logits = self.layer(batch["x"])
        return Output(loss=logits.square().mean(), logits=logits, extra=[options.get("name"), 3, logits.argmax(-1)])


def test_results_come_in_the_models_own_types():
    model = Rich()
    expected = model({"x": X}, name="n")
    compiled = autopar.compile(model, ({"x": X},), {"name": "n"})
    got = compiled({"x": X}, name="n")
    assert isinstance(got, Output)
    torch.testing.assert_close(got.logits, expected.logits.detach())
    assert got.loss.requires_grad
    assert not got.logits.requires_grad
    assert got.extra[:2] == ["n", 3]
    assert torch.equal(got.extra[2], expected.extra[2])
    got.loss.backward()
    assert compiled.layer.weight.grad is not None


def test_a_loss_in_a_tuple():
    compiled = autopar.compile(nn.Linear(4, 2), (X,), loss_fn=lambda y: (y.sum(), {"y": y, "n": 1}))
    loss, rest = compiled(X)
    loss.backward()
    assert rest["n"] == 1
    assert rest["y"].shape == (6, 2)


def test_results_carry_no_graph_and_outlive_updates():
    compiled = autopar.compile(nn.Linear(4, 2), (X,), loss_fn=lambda y: (y.sum(), y))
    _, kept = compiled(X)
    before = kept.clone()
    with torch.no_grad():
        compiled.weight.add_(1.0)
    compiled(X)
    assert kept.grad_fn is None
    assert torch.equal(kept, before)


def test_a_result_that_is_a_parameter_is_a_copy():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return {"loss": (self.w * x).sum(), "w": self.w}

    compiled = autopar.compile(Own(), (torch.ones(3),), loss_fn=lambda out: out)
    out = compiled(torch.ones(3))
    with torch.no_grad():
        compiled.w.zero_()
    assert out["w"].tolist() == [1.0, 1.0, 1.0]


def test_keyword_order_does_not_matter_and_a_new_structure_is_a_new_program():
    plain, compiled = pair()
    mask = torch.ones(8)
    for kwargs in ({"mask": mask, "scale": 2.0}, {"scale": 2.0, "mask": mask}):
        torch.testing.assert_close(compiled(X, targets=(Y,), **kwargs).detach(), mse(plain(X, **kwargs), Y).detach())
    assert len(compiled.engine.entries) == 2


def test_a_call_that_cannot_be_captured_says_what_is_different():
    _, compiled = pair()
    with pytest.raises(CaptureError, match=r"this call has kwargs\['masc'\]"):
        compiled(X, targets=(Y,), masc=None)
    with pytest.raises(CaptureError, match=r"lacks targets\[0\]"):
        compiled(X)
    compiled(X, targets=(Y,)).backward()


def test_the_loss_may_be_computed_outside():
    plain, _ = pair()
    compiled = autopar.compile(copy.deepcopy(plain), (X,))
    for _ in range(2):
        mse(plain(X), Y).backward()
        output = compiled(X)
        assert output.requires_grad
        mse(output, Y).backward()
    assert_same(grads(compiled), grads(plain))
    assert_same(dict(compiled.named_buffers()), dict(plain.named_buffers()))
    output = compiled(X)
    output.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeStateError, match="backward ran twice"):
        output.sum().backward()


def test_several_results_carry_grad_where_the_loss_is_outside():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x):
            h = self.a(x)
            return {"one": h, "two": self.b(x).view(-1), "again": h, "count": x.sum().long()}

    plain = Two()
    compiled = autopar.compile(copy.deepcopy(plain), (X,))
    for use in (("one", "two"), ("two",), ("one", "again")):
        for module in (plain, compiled):
            module.zero_grad()
            out = module(X)
            assert not out["count"].requires_grad
            sum(out[key].square().sum() for key in use).backward()
        theirs = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in plain.named_parameters()}
        assert_same(grads(compiled), theirs)


# the module -----------------------------------------------------------------------------------------------------------


def test_attributes_are_the_originals():
    _, compiled = pair()
    assert compiled.note == "mine"
    compiled.note = "other"
    assert compiled.original.note == "other"
    assert "note" in dir(compiled)
    with pytest.raises(AttributeError):
        compiled.no_such_thing  # noqa: B018
    with pytest.raises(RuntimeStateError, match="structure"):
        compiled.extra = nn.Linear(2, 2)
    with pytest.raises(RuntimeStateError, match="cannot be copied"):
        copy.deepcopy(compiled)


def test_layers_of_a_sequential_are_reached_by_number():
    compiled = autopar.compile(nn.Sequential(nn.Linear(4, 2), nn.ReLU()), (X,), loss_fn=torch.sum)
    assert isinstance(compiled[0], nn.Linear)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_programs_run_through_torch_compile():
    plain, compiled = pair(backend="aot_eager")
    mse(plain(X), Y).backward()
    compiled(X, targets=(Y,)).backward()
    assert_same(grads(compiled), grads(plain))


def test_moving_is_refused_unless_it_changes_nothing():
    _, compiled = pair()
    assert compiled.to("cpu").float() is compiled
    with pytest.raises(RuntimeStateError, match="convert and move the model before"):
        compiled.double()


def test_hooks_added_to_submodules_raise_and_hooks_of_the_module_run():
    _, compiled = pair()
    with pytest.raises(RuntimeStateError, match="would never run"):
        compiled.inner.register_forward_hook(lambda *a: None)
    with pytest.raises(RuntimeStateError, match="would never run"):
        compiled.inner.register_full_backward_hook(lambda *a: None)
    seen = []
    compiled.register_forward_hook(lambda module, args, output: seen.append(output.item()))
    loss = compiled(X, targets=(Y,))
    assert seen == [loss.item()]
    copy.deepcopy(compiled.inner).register_forward_hook(lambda *a: None)


def test_hooks_from_before_are_part_of_the_program():
    model = Net()
    model.inner.register_forward_hook(lambda module, args, output: output * 2)
    compiled = autopar.compile(copy.deepcopy(model), (X,), loss_fn=mse, targets=(Y,))
    torch.testing.assert_close(compiled(X, targets=(Y,)).detach(), mse(model(X), Y).detach())


def test_a_parameter_that_is_replaced_is_noticed():
    _, compiled = pair()
    compiled.inner.weight = nn.Parameter(torch.zeros(8, 4))
    with pytest.raises(RuntimeStateError, match=r"inner\.weight was replaced"):
        compiled(X, targets=(Y,))


def test_compiling_again_takes_the_model_over():
    plain, compiled = pair()
    again = autopar.compile(compiled, (X,), loss_fn=mse, targets=(Y,))
    again(X, targets=(Y,)).backward()
    mse(plain(X), Y).backward()
    assert_same(grads(again), grads(plain))


def test_two_modules_are_independent():
    (plain_a, a), (plain_b, b) = pair(), pair()
    (2 * a(X, targets=(Y,))).backward()
    b(X, targets=(Y,)).backward()
    (2 * mse(plain_a(X), Y)).backward()
    mse(plain_b(X), Y).backward()
    assert_same(grads(a), grads(plain_a))
    assert_same(grads(b), grads(plain_b))


def test_a_compiled_module_is_freed():
    compiled = autopar.compile(nn.Linear(4, 1), (X,), loss_fn=lambda y: y.sum())
    compiled(X).backward()
    gone = weakref.ref(compiled)
    del compiled
    gc.collect()
    assert gone() is None


def test_gradients_are_freed_with_the_loss():
    compiled = autopar.compile(nn.Linear(4, 1), (X,), loss_fn=lambda y: y.sum())
    loss = compiled(X)
    held = weakref.ref(loss.grad_fn.call)
    del loss
    assert held() is None


def test_clipping_gives_the_norm_of_one_device():
    for order in (2.0, 1.0, 3.0, float("inf")):
        plain, compiled = pair()
        mse(plain(X), Y).backward()
        compiled(X, targets=(Y,)).backward()
        wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01, order)
        torch.testing.assert_close(autopar.clip_grad_norm_(compiled, 0.01, order), wanted)
        assert_same(grads(compiled), grads(plain))
    with pytest.raises(UsageError, match="takes the compiled module"):
        autopar.clip_grad_norm_(plain, 1.0)


# refusals -------------------------------------------------------------------------------------------------------------


def test_sizes_that_one_process_cannot_form():
    with pytest.raises(ConstraintError, match="torchrun --nproc-per-node 4"):
        autopar.compile(Net(), (X,), constraints=autopar.Constraints(dp=2, tp=2))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"batch": "lokal"}, "batch='lokal'"), ({"rng": "x"}, "rng='x'"), ({"disable_passes": ["y"]}, "'y'")],
)
def test_unknown_options(wrong, message):
    with pytest.raises(UsageError, match=message):
        autopar.compile(Net(), (X,), **wrong)


def test_inputs_on_another_device():
    _, compiled = pair()
    with pytest.raises(InputError, match=r"args\[0\] is on meta and the model is on cpu"):
        compiled(X.to("meta"), targets=(Y,))


def test_an_error_inside_a_program_says_which_layer_it_was():
    compiled = autopar.compile(
        nn.Sequential(nn.Embedding(4, 2)), (torch.zeros(3, dtype=torch.long),), loss_fn=torch.sum
    )
    with pytest.raises(IndexError) as caught:
        compiled(torch.full((3,), 9))
    assert any("step 1" in note and "layer 0" in note for note in caught.value.__notes__)
