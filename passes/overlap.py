"""Order of communication: waits move down to the first use of what they wait for, gathers start one block ahead."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch import fx

from autopar.passes.base import Program
from autopar.passes.bucket import input_chain
from autopar.passes.torch_ops import ALL_GATHER, ALL_GATHER_COALESCED, OpOverload, is_wait

# Calls that only reshape what a wait gave: they move down together with it.
FOLLOWERS = frozenset({"aten::reshape", "aten::permute", "aten::slice.Tensor", "aten::clone", "aten::_to_copy"})


@dataclass(frozen=True, slots=True)
class Overlap:
    """The pass.

    Every wait, and the reshaping that follows it, stands right before the first real use.  With ``prefetch``, the
    all_gather of parameters that the program needs next starts before the wait for the present one: it runs beside the
    work of one block, and no more than two blocks are gathered at a time.
    """

    prefetch: bool = True

    def __call__(self, program: Program) -> Program:
        """``program`` with its nodes reordered in place."""
        graph = program.graph_module.graph
        sink_waits(graph)
        if self.prefetch:
            start_gathers_early(graph)
        graph.lint()
        program.graph_module.recompile()
        return program


def sink_waits(graph: fx.Graph) -> None:
    """Put waits and what follows them right before their first use."""
    nodes = list(graph.nodes)
    moving: set[fx.Node] = set()
    for node in nodes:
        if node.users and (is_wait(node) or follows(node, moving)):
            moving.add(node)
    # Walking backwards, the places of a node's users are known: where they stand, or before what they are put.
    place = {node: i for i, node in enumerate(nodes)}
    arriving: dict[int, list[fx.Node]] = {}
    for node in reversed(nodes):
        if node in moving:
            place[node] = min(place[user] for user in node.users)
            arriving.setdefault(place[node], []).append(node)
    for position, found in arriving.items():
        for node in reversed(found):  # in the order in which they stood, so dependencies come first
            nodes[position].prepend(node)


def follows(node: fx.Node, moving: set[fx.Node]) -> bool:
    """Whether ``node`` only reshapes something that moves."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    overload = node.target._schema.overload_name
    name = node.target._schema.name + (f".{overload}" if overload else "")
    inputs = node.all_input_nodes
    return name in FOLLOWERS and bool(inputs) and all(n in moving for n in inputs)


def start_gathers_early(graph: fx.Graph) -> None:
    """Move every gather of parameters up, to before the first wait for the gather before it."""
    gathers = []
    for node in graph.nodes:
        if node.op == "call_function" and node.target in (ALL_GATHER, ALL_GATHER_COALESCED):
            chains = gather_chains(node)
            if chains is not None:
                gathers.append((node, chains))
    position: dict[fx.Node, float] = {node: i for i, node in enumerate(graph.nodes)}
    for (before, _), (node, chain) in itertools.pairwise(gathers):
        waits = [n for n in downstream(before) if is_wait(n)]
        anchor = min(waits, key=position.__getitem__, default=None)
        if anchor is None or position[anchor] > position[node]:
            continue
        for link in (*chain, node, *(u for u in list(node.users) if not is_wait(u))):
            if position[link] > position[anchor]:  # what stands above may have other users there
                anchor.prepend(link)
                position[link] = position[anchor] - 0.5


def gather_chains(node: fx.Node) -> list[fx.Node] | None:
    """The calls between inputs of the step and a gather, or None where it depends on anything computed."""
    if node.target is ALL_GATHER:
        return input_chain(node)
    links: list[fx.Node] = []
    for source in node.all_input_nodes:
        while source.op == "call_function" and not is_wait(source):
            links.append(source)
            if len(source.all_input_nodes) != 1:
                return None
            source = source.all_input_nodes[0]
        if source.op != "placeholder":
            return None
    return list(reversed(links))


def downstream(node: fx.Node) -> list[fx.Node]:
    """The users of a collective, through the picking of its results."""
    if node.target is ALL_GATHER:
        return list(node.users)
    return [wait for part in node.users for wait in part.users]
