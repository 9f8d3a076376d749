"""Steps of a single call, and their programs with strided inputs."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopar.passes.base import InputKind, InputSpec, Mesh, OutputKind, OutputSpec, Phase, StepGraph
from autopar.passes.options import Choice, OptionSpace
from autopar.passes.partition import Assignment, Partitioner
from autopar.passes.placement import Partial, Placement
from autopar.passes.rules.row import Call, Row
from autopar.passes.rules.table import RuleTable, rows_of
from autopar.passes.torch_ops import FakeTensorMode, OpOverload, pytree
from autopar.verify import assemble, run_lockstep, shard_tensor


class Single:
    """One call as a step: its tensors are the inputs, its outputs the results."""

    def __init__(self, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.op = op
        leaves, spec = pytree.tree_flatten((list(args), kwargs))
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        mode, graph = FakeTensorMode(), fx.Graph()
        nodes = []
        for i, tensor in enumerate(self.tensors):
            node = graph.placeholder(f"x{i}")
            with mode:
                node.meta = self._meta(torch.empty(tensor.shape, dtype=tensor.dtype))
            nodes.append(node)
        feed = iter(nodes)
        new = [next(feed) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        given, named = pytree.tree_unflatten(new, spec)
        self.node = graph.call_function(op, tuple(given), named)
        with mode:
            fakes = [n.meta["val"] if isinstance(n, fx.Node) else n for n in new]
            given, named = pytree.tree_unflatten(fakes, spec)
            self.node.meta = self._meta(op(*given, **named))
        outputs = self._outputs(graph)
        graph.output(tuple(outputs))
        self.spec = spec
        self.leaves = leaves
        self.step = StepGraph(
            graph_module=fx.GraphModule({}, graph),
            inputs=tuple(InputSpec(kind=InputKind.BATCH, name=n.name, leaf=i) for i, n in enumerate(nodes)),
            outputs=tuple(OutputSpec(kind=OutputKind.RESULT, name=f"result[{i}]") for i in range(len(outputs))),
            training=False,
        )
        self.rows, self.unknown = rows_of(graph, RuleTable())
        self.row: Row = self.rows[self.node]
        self.space = OptionSpace(graph, self.rows)
        self.call = Call(self.node)

    @staticmethod
    def _meta(value: object) -> dict[str, Any]:
        return {"val": value, "layer": "", "phase": Phase.FORWARD, "source": ""}

    def _outputs(self, graph: fx.Graph) -> list[fx.Node]:
        value = self.node.meta["val"]
        if isinstance(value, torch.Tensor):
            return [self.node]
        outputs = []
        for i, item in enumerate(value):
            if isinstance(item, torch.Tensor):
                node = graph.call_function(operator.getitem, (self.node, i))
                node.meta = self._meta(item)
                outputs.append(node)
        return outputs

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The operation itself on other tensors in place of its own (whole ones or shards)."""
        feed = iter(tensors)
        leaves = [next(feed) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        out = self.op(*args, **kwargs)
        return [t for t in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(t, torch.Tensor)]

    def run_split(self, choice: Choice, mesh: Mesh, *, strided: bool) -> list[torch.Tensor]:
        """The outputs as the ranks of ``mesh`` compute them under ``choice``, put together."""
        storage = {f"x{i}": (placement,) for i, placement in enumerate(choice.inputs)}
        assignment = Assignment(mesh=mesh, choices={self.node.name: (choice,)}, storage=storage)
        maker = Strided if strided else Partitioner
        programs = [maker(self.step, self.rows, assignment, rank, "exact", {}).run() for rank in range(mesh.size)]
        held = [
            [self.part(t, p, mesh, rank, strided=strided) for t, p in zip(self.tensors, choice.inputs, strict=True)]
            for rank in range(mesh.size)
        ]
        outputs = run_lockstep(programs, held)
        whole = []
        for i, tensor in enumerate(programs[0].output_tensors):
            parts = [out[i] for out in outputs]
            whole.append(parts[0] if tensor is None else assemble(parts, tensor.layout, mesh, tensor.shape))
        return whole

    @staticmethod
    def part(tensor: torch.Tensor, placement: Placement, mesh: Mesh, rank: int, *, strided: bool) -> torch.Tensor:
        """What ``rank`` holds of an input."""
        if isinstance(placement, Partial):
            exact = not (tensor.is_floating_point() or tensor.is_complex())
            share = torch.zeros_like(tensor) if exact else tensor * 0.25
            value = share if rank else tensor if exact else tensor - share * (mesh.size - 1)
        else:
            value = shard_tensor(tensor, (placement,), mesh.sizes, mesh.coords(rank))
        return scattered(value) if strided else value.contiguous()


def scattered(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with other strides: dims in reverse order in memory, and gaps in a tensor of one dim."""
    if tensor.dim() > 1:
        order = list(reversed(range(tensor.dim())))
        return tensor.permute(order).contiguous().permute(order)
    wide = torch.stack([tensor, tensor], -1)
    return wide[..., 0]


class Strided(Partitioner):
    """A partitioner whose inputs arrive with strides of their own."""

    def _placeholder(self, node: fx.Node, spec: InputSpec) -> None:
        super()._placeholder(node, spec)
        new = self.values[node, 0]
        with self.emitter.fake_mode:
            new.meta["val"] = scattered(new.meta["val"])
