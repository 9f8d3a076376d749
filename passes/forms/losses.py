"""Losses averaged over a batch as sums over a global count or weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autopar.passes.forms.common import NARROW, Rewrite, as_output, widened
from autopar.passes.lowering import Emitter
from autopar.passes.rules.row import Call
from autopar.passes.torch_ops import broadcast_shapes

NONE, MEAN, SUM = 0, 1, 2
ELEMENTWISE = ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss")


def nll_forward(emitter: Emitter, call: Call) -> Any:
    """A mean over valid targets -> sum / total weight."""
    if call["reduction"] != MEAN:
        return None
    pair = emitter.call(call.op, call["self"], call["target"], call["weight"], SUM, call["ignore_index"])
    total, weight = emitter.getitem(pair, 0), total_weight(emitter, call)
    return emitter.call("div.Tensor", total, weight), weight


def total_weight(emitter: Emitter, call: Call) -> fx.Node:
    """The weight of all valid targets, from the targets alone: it is known before the forward has run."""
    scores = call["self"].meta["val"]
    if not call.has("weight"):
        valid = emitter.call("ne.Scalar", call["target"], call["ignore_index"])
        count = emitter.call("sum.default", emitter.call("_to_copy", valid, dtype=torch.float32))
        return count if scores.dtype is torch.float32 else emitter.call("_to_copy", count, dtype=scores.dtype)
    zero = emitter.call("zeros", [1] * scores.dim(), dtype=scores.dtype, device=scores.device)
    blank = emitter.call("expand", zero, list(scores.shape))
    pair = emitter.call(call.op, blank, call["target"], call["weight"], SUM, call["ignore_index"])
    return emitter.getitem(pair, 1)


def nll_backward(emitter: Emitter, call: Call) -> Any:
    """The gradient of a mean -> that of a sum, with the incoming gradient divided by the total weight."""
    if call["reduction"] != MEAN:
        return None
    grad = emitter.call("div.Tensor", call["grad_output"], call["total_weight"])
    return emitter.call(
        call.op, grad, call["self"], call["target"], call["weight"], SUM, call["ignore_index"], call["total_weight"]
    )


def with_reduction(call: Call, reduction: int) -> tuple[list[Any], dict[str, Any]]:
    """The call's arguments with another reduction."""
    args = [reduction if a.name == "reduction" else call[a.name] for a in call.op._schema.arguments if not a.kwarg_only]
    kwargs = {a.name: call[a.name] for a in call.op._schema.arguments if a.kwarg_only}
    return args, kwargs


def loss_mean(emitter: Emitter, call: Call) -> Any:
    """An element-wise loss averaged over all elements -> sum / count."""
    if call["reduction"] != MEAN:
        return None
    count = max(math.prod(broadcast_shapes(call.shapes)), 1)
    if call.tensors[0].meta["val"].dtype not in NARROW:
        args, kwargs = with_reduction(call, SUM)
        return emitter.call("div.Scalar", emitter.call(call.op, *args, **kwargs), count)
    args, kwargs = with_reduction(call, NONE)
    total = emitter.call("sum", widened(emitter, emitter.call(call.op, *args, **kwargs)))
    return as_output(emitter, emitter.call("div.Scalar", total, count), call)


def loss_mean_backward(emitter: Emitter, call: Call) -> Any:
    """The backward of :func:`loss_mean`."""
    if call["reduction"] != MEAN:
        return None
    args, kwargs = with_reduction(call, SUM)
    shape = broadcast_shapes(call.shapes[1:3])
    args[0] = emitter.call("div.Scalar", args[0], max(math.prod(shape), 1))
    return emitter.call(call.op, *args, **kwargs)


FORMS: Mapping[str, Rewrite] = {
    "aten::nll_loss_forward": nll_forward,
    "aten::nll_loss2d_forward": nll_forward,
    "aten::nll_loss_backward": nll_backward,
    "aten::nll_loss2d_backward": nll_backward,
    "aten::binary_cross_entropy_with_logits": loss_mean,
    **{f"aten::{name}": loss_mean for name in ELEMENTWISE},
    **{f"aten::{name}_backward": loss_mean_backward for name in ELEMENTWISE},
}
