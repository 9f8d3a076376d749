"""Random draws of a rank.

``exact``: the draw is made whole, from the default generator and in the order of one device, and then narrowed: the
numbers are those of one device (for tests and comparisons; it needs a temporary of global size).

``fast``: a draw is seeded by (seed of the step, number of the draw, which part of the tensor this rank holds): ranks
that hold the same part draw the same numbers, ranks that hold different parts different ones, and nothing is of global
size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from autopar.cost_models.errors import UnsupportedOpError
from autopar.passes.placement import REPLICATE, Shard
from autopar.passes.redistribute import MICROBATCHES, Redistributor
from autopar.passes.rules.table import op_name
from autopar.passes.torch_ops import OpOverload

if TYPE_CHECKING:
    from autopar.passes.lowering import LocalContext

SEED_NAME = "rng_seed"
# Draws that read the values of their arguments; of the arguments of others only the shape matters.
READS_VALUES = frozenset(
    f"aten::{name}"
    for name in (
        *("bernoulli", "binomial", "poisson", "normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor"),
        *("multinomial", "rrelu_with_noise_functional"),
    )
)
MULTIPLIER = 6364136223846793005  # Knuth's MMIX constant: spreads (draw, part) over 64 bits


def seeded(
    op: OpOverload, seed: torch.Tensor, draw: int, part: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a random operation with the default generator seeded by (seed, draw, part), and put the generator back."""
    mixed = (int(seed) * MULTIPLIER + draw * 1000003 + part * 7919 + 1) % 2**63
    device = next((a.device for a in args if isinstance(a, torch.Tensor)), torch.device(kwargs.get("device") or "cpu"))
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(mixed)
        return op(*args, **kwargs)


def part_index(ctx: LocalContext) -> int:
    """Which part of the draw this rank holds: its position along the axes that split it."""
    index = 0
    for axis, choice in enumerate(ctx.choices):
        if any(isinstance(p, Shard) for p in choice.outputs):
            index = index * ctx.sizes[axis] + ctx.coords[axis] + 1
    return index


def lower_random(ctx: LocalContext, rng: str, seed: fx.Node | None, draw: int) -> Any:
    """Emit the draw of ``ctx`` for one rank."""
    if rng == "exact":
        return lower_exact(ctx)
    if seed is None:
        raise UnsupportedOpError(f"{ctx.call.op} draws random numbers, but the program has no seed input")
    replaced: dict[str, Any] = {}
    if "size" in ctx.call.names:
        replaced["size"] = list(ctx.local_output_shape(0))
    args, kwargs = ctx.local_arguments(replaced)
    seeded_args = (ctx.call.op, seed, draw, part_index(ctx), args, kwargs)
    return ctx.emitter.opaque_call(seeded, seeded_args, ctx.call.op, args, kwargs)


def lower_exact(ctx: LocalContext) -> Any:
    """Draw the whole tensor in the single-device order, then narrow."""
    call = ctx.call
    # In a pipeline every stage makes all draws, so that each finds the generator where one device would have it.
    if not ctx.split_factors and MICROBATCHES not in ctx.axes and drawn_in_order(ctx):
        return ctx.emit_unchanged()
    if call.op is torch.ops.aten.native_dropout.default:
        drawn = ctx.emit(call.op, whole_argument(ctx, 0), call["p"], call["train"])
        mask = ctx.narrow_output(ctx.emitter.getitem(drawn, 1), 1)
        p = call["p"]
        scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
        return ctx.emit("mul.Scalar", ctx.emit("mul.Tensor", ctx.tensor(0), mask), scale), mask
    if op_name(call.op) in READS_VALUES:
        ctx.tensors = [whole_value(ctx, i) for i in range(len(ctx.tensors))]
    elif call.tensors:
        ctx.tensors[0] = whole_argument(ctx, 0)
    drawn = ctx.emit_unchanged()
    if isinstance(drawn.meta["val"], torch.Tensor):
        return ctx.narrow_output(drawn, 0)
    return tuple(ctx.narrow_output(ctx.emitter.getitem(drawn, i), i) for i in range(len(drawn.meta["val"])))


def whole_value(ctx: LocalContext, index: int) -> fx.Node:
    """The whole of a tensor argument, lying in memory as one device's does."""
    shape = tuple(ctx.call.shapes[index])
    layout = tuple(choice.inputs[index] for choice in ctx.choices)
    mover = Redistributor(ctx.emitter, ctx.axes, ctx.sizes, ctx.coords)
    whole = mover.run(ctx.tensors[index], layout, tuple(REPLICATE for _ in layout), shape)
    if whole.meta["val"].stride() == ctx.call.tensors[index].meta["val"].stride():
        return whole
    return ctx.emit("copy", whole_argument(ctx, index), whole)


def drawn_in_order(ctx: LocalContext) -> bool:
    """Whether the arguments lie in memory as one device's do: numbers are drawn in the order of memory."""
    return all(
        local.meta["val"].stride() == source.meta["val"].stride()
        for local, source in zip(ctx.tensors, ctx.call.tensors, strict=True)
    )


def whole_argument(ctx: LocalContext, index: int) -> fx.Node:
    """An empty tensor of the global shape and strides of a tensor argument."""
    value = ctx.call.tensors[index].meta["val"]
    shape, strides = list(value.shape), list(value.stride())
    if value.is_contiguous():
        return ctx.emit("empty.memory_format", shape, dtype=value.dtype, device=value.device)
    return ctx.emit("empty_strided", shape, strides, dtype=value.dtype, device=value.device)
