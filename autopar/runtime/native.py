"""Forms of communication that a backend runs faster; the numbers stay the same.

* a sum over ranks of a tensor that nobody else reads is taken in place (the functional form copies its input first)
* gloo's reduce_scatter is slower than an exchange of parts followed by a local sum (about twice on two ranks)
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from autopar.passes.torch_ops import ALL_REDUCE, ALL_REDUCE_IN_PLACE, ALL_TO_ALL, REDUCE_SCATTER, WAIT

aten = torch.ops.aten


def reduce_in_place(graph: fx.Graph) -> None:
    """Turn all_reduces of fresh, otherwise unread tensors into in-place ones."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target is ALL_REDUCE and is_fresh(node.args[0]):
            node.target = ALL_REDUCE_IN_PLACE


def is_fresh(value: object) -> bool:
    """Whether a value was made by a call, in memory of its own, for one reader."""
    while isinstance(value, fx.Node):
        if value.op != "call_function" or len(value.users) != 1 or value.target is operator.getitem:
            return False
        schema = getattr(value.target, "_schema", None)
        if schema is None or schema.name.startswith("_c10d_functional::"):
            return False
        if not any(result.alias_info for result in schema.returns) and schema.name not in VIEWS:
            return True
        value = value.args[0]
    return False


# Calls that may return their argument's memory though their schemas do not say so.
VIEWS = frozenset({"aten::_unsafe_view", "aten::_reshape_alias", "aten::alias", "aten::reshape", "aten::contiguous"})


def scatter_by_exchange(graph: fx.Graph) -> None:
    """Turn sums by reduce_scatter into an all_to_all and a sum of what arrived."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not REDUCE_SCATTER or node.args[1] != "sum":
            continue
        source, _, ranks, group = node.args
        waits = [user for user in node.users if user.target is WAIT]
        if len(waits) != len(node.users) or not isinstance(ranks, int):
            continue
        rows = node.meta["val"].shape[0]
        with graph.inserting_before(node):
            sent = graph.call_function(ALL_TO_ALL, (source, [rows] * ranks, [rows] * ranks, group))
            sent.meta = dict(node.meta)
        for wait in waits:
            with graph.inserting_before(wait):
                got = graph.call_function(WAIT, (sent,))
                parts = graph.call_function(aten.view.default, (got, [ranks, *node.meta["val"].shape]))
                total = graph.call_function(aten.sum.dim_IntList, (parts, [0]))
            for new in (got, parts, total):
                new.meta = dict(wait.meta)
            wait.replace_all_uses_with(total)
            graph.erase_node(wait)
        graph.erase_node(node)
