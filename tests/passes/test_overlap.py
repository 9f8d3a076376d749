"""Waits move down to their first use, whatever hangs on them."""

from random import Random

import pytest
import torch
from torch import fx

from autopar.passes.overlap import follows, sink_waits
from autopar.passes.torch_ops import ALL_REDUCE, WAIT, is_wait

aten = torch.ops.aten


def random_graph(random: Random) -> fx.Graph:
    """Reductions, their waits, views of them and sums, in any order that is right."""
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(2)]
    for _ in range(random.randint(5, 25)):
        source = random.choice(nodes[-6:])
        kind = random.choice(["reduce", "slice", "slice", "clone", "reshape", "add", "cat"])
        if kind == "reduce":
            reduced = graph.call_function(ALL_REDUCE, (source, "sum", "x"))
            nodes.append(graph.call_function(WAIT, (reduced,)))
        elif kind == "slice":
            nodes.append(graph.call_function(aten.slice.Tensor, (source, 0, 0, 4)))
        elif kind == "clone":
            nodes.append(graph.call_function(aten.clone.default, (source,)))
        elif kind == "reshape":
            nodes.append(graph.call_function(aten.reshape.default, (source, [2, 2])))
        elif kind == "add":
            nodes.append(graph.call_function(aten.add.Tensor, (source, random.choice(nodes))))
        else:
            nodes.append(graph.call_function(aten.cat.default, ([source, random.choice(nodes)],)))
    graph.output(tuple(n for n in nodes if not n.users))
    return graph


@pytest.mark.parametrize("seed", range(5))
def test_waits_and_their_views_stand_right_before_what_uses_them(seed):
    random = Random(seed)
    for _ in range(100):
        graph = random_graph(random)
        before = list(graph.nodes)
        moving: set[fx.Node] = set()
        for node in before:
            if is_wait(node) or follows(node, moving):
                moving.add(node)
        sink_waits(graph)
        graph.lint()
        after = list(graph.nodes)
        assert [n for n in after if n not in moving] == [n for n in before if n not in moving]
        for node in moving:
            used_at = next(n for n in after[after.index(node) :] if n not in moving)
            reached, queue = set(), [node]
            while queue:
                for user in queue.pop().users:
                    if user not in reached:
                        reached.add(user)
                        queue += [user] if user in moving else []
            assert used_at in reached
