"""Rows of normalisations: the normalised dims stay whole, all others are free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autopar.passes.rules.row import Call, Dims, Row
from autopar.passes.rules.views import dims_of

if TYPE_CHECKING:
    from autopar.passes.lowering import LocalContext


def linear_in_gradient(mask: Sequence[bool]) -> tuple[frozenset[int], ...]:
    """Backward is linear in the gradient that comes in, which is the first argument.

    Not said where gradients of weight and bias are asked for too (the rest of ``mask``): a partial sum passed through
    would be reduced once an output, and taken before it is reduced once.
    """
    return () if any(mask[1:]) else (frozenset({0}),)


def layer_norm_dims(call: Call) -> tuple[list[tuple[str, ...]], dict[str, int], int]:
    """(dims of the input, sizes, number of leading dims)."""
    shape = call.shape("input")
    dims, sizes = dims_of(shape)
    return dims, sizes, len(shape) - len(call["normalized_shape"])


def layer_norm_row(call: Call) -> Row:
    """aten.native_layer_norm: input, weight, bias -> output, mean, rstd."""
    dims, sizes, lead = layer_norm_dims(call)
    stat = (*dims[:lead], *(() for _ in dims[lead:]))
    inputs: list[Dims] = [tuple(dims)]
    inputs += [tuple(dims[lead:]) for name in ("weight", "bias") if call.has(name)]
    return Row(
        inputs=tuple(inputs),
        outputs=(tuple(dims), stat, stat),
        sizes=sizes,
        nosplit=frozenset(f for d in dims[lead:] for f in d),
    )


def layer_norm_backward_row(call: Call) -> Row:
    """aten.native_layer_norm_backward: gradients of weight and bias are sums over the leading dims."""
    dims, sizes, lead = layer_norm_dims(call)
    stat = (*dims[:lead], *(() for _ in dims[lead:]))
    inputs: list[Dims] = [tuple(dims), tuple(dims), stat, stat]
    inputs += [tuple(dims[lead:]) for name in ("weight", "bias") if call.has(name)]
    mask = call["output_mask"]
    tail = tuple(dims[lead:])
    return Row(
        inputs=tuple(inputs),
        outputs=(tuple(dims) if mask[0] else None, tail if mask[1] else None, tail if mask[2] else None),
        sizes=sizes,
        linear=linear_in_gradient(mask),
        reduce={f: "sum" for d in dims[:lead] for f in d},
        nosplit=frozenset(f for d in dims[lead:] for f in d),
    )


def rms_norm_row(call: Call) -> Row:
    """aten._fused_rms_norm: input, weight -> output, rstd."""
    dims, sizes, lead = layer_norm_dims(call)
    stat = (*dims[:lead], *(() for _ in dims[lead:]))
    inputs: list[Dims] = [tuple(dims)]
    inputs += [tuple(dims[lead:]) for name in ("weight",) if call.has(name)]
    return Row(
        inputs=tuple(inputs),
        outputs=(tuple(dims), stat),
        sizes=sizes,
        nosplit=frozenset(f for d in dims[lead:] for f in d),
    )


def rms_norm_backward_row(call: Call) -> Row:
    """aten._fused_rms_norm_backward."""
    dims, sizes, lead = layer_norm_dims(call)
    stat = (*dims[:lead], *(() for _ in dims[lead:]))
    inputs: list[Dims] = [tuple(dims), tuple(dims), stat]
    inputs += [tuple(dims[lead:]) for name in ("weight",) if call.has(name)]
    mask = call["output_mask"]
    return Row(
        inputs=tuple(inputs),
        outputs=(tuple(dims) if mask[0] else None, tuple(dims[lead:]) if mask[1] else None),
        sizes=sizes,
        linear=linear_in_gradient(mask),
        reduce={f: "sum" for d in dims[:lead] for f in d},
        nosplit=frozenset(f for d in dims[lead:] for f in d),
    )


def group_norm_pieces(call: Call) -> tuple[Dims, Dims, dict[str, int]]:
    """(dims of the input, dims of a channel vector, sizes): n, (g c), spatial."""
    shape, groups = call.shape("input"), call["group"]
    sizes = {"n": shape[0], "g": groups, "c": shape[1] // groups}
    tail, more = dims_of(shape[2:], "x")
    sizes.update(more)
    channels = tuple(f for f in ("g", "c") if sizes[f] != 1)
    return (("n",) if shape[0] != 1 else (), channels, *tail), (channels,), sizes


def group_norm_localize(ctx: LocalContext) -> dict[str, Any]:
    """Batch, channels and groups of this rank."""
    return {
        "N": ctx.size("n"),
        "C": ctx.size("g") * ctx.size("c"),
        "group": ctx.size("g"),
        "HxW": math.prod(ctx.call.shape("input")[2:]),
    }


def group_stat(sizes: dict[str, int]) -> Dims:
    """Dims of the statistics [n, g]."""
    return tuple((f,) if sizes[f] != 1 else () for f in ("n", "g"))


def group_norm_row(call: Call) -> Row:
    """aten.native_group_norm: batch and groups are free."""
    full, channel, sizes = group_norm_pieces(call)
    stat = group_stat(sizes)
    inputs = [full, *(channel for name in ("weight", "bias") if call.has(name))]
    return Row(
        inputs=tuple(inputs),
        outputs=(full, stat, stat),
        sizes=sizes,
        nosplit=frozenset(f for f in sizes if f not in ("n", "g")),
        localize=group_norm_localize,
    )


def group_norm_backward_row(call: Call) -> Row:
    """aten.native_group_norm_backward."""
    full, channel, sizes = group_norm_pieces(call)
    stat = group_stat(sizes)
    inputs = [full, full, stat, stat, *(channel for name in ("weight",) if call.has(name))]
    mask = call["output_mask"]
    return Row(
        inputs=tuple(inputs),
        outputs=(full if mask[0] else None, channel if mask[1] else None, channel if mask[2] else None),
        sizes=sizes,
        linear=linear_in_gradient(mask),
        reduce={"n": "sum"},
        nosplit=frozenset(f for f in sizes if f not in ("n", "g")),
        localize=group_norm_localize,
    )


def batch_norm_row(call: Call) -> Row:
    """All batch norms: channels are free; batch and spatial dims only where the statistics are given (evaluation).

    Training statistics over a split batch are made by a decomposition (``passes/normalize.py``).
    """
    backward = "backward" in call.op._schema.name
    x = call.shape("input")
    dims, sizes = dims_of(x)
    training = call.args.get(
        "training", call.args.get("train", call.args.get("update", "no_training" not in call.op._schema.name))
    )
    channel = (dims[1],)

    def described(shape: tuple[int, ...] | None) -> Dims:
        if shape == x:
            return tuple(dims)
        if shape is not None and len(shape) == 1 and shape[0] == x[1]:
            return channel
        return tuple(() for _ in shape or ())

    outputs = tuple(None if s is None else described(s) for s in call.out_shapes)
    others = {f for i, d in enumerate(dims) for f in d if i != 1}
    # Statistics that were not asked for, and what cuDNN keeps for itself, are empty tensors.
    empty = frozenset(i for i, s in enumerate(call.out_shapes) if s is not None and 0 in s)
    evaluates = not training and not backward
    narrow = frozenset(i for i, o in enumerate(outputs) if o is not None and o != tuple(dims))
    return Row(
        inputs=tuple(described(s) for s in call.shapes),
        outputs=outputs,
        sizes=sizes,
        linear=linear_in_gradient(call["output_mask"]) if backward else (),
        reduce=dict.fromkeys(others, "sum") if backward and not training else {},
        nosplit=frozenset(others) if training else frozenset(),
        complete=dict.fromkeys(dims[1], empty) | dict.fromkeys(others, narrow if evaluates else empty),
    )
