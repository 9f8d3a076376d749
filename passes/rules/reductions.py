"""Rows of reductions: a reduced factor may be split where the partial results combine with one reduction."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from autopar.passes.rules.row import Call, Dims, Row
from autopar.passes.rules.views import along_dims_row, dims_of

if TYPE_CHECKING:
    from autopar.passes.lowering import LocalContext

NARROW = (torch.float16, torch.bfloat16)  # dtypes that torch itself sums in float32


def reduced_dims(call: Call) -> list[int]:
    """Dims that the call reduces, from its ``dim`` argument (all where it is absent, None or empty)."""
    rank = len(call.shapes[0])
    given = call.args.get("dim")
    if given is None or (isinstance(given, (list, tuple)) and not given):
        return list(range(rank))
    return [d % rank for d in ([given] if isinstance(given, int) else given)] if rank else []


def reduction(how: str | None, *, linear: bool = False) -> Callable[[Call], Row]:
    """A rule for a reduction whose partial results combine with ``how`` (None: the reduced dims stay whole)."""

    def rule(call: Call) -> Row:
        shape = call.shapes[0]
        dims, sizes = dims_of(shape)
        gone = set(reduced_dims(call))
        keep = bool(call.args.get("keepdim", False))
        out = tuple(() if i in gone else d for i, d in enumerate(dims) if keep or i not in gone)
        factors = {f for i in gone for f in dims[i]}
        outputs = tuple(None if o is None else out for o in call.outputs)
        return Row(
            inputs=tuple(tuple(dims) if s == shape else tuple(() for _ in s) for s in call.shapes),
            outputs=outputs,
            sizes=sizes,
            reduce=dict.fromkeys(factors, how) if how else {},
            nosplit=frozenset() if how else frozenset(factors),
            linear=(frozenset({0}),) if linear else (),
        )

    return rule


def logsumexp_row(call: Call) -> Row:
    """aten.logsumexp: a split reduced dim needs the maximum over all ranks, then a sum."""
    row = reduction(None)(call)
    return row.with_(
        nosplit=frozenset(),
        lowerings=dict.fromkeys(row.nosplit, lower_logsumexp),
        complete={f: frozenset({0}) for f in row.nosplit},
    )


def lower_logsumexp(ctx: LocalContext) -> Any:
    """log(sum(exp(x - m))) + m with m and the sum taken over all ranks."""
    call = ctx.call
    dims = reduced_dims(call)
    factors = [f for d in dims for f in ctx.row.inputs[0][d]]
    x = ctx.tensor(0)
    if x.meta["val"].dtype in NARROW:
        x = ctx.emit("_to_copy", x, dtype=torch.float32)
    top = ctx.all_reduce(ctx.emit("amax", x, dims, keepdim=True), "max", factors)
    # An all -inf row would give -inf - -inf; torch takes the maximum as 0 there.
    safe = ctx.emit("masked_fill.Scalar", top, ctx.emit("isinf", top), 0)
    total = ctx.emit("sum.dim_IntList", ctx.emit("exp", ctx.emit("sub.Tensor", x, safe)), dims, keepdim=True)
    out = ctx.emit("add.Tensor", ctx.emit("log", ctx.all_reduce(total, "sum", factors)), safe)
    return ctx.cast_like_output(reduced(ctx, out), 0)


def reduced(ctx: LocalContext, kept: Any) -> Any:
    """A result with its reduced dims kept, in the shape that the call asks for."""
    shape = list(ctx.local_output_shape(0))
    return kept if list(kept.meta["val"].shape) == shape else ctx.emit("reshape", kept, shape)


def prod_row(call: Call) -> Row:
    """aten.prod: products over a split dim are multiplied over the ranks."""
    row = reduction(None)(call)
    if call.tensors[0].meta["val"].is_complex():
        return row
    return row.with_(
        nosplit=frozenset(),
        lowerings=dict.fromkeys(row.nosplit, lower_prod),
        complete={f: frozenset({0}) for f in row.nosplit},
    )


def lower_prod(ctx: LocalContext) -> Any:
    """The product of the ranks' products."""
    factors = [f for d in reduced_dims(ctx.call) for f in ctx.row.inputs[0][d]]
    return ctx.all_reduce(ctx.emit_unchanged(), "product", factors)


def pick_row(call: Call) -> Row:
    """argmax, argmin, and max and min along a dim: where a dim is split, the ranks' best are compared."""
    row = reduction(None)(call)
    everywhere = frozenset(i for i, dims in enumerate(row.outputs) if dims is not None)
    return row.with_(
        nosplit=frozenset(),
        whole=row.nosplit,
        lowerings=dict.fromkeys(row.nosplit, lower_pick),
        complete=dict.fromkeys(row.nosplit, everywhere),
    )


def lower_pick(ctx: LocalContext) -> Any:
    """The best value over all ranks, and the first place where it stands."""
    call, name = ctx.call, ctx.call.op._schema.name
    how, extreme = ("max", "amax") if "max" in name else ("min", "amin")
    dims = reduced_dims(call)
    factors = [f for d in dims for f in ctx.row.inputs[0][d]]
    x = ctx.tensor(0)
    if x.meta["val"].dtype == torch.bool:
        x = ctx.emit("_to_copy", x, dtype=torch.uint8)
    value = ctx.emit(extreme, x, dims, keepdim=True)
    best = ctx.all_reduce(value, how, factors)
    held = ctx.emit("logical_or", ctx.emit("eq.Tensor", value, best), ctx.emit("isnan", value))
    # Ranks without the best value name a place beyond the end, so that the smallest place is the first.
    place = global_place(ctx, ctx.emit(f"arg{how}", x, call.args.get("dim"), keepdim=True), dims)
    beyond = math.prod(call.shapes[0][d] for d in dims)
    place = ctx.emit("masked_fill.Scalar", place, ctx.emit("logical_not", held), beyond)
    place = reduced(ctx, ctx.all_reduce(place, "min", factors))
    return place if name.startswith("aten::arg") else (ctx.cast_like_output(reduced(ctx, best), 0), place)


def global_place(ctx: LocalContext, place: Any, dims: Sequence[int]) -> Any:
    """Places among the elements of ``dims``, counted in the whole tensor; ``place`` counts them in this rank's part.

    Dim by dim from the innermost, with n entries here of N and r elements behind: place p lies in run p // (n r) of the
    dim and before it lie (N - n) r more elements a run, and those of the ranks before.
    """
    behind = 1
    for d in reversed(dims):
        size, factors = ctx.call.shapes[0][d], ctx.row.inputs[0][d]
        here = ctx.size(factors[0]) if factors else 1
        if here != size:
            if d != dims[0]:
                runs = ctx.emit("div.Scalar_mode", place, here * behind, rounding_mode="floor")
                place = ctx.emit("add.Tensor", place, runs, alpha=(size - here) * behind)
            place = ctx.emit("add.Scalar", place, ctx.start(factors[0]) * behind)
        behind *= size
    return place


def scan_row(*, linear: bool) -> Callable[[Call], Row]:
    """cumsum, cumprod and the like: the scanned dim stays whole."""

    def rule(call: Call) -> Row:
        return along_dims_row(call, (call["dim"],), linear=linear)

    return rule


def cumsum_row(call: Call) -> Row:
    """aten.cumsum: along a split dim every rank adds the totals of those before it."""
    row = scan_row(linear=True)(call)
    return row.with_(nosplit=frozenset(), whole=row.nosplit, lowerings=dict.fromkeys(row.nosplit, lower_cumsum))


def lower_cumsum(ctx: LocalContext) -> Any:
    """Sums of one's own part, and the totals of the ranks before."""
    dim = ctx.call["dim"] % len(ctx.call.shapes[0])
    (axis,) = (a for f in ctx.row.inputs[0][dim] for a in ctx.split_axes(f))
    own = ctx.emit_unchanged()
    shape, ranks, here = list(own.meta["val"].shape), ctx.sizes[axis], ctx.coords[axis]
    last = ctx.emitter.contiguous(ctx.emit("slice.Tensor", own, dim, shape[dim] - 1, shape[dim]))
    one = list(last.meta["val"].shape)
    totals = ctx.emit("reshape", ctx.emitter.all_gather(last, ranks, ctx.axes[axis]), [ranks, *one])
    before = ctx.emit("slice.Tensor", totals, 0, 0, here)
    ctx.emitter.mark_rank_dependent(before)
    return ctx.emit("add.Tensor", own, ctx.emit("sum.dim_IntList", before, [0], dtype=own.meta["val"].dtype))


def sort_like_row(call: Call) -> Row:
    """sort, topk, kthvalue, mode: outputs share all dims but the one that is ordered."""
    shape = call.shapes[0]
    dims, sizes = dims_of(shape)
    if not shape:
        return along_dims_row(call, (), linear=False)
    dim = call.args.get("dim", -1) % len(shape)
    outputs: list[Dims | None] = []
    for i, out in enumerate(call.out_shapes):
        if out is None:
            outputs.append(None)
            continue
        sizes[f"o{i}"] = out[dim] if len(out) == len(shape) else 1
        if len(out) == len(shape):
            mine: Sequence[tuple[str, ...]] = [*dims[:dim], (f"o{i}",) if out[dim] != 1 else (), *dims[dim + 1 :]]
        else:
            mine = [*dims[:dim], *dims[dim + 1 :]]
        outputs.append(tuple(mine))
    nosplit = {*dims[dim], *(f for f in sizes if f.startswith("o"))}
    return Row(inputs=(tuple(dims),), outputs=tuple(outputs), sizes=sizes, nosplit=frozenset(nosplit))
