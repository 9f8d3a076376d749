"""The table of rules: the name of an ATen operation -> the function that makes its row.

Adding an operation is one line here (or :func:`register_rule` from outside).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from autopar.passes.rules import (
    attention,
    batched,
    diagonals,
    factories,
    indexing,
    matmul,
    norms,
    pointwise,
    reductions,
    softmax,
    spatial,
    views,
)
from autopar.passes.rules.row import Call, Row, parse_row
from autopar.passes.torch_ops import OpOverload

Rule = Callable[[Call], Row]

UNSUMMED = (
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
)

PLACES = """
    avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward
    max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices max_pool3d_with_indices_backward
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
    adaptive_max_pool2d adaptive_max_pool2d_backward adaptive_max_pool3d adaptive_max_pool3d_backward
    fractional_max_pool2d fractional_max_pool2d_backward fractional_max_pool3d fractional_max_pool3d_backward
    reflection_pad1d reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward
    reflection_pad3d reflection_pad3d_backward replication_pad1d replication_pad1d_backward
    replication_pad2d replication_pad2d_backward replication_pad3d replication_pad3d_backward
    upsample_nearest1d upsample_nearest1d_backward upsample_nearest2d upsample_nearest2d_backward
    upsample_nearest3d upsample_nearest3d_backward _upsample_nearest_exact1d _upsample_nearest_exact1d_backward
    _upsample_nearest_exact2d _upsample_nearest_exact2d_backward _upsample_nearest_exact3d
    _upsample_nearest_exact3d_backward upsample_linear1d upsample_linear1d_backward
    upsample_bilinear2d upsample_bilinear2d_backward upsample_bicubic2d upsample_bicubic2d_backward
    upsample_trilinear3d upsample_trilinear3d_backward _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward
    _upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward
""".split()  # noqa: SIM905 - fifty names read better as text

RULES: Mapping[str, Rule] = {
    # contractions
    "aten::mm": matmul.mm_row,
    "aten::bmm": matmul.bmm_row,
    # What the experts of the transformers library call where torch's own grouped product is not to be had.
    "transformers::grouped_mm_fallback": matmul.grouped_mm_row,
    "transformers::grouped_mm_fallback_backward": matmul.grouped_mm_backward_row,
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
    "aten::tril": diagonals.triangle_row,
    "aten::triu": diagonals.triangle_row,
    "aten::repeat": views.repeat_row,
    "aten::as_strided": views.strided_row,
    "aten::as_strided_scatter": views.strided_row,
    "aten::diagonal": diagonals.diagonal_row,
    "aten::unfold": diagonals.unfold_row,
    "aten::unfold_backward": diagonals.unfold_backward_row,
    "aten::diagonal_backward": diagonals.diagonal_backward_row,
    "aten::diagonal_scatter": diagonals.diagonal_scatter_row,
    "aten::diag_embed": diagonals.diag_embed_row,
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
    "aten::_batch_norm_with_update_functional": norms.batch_norm_row,
    "aten::batch_norm_backward": norms.batch_norm_row,
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
    "aten::binary_cross_entropy_with_logits": softmax.elementwise_loss_row,
    "aten::glu": pointwise.glu_row,
    "aten::glu_backward": pointwise.glu_row,
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
    "aten::max.dim": reductions.pick_row,
    "aten::min.dim": reductions.pick_row,
    "aten::argmax": reductions.pick_row,
    "aten::argmin": reductions.pick_row,
    "aten::prod": reductions.prod_row,
    "aten::prod.dim_int": reductions.prod_row,
    "aten::var.correction": reductions.reduction(None),
    "aten::var_mean.correction": reductions.reduction(None),
    "aten::std.correction": reductions.reduction(None),
    "aten::linalg_vector_norm": reductions.reduction(None),
    "aten::count_nonzero": reductions.reduction("sum"),
    "aten::count_nonzero.dim_IntList": reductions.reduction("sum"),
    "aten::logsumexp": reductions.logsumexp_row,
    "aten::cumsum": reductions.cumsum_row,
    "aten::cumprod": reductions.scan_row(linear=False),
    "aten::cummax": reductions.scan_row(linear=False),
    "aten::cummin": reductions.scan_row(linear=False),
    "aten::logcumsumexp": reductions.scan_row(linear=False),
    "aten::topk": reductions.sort_like_row,
    "aten::sort": reductions.sort_like_row,
    "aten::sort.stable": reductions.sort_like_row,
    "aten::kthvalue": reductions.sort_like_row,
    "aten::median.dim": reductions.sort_like_row,
    "aten::nanmedian.dim": reductions.sort_like_row,
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
    "aten::index_fill.int_Scalar": indexing.along_index_row,
    "aten::index_fill.int_Tensor": indexing.along_index_row,
    "aten::index_copy": indexing.along_index_row,
    "aten::index_reduce": indexing.along_index_row,
    "aten::_embedding_bag": indexing.bag_row,
    "aten::_embedding_bag_backward": indexing.bag_backward_row,
    "aten::_embedding_bag_per_sample_weights_backward": indexing.bag_weights_backward_row,
    # places: pooling, padding, resampling, patches
    **{f"aten::{name}": spatial.pool_row for name in PLACES},
    "aten::max_unpool2d": spatial.unpool_row,
    "aten::max_unpool3d": spatial.unpool_row,
    "aten::im2col": spatial.patches_row,
    "aten::col2im": spatial.patches_row,
    "aten::grid_sampler_2d": spatial.sampler_row,
    "aten::grid_sampler_3d": spatial.sampler_row,
    "aten::grid_sampler_2d_backward": spatial.sampler_backward_row,
    "aten::grid_sampler_3d_backward": spatial.sampler_backward_row,
    # batches of matrices, transforms, distances
    "aten::linalg_solve_triangular": batched.solving({"self": 2, "B": 2}, "B"),
    "aten::triangular_solve": batched.solving({"self": 2, "A": 2}, "self", (2,)),
    "aten::_linalg_solve_ex": batched.solve_row,
    "aten::_linalg_svd": batched.batched({"A": 2}, (2, 1, 2)),
    "aten::_linalg_eigh": batched.batched({"A": 2}, (1, 2)),
    "aten::linalg_eig": batched.batched({"self": 2}, (1, 2)),
    "aten::linalg_qr": batched.batched({"A": 2}, (2, 2)),
    "aten::linalg_lu": batched.batched({"A": 2}, (2, 2, 2)),
    "aten::linalg_lu_factor_ex": batched.batched({"A": 2}, (2, 1, 0)),
    "aten::linalg_lu_solve": batched.solving({"LU": 2, "pivots": 1, "B": 2}, "B"),
    "aten::lu_unpack": batched.batched({"LU_data": 2, "LU_pivots": 1}, (2, 2, 2)),
    "aten::linalg_ldl_factor_ex": batched.batched({"self": 2}, (2, 1, 0)),
    "aten::linalg_ldl_solve": batched.solving({"LD": 2, "pivots": 1, "B": 2}, "B"),
    "aten::linalg_cholesky_ex": batched.batched({"self": 2}, (2, 0)),
    "aten::cholesky": batched.batched({"self": 2}, (2,)),
    "aten::cholesky_inverse": batched.batched({"self": 2}, (2,)),
    "aten::cholesky_solve": batched.solving({"self": 2, "input2": 2}, "self"),
    "aten::linalg_inv_ex": batched.batched({"A": 2}, (2, 0)),
    "aten::linalg_pinv.atol_rtol_tensor": batched.batched({"self": 2, "atol": 0, "rtol": 0}, (2,)),
    "aten::_linalg_det": batched.batched({"A": 2}, (0, 2, 1)),
    "aten::_linalg_slogdet": batched.batched({"A": 2}, (0, 0, 2, 1)),
    "aten::linalg_matrix_exp": batched.batched({"self": 2}, (2,)),
    "aten::linalg_householder_product": batched.batched({"input": 2, "tau": 1}, (2,)),
    "aten::geqrf": batched.batched({"self": 2}, (2, 1)),
    "aten::ormqr": batched.solving({"self": 2, "input2": 1, "input3": 2}, "input3"),
    "aten::linalg_cross": batched.cross_row,
    "aten::addr": batched.addr_row,
    "aten::_trilinear": batched.trilinear_row,
    "aten::_cdist_forward": batched.cdist_row,
    "aten::_cdist_backward": batched.cdist_backward_row,
    "aten::_fft_c2c": batched.transform_row,
    "aten::_fft_r2c": batched.transform_row,
    "aten::_fft_c2r": batched.transform_row,
    "aten::view_as_real": batched.parts_row,
    "aten::view_as_complex": batched.parts_row,
    "aten::view.dtype": batched.bits_row,
    "aten::isin.Tensor_Tensor": batched.members_row("test_elements"),
    "aten::bucketize.Tensor": batched.members_row("boundaries"),
    "aten::searchsorted.Tensor": batched.searchsorted_row,
    "aten::histc": batched.histogram_row,
    "aten::segment_reduce": batched.segments_row,
    "aten::_segment_reduce_backward": batched.segments_row,
    "aten::take": batched.members_row("self", linear=views.LINEAR_IN_FIRST),
    "aten::renorm": batched.renorm_row,
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
    "aten::linspace.Tensor_Tensor": factories.range_row,
    "aten::linspace.Tensor_Scalar": factories.range_row,
    "aten::linspace.Scalar_Tensor": factories.range_row,
    "aten::logspace.Tensor_Tensor": factories.range_row,
    "aten::logspace.Tensor_Scalar": factories.range_row,
    "aten::logspace.Scalar_Tensor": factories.range_row,
    "aten::tril_indices": factories.range_row,
    "aten::triu_indices": factories.range_row,
    "aten::normal.float_float": factories.random_factory_row,
    "aten::rrelu_with_noise_functional": factories.random_factory_row,
    "aten::rand": factories.random_factory_row,
    "aten::randn": factories.random_factory_row,
    "aten::randint": factories.random_factory_row,
    "aten::randint.low": factories.random_factory_row,
    "aten::rand_like": factories.random_factory_row,
    "aten::randn_like": factories.random_factory_row,
    "aten::randint_like": factories.random_factory_row,
    "aten::randint_like.low_dtype": factories.random_factory_row,
    "aten::bernoulli": factories.random_factory_row,
    "aten::bernoulli.p": factories.random_factory_row,
    "aten::normal.Tensor_float": factories.random_factory_row,
    "aten::normal.float_Tensor": factories.random_factory_row,
    "aten::normal.Tensor_Tensor": factories.random_factory_row,
    "aten::normal_functional": factories.random_factory_row,
    "aten::uniform": factories.random_factory_row,
    "aten::exponential": factories.random_factory_row,
    "aten::cauchy": factories.random_factory_row,
    "aten::geometric": factories.random_factory_row,
    "aten::log_normal": factories.random_factory_row,
    "aten::binomial": factories.random_factory_row,
    "aten::poisson": factories.random_factory_row,
    "aten::randperm": factories.whole_random_row,
    "aten::multinomial": batched.samples_row,
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

    def forget(self, name: str) -> None:
        """Drop the rule of the operation called ``name``, if there is one."""
        self._rules.pop(name, None)

    def knows(self, name: str) -> bool:
        """Whether the operation called ``name`` has a rule of its own here."""
        return name in self._rules

    def row(self, call: Call) -> Row | None:
        """The row of a call, or None where no rule is known."""
        rule = self._rules.get(op_name(call.op))
        if rule is None and pointwise.is_pointwise(call.op) and call.outputs[0] is not None:
            rule = pointwise.pointwise_row
        if rule is None:
            return None
        row = rule(call)
        return row if can_be_partial(call) else row.with_(linear=())


def can_be_partial(call: Call) -> bool:
    """Whether sums over ranks can be taken of what the call gives: float8 and large unsigned numbers have no sum."""
    return all(o is None or o.dtype not in UNSUMMED for o in call.outputs)


def op_name(op: OpOverload) -> str:
    """Name "aten::add.Tensor" of ``torch.ops.aten.add.Tensor``.

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
