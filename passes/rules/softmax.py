"""Rows of softmax and of losses over classes; where the classes are split, a small program replaces the call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from autopar.passes.rules.row import Call, Dims, Row
from autopar.passes.rules.views import dims_of

if TYPE_CHECKING:
    from autopar.passes.lowering import LocalContext

NONE, MEAN = 0, 1  # torch's numbers of reductions
NARROW = (torch.float16, torch.bfloat16)


def softmax_row(call: Call) -> Row:
    """_softmax and _log_softmax: the normalised dim is split only through :func:`lower_softmax`."""
    shape = call.shapes[0]
    dims, sizes = dims_of(shape)
    factor = dims[call["dim"] % len(dims)] if dims else ()
    return Row(
        inputs=(tuple(dims),),
        outputs=(tuple(dims),),
        sizes=sizes,
        lowerings=dict.fromkeys(factor, lower_softmax),
    )


def lower_softmax(ctx: LocalContext) -> Any:
    """Maximum and sum over all ranks of the split dim."""
    call = ctx.call
    dim = call["dim"] % len(call.shapes[0])
    factors = list(ctx.row.inputs[0][dim])
    logarithm = "log" in call.op._schema.name
    x = ctx.tensor(0)
    if x.meta["val"].dtype in NARROW:
        x = ctx.emit("_to_copy", x, dtype=torch.float32)  # as the fused kernel does inside
    top = ctx.all_reduce(ctx.emit("amax", x, [dim], keepdim=True), "max", factors)
    if "safe" in call.op._schema.name:
        # A row of -inf is all zeros in the safe form: 0 / 0 is avoided by a finite maximum and a sum of at least tiny.
        top = ctx.emit("masked_fill.Scalar", top, ctx.emit("isinf", top), 0)
    shifted = ctx.emit("sub.Tensor", x, top)
    grown = ctx.emit("exp", shifted)
    total = ctx.all_reduce(ctx.emit("sum.dim_IntList", grown, [dim], keepdim=True), "sum", factors)
    if logarithm:
        return ctx.cast_like_output(ctx.emit("sub.Tensor", shifted, ctx.emit("log", total)), 0)
    if "safe" in call.op._schema.name:
        total = ctx.emit("masked_fill.Scalar", total, ctx.emit("eq.Scalar", total, 0), 1)
    return ctx.cast_like_output(ctx.emit("div.Tensor", grown, total), 0)


def softmax_backward_row(call: Call) -> Row:
    """_softmax_backward_data and _log_softmax_backward_data: linear in the gradient."""
    shape = call.shapes[0]
    dims, sizes = dims_of(shape)
    factor = dims[call["dim"] % len(dims)] if dims else ()
    return Row(
        inputs=(tuple(dims), tuple(dims)),
        outputs=(tuple(dims),),
        sizes=sizes,
        linear=(frozenset({0}),),
        lowerings=dict.fromkeys(factor, lower_softmax_backward),
    )


def lower_softmax_backward(ctx: LocalContext) -> Any:
    """The sum over classes is taken over all ranks."""
    call = ctx.call
    dim = call["dim"] % len(call.shapes[0])
    factors = list(ctx.row.inputs[0][dim])
    grad, output = ctx.tensor(0), ctx.tensor(1)
    if output.meta["val"].dtype in NARROW:
        grad, output = (ctx.emit("_to_copy", t, dtype=torch.float32) for t in (grad, output))
    if "log" in call.op._schema.name:
        total = ctx.all_reduce(ctx.emit("sum.dim_IntList", grad, [dim], keepdim=True), "sum", factors)
        out = ctx.emit("sub.Tensor", grad, ctx.emit("mul.Tensor", ctx.emit("exp", output), total))
    else:
        product = ctx.emit("mul.Tensor", grad, output)
        total = ctx.all_reduce(ctx.emit("sum.dim_IntList", product, [dim], keepdim=True), "sum", factors)
        out = ctx.emit("sub.Tensor", product, ctx.emit("mul.Tensor", output, total))
    return ctx.cast_like_output(out, 0)


def nll_dims(call: Call) -> tuple[Dims, Dims, dict[str, int]]:
    """(dims of the log probabilities, dims of the targets, sizes): classes are ``v``."""
    shape = call.shape("self")
    dims, sizes = dims_of(shape)
    position = 0 if len(shape) == 1 else 1
    sizes = {("v" if f == f"d{position}" else f): n for f, n in sizes.items()}
    full = [("v",) if i == position and shape[i] != 1 else d for i, d in enumerate(dims)]
    target = tuple(d for i, d in enumerate(full) if i != position)
    return tuple(full), target, sizes


def nll_forward_row(call: Call) -> Row:
    """nll_loss_forward and nll_loss2d_forward with reduction none or sum -> loss, total_weight.

    The mean is rewritten by ``passes/normalize.py`` as a sum over the total weight, which is itself a sum.
    """
    full, target, sizes = nll_dims(call)
    mean, none = call["reduction"] == MEAN, call["reduction"] == NONE
    inputs: list[Dims] = [full, target]
    if call.has("weight"):
        inputs.append((("v",) if "v" in sizes else (),))
    # Without weights the count of valid targets is whole on ranks that split the classes; without reduction it is zero.
    counted = {} if call.has("weight") and not none else {"v": frozenset({1})}
    rest = [f for f in sizes if f != "v"]
    return Row(
        inputs=tuple(inputs),
        outputs=(target if none else (), ()),
        sizes=sizes,
        reduce=dict.fromkeys(sizes, "sum"),
        complete=counted | (dict.fromkeys(rest, frozenset({1})) if none else {}),
        nosplit=frozenset(sizes) if mean else frozenset(),
        whole=frozenset({"v"}),
        lowerings={"v": lower_nll_forward},
    )


def local_targets(ctx: LocalContext, target: Any) -> tuple[Any, Any]:
    """(targets in local numbering, clamped; mask of those that this rank holds).  Nobody holds ignored targets."""
    call = ctx.call
    shifted = ctx.emit("sub.Tensor", target, ctx.start("v"))
    inside = ctx.emit("logical_and", ctx.emit("ge.Scalar", shifted, 0), ctx.emit("lt.Scalar", shifted, ctx.size("v")))
    held = ctx.emit("logical_and", inside, ctx.emit("ne.Scalar", target, call["ignore_index"]))
    return ctx.emit("masked_fill.Scalar", shifted, ctx.emit("logical_not", held), 0), held


def class_position(call: Call) -> int:
    """The dim of the classes."""
    return 0 if len(call.shape("self")) == 1 else 1


def lower_nll_forward(ctx: LocalContext) -> Any:
    """Each rank adds the log probabilities of the targets it holds: the loss is Partial."""
    call = ctx.call
    x, target = ctx.tensor(0), ctx.tensor(1)
    index, held = local_targets(ctx, target)
    position = class_position(call)
    gathered = ctx.emit("gather", x, position, ctx.emit("unsqueeze", index, position))
    picked = ctx.emit("neg", ctx.emit("squeeze.dim", gathered, position))
    if call.has("weight"):
        share = weights_of(ctx, ctx.tensor(2), index, held)
        picked = ctx.emit("mul.Tensor", picked, share)
    else:
        share = ctx.emit("_to_copy", ctx.emit("ne.Scalar", target, call["ignore_index"]), dtype=x.meta["val"].dtype)
    picked = ctx.emit("masked_fill.Scalar", picked, ctx.emit("logical_not", held), 0)
    if call["reduction"] == NONE:
        return picked, ctx.emit("full", [], 0, dtype=x.meta["val"].dtype, device=x.meta["val"].device)
    return ctx.emit("sum", picked), ctx.emit("sum", share)


def weights_of(ctx: LocalContext, weight: Any, index: Any, held: Any) -> Any:
    """The weights of the targets that this rank holds, zero for the others."""
    found = ctx.emit("index.Tensor", weight, [index])
    return ctx.emit("masked_fill.Scalar", found, ctx.emit("logical_not", held), 0)


def nll_backward_row(call: Call) -> Row:
    """nll_loss_backward and nll_loss2d_backward with reduction none or sum: linear in the gradient."""
    full, target, sizes = nll_dims(call)
    mean, none = call["reduction"] == MEAN, call["reduction"] == NONE
    inputs: list[Dims] = [target if none else (), full, target]
    if call.has("weight"):
        inputs.append((("v",) if "v" in sizes else (),))
    inputs.append(())
    return Row(
        inputs=tuple(inputs),
        outputs=(full,),
        sizes=sizes,
        nosplit=frozenset(sizes) if mean else frozenset(),
        linear=(frozenset({0}),),
        whole=frozenset({"v"}),
        lowerings={"v": lower_nll_backward},
    )


def lower_nll_backward(ctx: LocalContext) -> Any:
    """Minus the gradient at the targets that this rank holds, zero elsewhere."""
    call = ctx.call
    grad, x, target = ctx.tensor(0), ctx.tensor(1), ctx.tensor(2)
    index, held = local_targets(ctx, target)
    position = class_position(call)
    if call.has("weight"):
        share = weights_of(ctx, ctx.tensor(3), index, held)
    else:
        share = ctx.emit("_to_copy", held, dtype=grad.meta["val"].dtype)
    value = ctx.emit("mul.Tensor", ctx.emit("neg", grad), share)
    zeros = ctx.emit("full", list(x.meta["val"].shape), 0, dtype=x.meta["val"].dtype, device=x.meta["val"].device)
    return ctx.emit(
        "scatter.src", zeros, position, ctx.emit("unsqueeze", index, position), ctx.emit("unsqueeze", value, position)
    )


def elementwise_loss_row(call: Call) -> Row:
    """mse_loss, smooth_l1_loss, huber_loss, binary_cross_entropy ... with reduction none or sum; their backwards."""
    backward = "backward" in call.op._schema.name
    pivot = call.shape("self")
    dims, sizes = dims_of(pivot)
    none, mean = call["reduction"] == NONE, call["reduction"] == MEAN

    def described(shape: tuple[int, ...]) -> Dims:
        offset = len(dims) - len(shape)
        return tuple(() if n == 1 else dims[i + offset] for i, n in enumerate(shape))

    outputs: tuple[Dims, ...] = (tuple(dims),) if none or backward else ((),)
    return Row(
        inputs=tuple(described(s) for s in call.shapes),
        outputs=outputs,
        sizes=sizes,
        reduce={} if none or backward else dict.fromkeys(sizes, "sum"),
        nosplit=frozenset(sizes) if mean else frozenset(),
        linear=(frozenset({0}),) if backward else (),
    )


def dropout_row(call: Call) -> Row:
    """native_dropout: element-wise over the input, with random draws."""
    dims, sizes = dims_of(call.shapes[0])
    return Row(inputs=(tuple(dims),), outputs=(tuple(dims), tuple(dims)), sizes=sizes, random=True)
