"""Rows of pooling, padding, resampling and of patches of images: batch and channels are free, places stay whole."""

from __future__ import annotations

from autopar.passes.rules.row import Call, Dims, Row
from autopar.passes.rules.views import LINEAR_IN_FIRST, dims_of, opaque_row


def num_places(call: Call) -> int:
    """How many dims are places, from the operation's name (2 where it has none)."""
    name = call.op._schema.name
    return next((n for n in (1, 3) if f"{n}d" in name), 2)


def pool_row(call: Call) -> Row:
    """Pooling, padding and resampling, forward and backward: leading (batch and channel) dims are free."""
    name, target = call.op._schema.name, call.out_shapes[0] or ()
    lead = len(target) - num_places(call)
    if lead < 0 or any(len(s) < lead or s[:lead] != target[:lead] for s in call.shapes):
        return opaque_row(call)
    dims, sizes = dims_of(target[:lead])
    keep: set[str] = set()
    free = unpadded(call, len(target)) if "_pad" in name else ()

    def described(shape: tuple[int, ...], tag: str) -> Dims:
        out = list(dims)
        for d in range(lead, len(shape)):
            factor = f"p{d}" if d in free else f"{tag}{d}"
            out.append((factor,) if shape[d] != 1 else ())
            sizes[factor] = shape[d]
            keep.update(() if d in free else (factor,))
        return tuple(out)

    return Row(
        inputs=tuple(described(s, f"i{i}_") for i, s in enumerate(call.shapes)),
        outputs=tuple(None if s is None else described(s, f"o{i}_") for i, s in enumerate(call.out_shapes)),
        sizes=sizes,
        nosplit=frozenset(keep),
        linear=() if "max" in name and "backward" not in name else LINEAR_IN_FIRST,
        shape_args={"input_size": 0} if "input_size" in call.names else {},
    )


def unpadded(call: Call, rank: int) -> list[int]:
    """Dims to which a padding adds nothing; its amounts come in pairs, those of the last dim first."""
    amounts = call["padding"]
    return [rank - 1 - i for i in range(len(amounts) // 2) if not amounts[2 * i] and not amounts[2 * i + 1]]


def unpool_row(call: Call) -> Row:
    """aten.max_unpool2d and 3d: places are picked by indices that stay the same in every plane."""
    return pool_row(call).with_(linear=LINEAR_IN_FIRST)


def patches_row(call: Call) -> Row:
    """aten.im2col [n c h w] -> [n (c k) l] and aten.col2im, its reverse; a leading batch may be absent."""
    source, target = call.shapes[0], call.out_shapes[0] or ()
    to_columns = "im2col" in call.op._schema.name
    image, columns = (source, target) if to_columns else (target, source)
    channels = image[-3]
    sizes = {"c": channels, "k": columns[-2] // channels, "h": image[-2], "w": image[-1], "l": columns[-1]}
    lead: tuple[str, ...] = ()
    if len(image) == 4:
        sizes["n"], lead = image[0], ("n",)

    def dim(*names: str) -> tuple[str, ...]:
        return tuple(f for f in names if sizes[f] != 1)

    batch = (dim(*lead),) if lead else ()
    picture: Dims = (*batch, dim("c"), dim("h"), dim("w"))
    matrix: Dims = (*batch, dim("c", "k"), dim("l"))
    return Row(
        inputs=(picture if to_columns else matrix,),
        outputs=(matrix if to_columns else picture,),
        sizes=sizes,
        nosplit=frozenset("hwkl"),
        linear=LINEAR_IN_FIRST,
    )


def sampler_pieces(call: Call) -> tuple[Dims, Dims, Dims, dict[str, int]]:
    """(dims of the input, of the grid, of the sampled output, sizes): n, c, places read and places written."""
    x, grid = call.shape("input"), call.shape("grid")
    places = len(x) - 2
    sizes = {"n": x[0], "c": x[1], "axes": places}
    sizes.update({f"x{i}": x[2 + i] for i in range(places)})
    sizes.update({f"y{i}": grid[1 + i] for i in range(places)})

    def dims(*names: str) -> Dims:
        return tuple((f,) if sizes[f] != 1 else () for f in names)

    read, written = [f"x{i}" for i in range(places)], [f"y{i}" for i in range(places)]
    return dims("n", "c", *read), dims("n", *written, "axes"), dims("n", "c", *written), sizes


def sampler_row(call: Call) -> Row:
    """aten.grid_sampler_2d and 3d: every place that is written is read for itself."""
    image, grid, out, sizes = sampler_pieces(call)
    keep = frozenset(f for f in sizes if f[0] == "x" or f == "axes")
    return Row(inputs=(image, grid), outputs=(out,), sizes=sizes, nosplit=keep, linear=LINEAR_IN_FIRST)


def sampler_backward_row(call: Call) -> Row:
    """The gradient of the image is a sum over the places written, that of the grid one over the channels."""
    image, grid, out, sizes = sampler_pieces(call)
    mask = call["output_mask"]
    return Row(
        inputs=(out, image, grid),
        outputs=(image if mask[0] else None, grid if mask[1] else None),
        sizes=sizes,
        reduce={f: "sum" for f in sizes if f[0] == "y"} | {"c": "sum"},
        nosplit=frozenset(f for f in sizes if f[0] == "x" or f == "axes"),
        linear=LINEAR_IN_FIRST,
    )
