"""Rows of look-ups: embeddings, gather, scatter, index, index_put."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from autopar.passes.rules.row import Call, Dims, Row
from autopar.passes.rules.views import dims_of, opaque_row
from autopar.passes.torch_ops import broadcast_shapes

if TYPE_CHECKING:
    from autopar.passes.lowering import LocalContext


def embedding_row(call: Call) -> Row:
    """Of weight [v d], indices [i...] -> [i... d]; a split vocabulary gives a Partial."""
    table, index = call.shape("weight"), call.shape("indices")
    dims, sizes = dims_of(index, "i")
    width = ("d",) if table[1] != 1 else ()
    rows = ("v",) if table[0] != 1 else ()
    return Row(
        inputs=((rows, width), tuple(dims)),
        outputs=((*dims, width),),
        sizes={**sizes, "v": table[0], "d": table[1]},
        reduce={"v": "sum"},
        whole=frozenset({"v"}),
        linear=(frozenset({0}),),
        lowerings={"v": lower_embedding},
    )


def held_rows(ctx: LocalContext, index: Any, factor: str) -> tuple[Any, Any]:
    """(indices in local numbering, misses at 0; mask of the misses)."""
    shifted = ctx.emit("sub.Tensor", index, ctx.start(factor))
    inside = ctx.emit(
        "logical_and", ctx.emit("ge.Scalar", shifted, 0), ctx.emit("lt.Scalar", shifted, ctx.size(factor))
    )
    miss = ctx.emit("logical_not", inside)
    return ctx.emit("masked_fill.Scalar", shifted, miss, 0), miss


def lower_embedding(ctx: LocalContext) -> Any:
    """Look up what this rank holds; zero for the rest.  padding_idx matters to the backward only."""
    index, miss = held_rows(ctx, ctx.tensor(1), "v")
    found = ctx.emit("embedding", ctx.tensor(0), index)
    return ctx.emit("masked_fill.Scalar", found, ctx.emit("unsqueeze", miss, -1), 0)


def embedding_backward_row(call: Call) -> Row:
    """Of grad [i... d], indices [i...] -> [v d], a sum over i."""
    index, grad = call.shape("indices"), call.shape("grad_output")
    dims, sizes = dims_of(index, "i")
    width = ("d",) if grad[-1] != 1 else ()
    rows = ("v",) if call["num_weights"] != 1 else ()
    # Scaling by frequency counts over the whole batch: then the batch stays whole.
    by_frequency = bool(call["scale_grad_by_freq"])
    return Row(
        inputs=((*dims, width), tuple(dims)),
        outputs=((rows, width),),
        sizes={**sizes, "v": call["num_weights"], "d": grad[-1]},
        reduce={} if by_frequency else dict.fromkeys(sizes, "sum"),
        nosplit=frozenset({"v"}) if by_frequency else frozenset(),
        whole=frozenset({"v"}),
        linear=(frozenset({0}),),
        lowerings={"v": lower_embedding_backward},
    )


def lower_embedding_backward(ctx: LocalContext) -> Any:
    """Misses and padding go to an extra row that is cut off; padding_idx is in global numbering."""
    call = ctx.call
    grad, index = ctx.tensor(0), ctx.tensor(1)
    rows = ctx.size("v")
    local, miss = held_rows(ctx, index, "v")
    if call["padding_idx"] >= 0:
        miss = ctx.emit("logical_or", miss, ctx.emit("eq.Scalar", index, call["padding_idx"]))
    local = ctx.emit("masked_fill.Scalar", local, miss, rows)
    table = ctx.emit("embedding_dense_backward", grad, local, rows + 1, rows, scale_grad_by_freq=False)
    return ctx.emit("clone", ctx.emit("slice.Tensor", table, 0, 0, rows), memory_format=torch.contiguous_format)


def free_dims(
    shape: tuple[int, ...], others: list[tuple[int, ...]], dim: int
) -> tuple[list[tuple[str, ...]], dict[str, int]]:
    """Factors of dims other than ``dim`` in which all tensors agree; the rest stay whole (named ``x``)."""
    dims, sizes = dims_of(shape)
    for i in range(len(shape)):
        if i != dim and any(o[i] != shape[i] for o in others):
            sizes[f"x{i}"] = shape[i]
            sizes.pop(f"d{i}", None)
            dims[i] = (f"x{i}",) if shape[i] != 1 else ()
    return dims, sizes


def gather_row(call: Call) -> Row:
    """aten.gather: positions of the index along ``dim`` are free; the source's ``dim`` needs an offset and a mask."""
    source, index = call.shape("self"), call.shape("index")
    if not source or not index:
        return opaque_row(call)
    dim = call["dim"] % len(source)
    dims, sizes = free_dims(source, [index], dim)
    target, extra = dims_of(index, "j")
    nosplit = {f for f in sizes if f.startswith("x")}
    out: list[tuple[str, ...]] = []
    for i, d in enumerate(dims):
        free = i == dim or any(f.startswith("x") for f in d) or source[i] != index[i]
        out.append(target[i] if free else d)
        if free:
            sizes.update({f: extra[f] for f in target[i]})
            if i != dim:
                nosplit.update(target[i])
    inner = list(dims)
    inner[dim] = ("v",) if source[dim] != 1 else ()
    sizes["v"] = source[dim]
    sizes.pop(f"d{dim}", None)
    return Row(
        inputs=(tuple(inner), tuple(out)),
        outputs=(tuple(out),),
        sizes=sizes,
        nosplit=frozenset(nosplit),
        reduce={"v": "sum"},
        whole=frozenset({"v"}),
        linear=(frozenset({0}),),
        lowerings={"v": lower_gather},
    )


def lower_gather(ctx: LocalContext) -> Any:
    """Gather what this rank holds; zero for the rest."""
    index, miss = held_rows(ctx, ctx.tensor(1), "v")
    found = ctx.emit("gather", ctx.tensor(0), ctx.call["dim"], index)
    return ctx.emit("masked_fill.Scalar", found, miss, 0)


def scatter_row(call: Call) -> Row:
    """scatter.src, scatter.value, scatter_add, scatter_reduce: ``dim`` stays whole, equal other dims are free."""
    source, index = call.shape("self"), call.shape("index")
    if not source or not index:
        return opaque_row(call)
    dim = call["dim"] % len(source)
    others = [index] + ([call.shape("src")] if call.has("src") else [])
    dims, sizes = free_dims(source, others, dim)
    nosplit = {f for f in sizes if f.startswith("x")} | set(dims[dim])

    def described(shape: tuple[int, ...], tag: str) -> Dims:
        mine, extra = dims_of(shape, tag)
        out = []
        for i, d in enumerate(dims):
            if i == dim or any(f.startswith("x") for f in d) or shape[i] != source[i]:
                out.append(mine[i])
                sizes.update({f: extra[f] for f in mine[i]})
                nosplit.update(mine[i])
            else:
                out.append(d)
        return tuple(out)

    inputs = [tuple(dims), described(index, "j")]
    linear: tuple[frozenset[int], ...] = ()
    if call.has("src"):
        inputs.append(described(call.shape("src"), "s"))
        linear = (frozenset({0, 2}),) if "reduce" not in call.names else ()
    return Row(inputs=tuple(inputs), outputs=(tuple(dims),), sizes=sizes, nosplit=frozenset(nosplit), linear=linear)


def index_select_row(call: Call) -> Row:
    """aten.index_select: ``dim`` of the source stays whole, positions of the index are free."""
    source = call.shape("self")
    dims, sizes = dims_of(source)
    if not source:
        return opaque_row(call)
    dim = call["dim"] % len(source)
    index = call.shape("index")
    sizes["j"] = index[0] if index else 1
    place = ("j",) if sizes["j"] != 1 else ()
    out = [*dims[:dim], place, *dims[dim + 1 :]]
    return Row(
        inputs=(tuple(dims), (place,) if index else ()),
        outputs=(tuple(out),),
        sizes=sizes,
        nosplit=frozenset(dims[dim]),
        linear=(frozenset({0}),),
    )


def indexed(call: Call) -> tuple[Dims, list[Dims], Dims, dict[str, int], frozenset[str]] | None:
    """(dims of self, dims of every index, dims of the indexed result, sizes, nosplit), or None for boolean masks."""
    shape, indices = call.shape("self"), list(call["indices"])
    given = [i for i, ix in enumerate(indices) if isinstance(ix, fx.Node)]
    tensors = [indices[i].meta["val"] for i in given]
    if any(t.dtype in (torch.bool, torch.uint8) for t in tensors):
        return None
    dims, sizes = dims_of(shape)
    broad = broadcast_shapes(t.shape for t in tensors)
    places, extra = dims_of(tuple(broad), "i")
    sizes.update(extra)
    nosplit = frozenset(f for i in given for f in dims[i])
    described: list[Dims] = []
    for t in tensors:
        offset = len(broad) - t.dim()
        described.append(tuple(() if n == 1 else places[i + offset] for i, n in enumerate(t.shape)))
    kept = [d for i, d in enumerate(dims) if i not in given]
    together = given == list(range(given[0], given[0] + len(given)))
    at = given[0] if together else 0
    result = (*kept[:at], *places, *kept[at:])
    return tuple(dims), described, tuple(result), sizes, nosplit


def index_row(call: Call) -> Row:
    """aten.index.Tensor: indexed dims stay whole; other dims and the positions of the indices are free."""
    pieces = indexed(call)
    if pieces is None:
        return opaque_row(call)
    dims, described, result, sizes, nosplit = pieces
    return Row(
        inputs=(dims, *described),
        outputs=(result,),
        sizes=sizes,
        nosplit=nosplit,
        linear=(frozenset({0}),),
    )


def index_put_row(call: Call) -> Row:
    """aten.index_put: with accumulate, positions are summed over; else they stay whole."""
    pieces = indexed(call)
    if pieces is None:
        return opaque_row(call)
    dims, described, result, sizes, nosplit = pieces
    values = call.shape("values")
    offset = len(result) - len(values)
    value_dims = tuple(() if n == 1 else result[i + offset] for i, n in enumerate(values))
    positions = frozenset(f for f in sizes if f.startswith("i"))
    accumulate = bool(call.args.get("accumulate", False))
    last = 1 + len(described)
    return Row(
        inputs=(dims, *described, value_dims),
        outputs=(dims,),
        sizes=sizes,
        nosplit=nosplit | (frozenset() if accumulate else positions),
        reduce=dict.fromkeys(positions, "sum") if accumulate else {},
        addends={0: positions} if accumulate else {},
        linear=(frozenset({0, last}),),
    )


def index_add_row(call: Call) -> Row:
    """aten.index_add: ``dim`` stays whole; positions of the index are summed over."""
    shape = call.shape("self")
    if not shape:
        return opaque_row(call)
    dims, sizes = dims_of(shape)
    dim = call["dim"] % len(shape)
    source, index = call.shape("source"), call.shape("index")
    sizes["j"] = source[dim]
    place = ("j",) if source[dim] != 1 else ()
    return Row(
        inputs=(tuple(dims), (place,) if index else (), (*dims[:dim], place, *dims[dim + 1 :])),
        outputs=(tuple(dims),),
        sizes=sizes,
        nosplit=frozenset(dims[dim]),
        reduce={"j": "sum"},
        addends={0: frozenset({"j"})},
        linear=(frozenset({0, 2}),),
    )


def along_index_row(call: Call) -> Row:
    """index_fill, index_copy, index_reduce: ``dim`` and the index stay whole, all other dims are free."""
    shape = call.shape("self")
    if not shape:
        return opaque_row(call)
    dims, sizes = dims_of(shape)
    dim = call["dim"] % len(shape)
    count = call.shape("index")[0] if call.shape("index") else 1
    sizes["j"] = count
    place = ("j",) if count != 1 else ()
    inputs: list[Dims] = [tuple(dims), (place,) if call.shape("index") else ()]
    if call.has("source"):
        inputs.append((*dims[:dim], place, *dims[dim + 1 :]) if call.shape("source") else ())
    if call.has("value"):
        inputs.append(())
    copies = "copy" in call.op._schema.name
    return Row(
        inputs=tuple(inputs),
        outputs=(tuple(dims),),
        sizes=sizes,
        nosplit=frozenset((*dims[dim], "j")),
        linear=(frozenset({0, 2}),) if copies else (),
    )


def bag_row(call: Call) -> Row:
    """aten._embedding_bag: weight [v d] -> bags [n d]; only the width is free."""
    inputs = [plain(call.shape(name), name) for name in call.names if call.has(name)]
    outputs = [plain(shape or (), f"o{i}") for i, shape in enumerate(call.out_shapes)]
    sizes = {f: n for _, found in (*inputs, *outputs) for f, n in found.items()}
    width = call.shape("weight")[-1]
    sizes["d"] = width
    last = ("d",) if width != 1 else ()
    weight, bags = inputs[0][0][0], outputs[0][0][0]
    most = outputs[3][0]  # in max mode the row taken for every entry, else empty
    if len(most) == 2:
        most = (most[0], last)
    return Row(
        inputs=((weight, last), *(d for d, _ in inputs[1:])),
        outputs=((bags, last), outputs[1][0], outputs[2][0], most),
        sizes=sizes,
        nosplit=frozenset(f for f in sizes if f != "d"),
        complete={"d": frozenset({1, 2, 3})},
    )


def bag_backward_row(call: Call) -> Row:
    """aten._embedding_bag_backward: grad [n d] -> [v d]; only the width is free."""
    inputs = [plain(call.shape(name), name) for name in call.names if call.has(name)]
    sizes = {f: n for _, found in inputs for f, n in found.items()}
    rows, width = call.out_shapes[0] or (1, 1)
    sizes.update({"v": rows, "d": width})
    last = ("d",) if width != 1 else ()
    described = [d for d, _ in inputs]
    described[0] = (described[0][0], last)
    names = [name for name in call.names if call.has(name)]
    most = names.index("maximum_indices")
    if len(described[most]) == 2:
        described[most] = (described[most][0], last)
    return Row(
        inputs=tuple(described),
        outputs=((("v",) if rows != 1 else (), last),),
        sizes=sizes,
        nosplit=frozenset(f for f in sizes if f != "d"),
        linear=(frozenset({0}),),
    )


def bag_weights_backward_row(call: Call) -> Row:
    """aten._embedding_bag_per_sample_weights_backward: products of grad [n d] and weight [v d], summed over d."""
    inputs = [plain(call.shape(name), name) for name in call.names if call.has(name)]
    sizes = {f: n for _, found in inputs for f, n in found.items()}
    sizes["d"] = call.shape("grad")[-1]
    last = ("d",) if sizes["d"] != 1 else ()
    described = [d for d, _ in inputs]
    described[0], described[1] = (described[0][0], last), (described[1][0], last)
    out, found = dims_of(call.out_shapes[0] or (), "o")
    sizes.update(found)
    return Row(
        inputs=tuple(described),
        outputs=(tuple(out),),
        sizes=sizes,
        reduce={"d": "sum"},
        nosplit=frozenset(f for f in sizes if f != "d"),
        linear=(frozenset({0}), frozenset({1})),
    )


def plain(shape: tuple[int, ...], tag: str) -> tuple[Dims, dict[str, int]]:
    """Dims of a tensor that shares none of them."""
    dims, sizes = dims_of(shape, f"{tag}_")
    return tuple(dims), sizes
