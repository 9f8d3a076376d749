"""Forms of communication that a backend runs faster; the numbers stay the same.

* a sum over ranks of a tensor that nobody else reads is taken in place (the functional form copies its input first)
* what a micro-batch gives is added in place to a sum that nobody else reads (fresh memory costs more than the sum)
* gloo's reduce_scatter is slower than an exchange of parts followed by a local sum (about twice on two ranks)
"""

from __future__ import annotations

import operator
from typing import cast

import torch
from torch import fx

from autopar.passes.torch_ops import ALL_REDUCE, ALL_REDUCE_IN_PLACE, ALL_TO_ALL, REDUCE_SCATTER, WAIT

aten = torch.ops.aten


def reduce_in_place(graph: fx.Graph) -> None:
    """Turn all_reduces of fresh, otherwise unread tensors into in-place ones."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target is ALL_REDUCE and is_fresh(node.args[0]):
            node.target = ALL_REDUCE_IN_PLACE


def add_in_place(module: fx.GraphModule) -> None:
    """Turn sums into a fresh, otherwise unread tensor of the same kind into in-place ones, in the outermost graph."""
    for node in reversed(module.graph.find_nodes(op="call_function", target=aten.add.Tensor)):
        total = node.args[0]
        if node.kwargs or not isinstance(total, fx.Node) or not _same_kind(total.meta.get("val"), node.meta.get("val")):
            continue
        if len(total.users) == 1 and node.args[1] is not total and (is_fresh(total) or _is_fresh_result(module, total)):
            node.target = aten.add_.Tensor


def _same_kind(one: object, other: object) -> bool:
    """Whether the tensors have one shape and dtype, and no element of the first stands for several."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    spread = any(stride == 0 and size > 1 for stride, size in zip(one.stride(), one.shape, strict=True))
    return one.shape == other.shape and one.dtype == other.dtype and not spread


def _is_fresh_result(module: fx.GraphModule, value: fx.Node) -> bool:
    """Whether a value is the result of a sub-program that made it for this place alone."""
    if value.target is not operator.getitem:
        return False
    called, index = value.args
    if not isinstance(called, fx.Node) or called.op != "call_module":
        return False
    if [user.args[1] for user in called.users].count(index) != 1:
        return False
    graph = cast("fx.GraphModule", module.get_submodule(str(called.target))).graph
    results = cast("tuple[object, ...]", graph.output_node().args[0])
    result = results[cast("int", index)]
    return sum(other is result for other in results) == 1 and is_fresh(result)


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
