"""Rows of reductions: a reduced factor may be split where the partial results combine with one reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from autopar.passes.rules.row import Call, Dims, Row
from autopar.passes.rules.views import along_dims_row, dims_of

if TYPE_CHECKING:
    from autopar.passes.lowering import LocalContext


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


def logical_reduction(how: str) -> Callable[[Call], Row]:
    """For any and all: bools have no sum; they are combined as max or min of bytes by the lowering of the reduction."""
    return reduction(how)


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
    dims, keep = reduced_dims(call), bool(call.args.get("keepdim", False))
    factors = [f for d in dims for f in ctx.row.inputs[0][d]]
    x = ctx.tensor(0)
    top = ctx.all_reduce(ctx.emit("amax", x, dims, keepdim=True), "max", factors)
    # An all -inf row would give -inf - -inf; torch takes the maximum as 0 there.
    safe = ctx.emit("masked_fill.Scalar", top, ctx.emit("isinf", top), 0)
    total = ctx.emit("sum.dim_IntList", ctx.emit("exp", ctx.emit("sub.Tensor", x, safe)), dims, keepdim=True)
    out = ctx.emit("add.Tensor", ctx.emit("log", ctx.all_reduce(total, "sum", factors)), safe)
    return out if keep or not dims else ctx.emit("reshape", out, list(ctx.local_output_shape(0)))


def scan_row(*, linear: bool) -> Callable[[Call], Row]:
    """cumsum, cumprod and the like: the scanned dim stays whole."""

    def rule(call: Call) -> Row:
        return along_dims_row(call, (call["dim"],), linear=linear)

    return rule


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
