"""Rewrites that leave the numbers alone and give operations a form that can be split.

* means become sums over a global count; losses averaged over valid targets become sums over the total weight
* variances and norms become sums
* constants shaped like another tensor stop depending on that tensor
* training batch norms become sums over the batch, where the batch is to be split
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from autopar.passes.base import StepGraph
from autopar.passes.forms import batch_norm, losses, moves, sums
from autopar.passes.forms.common import Rewrite
from autopar.passes.lowering import Emitter
from autopar.passes.partition import fake_mode_of
from autopar.passes.rules.row import Call, is_getitem
from autopar.passes.rules.table import op_name
from autopar.passes.torch_ops import LazyGraphModule, OpOverload

FORMS: Mapping[str, Rewrite] = {**sums.FORMS, **losses.FORMS, **moves.FORMS}


@dataclass(frozen=True, slots=True)
class Normalize:
    """The pass.  ``split_batch``: the batch will be split, so training batch norms are written as sums."""

    split_batch: bool = True

    def __call__(self, step: StepGraph) -> StepGraph:
        """A copy of ``step`` in normal form."""
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        graph.graph_copy(step.graph, mapping)
        output = step.graph.output_node()
        graph.output(fx.node.map_arg(output.args[0], lambda n: mapping[n]))
        for old, new in mapping.items():
            new.meta = dict(old.meta)
        emitter = Emitter(graph, fake_mode_of(step))
        for node in list(graph.nodes):
            if node.op == "call_function" and isinstance(node.target, OpOverload):
                self._rewrite(graph, node, emitter)
        graph.eliminate_dead_code(is_impure_node=must_stay)
        graph.lint()
        return replace(step, graph_module=LazyGraphModule(step.graph_module, graph))

    def _rewrite(self, graph: fx.Graph, node: fx.Node, emitter: Emitter) -> None:
        name = op_name(node.target)  # type: ignore[arg-type]
        rule = FORMS.get(name) or (batch_norm.FORMS.get(name) if self.split_batch else None)
        if rule is None:
            return
        with graph.inserting_before(node):
            emitter.describe(node)
            new = rule(emitter, Call(node))
        if new is None:
            return
        if isinstance(new, fx.Node):
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            return
        for user in list(node.users):
            if not is_getitem(user):
                continue
            user.replace_all_uses_with(new[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)


def must_stay(node: fx.Node) -> bool:
    """Whether a node stays though nobody uses it: a draw moves the generator on for those after it."""
    return node.op in ("placeholder", "output") or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
