"""Emission of local nodes: an :class:`Emitter` that keeps shapes and descriptions, and the context that rules see."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.cost_models.errors import PartitionError
from autopar.passes.options import Choice
from autopar.passes.placement import REPLICATE, Layout, Placement, Shard, chunk
from autopar.passes.redistribute import Redistributor
from autopar.passes.rules.row import Call, Row
from autopar.passes.torch_ops import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    WAIT,
    FakeTensorMode,
    OpOverload,
    resolve,
)

KEPT_META = ("layer", "phase", "source", "stage")


Memo = dict[Any, Any]


def memo_key(item: Any) -> Any:
    """A hashable stand-in for an argument: tensors by all that shapes depend on, the rest by type and value."""
    if isinstance(item, torch.Tensor):
        return (tuple(item.shape), item.stride(), item.storage_offset(), item.dtype, item.device.type)
    if isinstance(item, (list, tuple)):
        return tuple(memo_key(i) for i in item)
    return (type(item), str(item) if isinstance(item, float) else item)


class Emitter:
    """Appends calls to a graph, running each on fake tensors so that every node knows its local shape.

    Args:
        graph: where calls are appended.
        fake_mode: the mode that the fake tensors belong to.
        memo: results of earlier runs, by operation and shapes; may be shared between graphs (ranks repeat each other,
            and so do layers).
    """

    def __init__(self, graph: fx.Graph, fake_mode: FakeTensorMode, memo: Memo | None = None) -> None:
        self.graph = graph
        self.fake_mode = fake_mode
        self.memo: Memo = {} if memo is None else memo
        self.meta: dict[str, Any] = {}
        self.origin_name: str | None = None

    def describe(self, origin: fx.Node) -> None:
        """Nodes emitted from now on belong to ``origin``."""
        self.meta = {k: origin.meta[k] for k in KEPT_META if k in origin.meta}
        self.origin_name = origin.name

    def call(self, op: str | OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
        """Append a call of ``op``; nodes among the arguments are passed by their fake values."""
        target = resolve(op)
        return self._append(target, args, kwargs, target._schema.name.partition("::")[2].strip("_"))

    def main_call(self, op: str | OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
        """Append the call that stands for the described node; it keeps that node's name."""
        return self._append(resolve(op), args, kwargs, self.origin_name)

    def _append(self, target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        node.meta["val"] = self._run(target, args, kwargs)
        node.meta.update(self.meta)
        return node

    def _run(self, target: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What ``target`` gives on the fake values of the arguments."""
        values = fx.node.map_aggregate(args, fake_value)
        named = fx.node.map_aggregate(dict(kwargs), fake_value)
        key = (target, memo_key(values), tuple((k, memo_key(v)) for k, v in named.items()))
        if key not in self.memo:
            with self.fake_mode:
                self.memo[key] = target(*values, **named)
        return self.memo[key]

    def opaque_call(
        self,
        function: Any,
        args: tuple[Any, ...],
        op: OpOverload,
        op_args: tuple[Any, ...],
        op_kwargs: Mapping[str, Any],
    ) -> fx.Node:
        """Append a call of a Python function that runs ``op`` on ``op_args`` in its own way (a seeded draw)."""
        node = self.graph.create_node("call_function", function, args, name=self.origin_name)
        node.meta["val"] = self._run(op, op_args, op_kwargs)
        node.meta.update(self.meta)
        self.mark_rank_dependent(node)
        return node

    def contiguous(self, node: fx.Node) -> fx.Node:
        """The value with contiguous strides: kernels exist that ignore strides silently."""
        if node.meta["val"].is_contiguous():
            return node
        return self.call("clone", node, memory_format=torch.contiguous_format)

    def mark_rank_dependent(self, node: fx.Node) -> None:
        """Mark a node whose constants differ between ranks."""
        node.meta["rank_dependent"] = True

    def wait(self, node: fx.Node) -> fx.Node:
        """Wait for a collective."""
        return self.call(WAIT, node)

    def all_reduce(self, node: fx.Node, how: str, group: str) -> fx.Node:
        """Reduce ``node`` over ``group``; bools travel as bytes."""
        if node.meta["val"].dtype == torch.bool:
            small = self.call("_to_copy", node, dtype=torch.uint8)
            return self.call("_to_copy", self.all_reduce(small, how, group), dtype=torch.bool)
        if node.meta["val"].is_complex():
            real = self.contiguous(self.call("view_as_real", node))
            return self.call("view_as_complex", self.all_reduce(real, how, group))
        return self.wait(self.call(ALL_REDUCE, self.contiguous(node), how, group))

    def all_gather(self, node: fx.Node, num_ranks: int, group: str) -> fx.Node:
        """Concatenate along dim 0 over ``group``."""
        if node.meta["val"].dtype == torch.bool:
            small = self.call("_to_copy", node, dtype=torch.uint8)
            return self.call("_to_copy", self.all_gather(small, num_ranks, group), dtype=torch.bool)
        if node.meta["val"].is_complex():
            return self.call(
                "view_as_complex", self.all_gather(self.contiguous(self.call("view_as_real", node)), num_ranks, group)
            )
        return self.wait(self.call(ALL_GATHER, node, num_ranks, group))

    def reduce_scatter(self, node: fx.Node, num_ranks: int, group: str) -> fx.Node:
        """Sum over ``group``, keeping this rank's part of dim 0."""
        if node.meta["val"].is_complex():
            real = self.contiguous(self.call("view_as_real", node))
            return self.call("view_as_complex", self.reduce_scatter(real, num_ranks, group))
        return self.wait(self.call(REDUCE_SCATTER, node, "sum", num_ranks, group))

    def all_to_all(self, node: fx.Node, num_ranks: int, group: str) -> fx.Node:
        """Exchange equal parts of dim 0 over ``group``."""
        if node.meta["val"].dtype == torch.bool:
            small = self.call("_to_copy", node, dtype=torch.uint8)
            return self.call("_to_copy", self.all_to_all(small, num_ranks, group), dtype=torch.bool)
        if node.meta["val"].is_complex():
            real = self.contiguous(self.call("view_as_real", node))
            return self.call("view_as_complex", self.all_to_all(real, num_ranks, group))
        part = node.meta["val"].shape[0] // num_ranks
        return self.wait(self.call(ALL_TO_ALL, node, [part] * num_ranks, [part] * num_ranks, group))

    def getitem(self, node: fx.Node, index: int) -> fx.Node:
        """One output of a multi-output call."""
        out = self.graph.call_function(operator.getitem, (node, index))
        out.meta["val"] = node.meta["val"][index]
        out.meta.update(self.meta)
        return out


def fake_value(item: Any) -> Any:
    """The fake value of a node; anything else is itself."""
    return item.meta["val"] if isinstance(item, fx.Node) else item


@dataclass(slots=True, kw_only=True)
class LocalContext:
    """What a rule sees when it lowers one call for one rank.

    Attributes:
        emitter: appends the local calls.
        call: the call of the whole step, with its global shapes.
        row: what its rule says of it.
        tensors: local values of its tensor arguments; a rule may put others in their place.
        choices: how it is split, one entry per mesh axis.
        axes, sizes: names and numbers of ranks of the mesh axes.
        coords: this rank's place on each of them.
    """

    emitter: Emitter
    call: Call
    row: Row
    tensors: list[fx.Node]
    choices: Sequence[Choice]
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    coords: tuple[int, ...]

    def tensor(self, index: int) -> fx.Node:
        """Local value of the tensor argument ``index``."""
        return self.tensors[index]

    def emit(self, op: str | OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
        """Append a call."""
        return self.emitter.call(op, *args, **kwargs)

    def split_axes(self, factor: str) -> list[int]:
        """Mesh axes that split ``factor``."""
        return [a for a, c in enumerate(self.choices) if c.factor == factor]

    @property
    def split_factors(self) -> set[str]:
        """Factors that some axis splits."""
        return {c.factor for c in self.choices if c.factor is not None}

    def size(self, factor: str) -> int:
        """Local size of a factor."""
        size = self.row.sizes[factor]
        for axis in self.split_axes(factor):
            choice = self.choices[axis]
            size = size // choice.units * chunk(choice.units, self.sizes[axis], self.coords[axis])[1]
        return size

    def start(self, factor: str) -> int:
        """Global position at which this rank's run of ``factor`` begins."""
        start = 0
        for axis in self.split_axes(factor):
            choice = self.choices[axis]
            unit = self.row.sizes[factor] // (choice.blocks * choice.units)
            start += chunk(choice.units, self.sizes[axis], self.coords[axis])[0] * unit
        return start

    def all_reduce(self, node: fx.Node, how: str, factors: Iterable[str]) -> fx.Node:
        """Reduce over every axis that splits one of ``factors``."""
        for factor in factors:
            for axis in self.split_axes(factor):
                node = self.emitter.all_reduce(node, how, self.axes[axis])
        return node

    def output_layout(self, index: int) -> Layout:
        """Layout of output ``index``."""
        layout: list[Placement] = []
        for choice in self.choices:
            placement = choice.outputs[index]
            if placement is None:
                raise PartitionError(f"output {index} of {self.call.node} is no tensor")
            layout.append(placement)
        return tuple(layout)

    def local_output_shape(self, index: int) -> tuple[int, ...]:
        """Local shape of output ``index``."""
        shape = list(self.call.out_shapes[index] or ())
        for axis, placement in enumerate(self.output_layout(index)):
            if isinstance(placement, Shard):
                length = chunk(placement.units, self.sizes[axis], self.coords[axis])[1]
                shape[placement.dim] = shape[placement.dim] // placement.units * length
        return tuple(shape)

    def cast_like_output(self, node: fx.Node, index: int) -> fx.Node:
        """The value in the dtype of output ``index``."""
        out = self.call.outputs[index]
        if out is None or out.dtype == node.meta["val"].dtype:
            return node
        return self.emit("_to_copy", node, dtype=out.dtype)

    def emit_unchanged(self) -> fx.Node:
        """The call with its local tensors and global arguments."""
        return self.emit_call({})

    def emit_call(self, replaced: Mapping[str, Any]) -> fx.Node:
        """The call with local tensors, and ``replaced`` arguments by name."""
        args, kwargs = self.local_arguments(replaced)
        return self.emitter.main_call(self.call.op, *args, **kwargs)

    def local_arguments(self, replaced: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Args and kwargs of the call with local tensors, and ``replaced`` arguments by name."""
        return local_arguments(self.call, self.tensors, replaced)

    def narrow_output(self, node: fx.Node, index: int) -> fx.Node:
        """This rank's part of a value that is whole."""
        layout = self.output_layout(index)
        whole = tuple(p if not isinstance(p, Shard) else REPLICATE for p in layout)
        mover = Redistributor(self.emitter, self.axes, self.sizes, self.coords)
        return mover.run(node, whole, layout, tuple(self.call.out_shapes[index] or ()))


def local_arguments(
    call: Call, tensors: Sequence[fx.Node], replaced: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's args and kwargs with its tensor nodes and some arguments replaced."""
    queue = list(tensors)
    position = 0
    new: dict[str, Any] = {}
    for name in call.names:
        value = call.args.get(name)
        items = value if isinstance(value, (list, tuple)) else (value,)
        mapped = []
        for item in items:
            if isinstance(item, fx.Node) and isinstance(item.meta.get("val"), torch.Tensor):
                mapped.append(queue[position])
                position += 1
            else:
                mapped.append(item)
        new[name] = mapped if isinstance(value, (list, tuple)) else mapped[0]
    new.update(replaced)
    schema = call.op._schema.arguments
    given = len(call.node.args)
    args = [new[a.name] for a in schema[:given]]
    kwargs = {k: new[k] for k in call.node.kwargs}
    for name in replaced:
        if name in kwargs or name in call.names[:given]:
            continue
        kwargs[name] = new[name]
    positional = [a for a in schema if not a.kwarg_only]
    late = [a.name for a in positional[given:] if a.name in kwargs]
    if late:  # a positional argument that the caller left at its default: pass it in its place
        last = max(i for i, a in enumerate(positional) if a.name in late)
        args.extend(kwargs.pop(a.name, new.get(a.name)) for a in positional[given : last + 1])
    return tuple(args), kwargs
