"""Rows of calls that make tensors from nothing: constants, ranges and random draws."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopar.passes.rules.row import Call, Row
from autopar.passes.rules.views import dims_of

if TYPE_CHECKING:
    from autopar.passes.lowering import LocalContext


def constant_row(call: Call) -> Row:
    """full, zeros, ones, empty: every part equals the whole in value, so each rank makes its own part."""
    dims, sizes = dims_of(call.out_shapes[0] or ())
    return Row(
        inputs=tuple(tuple(() for _ in s) for s in call.shapes),
        outputs=(tuple(dims),),
        sizes=sizes,
        shape_args={"size": 0} if "size" in call.names else {},
    )


def range_row(call: Call) -> Row:
    """arange, linspace: made whole, then narrowed (position matters)."""
    dims, sizes = dims_of(call.out_shapes[0] or ())
    return Row(
        inputs=tuple(tuple(() for _ in s) for s in call.shapes),
        outputs=tuple(tuple(dims) for _ in call.outputs),
        sizes=sizes,
        lower=lower_whole_then_narrow,
    )


def lower_whole_then_narrow(ctx: LocalContext) -> Any:
    """Emit the call unchanged and take this rank's part."""
    return ctx.narrow_output(ctx.emit_unchanged(), 0)


def random_factory_row(call: Call) -> Row:
    """rand, randn, randint, bernoulli, rand_like ...: any dim may be split; how to draw is the lowering's business."""
    shape = call.out_shapes[0] or ()
    dims, sizes = dims_of(shape)
    inputs = []
    for s in call.shapes:
        offset = len(shape) - len(s)
        inputs.append(tuple(() if n == 1 else dims[i + offset] for i, n in enumerate(s)))
    return Row(inputs=tuple(inputs), outputs=tuple(tuple(dims) for _ in call.outputs), sizes=sizes, random=True)


def whole_random_row(call: Call) -> Row:
    """randperm, multinomial and other draws whose elements depend on each other: never split."""
    row = random_factory_row(call) if not call.shapes else None
    if row is not None:
        return row.with_(nosplit=frozenset(row.sizes))
    inputs, sizes = [], {}
    for i, s in enumerate(call.shapes):
        d, more = dims_of(s, f"i{i}_")
        inputs.append(tuple(d))
        sizes.update(more)
    outputs = []
    for i, o in enumerate(call.out_shapes):
        d, more = dims_of(o or (), f"o{i}_")
        outputs.append(tuple(d))
        sizes.update(more)
    return Row(inputs=tuple(inputs), outputs=tuple(outputs), sizes=sizes, nosplit=frozenset(sizes), random=True)
