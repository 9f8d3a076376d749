"""What all normal forms share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.passes.lowering import Emitter
from autopar.passes.rules.row import Call

# Emits the form of a call: a node, a tuple with one node an output, or None where the call is left as it is.
Rewrite = Callable[[Emitter, Call], Any]

NARROW = (torch.float16, torch.bfloat16)  # dtypes that torch itself sums in float32


def widened(emitter: Emitter, x: fx.Node, dtype: torch.dtype | None = None) -> fx.Node:
    """``x`` as it is summed: in ``dtype`` where that is asked for, and in float32 where its own is narrower."""
    have = x.meta["val"].dtype
    want = have if dtype is None else dtype
    want = torch.float32 if want in NARROW else want
    return x if want == have else emitter.call("_to_copy", x, dtype=want)


def as_output(emitter: Emitter, x: fx.Node, call: Call, index: int = 0) -> fx.Node:
    """``x`` in the dtype of the call's output ``index``."""
    out = call.outputs[index]
    if out is None or out.dtype == x.meta["val"].dtype:
        return x
    return emitter.call("_to_copy", x, dtype=out.dtype)
