"""Training batch norms as sums over the batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autopar.passes.forms.common import NARROW, Rewrite
from autopar.passes.lowering import Emitter
from autopar.passes.rules.row import Call
from autopar.passes.rules.table import op_name


def batch_norm_forward(emitter: Emitter, call: Call) -> Any:
    """Training statistics as sums over the batch: (output, mean, invstd, new running mean, new running variance).

    The form with update has an empty tensor (what cuDNN keeps for itself) after the statistics.
    """
    functional = "functional" in call.op._schema.name
    if not call.args.get("training", True) or ("no_stats" not in op_name(call.op) and not functional):
        return None
    x = call["input"]
    shape = call.shape("input")
    dims = [d for d in range(len(shape)) if d != 1]
    count = math.prod(shape[d] for d in dims)
    wide = x.meta["val"].dtype
    if wide in NARROW:
        x, wide = emitter.call("_to_copy", x, dtype=torch.float32), torch.float32
    center = emitter.call("div.Scalar", emitter.call("sum.dim_IntList", x, dims, keepdim=True), count)
    apart = emitter.call("sub.Tensor", x, center)
    square = emitter.call("sum.dim_IntList", emitter.call("mul.Tensor", apart, apart), dims, keepdim=True)
    spread = emitter.call("div.Scalar", square, count)
    scale = emitter.call("rsqrt", emitter.call("add.Scalar", spread, call["eps"]))
    out = affine(emitter, call, emitter.call("mul.Tensor", apart, scale), len(shape))
    if out.meta["val"].dtype != call.outputs[0].dtype:  # type: ignore[union-attr]
        out = emitter.call("_to_copy", out, dtype=call.outputs[0].dtype)  # type: ignore[union-attr]
    channels = [shape[1]]
    results = [out, emitter.call("reshape", center, channels), emitter.call("reshape", scale, channels)]
    if "with_update" in call.op._schema.name:
        results.append(emitter.call("empty.memory_format", [0], dtype=torch.uint8, device=x.meta["val"].device))
    if functional:
        unbiased = emitter.call("div.Scalar", emitter.call("reshape", square, channels), max(count - 1, 1))
        results.append(moved(emitter, call["running_mean"], results[1], call["momentum"]))
        results.append(moved(emitter, call["running_var"], unbiased, call["momentum"]))
    return tuple(results)


def moved(emitter: Emitter, old: fx.Node, new: fx.Node, momentum: float) -> fx.Node:
    """(1 - momentum) * old + momentum * new."""
    kept = emitter.call("mul.Scalar", old, 1 - momentum)
    taken = emitter.call("mul.Scalar", emitter.call("_to_copy", new, dtype=old.meta["val"].dtype), momentum)
    return emitter.call("add.Tensor", kept, taken)


def per_channel(emitter: Emitter, vector: fx.Node, rank: int) -> fx.Node:
    """A channel vector that broadcasts against [n, c, ...]."""
    return emitter.call("reshape", vector, [1, vector.meta["val"].shape[0], *([1] * (rank - 2))])


def affine(emitter: Emitter, call: Call, x: fx.Node, rank: int) -> fx.Node:
    """Weight * x + bias, where the call has them."""
    if call.has("weight"):
        x = emitter.call("mul.Tensor", x, per_channel(emitter, call["weight"], rank))
    if call.has("bias"):
        x = emitter.call("add.Tensor", x, per_channel(emitter, call["bias"], rank))
    return x


def batch_norm_backward(emitter: Emitter, call: Call) -> Any:
    """Gradients of input, weight and bias of a training batch norm, as sums over the batch."""
    if not call.args.get("train", call.args.get("update", True)):
        return None
    grad, x = call["grad_out"], call["input"]
    deviation = "save_invstd" if "save_invstd" in call.names else "save_var"  # both hold one over the deviation
    shape = call.shape("input")
    rank, dtype = len(shape), x.meta["val"].dtype
    dims = [d for d in range(rank) if d != 1]
    count = math.prod(shape[d] for d in dims)
    if dtype in NARROW:
        grad, x = (emitter.call("_to_copy", t, dtype=torch.float32) for t in (grad, x))
    scale = per_channel(emitter, call[deviation], rank)
    normal = emitter.call(
        "mul.Tensor", emitter.call("sub.Tensor", x, per_channel(emitter, call["save_mean"], rank)), scale
    )
    total = emitter.call("sum.dim_IntList", grad, dims, keepdim=True)
    product = emitter.call("sum.dim_IntList", emitter.call("mul.Tensor", grad, normal), dims, keepdim=True)
    centered = emitter.call("sub.Tensor", grad, emitter.call("div.Scalar", total, count))
    centered = emitter.call(
        "sub.Tensor", centered, emitter.call("mul.Tensor", normal, emitter.call("div.Scalar", product, count))
    )
    gradient = emitter.call("mul.Tensor", centered, scale)
    if call.has("weight"):
        gradient = emitter.call("mul.Tensor", gradient, per_channel(emitter, call["weight"], rank))
    if gradient.meta["val"].dtype != dtype:
        gradient = emitter.call("_to_copy", gradient, dtype=dtype)
    channels = [shape[1]]
    return gradient, emitter.call("reshape", product, channels), emitter.call("reshape", total, channels)


FORMS: Mapping[str, Rewrite] = {
    "aten::_native_batch_norm_legit_functional": batch_norm_forward,
    "aten::_native_batch_norm_legit.no_stats": batch_norm_forward,
    "aten::_batch_norm_with_update_functional": batch_norm_forward,
    "aten::native_batch_norm_backward": batch_norm_backward,
    "aten::batch_norm_backward": batch_norm_backward,
}
