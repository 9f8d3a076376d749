"""Constants and rearrangements in the few operations that rows describe best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar.cost_models.errors import UnsupportedOpError
from autopar.passes.forms.common import Rewrite
from autopar.passes.lowering import Emitter
from autopar.passes.rules.row import Call

# Operations that copy what another one views: in a functional graph they are the same.
COPIES = (
    "alias",
    "detach",
    "diagonal",
    "expand",
    "narrow",
    "permute",
    "slice.Tensor",
    "select.int",
    "split.Tensor",
    "split_with_sizes",
    "squeeze",
    "squeeze.dim",
    "squeeze.dims",
    "t",
    "transpose.int",
    "unbind.int",
    "unfold",
    "unsqueeze",
    "view",
    "as_strided",
    "view_as_real",
    "view_as_complex",
)


def filled(value: Any) -> Rewrite:
    """A rewrite of *_like and new_* calls to ``full``; ``value`` is a number or the name of the argument holding it."""

    def rewrite(emitter: Emitter, call: Call) -> Any:
        out = call.outputs[0]
        fill = call[value] if isinstance(value, str) else value
        if out is None or isinstance(fill, fx.Node):
            return None
        if out.dtype == torch.bool:
            fill = bool(fill)
        return emitter.call("full", list(out.shape), fill, dtype=out.dtype, device=out.device)

    return rewrite


def identity(emitter: Emitter, call: Call) -> Any:
    """Operations that only matter to autograd."""
    return call.tensors[0]


def renamed(op: str) -> Rewrite:
    """A rewrite to another operation that takes the same arguments."""

    def rewrite(emitter: Emitter, call: Call) -> Any:
        args = [call[a.name] for a in call.op._schema.arguments if not a.kwarg_only]
        new = emitter.call(op, *args)
        if isinstance(new.meta["val"], (list, tuple)):
            return tuple(emitter.getitem(new, i) for i in range(len(new.meta["val"])))
        return new

    return rewrite


def copied(base: str) -> Rewrite:
    """The rewrite of ``base``'s copying twin."""
    if base == "as_strided":
        return as_strided
    if base == "narrow":
        return narrow
    return renamed({"view": "reshape"}.get(base, base))


def narrow(emitter: Emitter, call: Call) -> Any:
    """narrow_copy -> slice."""
    dim, start, length = call["dim"], call["start"], call["length"]
    start = start + call.shapes[0][dim] if start < 0 else start
    return emitter.call("slice.Tensor", call["self"], dim, start, start + length)


def pixel_shuffle(emitter: Emitter, call: Call) -> Any:
    """[*, c r r, h, w] -> [*, c, h r, w r] as reshapes around a permutation."""
    *lead, channels, height, width = call.shapes[0]
    r, n = call["upscale_factor"], len(lead)
    apart = emitter.call("reshape", call["self"], [*lead, channels // (r * r), r, r, height, width])
    moved = emitter.call("permute", apart, [*range(n + 1), n + 3, n + 1, n + 4, n + 2])
    return emitter.call("reshape", moved, list(call.out_shapes[0] or ()))


def pixel_unshuffle(emitter: Emitter, call: Call) -> Any:
    """The reverse of :func:`pixel_shuffle`."""
    *lead, channels, height, width = call.shapes[0]
    r, n = call["downscale_factor"], len(lead)
    apart = emitter.call("reshape", call["self"], [*lead, channels, height // r, r, width // r, r])
    moved = emitter.call("permute", apart, [*range(n + 1), n + 2, n + 4, n + 1, n + 3])
    return emitter.call("reshape", moved, list(call.out_shapes[0] or ()))


def channel_shuffle(emitter: Emitter, call: Call) -> Any:
    """[n, (groups c), ...] -> [n, (c groups), ...]."""
    shape, groups = call.shapes[0], call["groups"]
    apart = emitter.call("reshape", call["self"], [shape[0], groups, shape[1] // groups, *shape[2:]])
    return emitter.call("reshape", emitter.call("transpose.int", apart, 1, 2), list(shape))


def rot90(emitter: Emitter, call: Call) -> Any:
    """Quarter turns as flips and a transposition."""
    x, (a, b), turns = call["self"], call["dims"], call["k"] % 4
    if turns == 0:
        return x
    if turns == 2:
        return emitter.call("flip", x, [a, b])
    return emitter.call("transpose.int", emitter.call("flip", x, [b if turns == 1 else a]), a, b)


def stored_flat(emitter: Emitter, call: Call) -> tuple[fx.Node, Sequence[int], int]:
    """(the first argument in the order of its memory, as one dim; that order of its dims; where it begins there).

    Raises:
        UnsupportedOpError: the argument does not fill its memory, so that others' elements would be read.
    """
    value = call.tensors[0].meta["val"]
    order = sorted(range(value.dim()), key=lambda d: (-value.stride(d), d))
    span = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    if value.numel() and span != value.numel():
        raise UnsupportedOpError(
            f"{call.op} reads the memory of a tensor of shape {tuple(value.shape)} and strides {value.stride()}, which "
            "does not fill it; use indexing or unfold instead of as_strided"
        )
    moved = emitter.call("permute", call.tensors[0], order)
    dense = emitter.call("clone", moved, memory_format=torch.contiguous_format)
    return emitter.call("reshape", dense, [value.numel()]), order, value.storage_offset()


def offset_in(call: Call, begin: int) -> int:
    """The storage offset of a strided call relative to its argument."""
    given = call.args.get("storage_offset")
    return 0 if given is None else int(given) - begin


def as_strided(emitter: Emitter, call: Call) -> Any:
    """Strides are those of one device's memory: the argument is laid out that way first."""
    flat, _, begin = stored_flat(emitter, call)
    return emitter.call("as_strided", flat, call["size"], call["stride"], offset_in(call, begin))


def as_strided_scatter(emitter: Emitter, call: Call) -> Any:
    """As :func:`as_strided`, and back."""
    flat, order, begin = stored_flat(emitter, call)
    new = emitter.call("as_strided_scatter", flat, call["src"], call["size"], call["stride"], offset_in(call, begin))
    shape = call.shapes[0]
    apart = emitter.call("reshape", new, [shape[d] for d in order])
    return emitter.call("permute", apart, [order.index(d) for d in range(len(shape))])


FORMS: Mapping[str, Rewrite] = {
    "aten::zeros_like": filled(0),
    "aten::ones_like": filled(1),
    "aten::full_like": filled("fill_value"),
    "aten::empty_like": filled(0),
    "aten::new_zeros": filled(0),
    "aten::new_ones": filled(1),
    "aten::new_full": filled("fill_value"),
    "aten::new_empty": filled(0),
    "aten::new_empty_strided": filled(0),
    "aten::empty_strided": filled(0),
    "aten::empty_permuted": filled(0),
    "aten::zero": filled(0),
    "aten::_efficientzerotensor": filled(0),
    "aten::detach": identity,
    "aten::alias": identity,
    "aten::lift_fresh_copy": identity,
    "aten::_conj": renamed("conj_physical"),
    "aten::_neg_view": renamed("neg"),
    "aten::unsafe_split.Tensor": renamed("split.Tensor"),
    "aten::unsafe_split_with_sizes": renamed("split_with_sizes"),
    "aten::pixel_shuffle": pixel_shuffle,
    "aten::pixel_unshuffle": pixel_unshuffle,
    "aten::channel_shuffle": channel_shuffle,
    "aten::native_channel_shuffle": channel_shuffle,
    "aten::rot90": rot90,
    "aten::as_strided": as_strided,
    "aten::as_strided_scatter": as_strided_scatter,
    **{f"aten::{base.partition('.')[0]}_copy{base[len(base.partition('.')[0]) :]}": copied(base) for base in COPIES},
}
