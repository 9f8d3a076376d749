"""Where the loss is computed outside the step, one program becomes two: forward, and backward from given seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from autopar.passes.base import InputKind, Phase, Program
from autopar.runtime.bind import GRADIENTS, input_order


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """A program cut where its results leave it.

    Attributes:
        forward: takes what the bound program takes, without the seeds; returns one value for each entry of
            ``forward_outputs``, then the values that the backward half reads.
        backward: takes those values, then the seeds; returns one value for each entry of ``backward_outputs``.
        forward_outputs, backward_outputs: positions among the program's outputs.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    forward_outputs: tuple[int, ...]
    backward_outputs: tuple[int, ...]


def split_halves(bound: fx.GraphModule, program: Program) -> Halves:
    """Cut a bound program.

    To the backward half belongs what depends on a seed, and what was made for the backward (a weight gathered again)
    and no result needs.
    """
    graph = bound.graph
    values = list(graph.output_node().args[0])  # type: ignore[arg-type]
    placeholders = graph.find_nodes(op="placeholder")
    kinds = [program.inputs[i].kind for i in input_order(program)]
    seeds = [node for node, kind in zip(placeholders, kinds, strict=False) if kind is InputKind.SEED]
    late_outputs = [i for i, spec in enumerate(program.outputs) if spec.kind in GRADIENTS]
    early_outputs = [i for i in range(len(values)) if i not in late_outputs]
    late = _late(graph, seeds, [values[i] for i in early_outputs])
    saved: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node in late:
            saved.update((n, None) for n in node.all_input_nodes if n not in late)
    saved.update((values[i], None) for i in late_outputs if values[i] is not None and values[i] not in late)
    early = [n for n in graph.nodes if n not in late and n.op != "output"]
    forward = _graph(early, [values[i] for i in early_outputs] + list(saved))
    backward = _graph([n for n in graph.nodes if n in late], [values[i] for i in late_outputs], [*saved, *seeds])
    return Halves(
        forward=fx.GraphModule(bound, forward, class_name="Forward"),
        backward=fx.GraphModule(bound, backward, class_name="Backward"),
        forward_outputs=tuple(early_outputs),
        backward_outputs=tuple(late_outputs),
    )


def _late(graph: fx.Graph, seeds: Sequence[fx.Node], early_values: Sequence[fx.Node | None]) -> set[fx.Node]:
    """The nodes of the backward half, the seeds among them."""
    late = set(seeds)
    for node in graph.nodes:
        if node.op != "output" and any(n in late for n in node.all_input_nodes):
            late.add(node)
    needed = {n for n in early_values if n is not None}
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    for node in graph.nodes:
        made_for_backward = node.op not in ("placeholder", "output") and node.meta.get("phase") is Phase.BACKWARD
        if made_for_backward and node not in needed:
            late.add(node)
    return late


def _graph(nodes: Sequence[fx.Node], outputs: Sequence[fx.Node | None], inputs: Sequence[fx.Node] = ()) -> fx.Graph:
    """A graph of ``nodes`` that returns ``outputs``; ``inputs`` become placeholders in front."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        new[node] = graph.placeholder(node.name)
        new[node].meta = dict(node.meta)
    for node in nodes:
        if node not in new:
            new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(None if value is None else new[value] for value in outputs))
    graph.lint()
    return graph
