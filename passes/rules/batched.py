"""Rows of operations that do the same to every entry of a batch: linear algebra, transforms, distances, samplers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autopar.passes.rules.row import Call, Dims, Row, parse_row
from autopar.passes.rules.views import LINEAR_IN_FIRST, dims_of, opaque_row
from autopar.passes.torch_ops import broadcast_shapes

if TYPE_CHECKING:
    from autopar.passes.lowering import LocalContext

Linear = tuple[frozenset[int], ...]


class Described:
    """Collects the dims of a call's tensors: shared leading dims, and dims of their own that stay whole."""

    def __init__(self, lead: Sequence[int]) -> None:
        self.lead, self.sizes = dims_of(lead, "b")
        self.whole: set[str] = set()

    def dims(self, shape: Sequence[int], own: int, tag: str) -> Dims:
        """Dims of a tensor whose last ``own`` dims are its own; the others broadcast against the leading dims."""
        cut = len(shape) - own
        tail, found = dims_of(shape[cut:], tag)
        self.sizes.update(found)
        self.whole.update(found)
        skip = len(self.lead) - cut
        head = tuple(() if n == 1 else self.lead[i + skip] for i, n in enumerate(shape[:cut]))
        return (*head, *tail)


def batched(inputs: Mapping[str, int], outputs: Sequence[int], linear: Linear = ()) -> Callable[[Call], Row]:
    """A rule for a call that treats leading dims alike.

    Args:
        inputs: for every tensor argument by name, how many trailing dims are its own (a matrix: 2).
        outputs: the same for every output.
        linear: the row's linearity.
    """

    def rule(call: Call) -> Row:
        given = {name: call.shape(name) for name in inputs if call.has(name)}
        if any(len(shape) < inputs[name] for name, shape in given.items()) or len(given) != len(call.tensors):
            return opaque_row(call)
        lead = broadcast_shapes(shape[: len(shape) - inputs[name]] for name, shape in given.items())
        found = Described(lead)
        order = [name for name in call.names if name in given]
        described = tuple(found.dims(given[name], inputs[name], f"{name}_") for name in order)
        complete: set[int] = set()
        results: list[Dims | None] = []
        for i, (shape, own) in enumerate(zip(call.out_shapes, outputs, strict=True)):
            if shape is not None and len(shape) != len(lead) + own:
                complete.add(i)  # an output that was not asked for is an empty tensor
                own = len(shape)
            results.append(None if shape is None else found.dims(shape, own, f"o{i}_"))
        factors = [f for dim in found.lead for f in dim]
        return Row(
            inputs=described,
            outputs=tuple(results),
            sizes=found.sizes,
            nosplit=frozenset(found.whole),
            complete={f: frozenset(complete) for f in factors} if complete else {},
            linear=linear,
        )

    return rule


def solving(inputs: Mapping[str, int], side: str, others: Sequence[int] = ()) -> Callable[[Call], Row]:
    """A rule for a solver with given factors: the columns of the right-hand side ``side`` are free.

    With ``left=False`` the system is written the other way round, and rows are free.  Outputs beside the solution
    (``others``: how many trailing dims are their own) tell of the factors; with none the call is linear in ``side``.
    """

    def rule(call: Call) -> Row:
        row = batched(inputs, (2, *others))(call)
        free = -1 if call.args.get("left", True) else -2
        index = [name for name in call.names if call.has(name)].index(side)
        out = row.outputs[0]
        if len(row.inputs[index]) < 2 or out is None:
            return row
        column, solution = row.inputs[index][free], list(out)
        solution[free] = column
        return row.with_(
            outputs=(tuple(solution), *row.outputs[1:]),
            nosplit=row.nosplit - frozenset(column),
            complete={**row.complete, **dict.fromkeys(column, frozenset(range(1, len(row.outputs))))},
            linear=() if others else (frozenset({index}),),
        )

    return rule


def solve_row(call: Call) -> Row:
    """aten._linalg_solve_ex: the right-hand side is a vector or a matrix."""
    a, b = call.shape("A"), call.shape("B")
    vector = len(b) == 1 or (len(b) == len(a) - 1 and b == a[:-1])
    rule = batched({"A": 2, "B": 1}, (1, 2, 1, 0)) if vector else solving({"A": 2, "B": 2}, "B", (2, 1, 0))
    return rule(call)


def transform_row(call: Call) -> Row:
    """Fourier transforms: transformed dims stay whole, and may change their size."""
    source, target = call.shapes[0], call.out_shapes[0] or ()
    dims, sizes = dims_of(source)
    changed = [d % len(source) for d in call["dim"]]
    out, whole = list(dims), {f for d in changed for f in dims[d]}
    for d in changed:
        sizes[f"o{d}"] = target[d]
        out[d] = (f"o{d}",) if target[d] != 1 else ()
        whole.add(f"o{d}")
    return Row(
        inputs=(tuple(dims),), outputs=(tuple(out),), sizes=sizes, nosplit=frozenset(whole), linear=LINEAR_IN_FIRST
    )


def parts_row(call: Call) -> Row:
    """view_as_real and view_as_complex: the dim of the two parts stays whole."""
    shape = call.shapes[0]
    real = "as_real" in call.op._schema.name
    dims, sizes = dims_of(shape if real else shape[:-1])
    parts = (*dims, ("parts",))
    plain = tuple(dims)
    return Row(
        inputs=(plain if real else parts,),
        outputs=(parts if real else plain,),
        sizes={**sizes, "parts": 2},
        nosplit=frozenset({"parts"}),
        linear=LINEAR_IN_FIRST,
    )


def bits_row(call: Call) -> Row:
    """aten.view.dtype: the bits of a tensor as another dtype; where the width changes, so does the last dim."""
    source, target = call.shapes[0], call.out_shapes[0] or ()
    dims, sizes = dims_of(source)
    if source == target:
        return Row(inputs=(tuple(dims),), outputs=(tuple(dims),), sizes=sizes)
    few = min(source[-1], target[-1])
    pieces = max(source[-1], target[-1]) // max(few, 1)
    wide, narrow = (("m",) if few != 1 else ()), (("m", "w") if few != 1 else ("w",))
    last, new = (wide, narrow) if few == source[-1] else (narrow, wide)
    return Row(
        inputs=((*dims[:-1], last),),
        outputs=((*dims[:-1], new),),
        sizes={**sizes, "m": few, "w": pieces},
        nosplit=frozenset("w"),
    )


def cross_row(call: Call) -> Row:
    """aten.linalg_cross: element-wise but for the dim of the three components."""
    target = call.out_shapes[0] or ()
    dims, sizes = dims_of(target)
    whole = frozenset(dims[call["dim"] % len(target)])

    def described(shape: tuple[int, ...]) -> Dims:
        skip = len(target) - len(shape)
        return tuple(() if n == 1 else dims[i + skip] for i, n in enumerate(shape))

    return Row(
        inputs=tuple(described(s) for s in call.shapes),
        outputs=(tuple(dims),),
        sizes=sizes,
        nosplit=whole,
        linear=(frozenset({0}), frozenset({1})),
    )


DISTANCE_BY_PRODUCT = 25  # from this many points on torch takes Euclidean distances by a matrix product


def cdist_row(call: Call) -> Row:
    """aten._cdist_forward: x1 [b p m], x2 [b r m] -> [b p r]."""
    x1, x2 = call.shapes
    if x1[:-2] != x2[:-2]:
        return opaque_row(call)
    lead, sizes = dims_of(x1[:-2], "b")
    sizes.update({"p": x1[-2], "r": x2[-2], "m": x1[-1]})
    p, r, m = ((f,) if sizes[f] != 1 else () for f in "prm")

    def localize(ctx: LocalContext) -> dict[str, Any]:
        mode = ctx.call["compute_mode"] or 0
        by_product = x1[-2] > DISTANCE_BY_PRODUCT or x2[-2] > DISTANCE_BY_PRODUCT
        return {"compute_mode": (1 if by_product else 2) if mode == 0 else mode}

    how = {0: "sum", 1: "sum", math.inf: "max"}.get(call["p"])
    return Row(
        inputs=((*lead, p, m), (*lead, r, m)),
        outputs=((*lead, p, r),),
        sizes=sizes,
        reduce={"m": how} if how else {},
        localize=localize,
    )


def cdist_backward_row(call: Call) -> Row:
    """aten._cdist_backward: the gradient of x1 is a sum over the points of x2."""
    grad, x1, x2, _ = call.shapes
    if x1[:-2] != x2[:-2] or grad[:-2] != x1[:-2]:
        return opaque_row(call)
    lead, sizes = dims_of(x1[:-2], "b")
    sizes.update({"p": x1[-2], "r": x2[-2], "m": x1[-1]})
    p, r, m = ((f,) if sizes[f] != 1 else () for f in "prm")
    return Row(
        inputs=((*lead, p, r), (*lead, p, m), (*lead, r, m), (*lead, p, r)),
        outputs=((*lead, p, m),),
        sizes=sizes,
        reduce={"r": "sum"},
        linear=LINEAR_IN_FIRST,
    )


def addr_row(call: Call) -> Row:
    """aten.addr: an addend and the outer product of two vectors."""
    target = call.out_shapes[0] or ()
    addend = call.shape("self")
    skip = 2 - len(addend)
    first = " ".join("1" if n == 1 else "mn"[i + skip] for i, n in enumerate(addend))
    dims = ["m" if target[0] != 1 else "1", "n" if target[1] != 1 else "1"]
    text = f"{first}, {dims[0]}, {dims[1]} -> {dims[0]} {dims[1]} | linear 0 1 / 0 2"
    return parse_row(text, call.shapes)


def trilinear_row(call: Call) -> Row:
    """aten._trilinear: three tensors, each with some dims of size 1 put in, multiplied and summed over some dims."""
    expanded = [call["expand1"], call["expand2"], call["expand3"]]
    rank = len(call.shapes[0]) + len(expanded[0])
    sizes: dict[str, int] = {}
    inputs = []
    for shape, gaps in zip(call.shapes, expanded, strict=True):
        places = [d for d in range(rank) if d not in gaps]
        for d, n in zip(places, shape, strict=True):
            sizes[f"d{d}"] = max(n, sizes.get(f"d{d}", 1))
        inputs.append(tuple((f"d{d}",) if n != 1 else () for d, n in zip(places, shape, strict=True)))
    gone = {d % rank for d in call["sumdim"]}
    return Row(
        inputs=tuple(inputs),
        outputs=(tuple((f"d{d}",) if sizes[f"d{d}"] != 1 else () for d in range(rank) if d not in gone),),
        sizes=sizes,
        reduce={f"d{d}": "sum" for d in gone},
        linear=(frozenset({0}), frozenset({1}), frozenset({2})),
    )


def members_row(*whole: str, linear: Linear = ()) -> Callable[[Call], Row]:
    """A rule for look-ups element by element in tensors that stay whole (isin, bucketize, take)."""

    def rule(call: Call) -> Row:
        target = call.out_shapes[0] or ()
        dims, sizes = dims_of(target)
        inputs: list[Dims] = []
        keep: set[str] = set()
        for name in call.names:
            if not call.has(name):
                continue
            if name in whole:
                own, found = dims_of(call.shape(name), f"{name}_")
                sizes.update(found)
                keep.update(found)
                inputs.append(tuple(own))
            else:
                inputs.append(tuple(dims))
        return Row(inputs=tuple(inputs), outputs=(tuple(dims),), sizes=sizes, nosplit=frozenset(keep), linear=linear)

    return rule


def searchsorted_row(call: Call) -> Row:
    """aten.searchsorted.Tensor: one sorted row for all, or one a leading index; values are looked up one by one."""
    if len(call.shape("sorted_sequence")) == 1:
        return members_row("sorted_sequence", "sorter")(call)
    row = batched({"sorted_sequence": 1, "self": 1, "sorter": 1}, (1,))(call)
    values, out = row.inputs[1][-1], row.outputs[0] or ()
    return row.with_(outputs=((*out[:-1], values),), nosplit=row.nosplit - frozenset(values))


def histogram_row(call: Call) -> Row:
    """aten.histc with its range given: counts of parts add up; without, the range is that of all elements."""
    row = opaque_row(call)
    if call["min"] == call["max"]:
        return row
    factors = frozenset(f for dim in row.inputs[0] for f in dim)
    return row.with_(reduce=dict.fromkeys(factors, "sum"), nosplit=row.nosplit - factors)


def samples_row(call: Call) -> Row:
    """aten.multinomial: every row of probabilities is drawn from for itself."""
    return batched({"self": 1}, (1,))(call).with_(random=True)


def segments_row(call: Call) -> Row:
    """aten.segment_reduce and its backward along dim 0, with lengths or offsets: trailing dims are free."""
    trailing = call.shape("data")[1:]
    if call["axis"] != 0 or not trailing:
        return opaque_row(call)
    dims, sizes = dims_of(trailing, "t")
    keep: set[str] = set()

    def described(shape: tuple[int, ...], tag: str) -> Dims:
        rest = len(shape) - len(trailing)
        shared = rest == 1 and shape[1:] == trailing
        own, found = dims_of(shape[:1] if shared else shape, tag)
        sizes.update(found)
        keep.update(found)
        return (*own, *dims) if shared else tuple(own)

    names = [name for name in call.names if call.has(name)]
    plain = ("lengths", "offsets")
    inputs = []
    for name in names:
        shape = call.shape(name)
        if name in plain and len(shape) != 1:
            return opaque_row(call)
        inputs.append(described(shape, f"{name}_"))
    outputs = tuple(described(s or (), f"o{i}_") for i, s in enumerate(call.out_shapes))
    return Row(inputs=tuple(inputs), outputs=outputs, sizes=sizes, nosplit=frozenset(keep))


def renorm_row(call: Call) -> Row:
    """aten.renorm: every slice along ``dim`` for itself."""
    dims, sizes = dims_of(call.shapes[0])
    free = call["dim"] % len(dims)
    keep = frozenset(f for i, d in enumerate(dims) if i != free for f in d)
    return Row(inputs=(tuple(dims),), outputs=(tuple(dims),), sizes=sizes, nosplit=keep)
