"""The private torch operations that the passes emit, each with the public behaviour it stands for.

``torch.ops._c10d_functional.*``: functional collectives (what ``torch.distributed._functional_collectives`` calls):
they return at once; ``wait_tensor`` waits.
``OpOverload``: the type of ``torch.ops.aten.add.Tensor``.  ``FakeTensorMode``: tensors with a shape, dtype and device
but no data (what ``torch.export`` runs models on).  ``pytree``: the flattening of nested containers.
``LazyGraphModule``: a ``torch.fx.GraphModule`` that makes its code when it is needed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils import _pytree

LazyGraphModule = _LazyGraphModule
pytree = _pytree

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

ALL_REDUCE = c10d.all_reduce.default
ALL_GATHER = c10d.all_gather_into_tensor.default
REDUCE_SCATTER = c10d.reduce_scatter_tensor.default
ALL_TO_ALL = c10d.all_to_all_single.default
ALL_GATHER_COALESCED = c10d.all_gather_into_tensor_coalesced.default
ALL_REDUCE_IN_PLACE = c10d.all_reduce_.default
WAIT = c10d.wait_tensor.default
ISEND = c10d.isend.default
IRECV = c10d.irecv.default

COLLECTIVES = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, ALL_GATHER_COALESCED)


def broadcast_shapes(shapes: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """The shape that tensors of ``shapes`` have together."""
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call] # torch gives it no types


def resolve(name: str | OpOverload) -> OpOverload:
    """``"add.Tensor"`` -> ``torch.ops.aten.add.Tensor``; an overload is returned as it is."""
    if not isinstance(name, str):
        return name
    base, _, overload = name.partition(".")
    return getattr(getattr(aten, base), overload or "default")  # type: ignore[no-any-return]


def is_collective(node: fx.Node) -> bool:
    """Whether the node starts a collective."""
    return node.op == "call_function" and node.target in COLLECTIVES


def is_wait(node: fx.Node) -> bool:
    """Whether the node waits for a collective."""
    return node.op == "call_function" and node.target is WAIT


def group_of(node: fx.Node) -> str:
    """The group argument of a collective: the name of a mesh axis, or several joined by "+"."""
    return str(node.args[-1])


def getitem(value: Any, index: int) -> Any:
    """The function that fx uses to pick an output of a multi-output call."""
    return operator.getitem(value, index)
