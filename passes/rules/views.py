"""Rows of operations that move data without computing: views, permutations, slices, concatenations, expansions.

Rows of reshapes are generated: both shapes are walked from the outside, cutting common atoms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from autopar.passes.rules.row import Call, Dims, Row

if TYPE_CHECKING:
    from autopar.passes.lowering import LocalContext

LINEAR_IN_FIRST = (frozenset({0}),)


def dims_of(shape: Sequence[int], prefix: str = "d") -> tuple[list[tuple[str, ...]], dict[str, int]]:
    """One factor a dim; dims of size 1 have none."""
    sizes = {f"{prefix}{i}": s for i, s in enumerate(shape) if s != 1}
    return [(f"{prefix}{i}",) if s != 1 else () for i, s in enumerate(shape)], sizes


def reshape_atoms(source: Sequence[int], target: Sequence[int]) -> tuple[Dims, Dims, dict[str, int], set[str]]:
    """Common atoms of two shapes of equal element count: (source dims, target dims, sizes, atoms crossing a boundary).

    >>> reshape_atoms((4, 6), (4, 3, 2))[:2]
    ((('a0',), ('a1', 'a2')), (('a0',), ('a1',), ('a2',)))
    """
    left: list[list[str]] = [[] for _ in source]
    right: list[list[str]] = [[] for _ in target]
    sizes: dict[str, int] = {}
    crossing: set[str] = set()
    names = (f"a{i}" for i in count())

    def put(where: list[str], name: str, size: int) -> None:
        where.append(name)
        sizes[name] = size

    i, j, a, b = -1, -1, 1, 1
    while True:
        while a == 1 and i + 1 < len(source):
            i, a = i + 1, source[i + 1]
        while b == 1 and j + 1 < len(target):
            j, b = j + 1, target[j + 1]
        if a == 1 and b == 1:
            break
        common = math.gcd(a, b)
        if common > 1:
            name = next(names)
            put(left[i], name, common)
            put(right[j], name, common)
            a, b = a // common, b // common
            continue
        # Nothing in common: the boundary of one shape cuts through a dim of the other.  Gather dims up to the next
        # common boundary into atoms that nobody may split.
        product_a, product_b, pieces = a, b, [(left[i], a), (right[j], b)]
        while product_a != product_b:
            if product_a < product_b:
                i += 1
                product_a *= source[i]
                pieces.append((left[i], source[i]))
            else:
                j += 1
                product_b *= target[j]
                pieces.append((right[j], target[j]))
        for where, size in pieces:
            if size > 1:
                name = next(names)
                put(where, name, size)
                crossing.add(name)
        a = b = 1
    return tuple(map(tuple, left)), tuple(map(tuple, right)), sizes, crossing


def reshape_row(call: Call) -> Row:
    """view, reshape, _unsafe_view, flatten-like calls."""
    (source,), target = call.shapes, call.out_shapes[0]
    assert_shape = target if target is not None else ()
    left, right, sizes, crossing = reshape_atoms(source, assert_shape)
    name = "size" if "size" in call.names else "shape"
    return Row(
        inputs=(left,),
        outputs=(right,),
        sizes=sizes,
        nosplit=frozenset(crossing),
        linear=LINEAR_IN_FIRST,
        shape_args={name: 0} if name in call.names else {},
    )


def permuted(call: Call, order: Sequence[int]) -> Row:
    """Row of a call whose output dim ``i`` is input dim ``order[i]``."""
    dims, sizes = dims_of(call.shapes[0])
    rank = len(dims)
    return Row(
        inputs=(tuple(dims),),
        outputs=(tuple(dims[i % rank] for i in order),),
        sizes=sizes,
        linear=LINEAR_IN_FIRST,
    )


def permute_row(call: Call) -> Row:
    """aten.permute."""
    return permuted(call, call["dims"])


def transpose_row(call: Call) -> Row:
    """aten.transpose.int and aten.t."""
    rank = len(call.shapes[0])
    order = list(range(rank))
    if "dim0" in call.names and rank:
        a, b = call["dim0"] % rank, call["dim1"] % rank
        order[a], order[b] = b, a
    elif rank == 2:
        order.reverse()
    return permuted(call, order)


def unsqueeze_row(call: Call) -> Row:
    """aten.unsqueeze."""
    dims, sizes = dims_of(call.shapes[0])
    out = list(dims)
    out.insert(call["dim"] % (len(dims) + 1), ())
    return Row(inputs=(tuple(dims),), outputs=(tuple(out),), sizes=sizes, linear=LINEAR_IN_FIRST)


def squeeze_row(call: Call) -> Row:
    """aten.squeeze: a dim that is 1 globally is 1 locally; which dims go is said explicitly, never by local size."""
    dims, sizes = dims_of(call.shapes[0])
    rank = len(dims)
    given = call.args.get("dim")
    asked = range(rank) if given is None else [given] if isinstance(given, int) else given
    gone = {d % rank for d in asked if rank and call.shapes[0][d % rank] == 1}
    out = [dim for i, dim in enumerate(dims) if i not in gone]
    return Row(
        inputs=(tuple(dims),),
        outputs=(tuple(out),),
        sizes=sizes,
        linear=LINEAR_IN_FIRST,
        lower=lower_as_reshape,
    )


def lower_as_reshape(ctx: LocalContext) -> Any:
    """Emit a reshape to the local output shape."""
    return ctx.emit("reshape", ctx.tensor(0), list(ctx.local_output_shape(0)))


def expand_row(call: Call) -> Row:
    """aten.expand: a size-1 dim of the input gets a factor that only the output has."""
    (source,), target = call.shapes, call.out_shapes[0] or ()
    dims, sizes = dims_of(target)
    offset = len(target) - len(source)
    inputs = tuple(() if source[i] == 1 else dims[i + offset] for i in range(len(source)))
    return Row(inputs=(inputs,), outputs=(tuple(dims),), sizes=sizes, linear=LINEAR_IN_FIRST, shape_args={"size": 0})


def slice_bounds(call: Call, size: int) -> tuple[int, int, int]:
    """(start, end, step) of aten.slice and slice_backward, clamped as torch does."""
    step = call.args.get("step") or 1
    start, end, _ = slice(call.args.get("start"), call.args.get("end")).indices(size)
    return start, max(start, end), step


def part_dims(
    size: int, start: int, end: int, step: int
) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, int], set[str]]:
    """Atoms of a dim and of a slice of it: (whole dim, slice, sizes, nosplit).

    A slice that is one of several equal parts keeps the part's factor ("n p" -> "p", ``n`` not split).
    """
    length = -(-(end - start) // step)
    if step == 1 and length == size:
        return (("p",), ("p",), {"p": size}, set()) if size != 1 else ((), (), {}, set())
    if step == 1 and length > 1 and size % length == 0 and start % length == 0:
        return ("n", "p"), ("p",), {"n": size // length, "p": length}, {"n"}
    whole = ("n",) if size != 1 else ()
    part = ("p",) if length != 1 else ()
    return whole, part, {"n": size, "p": length}, {"n", "p"}


def slice_row(call: Call) -> Row:
    """aten.slice.Tensor."""
    return _between_whole_and_part(call, call.shapes[0], backward=False)


def slice_backward_row(call: Call) -> Row:
    """aten.slice_backward: the reverse of slice, zeros elsewhere."""
    return _between_whole_and_part(call, call.out_shapes[0] or (), backward=True)


def _between_whole_and_part(call: Call, shape: Sequence[int], *, backward: bool) -> Row:
    """From a tensor of ``shape`` to its slice, or back."""
    dim = call["dim"] % len(shape)
    start, end, step = slice_bounds(call, shape[dim])
    whole, part, extra, nosplit = part_dims(shape[dim], start, end, step)
    dims, sizes = dims_of(shape)
    out = list(dims)
    dims[dim], out[dim] = whole, part
    length = max(end - start, 1)

    def localize(ctx: LocalContext) -> dict[str, Any]:
        if "p" in nosplit or "p" not in extra:
            return {}
        local = ctx.size("p")
        return {"start": start // length * local, "end": start // length * local + local}

    return Row(
        inputs=(tuple(out if backward else dims),),
        outputs=(tuple(dims if backward else out),),
        sizes={**sizes, **extra},
        nosplit=frozenset(nosplit),
        linear=LINEAR_IN_FIRST,
        shape_args={"input_sizes": 0} if backward else {},
        localize=localize,
    )


def slice_scatter_row(call: Call) -> Row:
    """aten.slice_scatter: the sliced dim stays whole unless the slice is everything."""
    shape, source = call.shapes
    dim = call["dim"] % len(shape)
    dims, sizes = dims_of(shape)
    src = list(dims)
    src[dim] = ("p",) if source[dim] != 1 else ()
    nosplit = {*dims[dim], *src[dim]}
    return Row(
        inputs=(tuple(dims), tuple(src)),
        outputs=(tuple(dims),),
        sizes={**sizes, "p": source[dim]},
        nosplit=frozenset(nosplit),
        linear=(frozenset({0, 1}),),
    )


def select_row(call: Call) -> Row:
    """aten.select.int: the selected dim stays whole."""
    dims, sizes = dims_of(call.shapes[0])
    dim = call["dim"] % len(dims)
    out = dims[:dim] + dims[dim + 1 :]
    return Row(
        inputs=(tuple(dims),), outputs=(tuple(out),), sizes=sizes, nosplit=frozenset(dims[dim]), linear=LINEAR_IN_FIRST
    )


def select_backward_row(call: Call) -> Row:
    """aten.select_backward."""
    shape = call.out_shapes[0] or ()
    dims, sizes = dims_of(shape)
    dim = call["dim"] % len(dims)
    grad = dims[:dim] + dims[dim + 1 :]
    return Row(
        inputs=(tuple(grad),),
        outputs=(tuple(dims),),
        sizes=sizes,
        nosplit=frozenset(dims[dim]),
        linear=LINEAR_IN_FIRST,
        shape_args={"input_sizes": 0},
    )


def select_scatter_row(call: Call) -> Row:
    """aten.select_scatter."""
    dims, sizes = dims_of(call.shapes[0])
    dim = call["dim"] % len(dims)
    src = dims[:dim] + dims[dim + 1 :]
    return Row(
        inputs=(tuple(dims), tuple(src)),
        outputs=(tuple(dims),),
        sizes=sizes,
        nosplit=frozenset(dims[dim]),
        linear=(frozenset({0, 1}),),
    )


def pieces_dims(lengths: Sequence[int]) -> tuple[tuple[str, ...], list[tuple[str, ...]], dict[str, int], set[str]]:
    """Atoms of a dim cut into ``lengths``: the parts share the atom ``p`` of their greatest common length."""
    common = math.gcd(*lengths) if lengths else 1
    total = sum(lengths)
    sizes = {"p": common, "n": total // common if common else total}
    nosplit = {"n"}
    parts: list[tuple[str, ...]] = []
    for i, length in enumerate(lengths):
        if length == common:
            parts.append(("p",) if common != 1 else ())
        else:
            sizes[f"n{i}"] = length // common
            nosplit.add(f"n{i}")
            parts.append((f"n{i}", "p") if common != 1 else (f"n{i}",))
    whole = tuple(f for f in ("n", "p") if sizes[f] != 1)
    return whole, parts, sizes, nosplit


def split_row(call: Call) -> Row:
    """aten.split.Tensor and split_with_sizes: packed parts are split one by one."""
    shape = call.shapes[0]
    dim = call["dim"] % len(shape)
    lengths = [(o or ())[dim] for o in call.out_shapes]
    dims, sizes = dims_of(shape)
    whole, parts, extra, nosplit = pieces_dims(lengths)
    inner = list(dims)
    inner[dim] = whole
    outputs = tuple((*dims[:dim], part, *dims[dim + 1 :]) for part in parts)
    common = extra["p"]

    def localize(ctx: LocalContext) -> dict[str, Any]:
        scaled = [length // common * ctx.size("p") for length in lengths] if common != 1 else lengths
        return {"split_size": scaled[0]} if "split_size" in call.names else {"split_sizes": scaled}

    return Row(
        inputs=(tuple(inner),),
        outputs=outputs,
        sizes={**sizes, **extra},
        nosplit=frozenset(nosplit),
        linear=LINEAR_IN_FIRST,
        localize=localize,
    )


def cat_row(call: Call) -> Row:
    """aten.cat: the reverse of split."""
    target = call.out_shapes[0] or ()
    dim = call["dim"] % len(target)
    if any(len(s) != len(target) for s in call.shapes):
        return opaque_row(call)  # torch allows legacy empty 1-d tensors among the parts
    dims, sizes = dims_of(target)
    whole, parts, extra, nosplit = pieces_dims([s[dim] for s in call.shapes])
    out = list(dims)
    out[dim] = whole
    return Row(
        inputs=tuple((*dims[:dim], part, *dims[dim + 1 :]) for part in parts),
        outputs=(tuple(out),),
        sizes={**sizes, **extra},
        nosplit=frozenset(nosplit),
        linear=(frozenset(range(len(call.shapes))),),
    )


def stack_row(call: Call) -> Row:
    """aten.stack: the new dim stays whole."""
    target = call.out_shapes[0] or ()
    dim = call["dim"] % len(target)
    dims, sizes = dims_of(target)
    return Row(
        inputs=tuple((*dims[:dim], *dims[dim + 1 :]) for _ in call.shapes),
        outputs=(tuple(dims),),
        sizes=sizes,
        nosplit=frozenset(dims[dim]),
        linear=(frozenset(range(len(call.shapes))),),
    )


def unbind_row(call: Call) -> Row:
    """aten.unbind.int."""
    dims, sizes = dims_of(call.shapes[0])
    dim = call["dim"] % len(dims)
    return Row(
        inputs=(tuple(dims),),
        outputs=tuple((*dims[:dim], *dims[dim + 1 :]) for _ in call.outputs),
        sizes=sizes,
        nosplit=frozenset(dims[dim]),
        linear=LINEAR_IN_FIRST,
    )


def pad_row(call: Call) -> Row:
    """aten.constant_pad_nd: padded dims stay whole."""
    shape, target = call.shapes[0], call.out_shapes[0] or ()
    dims, sizes = dims_of(shape)
    pads = call["pad"]
    out = list(dims)
    nosplit: set[str] = set()
    for i in range(len(pads) // 2):
        dim = len(shape) - 1 - i
        if pads[2 * i] or pads[2 * i + 1]:
            nosplit.update(dims[dim])
            out[dim] = (f"o{dim}",) if target[dim] != 1 else ()
            sizes[f"o{dim}"] = target[dim]
            nosplit.add(f"o{dim}")
    zero = call.args.get("value", 0) == 0
    return Row(
        inputs=(tuple(dims),),
        outputs=(tuple(out),),
        sizes=sizes,
        nosplit=frozenset(nosplit),
        linear=LINEAR_IN_FIRST if zero else (),
    )


def along_dims_row(call: Call, whole_dims: Sequence[int], *, linear: bool) -> Row:
    """Row of a shape-preserving call that mixes the elements of ``whole_dims`` only (flip, cumsum, sort, roll...)."""
    shape = call.shapes[0]
    dims, sizes = dims_of(shape)
    nosplit = {f for d in whole_dims for f in dims[d % len(dims)]} if dims else set()
    return Row(
        inputs=tuple(tuple(dims) for _ in call.shapes),
        outputs=tuple(None if o is None else tuple(dims) for o in call.outputs),
        sizes=sizes,
        nosplit=frozenset(nosplit),
        linear=LINEAR_IN_FIRST if linear else (),
    )


def flip_row(call: Call) -> Row:
    """aten.flip and aten.roll."""
    dims = call["dims"]
    whole = list(dims) if dims else list(range(len(call.shapes[0])))
    return along_dims_row(call, whole, linear=True)


def repeat_row(call: Call) -> Row:
    """aten.repeat: a repeated dim becomes (repeat, dim); the copies are not split."""
    shape, repeats = call.shapes[0], list(call["repeats"])
    dims, sizes = dims_of(shape)
    offset = len(repeats) - len(shape)
    out: list[tuple[str, ...]] = []
    for i, times in enumerate(repeats):
        inner = dims[i - offset] if i >= offset else ()
        if times == 1:
            out.append(inner)
            continue
        sizes[f"r{i}"] = times
        out.append((f"r{i}", *inner))

    def localize(ctx: LocalContext) -> dict[str, Any]:
        return {"repeats": [ctx.size(f"r{i}") if times != 1 else 1 for i, times in enumerate(repeats)]}

    return Row(inputs=(tuple(dims),), outputs=(tuple(out),), sizes=sizes, linear=LINEAR_IN_FIRST, localize=localize)


def strided_row(call: Call) -> Row:
    """as_strided and as_strided_scatter: elements are found by their place in memory, so nothing is split."""
    return opaque_row(call).with_(linear=(frozenset(range(len(call.shapes))),))


def opaque_row(call: Call) -> Row:
    """A row that offers nothing: the call runs replicated."""
    inputs, sizes = [], {}
    for i, shape in enumerate(call.shapes):
        dims, found = dims_of(shape, f"i{i}_")
        inputs.append(tuple(dims))
        sizes.update(found)
    outputs: list[Dims | None] = []
    for i, out in enumerate(call.out_shapes):
        if out is None:
            outputs.append(None)
            continue
        dims, found = dims_of(out, f"o{i}_")
        outputs.append(tuple(dims))
        sizes.update(found)
    return Row(inputs=tuple(inputs), outputs=tuple(outputs), sizes=sizes, nosplit=frozenset(sizes))
