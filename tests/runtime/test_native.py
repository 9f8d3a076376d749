"""Sums over micro-batches are taken in place where nobody else can see the memory."""

import operator

import pytest
import torch
from torch import fx

from autopar.runtime.native import add_in_place

ATEN = torch.ops.aten


def with_part(results, outer):
    """A module that calls a part, which returns ``results(graph, x)``, and returns ``outer(graph, call, x)``."""
    inner = fx.Graph()
    inner.output(tuple(results(inner, inner.placeholder("x"))))
    root, graph = torch.nn.Module(), fx.Graph()
    root.add_module("part", fx.GraphModule(torch.nn.Module(), inner))
    x = graph.placeholder("x")
    graph.output(outer(graph, lambda: graph.call_module("part", (x,)), x))
    for part in (graph, inner):
        for node in part.nodes:
            node.meta["val"] = torch.empty(4, 4)
    return fx.GraphModule(root, graph)


def pick(graph, called, index=0):
    return graph.call_function(operator.getitem, (called, index))


def added(graph, one, other):
    return graph.call_function(ATEN.add.Tensor, (one, other))


def sum_of_three(graph, call, _):
    first, second, third = pick(graph, call()), pick(graph, call()), pick(graph, call())
    return added(graph, added(graph, first, second), third)


def read_twice(graph, call, _):
    first = pick(graph, call())
    return added(graph, first, pick(graph, call())), first


def picked_twice(graph, call, _):
    called = call()
    return added(graph, pick(graph, called), pick(graph, called))


def product(graph, x):
    return [graph.call_function(ATEN.mm.default, (x, x))]


def transposed(graph, x):
    return [graph.call_function(ATEN.t.default, (product(graph, x)[0],))]


def two_views(graph, x):
    whole = product(graph, x)[0]
    return [whole, graph.call_function(ATEN.t.default, (whole,))]


def one_twice(graph, x):
    return product(graph, x) * 2


def the_input(graph, x):
    return [graph.call_function(ATEN.t.default, (x,))]


@pytest.mark.parametrize(
    ("results", "outer", "in_place"),
    [
        (product, sum_of_three, 2),
        (transposed, sum_of_three, 2),
        (two_views, sum_of_three, 1),  # the first sum makes memory of its own, the second adds to it
        (one_twice, sum_of_three, 1),
        (the_input, sum_of_three, 1),
        (product, read_twice, 0),
        (product, picked_twice, 0),
    ],
)
def test_sums_in_place_change_nothing_that_others_see(results, outer, in_place):
    module = with_part(results, outer)
    x = torch.randn(4, 4)
    given, want = x.clone(), module(x)
    add_in_place(module)
    module.recompile()
    assert len(module.graph.find_nodes(op="call_function", target=ATEN.add_.Tensor)) == in_place
    torch.testing.assert_close(module(x), want, rtol=0, atol=0)
    assert torch.equal(x, given)


def test_a_smaller_sum_is_not_taken_in_place():
    graph = fx.Graph()
    x = graph.placeholder("x")
    row = graph.call_function(ATEN.sum.dim_IntList, (x, [0]))
    total = graph.call_function(ATEN.add.Tensor, (row, x))
    graph.output(total)
    for node, shape in ((x, (4, 4)), (row, (4,)), (total, (4, 4))):
        node.meta["val"] = torch.empty(shape)
    module = fx.GraphModule(torch.nn.Module(), graph)
    add_in_place(module)
    assert total.target is ATEN.add.Tensor
