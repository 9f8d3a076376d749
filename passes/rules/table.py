"""The table of rules: the name of an ATen operation -> the function that makes its row.

Adding an operation is one line here (or :func:`register_rule` from outside).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from autopar.passes.rules import attention, factories, indexing, matmul, norms, pointwise, reductions, softmax, views
from autopar.passes.rules.row import Call, Row, parse_row
from autopar.passes.torch_ops import OpOverload

Rule = Callable[[Call], Row]

RULES: Mapping[str, Rule] = {
    # contractions
    "aten::mm": matmul.mm_row,
    "aten::bmm": matmul.bmm_row,
    "aten::dot": matmul.dot_row,
    "aten::vdot": matmul.dot_row,
    "aten::mv": matmul.mv_row,
    "aten::addmm": matmul.addmm_row,
    "aten::baddbmm": matmul.baddbmm_row,
    "aten::addmv": matmul.addmv_row,
    "aten::addbmm": matmul.addbmm_row,
    "aten::convolution": matmul.convolution_row,
    "aten::convolution_backward": matmul.convolution_backward_row,
    # attention
    "aten::_scaled_dot_product_flash_attention_for_cpu": attention.attention_row,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": attention.attention_backward_row,
    # views
    "aten::view": views.reshape_row,
    "aten::_unsafe_view": views.reshape_row,
    "aten::reshape": views.reshape_row,
    "aten::permute": views.permute_row,
    "aten::transpose.int": views.transpose_row,
    "aten::t": views.transpose_row,
    "aten::unsqueeze": views.unsqueeze_row,
    "aten::squeeze": views.squeeze_row,
    "aten::squeeze.dim": views.squeeze_row,
    "aten::squeeze.dims": views.squeeze_row,
    "aten::expand": views.expand_row,
    "aten::slice.Tensor": views.slice_row,
    "aten::slice_backward": views.slice_backward_row,
    "aten::slice_scatter": views.slice_scatter_row,
    "aten::select.int": views.select_row,
    "aten::select_backward": views.select_backward_row,
    "aten::select_scatter": views.select_scatter_row,
    "aten::split.Tensor": views.split_row,
    "aten::split_with_sizes": views.split_row,
    "aten::cat": views.cat_row,
    "aten::stack": views.stack_row,
    "aten::unbind.int": views.unbind_row,
    "aten::constant_pad_nd": views.pad_row,
    "aten::flip": views.flip_row,
    "aten::roll": views.flip_row,
    "aten::tril": views.triangle_row,
    "aten::triu": views.triangle_row,
    "aten::repeat": views.repeat_row,
    "aten::diagonal": views.diagonal_row,
    "aten::unfold": views.unfold_row,
    # norms
    "aten::native_layer_norm": norms.layer_norm_row,
    "aten::native_layer_norm_backward": norms.layer_norm_backward_row,
    "aten::_fused_rms_norm": norms.rms_norm_row,
    "aten::_fused_rms_norm_backward": norms.rms_norm_backward_row,
    "aten::native_group_norm": norms.group_norm_row,
    "aten::native_group_norm_backward": norms.group_norm_backward_row,
    "aten::native_batch_norm": norms.batch_norm_row,
    "aten::_native_batch_norm_legit": norms.batch_norm_row,
    "aten::_native_batch_norm_legit.no_stats": norms.batch_norm_row,
    "aten::_native_batch_norm_legit_functional": norms.batch_norm_row,
    "aten::_native_batch_norm_legit_no_training": norms.batch_norm_row,
    "aten::native_batch_norm_backward": norms.batch_norm_row,
    # softmax and losses
    "aten::_softmax": softmax.softmax_row,
    "aten::_log_softmax": softmax.softmax_row,
    "aten::_safe_softmax": softmax.softmax_row,
    "aten::_softmax_backward_data": softmax.softmax_backward_row,
    "aten::_log_softmax_backward_data": softmax.softmax_backward_row,
    "aten::nll_loss_forward": softmax.nll_forward_row,
    "aten::nll_loss2d_forward": softmax.nll_forward_row,
    "aten::nll_loss_backward": softmax.nll_backward_row,
    "aten::nll_loss2d_backward": softmax.nll_backward_row,
    "aten::mse_loss": softmax.elementwise_loss_row,
    "aten::mse_loss_backward": softmax.elementwise_loss_row,
    "aten::smooth_l1_loss": softmax.elementwise_loss_row,
    "aten::smooth_l1_loss_backward": softmax.elementwise_loss_row,
    "aten::huber_loss": softmax.elementwise_loss_row,
    "aten::huber_loss_backward": softmax.elementwise_loss_row,
    "aten::binary_cross_entropy": softmax.elementwise_loss_row,
    "aten::binary_cross_entropy_backward": softmax.elementwise_loss_row,
    "aten::soft_margin_loss": softmax.elementwise_loss_row,
    "aten::soft_margin_loss_backward": softmax.elementwise_loss_row,
    # reductions
    "aten::sum": reductions.reduction("sum", linear=True),
    "aten::sum.dim_IntList": reductions.reduction("sum", linear=True),
    "aten::mean": reductions.reduction(None, linear=True),
    "aten::mean.dim": reductions.reduction(None, linear=True),
    "aten::amax": reductions.reduction("max"),
    "aten::amin": reductions.reduction("min"),
    "aten::max": reductions.reduction("max"),
    "aten::min": reductions.reduction("min"),
    "aten::any": reductions.reduction("max"),
    "aten::any.dim": reductions.reduction("max"),
    "aten::any.dims": reductions.reduction("max"),
    "aten::all": reductions.reduction("min"),
    "aten::all.dim": reductions.reduction("min"),
    "aten::all.dims": reductions.reduction("min"),
    "aten::max.dim": reductions.reduction(None),
    "aten::min.dim": reductions.reduction(None),
    "aten::argmax": reductions.reduction(None),
    "aten::argmin": reductions.reduction(None),
    "aten::prod": reductions.reduction(None),
    "aten::prod.dim_int": reductions.reduction(None),
    "aten::var.correction": reductions.reduction(None),
    "aten::var_mean.correction": reductions.reduction(None),
    "aten::std.correction": reductions.reduction(None),
    "aten::linalg_vector_norm": reductions.reduction(None),
    "aten::logsumexp": reductions.logsumexp_row,
    "aten::cumsum": reductions.scan_row(linear=True),
    "aten::cumprod": reductions.scan_row(linear=False),
    "aten::cummax": reductions.scan_row(linear=False),
    "aten::cummin": reductions.scan_row(linear=False),
    "aten::logcumsumexp": reductions.scan_row(linear=False),
    "aten::topk": reductions.sort_like_row,
    "aten::sort": reductions.sort_like_row,
    "aten::sort.stable": reductions.sort_like_row,
    "aten::kthvalue": reductions.sort_like_row,
    "aten::median.dim": reductions.sort_like_row,
    "aten::mode": reductions.sort_like_row,
    # look-ups
    "aten::embedding": indexing.embedding_row,
    "aten::embedding_dense_backward": indexing.embedding_backward_row,
    "aten::gather": indexing.gather_row,
    "aten::scatter.src": indexing.scatter_row,
    "aten::scatter.value": indexing.scatter_row,
    "aten::scatter_add": indexing.scatter_row,
    "aten::scatter_reduce.two": indexing.scatter_row,
    "aten::index_select": indexing.index_select_row,
    "aten::index.Tensor": indexing.index_row,
    "aten::_unsafe_index.Tensor": indexing.index_row,
    "aten::index_put": indexing.index_put_row,
    "aten::_unsafe_index_put": indexing.index_put_row,
    "aten::index_add": indexing.index_add_row,
    # pooling and resampling
    "aten::avg_pool2d": matmul.pool_row,
    "aten::avg_pool2d_backward": matmul.pool_row,
    "aten::avg_pool3d": matmul.pool_row,
    "aten::avg_pool3d_backward": matmul.pool_row,
    "aten::max_pool2d_with_indices": matmul.pool_row,
    "aten::max_pool2d_with_indices_backward": matmul.pool_row,
    "aten::max_pool3d_with_indices": matmul.pool_row,
    "aten::max_pool3d_with_indices_backward": matmul.pool_row,
    "aten::_adaptive_avg_pool2d": matmul.pool_row,
    "aten::_adaptive_avg_pool2d_backward": matmul.pool_row,
    "aten::adaptive_max_pool2d": matmul.pool_row,
    "aten::adaptive_max_pool2d_backward": matmul.pool_row,
    "aten::reflection_pad1d": matmul.pool_row,
    "aten::reflection_pad2d": matmul.pool_row,
    "aten::replication_pad2d": matmul.pool_row,
    "aten::upsample_nearest1d": matmul.pool_row,
    "aten::upsample_nearest1d_backward": matmul.pool_row,
    "aten::upsample_nearest2d": matmul.pool_row,
    "aten::upsample_nearest2d_backward": matmul.pool_row,
    "aten::upsample_bilinear2d": matmul.pool_row,
    "aten::upsample_bilinear2d_backward": matmul.pool_row,
    "aten::upsample_bicubic2d": matmul.pool_row,
    "aten::upsample_bicubic2d_backward": matmul.pool_row,
    # tensors from nothing
    "aten::full": factories.constant_row,
    "aten::zeros": factories.constant_row,
    "aten::ones": factories.constant_row,
    "aten::empty.memory_format": factories.constant_row,
    "aten::scalar_tensor": factories.constant_row,
    "aten::arange": factories.range_row,
    "aten::arange.start": factories.range_row,
    "aten::arange.start_step": factories.range_row,
    "aten::linspace": factories.range_row,
    "aten::logspace": factories.range_row,
    "aten::eye": factories.range_row,
    "aten::eye.m": factories.range_row,
    "aten::native_dropout": softmax.dropout_row,
    "aten::rand": factories.random_factory_row,
    "aten::randn": factories.random_factory_row,
    "aten::randint": factories.random_factory_row,
    "aten::randint.low": factories.random_factory_row,
    "aten::rand_like": factories.random_factory_row,
    "aten::randn_like": factories.random_factory_row,
    "aten::randint_like": factories.random_factory_row,
    "aten::randint_like.low_dtype": factories.random_factory_row,
    "aten::bernoulli": factories.whole_random_row,
    "aten::bernoulli.p": factories.random_factory_row,
    "aten::normal.Tensor_float": factories.whole_random_row,
    "aten::normal.float_Tensor": factories.whole_random_row,
    "aten::normal.Tensor_Tensor": factories.whole_random_row,
    "aten::normal_functional": factories.random_factory_row,
    "aten::uniform": factories.random_factory_row,
    "aten::exponential": factories.random_factory_row,
    "aten::poisson": factories.whole_random_row,
    "aten::randperm": factories.whole_random_row,
    "aten::multinomial": factories.whole_random_row,
}


class RuleTable:
    """Rules by operation name; user rules are added to a copy."""

    def __init__(self, rules: Mapping[str, Rule] = RULES) -> None:
        self._rules = dict(rules)

    def register(self, op: OpOverload | str, row: str | Rule) -> None:
        """Add or replace the rule of an operation; ``row`` is row text or a function of the call."""
        name = op if isinstance(op, str) else op_name(op)
        if isinstance(row, str):
            text = row
            self._rules[name] = lambda call: parse_row(text, call.shapes)
        else:
            self._rules[name] = row

    def row(self, call: Call) -> Row | None:
        """The row of a call, or None where no rule is known."""
        rule = self._rules.get(op_name(call.op))
        if rule is not None:
            return rule(call)
        return pointwise.pointwise_row(call) if pointwise.is_pointwise(call.op) and call.outputs[0] is not None else None


def op_name(op: OpOverload) -> str:
    """"aten::add.Tensor" of ``torch.ops.aten.add.Tensor``.

    >>> import torch
    >>> op_name(torch.ops.aten.add.Tensor), op_name(torch.ops.aten.mm.default)
    ('aten::add.Tensor', 'aten::mm')
    """
    overload = op._schema.overload_name
    return op._schema.name + (f".{overload}" if overload else "")


def rows_of(graph: fx.Graph, table: RuleTable) -> tuple[dict[fx.Node, Row], list[fx.Node]]:
    """Rows of all calls of a graph, and the calls that have none (they run replicated)."""
    rows: dict[fx.Node, Row] = {}
    unknown: list[fx.Node] = []
    known: dict[Any, Row | None] = {}  # layers repeat each other: equal calls share one row
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        key = (node.target, signature(node.args), signature(node.kwargs), signature(node.meta["val"]))
        if key not in known:
            call = Call(node)
            row = table.row(call)
            known[key] = row
            known[key, "opaque"] = views.opaque_row(call) if row is None else None
        found = known[key]
        if found is None:
            unknown.append(node)
            found = known[key, "opaque"]
        rows[node] = found  # type: ignore[assignment]
    return rows, unknown


def signature(item: Any) -> Any:
    """All of an argument that a row may depend on: shapes and dtypes of tensors, other values themselves."""
    if isinstance(item, fx.Node):
        return ("node", signature(item.meta.get("val")))
    if isinstance(item, torch.Tensor):
        return (tuple(item.shape), item.dtype)
    if isinstance(item, (list, tuple)):
        return tuple(signature(i) for i in item)
    if isinstance(item, dict):
        return tuple((k, signature(v)) for k, v in item.items())
    return (type(item).__name__, str(item))
