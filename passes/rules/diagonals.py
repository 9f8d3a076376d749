"""Rows of calls that mix two dims (diagonals, triangles) or make two of one (windows); all other dims are free."""

from __future__ import annotations

from autopar.passes.rules.row import Call, Dims, Row
from autopar.passes.rules.views import LINEAR_IN_FIRST, along_dims_row, dims_of, opaque_row


def triangle_row(call: Call) -> Row:
    """aten.tril and aten.triu: the last two dims stay whole."""
    return along_dims_row(call, (-1, -2), linear=True)


def diagonal_pieces(
    call: Call, full: tuple[int, ...], length: int
) -> tuple[Dims, Dims, dict[str, int], frozenset[str]]:
    """(dims of the tensor, dims of its diagonal, sizes, factors that stay whole)."""
    dims, sizes = dims_of(full)
    a, b = (call[name] % len(full) for name in ("dim1", "dim2"))
    sizes["diag"] = length
    last = ("diag",) if length != 1 else ()
    diagonal = (*(d for i, d in enumerate(dims) if i not in (a, b)), last)
    return tuple(dims), diagonal, sizes, frozenset((*dims[a], *dims[b], "diag"))


def diagonal_row(call: Call) -> Row:
    """aten.diagonal: the diagonal comes last."""
    full, out = call.shapes[0], call.out_shapes[0] or (1,)
    dims, diagonal, sizes, whole = diagonal_pieces(call, full, out[-1])
    return Row(inputs=(dims,), outputs=(diagonal,), sizes=sizes, nosplit=whole, linear=LINEAR_IN_FIRST)


def diagonal_backward_row(call: Call) -> Row:
    """aten.diagonal_backward: zeros beside the diagonal."""
    full = call.out_shapes[0] or ()
    dims, diagonal, sizes, whole = diagonal_pieces(call, full, call.shapes[0][-1])
    return Row(
        inputs=(diagonal,),
        outputs=(dims,),
        sizes=sizes,
        nosplit=whole,
        linear=LINEAR_IN_FIRST,
        shape_args={"input_sizes": 0},
    )


def diagonal_scatter_row(call: Call) -> Row:
    """aten.diagonal_scatter: a tensor with another diagonal."""
    dims, diagonal, sizes, whole = diagonal_pieces(call, call.shapes[0], call.shapes[1][-1])
    return Row(inputs=(dims, diagonal), outputs=(dims,), sizes=sizes, nosplit=whole, linear=(frozenset({0, 1}),))


def diag_embed_row(call: Call) -> Row:
    """aten.diag_embed: the last dim becomes a diagonal over two dims."""
    full = call.out_shapes[0] or ()
    dims, diagonal, sizes, whole = diagonal_pieces(call, full, call.shapes[0][-1])
    return Row(inputs=(diagonal,), outputs=(dims,), sizes=sizes, nosplit=whole, linear=LINEAR_IN_FIRST)


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
