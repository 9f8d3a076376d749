"""Rows of element-wise operations: one factor a dim of the output, inputs broadcast against it.

Which arguments a call is linear in is data: a Partial value may pass through such an argument unreduced.
"""

from __future__ import annotations

import torch

from autopar.passes.rules.row import Call, Dims, Row
from autopar.passes.rules.views import dims_of
from autopar.passes.torch_ops import OpOverload, broadcast_shapes

aten = torch.ops.aten

# Argument positions (among the tensor arguments) that may be Partial together.  ``mul`` is linear in one argument at
# a time; adding a Python number is not linear at all.
LINEAR: dict[str, tuple[tuple[int, ...], ...]] = {
    "aten::add.Tensor": ((0, 1),),
    "aten::sub.Tensor": ((0, 1),),
    "aten::neg": ((0,),),
    "aten::mul.Tensor": ((0,), (1,)),
    "aten::mul.Scalar": ((0,),),
    "aten::div.Tensor": ((0,),),
    "aten::div.Scalar": ((0,),),
    "aten::clone": ((0,),),
    "aten::alias": ((0,),),
    "aten::detach": ((0,),),
    "aten::lift_fresh_copy": ((0,),),
    "aten::where.self": ((1, 2),),
    "aten::gelu_backward": ((0,),),
    "aten::silu_backward": ((0,),),
    "aten::tanh_backward": ((0,),),
    "aten::sigmoid_backward": ((0,),),
    "aten::threshold_backward": ((0,),),
    "aten::softplus_backward": ((0,),),
    "aten::elu_backward": ((0,),),
    "aten::leaky_relu_backward": ((0,),),
    "aten::hardswish_backward": ((0,),),
    "aten::hardsigmoid_backward": ((0,),),
    "aten::hardtanh_backward": ((0,),),
    "aten::native_dropout_backward": ((0,),),
    "aten::lerp.Scalar": ((0, 1),),
    "aten::real": ((0,),),
    "aten::imag": ((0,),),
    "aten::conj_physical": ((0,),),
    "aten::complex": ((0, 1),),
    "aten::addcmul": ((0, 1), (0, 2)),
    "aten::deg2rad": ((0,),),
    "aten::rad2deg": ((0,),),
    "aten::ldexp.Tensor": ((0,),),
    "aten::lerp.Tensor": ((0, 1),),
    "aten::log_sigmoid_backward": ((0,),),
    "aten::mish_backward": ((0,),),
    "aten::polar": ((0,),),
    "aten::addcdiv": ((0, 1),),
    "aten::_prelu_kernel_backward": ((0,),),
    "aten::rsub.Tensor": ((0, 1),),
    "aten::rrelu_with_noise_backward": ((0,),),
}

# Element-wise operations that torch does not tag as such.
UNTAGGED = frozenset(
    {
        "aten::_to_copy",
        "aten::clone",
        "aten::alias",
        "aten::detach",
        "aten::lift_fresh_copy",
        "aten::copy",
        "aten::native_dropout_backward",
        "aten::masked_fill.Scalar",
        "aten::masked_fill.Tensor",
        "aten::softplus_backward",
        "aten::elu_backward",
        "aten::leaky_relu_backward",
        "aten::hardswish_backward",
        "aten::hardsigmoid_backward",
        "aten::hardtanh_backward",
        "aten::gelu_backward",
        "aten::silu_backward",
        "aten::mish_backward",
        "aten::prelu",
        "aten::_prelu_kernel",
        "aten::_prelu_kernel_backward",
        "aten::log_sigmoid_forward",
        "aten::log_sigmoid_backward",
        "aten::view_as_real_copy",
        "aten::fill.Scalar",
        "aten::fill.Tensor",
        "aten::zeros_like",
        "aten::ones_like",
        "aten::full_like",
        "aten::empty_like",
        "aten::celu",
        "aten::heaviside",
        "aten::floor_divide",
        "aten::floor_divide.Scalar",
        "aten::rsub.Tensor",
        "aten::rsub.Scalar",
        "aten::hardswish",
        "aten::rrelu_with_noise_backward",
        "aten::complex",
        "aten::polar",
        "aten::conj_physical",
        "aten::nan_to_num",
        "aten::frac",
    }
)


def broadcast_dims(shape: tuple[int, ...], dims: list[tuple[str, ...]]) -> Dims:
    """Factors of an input that broadcasts against an output with ``dims``."""
    offset = len(dims) - len(shape)
    return tuple(() if size == 1 else dims[i + offset] for i, size in enumerate(shape))


def is_pointwise(op: OpOverload) -> bool:
    """Whether the operation is element-wise (torch's own tag, or our list) and functional."""
    name = op._schema.name + (f".{op._schema.overload_name}" if op._schema.overload_name else "")
    return (torch.Tag.pointwise in op.tags or name in UNTAGGED) and not op._schema.is_mutable


def pointwise_row(call: Call) -> Row:
    """Row of an element-wise call."""
    name = call.op._schema.name + (f".{call.op._schema.overload_name}" if call.op._schema.overload_name else "")
    shape = broadcast_shapes(s for s in call.out_shapes if s is not None)
    dims, sizes = dims_of(shape)
    outputs = tuple(None if s is None else broadcast_dims(s, dims) for s in call.out_shapes)
    linear = LINEAR.get(name, ())
    if name in ("aten::add.Tensor", "aten::sub.Tensor") and len(call.tensors) == 1:
        linear = ()
    if name in ("aten::mul.Tensor", "aten::div.Tensor") and len(call.tensors) == 1:
        linear = ((0,),)
    if name == "aten::div.Tensor_mode" and call.args.get("rounding_mode") is None:
        linear = ((0,),)
    if name in ("aten::masked_fill.Scalar",) and call["value"] == 0:
        linear = ((0,),)
    if name == "aten::_to_copy" and keeps_precision(call, 0):
        linear = ((0,),)
    if name == "aten::copy" and keeps_precision(call, 1):
        linear = ((1,),)
    if not all(o is None or o.dtype.is_floating_point or o.dtype.is_complex for o in call.outputs):
        linear = ()
    return Row(
        inputs=tuple(broadcast_dims(s, dims) for s in call.shapes),
        outputs=outputs,
        sizes=sizes,
        linear=tuple(frozenset(group) for group in linear),
    )


def keeps_precision(call: Call, index: int) -> bool:
    """Whether a cast of tensor ``index`` loses nothing, so that a sum may be taken after it."""
    output = call.outputs[0]
    if output is None:
        return False
    source, target = call.tensors[index].meta["val"].dtype, output.dtype
    if not (source.is_floating_point and target.is_floating_point):
        return False
    return torch.finfo(target).eps <= torch.finfo(source).eps and torch.finfo(target).max >= torch.finfo(source).max


def glu_row(call: Call) -> Row:
    """aten.glu and aten.glu_backward: the halves of ``dim`` are split alike."""
    backward = "backward" in call.op._schema.name
    full = call.shape("self")
    dim = call["dim"] % len(full)
    dims, sizes = dims_of(full)
    sizes.pop(f"d{dim}", None)
    sizes.update({"half": 2, "n": full[dim] // 2})
    inner = ("n",) if sizes["n"] != 1 else ()
    whole = (*dims[:dim], ("half", *inner), *dims[dim + 1 :])
    part = (*dims[:dim], inner, *dims[dim + 1 :])
    return Row(
        inputs=(part, whole) if backward else (whole,),
        outputs=(whole if backward else part,),
        sizes=sizes,
        nosplit=frozenset({"half"}),
        linear=(frozenset({0}),) if backward else (),
    )
