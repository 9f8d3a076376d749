"""Fewer, larger messages: gradients of one group are reduced together, parameters of one block gathered together."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from torch import fx

from autopar.cost_models.errors import PartitionError
from autopar.passes.base import OutputKind, Program, ProgramTensor
from autopar.passes.lowering import Emitter
from autopar.passes.placement import local_shape
from autopar.passes.torch_ops import (
    ALL_GATHER,
    ALL_GATHER_COALESCED,
    ALL_REDUCE,
    REDUCE_SCATTER,
    WAIT,
    is_collective,
    is_wait,
)


@dataclass(frozen=True, slots=True)
class Bucket:
    """The pass.

    * all_reduces and reduce_scatters of gradients that only leave the step are joined into buckets of ``max_bytes``:
      the members are laid side by side in one tensor, reduced together as soon as the last of them is ready, and the
      gradients are views of the result (as in DistributedDataParallel);
    * all_gathers of parameters for one block and phase become one coalesced all_gather, at the place of the first (as
      in FSDP's groups).
    """

    max_bytes: int = 25_000_000

    def __call__(self, program: Program) -> Program:
        """``program`` with its messages in buckets (in place)."""
        graph = program.graph_module.graph
        leaving = {
            node: tensor
            for spec, tensor, node in zip(
                program.outputs,
                program.output_tensors,
                graph.output_node().args[0],  # type: ignore[arg-type]
                strict=True,
            )
            if spec.kind is OutputKind.GRADIENT and isinstance(node, fx.Node) and tensor is not None
        }
        sizes: dict[fx.Node, int] = {}
        reductions: dict[Any, list[fx.Node]] = {}
        gathers: dict[Any, list[fx.Node]] = {}
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            if node.target in (ALL_REDUCE, REDUCE_SCATTER) and (chain := reductions_from(node, leaving)):
                dtype = node.args[0].meta["val"].dtype
                key = (-len(chain.collectives), node.target, node.args[1:], dtype, node.meta.get("stage"))
                reductions.setdefault(key, []).append(node)
                sizes[node] = first_rank_elements(chain, leaving[chain.end], program.mesh.sizes) * dtype.itemsize
            elif node.target is ALL_GATHER and input_chain(node) is not None:
                dtype = node.meta["val"].dtype
                block = block_of(node)
                together = (block, node.meta.get("phase"), node.args[1:], dtype, node.meta.get("stage"))
                gathers.setdefault(together, []).append(node)
        # A gradient may be reduced over one axis after another: first reductions are joined first.
        for key in sorted(reductions, key=lambda k: k[0]):
            position = {node: i for i, node in enumerate(graph.nodes)}
            for bucket in self.cut(sorted(reductions[key], key=position.__getitem__), sizes):
                if len(bucket) > 1:
                    join_reductions(graph, bucket)
        if self.max_bytes:
            for nodes in gathers.values():
                if len(nodes) > 1:
                    join_gathers(graph, nodes)
        graph.lint()
        program.graph_module.recompile()
        return program

    def cut(self, nodes: Sequence[fx.Node], sizes: Mapping[fx.Node, int]) -> list[list[fx.Node]]:
        """Runs of neighbours of at most ``max_bytes`` together (a single larger one stands alone)."""
        buckets: list[list[fx.Node]] = []
        filled = 0
        for node in nodes:
            if not buckets or filled + sizes[node] > self.max_bytes:
                buckets.append([])
                filled = 0
            buckets[-1].append(node)
            filled += sizes[node]
        return buckets


@dataclass(frozen=True)
class Chain:
    """The reductions that one gradient goes through, the first of them in question, and the node that leaves."""

    collectives: tuple[fx.Node, ...]
    end: fx.Node


def first_rank_elements(chain: Chain, gradient: ProgramTensor, sizes: tuple[int, ...]) -> int:
    """Number of elements that enter a chain on the first rank.

    Not this rank's: where parts are uneven, ranks would fill their buckets differently and reduce in different orders.
    """
    held = math.prod(local_shape(gradient.shape, gradient.layout, sizes, tuple(0 for _ in sizes)))
    scattered = (c.args[2] for c in chain.collectives if c.target is REDUCE_SCATTER)
    return held * math.prod(n for n in scattered if isinstance(n, int))


def reductions_from(node: fx.Node, leaving: Container[fx.Node]) -> Chain | None:
    """The reductions from ``node`` on if its result only leaves the step as a gradient; None: it does more."""
    collectives = [node]
    while True:
        if len(node.users) != 1:
            return None
        (node,) = node.users
        if node.op == "output" or len(node.all_input_nodes) != 1:
            return None
        if node in leaving:
            alone = all(user.op == "output" for user in node.users)
            return Chain(collectives=tuple(collectives), end=node) if alone else None
        if is_collective(node):
            collectives.append(node)


def block_of(node: fx.Node) -> str:
    """The block that a node serves: its layer up to the first number (``blocks.3.mlp.up`` -> ``blocks.3``)."""
    parts = str(node.meta.get("layer", "")).split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ""


def input_chain(node: fx.Node) -> list[fx.Node] | None:
    """The calls between an all_gather and the one input of the step that it gathers, or None where there is more."""
    chain: list[fx.Node] = []
    source = node.all_input_nodes
    while len(source) == 1 and source[0].op == "call_function" and not is_wait(source[0]):
        chain.append(source[0])
        source = source[0].all_input_nodes
    if len(source) != 1 or source[0].op != "placeholder":
        return None
    return list(reversed(chain))


def join_gathers(graph: fx.Graph, bucket: Sequence[fx.Node]) -> None:
    """Replace the all_gathers of ``bucket`` by one coalesced call at the place of the first."""
    first = bucket[0]
    late = set(graph.nodes) - nodes_before(graph, first)
    for node in bucket[1:]:
        for link in input_chain(node) or ():
            if link in late:  # what stands above may have other users there
                first.prepend(link)
                late.remove(link)
    emitter = Emitter(graph, first.meta["val"].fake_mode)
    with graph.inserting_before(first):
        emitter.describe(first)
        whole = emitter.call(ALL_GATHER_COALESCED, [n.args[0] for n in bucket], first.args[1], first.args[2])
        parts = [emitter.getitem(whole, i) for i in range(len(bucket))]
    for node, part in zip(bucket, parts, strict=True):
        node.replace_all_uses_with(part)
        graph.erase_node(node)


def nodes_before(graph: fx.Graph, last: fx.Node) -> set[fx.Node]:
    """The nodes that stand above ``last``."""
    return set(takewhile(lambda node: node is not last, graph.nodes))


def join_reductions(graph: fx.Graph, bucket: Sequence[fx.Node]) -> None:
    """Replace the reductions of ``bucket`` by one, right after the last of them."""
    last = bucket[-1]
    ranks = last.args[2] if last.target is REDUCE_SCATTER else 1
    if not isinstance(ranks, int):
        raise PartitionError(f"{last.format_node()} has {ranks!r} as its number of ranks, which must be an int")
    emitter = Emitter(graph, last.meta["val"].fake_mode)
    waits = [next(iter(n.users)) for n in bucket]
    with graph.inserting_before(last):
        emitter.describe(last)
        # A reduce_scatter hands out dim 0: the parts for each rank lie side by side in its row.
        flat = [emitter.call("reshape", n.args[0], [ranks, -1] if ranks > 1 else [-1]) for n in bucket]
        packed = emitter.call("cat", flat, 1 if ranks > 1 else 0)
        reduced = emitter.call(last.target, packed, *last.args[1:])  # type: ignore[arg-type]
        whole = emitter.call("reshape", emitter.call(WAIT, reduced), [-1])
        pieces = emitter.call("split_with_sizes", whole, [math.prod(n.meta["val"].shape) for n in bucket])
        for index, (node, wait) in enumerate(zip(bucket, waits, strict=True)):
            emitter.describe(wait)
            new = emitter.call("reshape", emitter.getitem(pieces, index), list(node.meta["val"].shape))
            new.meta.update({k: wait.meta[k] for k in ("layout", "global_shape") if k in wait.meta})
            replace_later(wait, new, last)
    for node, wait in zip(bucket, waits, strict=True):
        graph.erase_node(wait)
        graph.erase_node(node)


def replace_later(wait: fx.Node, new: fx.Node, anchor: fx.Node) -> None:
    """Let ``new``, which stands further down, take the place of ``wait``: what hangs on it moves down behind it."""
    hanging = followers([wait])
    wait.replace_all_uses_with(new)
    place = anchor
    for node in hanging:
        place.append(node)
        place = node


def followers(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Calls that hang on ``nodes`` alone, in order (the views and casts between a reduction and the output)."""
    found: list[fx.Node] = []
    queue = list(nodes)
    while queue:
        node = queue.pop(0)
        for user in node.users:
            if user.op == "call_function" and user not in found:
                found.append(user)
                queue.append(user)
    return found
