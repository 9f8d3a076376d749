"""Rows of contractions: matrix products and convolutions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopar.passes.rules.row import Call, Row, parse_row

if TYPE_CHECKING:
    from autopar.passes.lowering import LocalContext


def mm_row(call: Call) -> Row:
    """aten.mm."""
    return parse_row("m k, k n -> m n | sum k | linear 0 / 1", call.shapes)


def bmm_row(call: Call) -> Row:
    """aten.bmm."""
    return parse_row("b m k, b k n -> b m n | sum k | linear 0 / 1", call.shapes)


def grouped_mm_row(call: Call) -> Row:
    """Rows sorted by group times the matrix of their group (input, weight, ends of the groups).

    Neither rows nor groups can be split: where a group ends is counted over all rows.
    """
    return parse_row("m k, x k n, x -> m n | sum k | nosplit m x | linear 0 / 1", call.shapes)


def grouped_mm_backward_row(call: Call) -> Row:
    """Gradients of input and weight (input, weight, ends of the groups, gradient)."""
    return parse_row("m k, x k n, x, m n -> m k, x k n | sum n | nosplit m x | linear 3", call.shapes)


def dot_row(call: Call) -> Row:
    """aten.dot and aten.vdot."""
    return parse_row("k, k -> | sum k | linear 0 / 1", call.shapes)


def mv_row(call: Call) -> Row:
    """aten.mv."""
    return parse_row("m k, k -> m | sum k | linear 0 / 1", call.shapes)


def with_addend(text: str, target: str) -> Any:
    """A rule for ``beta * addend + alpha * (product)``: the addend broadcasts against the product."""

    def rule(call: Call) -> Row:
        left, right = text.split("->")
        dims = target.split()
        addend = call.shapes[0]
        offset = len(dims) - len(addend)
        first = " ".join("1" if size == 1 else dims[i + offset] for i, size in enumerate(addend))
        row = parse_row(f"{first}, {left} -> {right} | sum k | linear 0 1 / 0 2", call.shapes)
        return row.with_(addends={0: frozenset(row.reduce)})

    return rule


addmm_row = with_addend("m k, k n -> m n", "m n")
baddbmm_row = with_addend("b m k, b k n -> b m n", "b m n")
addmv_row = with_addend("m k, k -> m", "m")
addbmm_row = with_addend("b m k, b k n -> m n | sum b", "m n")


def conv_pieces(
    call: Call, x: tuple[int, ...], w: tuple[int, ...]
) -> tuple[dict[str, tuple[tuple[str, ...], ...]], dict[str, int]]:
    """Dims of input, weight and output of a (transposed) convolution: n, (g ci), (g co), spatial and kernel factors."""
    groups, transposed = call["groups"], call["transposed"]
    spatial = len(x) - 2
    inner, outer = x[1] // groups, (w[1] if transposed else w[0] // groups)
    sizes = {"n": x[0], "g": groups, "ci": inner, "co": outer}
    sizes.update({f"x{i}": x[2 + i] for i in range(spatial)})
    sizes.update({f"w{i}": w[2 + i] for i in range(spatial)})

    def dim(*names: str) -> tuple[str, ...]:
        return tuple(f for f in names if sizes[f] != 1)

    kernel = tuple(dim(f"w{i}") for i in range(spatial))
    weight = (dim("g", "ci"), dim("co")) if transposed else (dim("g", "co"), dim("ci"))
    pieces = {
        "input": (dim("n"), dim("g", "ci"), *(dim(f"x{i}") for i in range(spatial))),
        "weight": (*weight, *kernel),
        "bias": (dim("g", "co"),),
        "channels": (dim("n"), dim("g", "co")),
    }
    return pieces, sizes


def spatial_output(pieces: dict[str, Any], sizes: dict[str, int], out: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
    """Dims of a convolution's output; registers its spatial factors."""
    for i, size in enumerate(out[2:]):
        sizes[f"y{i}"] = size
    return (*pieces["channels"], *((f"y{i}",) if size != 1 else () for i, size in enumerate(out[2:])))


def local_groups(ctx: LocalContext) -> dict[str, Any]:
    """Groups that this rank computes."""
    return {"groups": ctx.size("g")}


def convolution_row(call: Call) -> Row:
    """aten.convolution: batch, groups, output channels, and input channels (a sum); spatial dims stay whole."""
    x, w = call.shape("input"), call.shape("weight")
    pieces, sizes = conv_pieces(call, x, w)
    out = spatial_output(pieces, sizes, call.out_shapes[0] or ())
    inputs = [pieces["input"], pieces["weight"]]
    addends = {}
    linear: tuple[frozenset[int], ...] = (frozenset({0}), frozenset({1}))
    if call.has("bias"):
        inputs.append(pieces["bias"])
        addends[2] = frozenset({"ci"})
        linear = (frozenset({0, 2}), frozenset({1, 2}))
    keep = {f for f in sizes if f[0] in "xwy"}
    return Row(
        inputs=tuple(inputs),
        outputs=(out,),
        sizes=sizes,
        reduce={"ci": "sum"},
        nosplit=frozenset(keep),
        linear=linear,
        addends=addends,
        localize=local_groups,
    )


def convolution_backward_row(call: Call) -> Row:
    """aten.convolution_backward: gradients of input (sum over co), weight (sum over n) and bias (sum over n)."""
    x, w = call.shape("input"), call.shape("weight")
    pieces, sizes = conv_pieces(call, x, w)
    grad = spatial_output(pieces, sizes, call.shape("grad_output"))
    mask = call["output_mask"]
    outputs = (
        pieces["input"] if mask[0] else None,
        pieces["weight"] if mask[1] else None,
        pieces["bias"] if mask[2] else None,
    )
    keep = {f for f in sizes if f[0] in "xwy"}

    def localize(ctx: LocalContext) -> dict[str, Any]:
        out = local_groups(ctx)
        if call["bias_sizes"] is not None:
            out["bias_sizes"] = [ctx.size("g") * ctx.size("co")]
        return out

    return Row(
        inputs=(grad, pieces["input"], pieces["weight"]),
        outputs=outputs,
        sizes=sizes,
        reduce={"n": "sum", "co": "sum"},
        complete={"ci": frozenset({2})},
        nosplit=frozenset(keep),
        linear=(frozenset({0}),),
        localize=localize,
    )
