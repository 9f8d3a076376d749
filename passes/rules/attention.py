"""Rows of fused attention, forward and backward, in its CPU flash, efficient, flash and cuDNN forms."""

from __future__ import annotations

from autopar.passes.rules.row import Call, Dims, Row
from autopar.passes.rules.views import opaque_row


def attention_sizes(call: Call) -> dict[str, int]:
    """Sizes of the factors: batch, kv heads h, queries per kv head g, lengths l and s, widths d and e."""
    q, k, v = call.shape("query"), call.shape("key"), call.shape("value")
    return {"b": q[0], "h": k[1], "g": q[1] // k[1], "l": q[2], "s": k[2], "d": q[3], "e": v[3]}


def mask_dims(shape: tuple[int, ...], sizes: dict[str, int]) -> Dims:
    """Dims of a mask that broadcasts against [b, (h g), l, s]."""
    full: Dims = (("b",), ("h", "g"), ("l",), ("s",))
    offset = 4 - len(shape)
    return tuple(() if n == 1 else squeeze_dim(full[i + offset], sizes) for i, n in enumerate(shape))


def squeeze_dim(dim: tuple[str, ...], sizes: dict[str, int]) -> tuple[str, ...]:
    """Atoms of size 1 are not written."""
    return tuple(f for f in dim if sizes[f] != 1)


def squeezed(dims: Dims, sizes: dict[str, int]) -> Dims:
    """:func:`squeeze_dim` over all dims."""
    return tuple(squeeze_dim(d, sizes) for d in dims)


QUERY: Dims = (("b",), ("h", "g"), ("l",), ("d",))
KEY: Dims = (("b",), ("h",), ("s",), ("d",))
VALUE: Dims = (("b",), ("h",), ("s",), ("e",))
OUT: Dims = (("b",), ("h", "g"), ("l",), ("e",))
LSE: Dims = (("b",), ("h", "g"), ("l",))


def attention_row(call: Call) -> Row:
    """Of q [b (h g) l d], k [b h s d], v [b h s e] -> out [b (h g) l e], logsumexp [b (h g) l]."""
    if len(call.shape("query")) != 4 or call.args.get("dropout_p", 0.0):
        return opaque_row(call)
    sizes = attention_sizes(call)
    inputs = [squeezed(d, sizes) for d in (QUERY, KEY, VALUE)]
    if call.has("attn_mask"):
        inputs.append(mask_dims(call.shape("attn_mask"), sizes))
    outputs: list[Dims | None] = [None] * len(call.outputs)
    outputs[0], outputs[1] = squeezed(OUT, sizes), squeezed(LSE, sizes)
    keep = {"d", "s", "e"} | ({"l"} if call.args.get("is_causal") else set())
    return Row(inputs=tuple(inputs), outputs=tuple(outputs), sizes=sizes, nosplit=frozenset(keep))


def attention_backward_row(call: Call) -> Row:
    """Gradients of q, k, v: those of k and v are sums over the queries, and over the query heads that share them."""
    if len(call.shape("query")) != 4 or call.args.get("dropout_p", 0.0):
        return opaque_row(call)
    sizes = attention_sizes(call)
    inputs = [squeezed(d, sizes) for d in (OUT, QUERY, KEY, VALUE, OUT, LSE)]
    if call.has("attn_mask"):
        inputs.append(mask_dims(call.shape("attn_mask"), sizes))
    keep = {"d", "s", "e"} | ({"l"} if call.args.get("is_causal") else set())
    return Row(
        inputs=tuple(inputs),
        outputs=tuple(squeezed(d, sizes) for d in (QUERY, KEY, VALUE)),
        sizes=sizes,
        reduce={"g": "sum"} if "l" in keep else {"g": "sum", "l": "sum"},
        nosplit=frozenset(keep),
        linear=(frozenset({0}),),
    )
