"""Means, moments and norms as sums: what a sum needs of a split dim is one reduction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import fx

from autopar.passes.forms.common import Rewrite, as_output, widened
from autopar.passes.lowering import Emitter
from autopar.passes.rules.reductions import reduced_dims
from autopar.passes.rules.row import Call


def count_of(call: Call, dims: list[int]) -> int:
    """Elements of the first tensor argument along ``dims``."""
    return math.prod(call.shapes[0][d] for d in dims)


def mean(emitter: Emitter, call: Call) -> Any:
    """Mean -> sum / count."""
    dims = reduced_dims(call)
    count = count_of(call, dims)
    if count == 0:
        return None
    x = widened(emitter, call["self"], call.args.get("dtype"))
    total = emitter.call("sum.dim_IntList", x, dims, bool(call.args.get("keepdim", False)))
    return as_output(emitter, emitter.call("div.Scalar", total, count), call)


def moments(emitter: Emitter, call: Call) -> tuple[fx.Node, fx.Node]:
    """(mean, variance) over the call's dims, in two passes."""
    dims, keep = reduced_dims(call), bool(call.args.get("keepdim", False))
    correction = call.args.get("correction")
    count = count_of(call, dims)
    freedom = max(count - (1 if correction is None else correction), 0)
    x = widened(emitter, call["self"])
    center = emitter.call("div.Scalar", emitter.call("sum.dim_IntList", x, dims, keepdim=True), count)
    apart = emitter.call("sub.Tensor", x, center)
    square = emitter.call("sum.dim_IntList", emitter.call("mul.Tensor", apart, apart), dims, keep)
    spread = emitter.call("div.Scalar", square, float(freedom))
    if not keep:
        center = emitter.call("reshape", center, list(spread.meta["val"].shape))
    return center, spread


def sums_squares(call: Call) -> bool:
    """Whether the call's variance is a plain sum over something."""
    return not call.tensors[0].meta["val"].is_complex() and math.prod(call.shapes[0]) > 0


def var(emitter: Emitter, call: Call) -> Any:
    """Var -> sum of squares / degrees of freedom."""
    return as_output(emitter, moments(emitter, call)[1], call) if sums_squares(call) else None


def std(emitter: Emitter, call: Call) -> Any:
    """Std -> sqrt(var)."""
    if not sums_squares(call):
        return None
    return as_output(emitter, emitter.call("sqrt", moments(emitter, call)[1]), call)


def var_mean(emitter: Emitter, call: Call) -> Any:
    """var_mean -> both moments."""
    if not sums_squares(call):
        return None
    center, spread = moments(emitter, call)
    return as_output(emitter, spread, call, 0), as_output(emitter, center, call, 1)


def std_mean(emitter: Emitter, call: Call) -> Any:
    """std_mean -> the square root of one moment, and the other."""
    if not sums_squares(call):
        return None
    center, spread = moments(emitter, call)
    return as_output(emitter, emitter.call("sqrt", spread), call, 0), as_output(emitter, center, call, 1)


def vector_norm(emitter: Emitter, call: Call) -> Any:
    """A norm -> a sum, maximum or minimum of powers of absolute values."""
    x = widened(emitter, call["self"], call.args.get("dtype"))
    return norm_of(emitter, call, x, reduced_dims(call))


def norm_of(emitter: Emitter, call: Call, x: fx.Node, dims: list[int]) -> Any:
    """The call's norm of ``x`` over ``dims``, or None where torch's own is needed."""
    given = call.args.get("ord", call.args.get("p"))
    order, keep = 2.0 if given is None else float(given), bool(call.args.get("keepdim", False))
    if not dims or x.meta["val"].numel() == 0:
        return None
    if order == 2 and not x.meta["val"].is_complex():
        total = emitter.call("sum.dim_IntList", emitter.call("mul.Tensor", x, x), dims, keep)
        return as_output(emitter, emitter.call("sqrt", total), call)
    size = emitter.call("abs", x)
    if math.isinf(order):
        return as_output(emitter, emitter.call("amax" if order > 0 else "amin", size, dims, keep), call)
    if order == 0:
        present = emitter.call("_to_copy", emitter.call("ne.Scalar", size, 0), dtype=size.meta["val"].dtype)
        return as_output(emitter, emitter.call("sum.dim_IntList", present, dims, keep), call)
    power = size if order == 1 else emitter.call("pow.Tensor_Scalar", size, order)
    total = emitter.call("sum.dim_IntList", power, dims, keep)
    return as_output(emitter, total if order == 1 else emitter.call("pow.Tensor_Scalar", total, 1 / order), call)


def dist(emitter: Emitter, call: Call) -> Any:
    """Dist -> the norm of the difference."""
    apart = widened(emitter, emitter.call("sub.Tensor", call["self"], call["other"]))
    return norm_of(emitter, call, apart, list(range(apart.meta["val"].dim())))


def nansum(emitter: Emitter, call: Call) -> Any:
    """Nansum -> sum, with zeros in place of what is not a number."""
    x, dims = call["self"], reduced_dims(call)
    clean = emitter.call("masked_fill.Scalar", x, emitter.call("isnan", x), 0)
    keep = bool(call.args.get("keepdim", False))
    return emitter.call("sum.dim_IntList", clean, dims, keep, dtype=call.args.get("dtype"))


def trace(emitter: Emitter, call: Call) -> Any:
    """Trace -> the sum of the diagonal."""
    return emitter.call("sum", emitter.call("diagonal", call["self"]))


def aminmax(emitter: Emitter, call: Call) -> Any:
    """Aminmax -> amin and amax, which combine over ranks in different ways."""
    dims, keep = reduced_dims(call), bool(call.args.get("keepdim", False))
    return tuple(emitter.call(op, call["self"], dims, keep) for op in ("amin", "amax"))


FORMS: Mapping[str, Rewrite] = {
    "aten::mean": mean,
    "aten::mean.dim": mean,
    "aten::var.correction": var,
    "aten::std.correction": std,
    "aten::var_mean.correction": var_mean,
    "aten::std_mean.correction": std_mean,
    "aten::linalg_vector_norm": vector_norm,
    "aten::norm.Scalar": vector_norm,
    "aten::norm.ScalarOpt_dim": vector_norm,
    "aten::norm.ScalarOpt_dtype": vector_norm,
    "aten::norm.ScalarOpt_dim_dtype": vector_norm,
    "aten::dist": dist,
    "aten::nansum": nansum,
    "aten::trace": trace,
    "aten::aminmax": aminmax,
}
