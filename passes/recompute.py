"""Recompute: values that the backward reads are made again right before it needs them, instead of being kept.

``full``: of a block only what enters it is kept.  ``selective``: cheap operations are repeated where their inputs are
kept anyway.  Regions that the user wrapped in ``torch.utils.checkpoint`` are treated as ``full``.

A random draw is never repeated: its results are kept, so that the backward belongs to the same sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from autopar.passes.base import Phase, StepGraph
from autopar.passes.rules.row import is_getitem
from autopar.passes.torch_ops import LazyGraphModule, OpOverload

COPY_OF = "copy_of"  # node.meta: name of the forward node that a node repeats

# Calls that are cheap beside the matrix products around them, though they are not pointwise.
CHEAP = frozenset(
    {
        "aten::native_layer_norm",
        "aten::_fused_rms_norm",
        "aten::_softmax",
        "aten::_log_softmax",
        "aten::sum.dim_IntList",
        "aten::mean.dim",
        "aten::amax",
        "aten::t",
        "aten::transpose.int",
        "aten::permute",
        "aten::view",
        "aten::reshape",
        "aten::_unsafe_view",
        "aten::expand",
        "aten::unsqueeze",
        "aten::squeeze.dim",
        "aten::slice.Tensor",
        "aten::select.int",
        "aten::split.Tensor",
        "aten::split_with_sizes",
        "aten::clone",
        "aten::_to_copy",
        "aten::cat",
        "aten::alias",
        "aten::detach",
        "aten::unbind.int",
        "aten::chunk",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """The pass.

    Attributes:
        mode: "none", "selective" or "full", for layers that ``layers`` does not name.
        layers: mode of a layer and all inside it, by dotted path; the longest path that fits counts.
    """

    mode: str = "full"
    layers: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, step: StepGraph) -> StepGraph:
        """A copy of ``step`` whose backward repeats parts of the forward.  Copies carry ``meta["copy_of"]``."""
        if not step.training or not self.acts_on(step):
            return step
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        graph.graph_copy(step.graph, mapping)
        graph.output(fx.node.map_arg(step.graph.output_node().args[0], mapping.__getitem__))
        for old, new in mapping.items():
            new.meta = dict(old.meta)
        repeated = self._full(step, graph) + self._selective(graph)
        for region in repeated:
            repeat(graph, region)
        graph.lint()
        return replace(step, graph_module=LazyGraphModule(step.graph_module, graph))

    def acts_on(self, step: StepGraph) -> bool:
        """Whether there is anything to do."""
        return self.mode != "none" or any(m != "none" for m in self.layers.values()) or bool(step.checkpoints)

    def of_layer(self, layer: str) -> str:
        """The mode of a layer."""
        fitting = [path for path in self.layers if layer == path or layer.startswith(path + ".")]
        return self.layers[max(fitting, key=len)] if fitting else self.mode

    def _full(self, step: StepGraph, graph: fx.Graph) -> list[set[fx.Node]]:
        """The values to make again of every block: those that the backward reads and nobody outside in the forward."""
        found = []
        for region in self._regions(step, graph):
            wanted = {n for n in region if read_by(n, Phase.BACKWARD) and not read_outside(n, region)}
            found.append(ancestors_within(wanted, region))
        return found

    def _regions(self, step: StepGraph, graph: fx.Graph) -> list[set[fx.Node]]:
        """Forward nodes by block: the user's checkpoints, copies of one block, else the children of the model."""
        blocks = {path for group in step.repeated for path in group}
        regions: dict[tuple[str, object], set[fx.Node]] = {}
        for node in forward_calls(graph):
            layer = node.meta.get("layer", "")
            if "checkpoint" in node.meta and node.meta["checkpoint"] is not None:
                regions.setdefault(("checkpoint", node.meta["checkpoint"]), set()).add(node)
            elif layer and self.of_layer(layer) == "full":
                parts = layer.split(".")
                paths = [".".join(parts[:i]) for i in range(1, len(parts) + 1)]
                block = next((p for p in paths if p in blocks), paths[0])
                regions.setdefault(("layer", block), set()).add(node)
        return list(regions.values())

    def _selective(self, graph: fx.Graph) -> list[set[fx.Node]]:
        """Cheap values whose inputs are kept anyway, or are made again themselves."""
        kept: set[fx.Node] = {n for n in graph.nodes if n.op in ("placeholder", "get_attr")}
        again: list[set[fx.Node]] = []
        chains: dict[fx.Node, set[fx.Node]] = {}
        kept |= {n for n in forward_calls(graph) if read_by(n, Phase.BACKWARD) and not is_cheap(n)}
        for node in forward_calls(graph):
            if (
                not is_cheap(node)
                or "checkpoint" in node.meta
                or self.of_layer(node.meta.get("layer", "")) != "selective"
            ):
                if read_by(node, Phase.BACKWARD):
                    kept.add(node)
                continue
            sources = [s for s in node.all_input_nodes if s not in kept]
            possible = all(s in chains for s in sources)
            if possible:
                chains[node] = {node}.union(*(chains[s] for s in sources))
            if read_by(node, Phase.BACKWARD) and not isinstance(node.meta.get("val"), (list, tuple)):
                if possible:
                    again.append(chains[node])
                else:
                    kept.add(node)
        return merged(again)


def forward_calls(graph: fx.Graph) -> list[fx.Node]:
    """Calls of the forward half, in order."""
    return [n for n in graph.nodes if n.op == "call_function" and n.meta.get("phase") is not Phase.BACKWARD]


def read_by(node: fx.Node, phase: Phase) -> bool:
    """Whether a call of ``phase`` reads the value (or a piece of it)."""
    return any(u.op == "call_function" and u.meta.get("phase") is phase for u in node.users)


def read_outside(node: fx.Node, region: set[fx.Node]) -> bool:
    """Whether the forward reads the value outside ``region``, or the step returns it."""
    return any(u.op == "output" or (u.meta.get("phase") is not Phase.BACKWARD and u not in region) for u in node.users)


def is_random(node: fx.Node) -> bool:
    """Whether the node, or the call it picks from, draws random numbers."""
    call = node.args[0] if is_getitem(node) else node
    return torch.Tag.nondeterministic_seeded in getattr(getattr(call, "target", None), "tags", ())


def is_cheap(node: fx.Node) -> bool:
    """Whether a call costs little beside a matrix product."""
    call = node.args[0] if is_getitem(node) else node
    target = getattr(call, "target", None)
    if is_random(node) or not isinstance(target, OpOverload):
        return False
    name = target._schema.name + (f".{target._schema.overload_name}" if target._schema.overload_name else "")
    return torch.Tag.pointwise in target.tags or name in CHEAP


def ancestors_within(wanted: set[fx.Node], region: set[fx.Node]) -> set[fx.Node]:
    """``wanted`` and what of ``region`` they are made from, up to what is kept: random draws, what leaves it."""
    found: set[fx.Node] = set()
    queue = [n for n in wanted if not is_random(n)]
    while queue:
        node = queue.pop()
        if node in found:
            continue
        found.add(node)
        queue += [
            s
            for s in node.all_input_nodes
            if s in region and not is_random(s) and (is_getitem(node) or not kept_outside(s, region))
        ]
    return found


def kept_outside(node: fx.Node, region: set[fx.Node]) -> bool:
    """Whether the value stays anyway, because the forward goes on from it outside the region."""
    return read_outside(node, region)


def merged(chains: Iterable[set[fx.Node]]) -> list[set[fx.Node]]:
    """Chains of one layer together, so that what they share is repeated once."""
    by_layer: dict[str, set[fx.Node]] = {}
    for chain in chains:
        for node in chain:
            by_layer.setdefault(node.meta.get("layer", ""), set())
        layers = sorted({n.meta.get("layer", "") for n in chain})
        by_layer[layers[0]] |= chain
    return [nodes for nodes in by_layer.values() if nodes]


def repeat(graph: fx.Graph, region: set[fx.Node]) -> None:
    """Make the values of ``region`` again before their first reader in the backward, which reads those from then on."""
    order = [n for n in graph.nodes if n in region]
    first = next((n for n in graph.nodes if is_backward(n) and any(s in region for s in n.all_input_nodes)), None)
    if first is None or not all_before(first, order):
        return
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(first):
        for node in order:
            copy = graph.node_copy(node, lambda n: copies.get(n, n))
            copy.meta = {**node.meta, "phase": Phase.BACKWARD, COPY_OF: node.meta.get(COPY_OF, node.name)}
            copies[node] = copy
    made = set(copies.values())
    for node, copy in copies.items():
        for user in list(node.users):
            if is_backward(user) and user not in made:
                user.replace_input_with(node, copy)
    for copy in reversed(list(copies.values())):
        if not copy.users:
            graph.erase_node(copy)


def all_before(first: fx.Node, region: Iterable[fx.Node]) -> bool:
    """Whether everything that ``region`` is made from is there when ``first`` runs.

    Forward calls may follow it where the forward itself takes gradients.
    """
    return all(source < first for node in region for source in (node, *node.all_input_nodes))


def is_backward(node: fx.Node) -> bool:
    """Whether the node is a call of the backward half."""
    return node.op == "call_function" and node.meta.get("phase") is Phase.BACKWARD
