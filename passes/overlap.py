"""Order of communication: waits move down to the first use of what they wait for, so that collectives run beside work."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autopar.passes.base import Program
from autopar.passes.torch_ops import OpOverload, is_wait

# Calls that only reshape what a wait gave: they move down together with it.
FOLLOWERS = frozenset({"aten::reshape", "aten::permute", "aten::slice.Tensor", "aten::clone", "aten::_to_copy"})


@dataclass(frozen=True, slots=True)
class Overlap:
    """The pass: every wait, and the reshaping that follows it, stands right before the first real use."""

    def __call__(self, program: Program) -> Program:
        """``program`` with its nodes reordered in place."""
        graph = program.graph_module.graph
        nodes = list(graph.nodes)
        moving: set[fx.Node] = set()
        for node in nodes:
            if is_wait(node) or follows(node, moving):
                moving.add(node)
        # Walking backwards, the users of a node have found their places before the node is put before the first of them.
        heads: dict[fx.Node, list[fx.Node]] = {}
        position = {node: i for i, node in enumerate(nodes)}
        for node in reversed(nodes):
            if node in moving and node.users:
                first = min(node.users, key=lambda user: position[user])
                position[node] = position[first]
                heads.setdefault(first, []).append(node)
        place(heads, [n for n in nodes if n not in moving or not n.users])
        graph.lint()
        program.graph_module.recompile()
        return program


def place(heads: dict[fx.Node, list[fx.Node]], fixed: list[fx.Node]) -> None:
    """Put every moving node right before the node it belongs to, dependencies first."""
    for anchor in fixed:
        stack = [(anchor, iter(heads.get(anchor, ())))]
        while stack:
            target, pending = stack[-1]
            node = next(pending, None)
            if node is None:
                stack.pop()
                continue
            target.prepend(node)
            stack.append((node, iter(heads.get(node, ()))))


def follows(node: fx.Node, moving: set[fx.Node]) -> bool:
    """Whether ``node`` only reshapes something that moves."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    overload = node.target._schema.overload_name
    name = node.target._schema.name + (f".{overload}" if overload else "")
    inputs = node.all_input_nodes
    return name in FOLLOWERS and bool(inputs) and all(n in moving for n in inputs)
