"""Rewrites that leave the numbers alone and give operations a form that can be split.

* means become sums over a global count; losses averaged over valid targets become sums over the total weight
* variances and norms become sums
* constants shaped like another tensor stop depending on that tensor
* training batch norms become sums over the batch, where the batch is to be split
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.passes.base import StepGraph
from autopar.passes.lowering import Emitter
from autopar.passes.partition import fake_mode_of
from autopar.passes.rules.reductions import reduced_dims
from autopar.passes.rules.row import Call, is_getitem
from autopar.passes.rules.table import op_name
from autopar.passes.torch_ops import LazyGraphModule, OpOverload

MEAN, SUM = 1, 2
NARROW = (torch.float16, torch.bfloat16)  # dtypes that torch itself sums in float32
Rewrite = Callable[[Emitter, Call], Any]


@dataclass(frozen=True, slots=True)
class Normalize:
    """The pass.  ``split_batch``: the batch will be split, so training batch norms are written as sums."""

    split_batch: bool = True

    def __call__(self, step: StepGraph) -> StepGraph:
        """A copy of ``step`` in normal form."""
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        graph.graph_copy(step.graph, mapping)
        output = step.graph.output_node()
        graph.output(fx.node.map_arg(output.args[0], lambda n: mapping[n]))
        for old, new in mapping.items():
            new.meta = dict(old.meta)
        emitter = Emitter(graph, fake_mode_of(step))
        for node in list(graph.nodes):
            if node.op == "call_function" and isinstance(node.target, OpOverload):
                self._rewrite(graph, node, emitter)
        graph.eliminate_dead_code(is_impure_node=must_stay)
        graph.lint()
        return replace(step, graph_module=LazyGraphModule(step.graph_module, graph))

    def _rewrite(self, graph: fx.Graph, node: fx.Node, emitter: Emitter) -> None:
        name = op_name(node.target)  # type: ignore[arg-type]
        rule = REWRITES.get(name) or (BATCH_NORMS.get(name) if self.split_batch else None)
        if rule is None:
            return
        with graph.inserting_before(node):
            emitter.describe(node)
            new = rule(emitter, Call(node))
        if new is None:
            return
        if isinstance(new, fx.Node):
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            return
        for user in list(node.users):
            if not is_getitem(user):
                continue
            user.replace_all_uses_with(new[user.args[1]])  # type: ignore[index]
            graph.erase_node(user)
        graph.erase_node(node)


def must_stay(node: fx.Node) -> bool:
    """Whether a node stays though nobody uses it: a draw moves the generator on for those after it."""
    return node.op in ("placeholder", "output") or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def count_of(call: Call, dims: list[int]) -> int:
    """Elements of the first tensor argument along ``dims``."""
    return math.prod(call.shapes[0][d] for d in dims)


def widened(emitter: Emitter, x: fx.Node, dtype: torch.dtype | None = None) -> fx.Node:
    """``x`` as it is summed: in ``dtype`` where that is asked for, and in float32 where its own is narrower."""
    have = x.meta["val"].dtype
    want = have if dtype is None else dtype
    want = torch.float32 if want in NARROW else want
    return x if want == have else emitter.call("_to_copy", x, dtype=want)


def as_output(emitter: Emitter, x: fx.Node, call: Call, index: int = 0) -> fx.Node:
    """``x`` in the dtype of the call's output ``index``."""
    out = call.outputs[index]
    if out is None or out.dtype == x.meta["val"].dtype:
        return x
    return emitter.call("_to_copy", x, dtype=out.dtype)


def mean(emitter: Emitter, call: Call) -> Any:
    """mean -> sum / count."""
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
    center = emitter.call("div.Scalar", emitter.call("sum.dim_IntList", x, dims, True), count)
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
    """var -> sum of squares / degrees of freedom."""
    return as_output(emitter, moments(emitter, call)[1], call) if sums_squares(call) else None


def std(emitter: Emitter, call: Call) -> Any:
    """std -> sqrt(var)."""
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
    order, dims, keep = float(call.args.get("ord", 2)), reduced_dims(call), bool(call.args.get("keepdim", False))
    if not dims or math.prod(call.shapes[0]) == 0:
        return None
    x = widened(emitter, call["self"], call.args.get("dtype"))
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


def with_sum(call: Call) -> tuple[list[Any], dict[str, Any]]:
    """The call's arguments with reduction sum."""
    args = [SUM if a.name == "reduction" else call[a.name] for a in call.op._schema.arguments if not a.kwarg_only]
    kwargs = {a.name: call[a.name] for a in call.op._schema.arguments if a.kwarg_only}
    return args, kwargs


def loss_mean(emitter: Emitter, call: Call) -> Any:
    """An element-wise loss averaged over all elements -> sum / count."""
    if call["reduction"] != MEAN:
        return None
    args, kwargs = with_sum(call)
    shape = torch.broadcast_shapes(*call.shapes[:2])
    return emitter.call("div.Scalar", emitter.call(call.op, *args, **kwargs), max(math.prod(shape), 1))


def loss_mean_backward(emitter: Emitter, call: Call) -> Any:
    """The backward of :func:`loss_mean`."""
    if call["reduction"] != MEAN:
        return None
    args, kwargs = with_sum(call)
    shape = torch.broadcast_shapes(*call.shapes[1:3])
    args[0] = emitter.call("div.Scalar", args[0], max(math.prod(shape), 1))
    return emitter.call(call.op, *args, **kwargs)


def filled(value: Any) -> Rewrite:
    """A rewrite of *_like and new_* calls to ``full``; ``value`` is a number or the name of the argument that holds it."""

    def rewrite(emitter: Emitter, call: Call) -> Any:
        out = call.outputs[0]
        fill = call[value] if isinstance(value, str) else value
        if out is None or isinstance(fill, fx.Node):
            return None
        if out.dtype == torch.bool:
            fill = bool(fill)
        return emitter.call("full", list(out.shape), fill, dtype=out.dtype, device=out.device)

    return rewrite


def identity(emitter: Emitter, call: Call) -> Any:
    """Operations that only matter to autograd."""
    return call.tensors[0]


def batch_norm_forward(emitter: Emitter, call: Call) -> Any:
    """Training statistics as sums over the batch: (output, mean, invstd, new running mean, new running variance)."""
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
    center = emitter.call("div.Scalar", emitter.call("sum.dim_IntList", x, dims, True), count)
    apart = emitter.call("sub.Tensor", x, center)
    square = emitter.call("sum.dim_IntList", emitter.call("mul.Tensor", apart, apart), dims, True)
    spread = emitter.call("div.Scalar", square, count)
    scale = emitter.call("rsqrt", emitter.call("add.Scalar", spread, call["eps"]))
    out = affine(emitter, call, emitter.call("mul.Tensor", apart, scale), len(shape))
    if out.meta["val"].dtype != call.outputs[0].dtype:  # type: ignore[union-attr]
        out = emitter.call("_to_copy", out, dtype=call.outputs[0].dtype)  # type: ignore[union-attr]
    channels = [shape[1]]
    results = [out, emitter.call("reshape", center, channels), emitter.call("reshape", scale, channels)]
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
    """weight * x + bias, where the call has them."""
    if call.has("weight"):
        x = emitter.call("mul.Tensor", x, per_channel(emitter, call["weight"], rank))
    if call.has("bias"):
        x = emitter.call("add.Tensor", x, per_channel(emitter, call["bias"], rank))
    return x


def batch_norm_backward(emitter: Emitter, call: Call) -> Any:
    """Gradients of input, weight and bias of a training batch norm, as sums over the batch."""
    if not call.args.get("train", True):
        return None
    grad, x = call["grad_out"], call["input"]
    shape = call.shape("input")
    rank, dtype = len(shape), x.meta["val"].dtype
    dims = [d for d in range(rank) if d != 1]
    count = math.prod(shape[d] for d in dims)
    if dtype in NARROW:
        grad, x = (emitter.call("_to_copy", t, dtype=torch.float32) for t in (grad, x))
    scale = per_channel(emitter, call["save_invstd"], rank)
    normal = emitter.call(
        "mul.Tensor", emitter.call("sub.Tensor", x, per_channel(emitter, call["save_mean"], rank)), scale
    )
    total = emitter.call("sum.dim_IntList", grad, dims, True)
    product = emitter.call("sum.dim_IntList", emitter.call("mul.Tensor", grad, normal), dims, True)
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


REWRITES: Mapping[str, Rewrite] = {
    "aten::mean": mean,
    "aten::mean.dim": mean,
    "aten::var.correction": var,
    "aten::std.correction": std,
    "aten::var_mean.correction": var_mean,
    "aten::std_mean.correction": std_mean,
    "aten::linalg_vector_norm": vector_norm,
    "aten::nll_loss_forward": nll_forward,
    "aten::nll_loss2d_forward": nll_forward,
    "aten::nll_loss_backward": nll_backward,
    "aten::nll_loss2d_backward": nll_backward,
    "aten::mse_loss": loss_mean,
    "aten::smooth_l1_loss": loss_mean,
    "aten::huber_loss": loss_mean,
    "aten::binary_cross_entropy": loss_mean,
    "aten::soft_margin_loss": loss_mean,
    "aten::mse_loss_backward": loss_mean_backward,
    "aten::smooth_l1_loss_backward": loss_mean_backward,
    "aten::huber_loss_backward": loss_mean_backward,
    "aten::binary_cross_entropy_backward": loss_mean_backward,
    "aten::soft_margin_loss_backward": loss_mean_backward,
    "aten::zeros_like": filled(0),
    "aten::ones_like": filled(1),
    "aten::full_like": filled("fill_value"),
    "aten::empty_like": filled(0),
    "aten::new_zeros": filled(0),
    "aten::new_ones": filled(1),
    "aten::new_full": filled("fill_value"),
    "aten::new_empty": filled(0),
    "aten::new_empty_strided": filled(0),
    "aten::detach": identity,
    "aten::alias": identity,
    "aten::lift_fresh_copy": identity,
}

BATCH_NORMS: Mapping[str, Rewrite] = {
    "aten::_native_batch_norm_legit_functional": batch_norm_forward,
    "aten::_native_batch_norm_legit.no_stats": batch_norm_forward,
    "aten::native_batch_norm_backward": batch_norm_backward,
}
