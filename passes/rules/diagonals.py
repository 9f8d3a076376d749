"""Rows of calls that mix two dims (diagonals, triangles) or make two of one (windows); all other dims are free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopar.passes.rules.row import Call, Dims, Row
from autopar.passes.rules.views import LINEAR_IN_FIRST, along_dims_row, dims_of, opaque_row

if TYPE_CHECKING:
    from autopar.passes.lowering import LocalContext


def triangle_row(call: Call) -> Row:
    """aten.tril and aten.triu: the last two dims stay whole."""
    return along_dims_row(call, (-1, -2), linear=True)


def diagonal_pieces(call: Call, full: tuple[int, ...], length: int) -> tuple[Dims, Dims, dict[str, Any]]:
    """(dims of the tensor, dims of its diagonal, what a row says of their factors).

    Element i of the diagonal stands in row i + max(-offset, 0) and column i + max(offset, 0).  Where it takes up all
    rows (or else all columns) these may be split with it: the part of a rank has a diagonal at another offset.
    """
    dims, sizes = dims_of(full)
    a, b = (call[name] % len(full) for name in ("dim1", "dim2"))
    own = frozenset((*dims[a], *dims[b]))
    sizes["diag"] = length
    last = ("diag",) if length != 1 else ()
    diagonal = (*(d for i, d in enumerate(dims) if i not in (a, b)), last)
    taken = next((d for d in (a, b) if full[d] == length), None)
    if taken is None or not last:
        return tuple(dims), diagonal, {"sizes": sizes, "nosplit": own | {"diag"}}
    own -= frozenset(dims[taken])
    dims[taken] = last
    sign = 1 if taken == a else -1

    def localize(ctx: LocalContext) -> dict[str, Any]:
        return {"offset": ctx.call["offset"] + sign * ctx.start("diag")}

    return tuple(dims), diagonal, {"sizes": sizes, "nosplit": own, "whole": frozenset(last), "localize": localize}


def diagonal_row(call: Call) -> Row:
    """aten.diagonal: the diagonal comes last."""
    full, out = call.shapes[0], call.out_shapes[0] or (1,)
    dims, diagonal, rest = diagonal_pieces(call, full, out[-1])
    return Row(inputs=(dims,), outputs=(diagonal,), linear=LINEAR_IN_FIRST, **rest)


def diagonal_backward_row(call: Call) -> Row:
    """aten.diagonal_backward: zeros beside the diagonal."""
    dims, diagonal, rest = diagonal_pieces(call, call.out_shapes[0] or (), call.shapes[0][-1])
    return Row(inputs=(diagonal,), outputs=(dims,), linear=LINEAR_IN_FIRST, shape_args={"input_sizes": 0}, **rest)


def diagonal_scatter_row(call: Call) -> Row:
    """aten.diagonal_scatter: a tensor with another diagonal."""
    dims, diagonal, rest = diagonal_pieces(call, call.shapes[0], call.shapes[1][-1])
    return Row(inputs=(dims, diagonal), outputs=(dims,), linear=(frozenset({0, 1}),), **rest)


def diag_embed_row(call: Call) -> Row:
    """aten.diag_embed: the last dim becomes a diagonal over two dims, which are as long as it and the offset."""
    dims, diagonal, rest = diagonal_pieces(call, call.out_shapes[0] or (), call.shapes[0][-1])
    return Row(
        inputs=(diagonal,),
        outputs=(dims,),
        linear=LINEAR_IN_FIRST,
        lowerings=dict.fromkeys(rest.get("whole", ()), lower_diag_embed),
        **rest,
    )


def lower_diag_embed(ctx: LocalContext) -> Any:
    """This rank's rows: they are not square, as those of its own diagonal would be."""
    shape, offset = list(ctx.local_output_shape(0)), ctx.call["offset"] + ctx.start("diag")
    return ctx.emit("diagonal_backward", ctx.tensor(0), shape, offset, ctx.call["dim1"], ctx.call["dim2"])


def unfold_pieces(full: tuple[int, ...], windows: tuple[int, ...], dim: int) -> tuple[Dims, Dims, dict[str, int]]:
    """(dims of the tensor, dims of its windows, sizes): ``dim`` becomes windows w, and their width k comes last."""
    dims, sizes = dims_of(full)
    out = list(dims)
    sizes.update({"w": windows[dim], "k": windows[-1]})
    out[dim] = ("w",) if windows[dim] != 1 else ()
    out.append(("k",) if windows[-1] != 1 else ())
    return tuple(dims), tuple(out), sizes


def unfold_row(call: Call) -> Row:
    """aten.unfold: the unfolded dim stays whole."""
    full = call.shapes[0]
    if not full:
        return opaque_row(call)
    dim = call["dimension"] % len(full)
    dims, out, sizes = unfold_pieces(full, call.out_shapes[0] or (), dim)
    whole = frozenset((*dims[dim], "w", "k"))
    return Row(inputs=(dims,), outputs=(out,), sizes=sizes, nosplit=whole, linear=LINEAR_IN_FIRST)


def unfold_backward_row(call: Call) -> Row:
    """aten.unfold_backward: windows are added where they overlap."""
    full = call.out_shapes[0] or ()
    if not full:
        return opaque_row(call)
    dim = call["dim"] % len(full)
    dims, out, sizes = unfold_pieces(full, call.shapes[0], dim)
    return Row(
        inputs=(out,),
        outputs=(dims,),
        sizes=sizes,
        nosplit=frozenset((*dims[dim], "w", "k")),
        linear=LINEAR_IN_FIRST,
        shape_args={"input_sizes": 0},
    )
