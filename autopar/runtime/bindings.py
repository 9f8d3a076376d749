"""Cheaper calls: ``torch.mm`` in place of ``torch.ops.aten.mm.default``.

Both run the same kernel; the way there through Python's binding takes about half the time, which is most of the time of
a small operation.  A call is exchanged only where it is seen to dispatch the same overload with the same arguments.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from autopar.torch_private import dispatched

Binding = Callable[..., Any]
BINDING_TYPES = (types.BuiltinFunctionType, types.MethodDescriptorType)


def use_bindings(graph: fx.Graph, known: dict[Any, Binding | None]) -> None:
    """Exchange the calls of ``graph`` for cheaper ones.

    Args:
        graph: nodes know their values; nothing but their targets changes.
        known: what was found out about kinds of calls so far.
    """
    for node in graph.nodes:
        if node.op != "call_function" or getattr(node.target, "namespace", "") != "aten":
            continue
        kind = (node.target, _kind(node.args), _kind(node.kwargs))
        if kind not in known:
            known[kind] = _binding(node)
        if known[kind] is not None:
            node.target = known[kind]


def _kind(value: Any) -> Any:  # noqa: ANN401 - arguments of nodes
    """What decides to which overload a call with such an argument goes."""
    if isinstance(value, fx.Node):
        return "tensor" if isinstance(value.meta.get("val"), torch.Tensor) else type(value.meta.get("val"))
    if isinstance(value, dict):
        return tuple((key, _kind(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return (type(value), *map(_kind, value))
    return type(value)


def _binding(node: fx.Node) -> Binding | None:
    """The function of ``torch``, or method of ``torch.Tensor``, that does what the node does."""
    name = str(getattr(node.target, "_schema").name).removeprefix("aten::")  # noqa: B009 - not every target has one
    for home in (torch, torch.nn.functional, torch.Tensor):
        found = getattr(home, name, None)
        if isinstance(found, BINDING_TYPES) and _does_the_same(found, node):
            return found
    return None


def _does_the_same(function: Binding, node: fx.Node) -> bool:
    stand_ins: dict[fx.Node, Any] = {}

    def stand_in(argument: fx.Node) -> Any:  # noqa: ANN401 - values of nodes
        if argument not in stand_ins:
            value = argument.meta.get("val")
            if isinstance(value, torch.Tensor):
                value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            stand_ins[argument] = value
        return stand_ins[argument]

    args, kwargs = map_arg((node.args, node.kwargs), stand_in)
    try:
        with torch.no_grad():
            wanted = dispatched(node.target, args, kwargs)  # type: ignore[arg-type]
            got = dispatched(function, args, kwargs)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):  # not for such arguments, or not without data
        return False
    given = {id(value) for value in stand_ins.values()}
    return len(wanted) == len(got) and all(
        one[0] is other[0] and _equal(_complete(*one), _complete(*other), given)
        for one, other in zip(wanted, got, strict=True)
    )


def _complete(target: Any, args: Any, kwargs: Any) -> list[Any]:  # noqa: ANN401 - an OpOverload and its arguments
    """All arguments in the order of the schema."""
    found = []
    for position, argument in enumerate(target._schema.arguments):
        if position < len(args):
            found.append(args[position])
        else:
            found.append(kwargs.get(argument.name, argument.default_value))
    return found


def _equal(one: Any, other: Any, given: set[int]) -> bool:  # noqa: ANN401 - arguments
    """Whether arguments are equal: tensors that were given are the same, those made on the way look the same."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if {id(one), id(other)} & given:
            return one is other
        return (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(_equal(a, b, given) for a, b in zip(one, other, strict=True))
    return type(one) is type(other) and bool(one == other)
