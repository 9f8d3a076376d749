"""Fewer, larger gradient reductions: small all_reduces and reduce_scatters of one group travel together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar.passes.base import OutputKind, Program
from autopar.passes.lowering import Emitter
from autopar.passes.torch_ops import ALL_REDUCE, WAIT


@dataclass(frozen=True, slots=True)
class Bucket:
    """The pass: gradient all_reduces whose results only leave the step are joined into buckets of ``max_bytes``.

    The members of a bucket are flattened into one tensor, reduced together as soon as the last of them is ready, and the
    gradients are views of the result (as in DistributedDataParallel).
    """

    max_bytes: int = 25_000_000

    def __call__(self, program: Program) -> Program:
        """``program`` with its gradient reductions in buckets."""
        graph = program.graph_module.graph
        leaving = {
            node
            for spec, node in zip(program.outputs, graph.output_node().args[0], strict=True)  # type: ignore[arg-type]
            if spec.kind is OutputKind.GRADIENT and isinstance(node, fx.Node)
        }
        members: dict[tuple[str, str, torch.dtype], list[fx.Node]] = {}
        for node in graph.nodes:
            if node.op == "call_function" and node.target is ALL_REDUCE and leaves(node, leaving):
                key = (str(node.args[1]), str(node.args[2]), node.meta["val"].dtype)
                members.setdefault(key, []).append(node)
        for nodes in members.values():
            for bucket in self.cut(nodes):
                if len(bucket) > 1:
                    join(program, bucket)
        graph.lint()
        program.graph_module.recompile()
        return program

    def cut(self, nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
        """Runs of neighbours of at most ``max_bytes`` together (a single larger one stands alone)."""
        buckets: list[list[fx.Node]] = []
        filled = 0
        for node in nodes:
            size = num_bytes(node)
            if not buckets or filled + size > self.max_bytes:
                buckets.append([])
                filled = 0
            buckets[-1].append(node)
            filled += size
        return buckets


def num_bytes(node: fx.Node) -> int:
    """Bytes of a node's tensor."""
    value = node.meta["val"]
    return int(math.prod(value.shape) * value.dtype.itemsize)


def leaves(node: fx.Node, leaving: set[fx.Node]) -> bool:
    """Whether all that becomes of a reduction is a gradient that leaves the step."""
    (wait,) = tuple(node.users)[:1] or (None,)
    return wait is not None and len(node.users) == 1 and wait in leaving and all(u.op == "output" for u in wait.users)


def join(program: Program, bucket: Sequence[fx.Node]) -> None:
    """Replace the reductions of ``bucket`` by one, right after the last of them."""
    graph = program.graph_module.graph
    last = bucket[-1]
    emitter = Emitter(graph, last.meta["val"].fake_mode)
    waits = [next(iter(n.users)) for n in bucket]
    with graph.inserting_after(last):
        anchor = graph.call_function(torch.ops.aten.alias.default, (last,))
    with graph.inserting_before(anchor):
        emitter.describe(last)
        flat = [emitter.call("reshape", n.args[0], [-1]) for n in bucket]
        packed = emitter.call("cat", flat)
        reduced = emitter.call(ALL_REDUCE, packed, last.args[1], last.args[2])
        whole = emitter.call(WAIT, reduced)
        pieces = emitter.call("split_with_sizes", whole, [math.prod(n.meta["val"].shape) for n in bucket])
        for index, (node, wait) in enumerate(zip(bucket, waits, strict=True)):
            emitter.describe(wait)
            shape = list(node.meta["val"].shape)
            new = emitter.call("reshape", emitter.getitem(pieces, index), shape)
            new.meta.update({k: wait.meta[k] for k in ("layout", "global_shape") if k in wait.meta})
            wait.replace_all_uses_with(new)
    graph.erase_node(anchor)
    for node, wait in zip(bucket, waits, strict=True):
        graph.erase_node(wait)
        graph.erase_node(node)
