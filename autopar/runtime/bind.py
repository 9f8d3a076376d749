"""Binding: a program becomes a graph that runs in this process.

Group names become real groups, devices become this rank's, placeholders are put into the order in which the runtime
holds its values, and every gradient gets storage of its own, because the runtime scales gradients in place.
"""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import fx
from torch.fx.node import map_aggregate

from autopar.passes.base import InputKind, OutputKind, Program
from autopar.runtime.attention import attend_on_device
from autopar.runtime.native import add_in_place, reduce_in_place, scatter_by_exchange

INPUT_ORDER = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.BATCH, InputKind.SEED)
GRADIENTS = (OutputKind.GRADIENT, OutputKind.INPUT_GRADIENT)
# Operations that return (a view of) their first argument though their schemas do not say so.
UNDECLARED_VIEWS = ("_c10d_functional::wait_tensor", "aten::_unsafe_view", "aten::_reshape_alias", "aten::alias")
SPLITS = ("aten::split", "aten::split_with_sizes", "aten::chunk", "aten::unbind", "aten::unsafe_split")


def input_order(program: Program) -> list[int]:
    """Positions of the program's inputs in the order of the bound graph: parameters, buffers, batch, seeds."""
    return sorted(range(len(program.inputs)), key=lambda i: INPUT_ORDER.index(program.inputs[i].kind))


def group_names(module: fx.GraphModule) -> set[str]:
    """The names of the groups in which the program communicates."""
    return {str(node.args[position]) for node, position in _grouped(module)}


def bind(program: Program, real_name: Callable[[str], str], device: torch.device) -> fx.GraphModule:
    """A copy of the program's graph that runs in this process.

    Args:
        program: the program of this rank.
        real_name: the name of the process group behind a name such as "tp" or "dp+tp".
        device: where this rank computes.

    Returns:
        a graph whose placeholders follow :func:`input_order`, the random seed last where the program has one.
    """
    module = _copy(program.graph_module)
    _bind_nodes(module, real_name, device)
    _order_placeholders(module.graph, input_order(program))
    _own_results(module.graph, program)
    _own_gradients(module.graph, program)
    for graph_module in _graph_modules(module):
        if device.type == "cpu":
            scatter_by_exchange(graph_module.graph)
        else:
            attend_on_device(graph_module.graph)
        reduce_in_place(graph_module.graph)
        graph_module.recompile()
    add_in_place(module)
    module.graph.lint()
    module.recompile()
    return module


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    """A copy with a graph of its own, in its sub-programs too; constants are shared."""
    copied = fx.GraphModule(module, copy.deepcopy(module.graph), class_name=type(module).__name__)
    for name, child in module.named_children():
        if isinstance(child, fx.GraphModule):
            setattr(copied, name, _copy(child))
    return copied


def _bind_nodes(module: fx.GraphModule, real_name: Callable[[str], str], device: torch.device) -> None:
    for node, position in list(_grouped(module)):
        args = list(node.args)
        args[position] = real_name(str(args[position]))
        node.args = tuple(args)

    def here(value: Any) -> Any:  # noqa: ANN401 - any argument of a node
        return device if isinstance(value, torch.device) else value

    for graph_module in _graph_modules(module):
        for node in graph_module.graph.nodes:
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), here)
            if node.op == "get_attr":
                _move_constant(graph_module, str(node.target), device)
        graph_module.recompile()


def _move_constant(module: fx.GraphModule, name: str, device: torch.device) -> None:
    owner_name, _, key = name.rpartition(".")
    owner = module.get_submodule(owner_name)
    value = getattr(owner, key)
    if isinstance(value, torch.Tensor) and value.device != device:
        delattr(owner, key)
        owner.register_buffer(key, value.to(device), persistent=False)


def _graph_modules(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    return (child for child in module.modules() if isinstance(child, fx.GraphModule))


def _grouped(module: fx.GraphModule) -> Iterator[tuple[fx.Node, int]]:
    """Every communication node with the position of its group among its arguments."""
    for graph_module in _graph_modules(module):
        for node in graph_module.graph.nodes:
            position = group_position(node)
            if position is not None:
                yield node, position


def group_position(node: fx.Node) -> int | None:
    """Where the group stands among the arguments of ``node``; None where it does not communicate."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.name.startswith("_c10d_functional::"):
        return None
    names = [argument.name for argument in schema.arguments]
    return names.index("group_name") if "group_name" in names else None


def _order_placeholders(graph: fx.Graph, order: list[int]) -> None:
    nodes = graph.find_nodes(op="placeholder")
    ordered = [nodes[i] for i in order] + nodes[len(order) :]
    if ordered == nodes:
        return
    anchor = next(node for node in graph.nodes if node.op != "placeholder")
    for node in ordered:
        anchor.prepend(node)


def _own_results(graph: fx.Graph, program: Program) -> None:
    """Copy results that are (views of) parameters or buffers, which change later, and results that are there twice."""
    output = graph.output_node()
    values: list[fx.Node | None] = list(output.args[0])  # type: ignore[arg-type]
    kinds = [program.inputs[i].kind for i in input_order(program)]
    placeholders = graph.find_nodes(op="placeholder")
    held = [node for node, kind in zip(placeholders, kinds, strict=False) if kind is not InputKind.BATCH]
    for i, (spec, value) in enumerate(zip(program.outputs, values, strict=True)):
        if spec.kind in (OutputKind.LOSS, OutputKind.RESULT) and value is not None:
            owner = _memory(value)[-1][0]
            if owner in held or owner.op == "get_attr" or value in values[:i]:
                values[i] = _cloned(graph, value)
    output.args = (tuple(values),)


def _cloned(graph: fx.Graph, value: fx.Node) -> fx.Node:
    with graph.inserting_before(graph.output_node()):
        copied = graph.call_function(torch.ops.aten.clone.default, (value,), {"memory_format": torch.contiguous_format})
    copied.meta = dict(value.meta)
    return copied


def _own_gradients(graph: fx.Graph, program: Program) -> None:
    """Copy every gradient that shares memory with an input, a constant, another output or with itself."""
    output = graph.output_node()
    values: list[fx.Node | None] = list(output.args[0])  # type: ignore[arg-type]
    memories = [_memory(value) if isinstance(value, fx.Node) else [] for value in values]
    owners = Counter(memory[0] for memory in memories if memory)
    for i, (spec, value) in enumerate(zip(program.outputs, values, strict=True)):
        if spec.kind not in GRADIENTS or value is None:
            continue
        own, *wholes = memories[i]
        given = any(node.op in ("placeholder", "get_attr") for node, _ in memories[i])
        if given or owners[own] > 1 or any(owners[whole] for whole in wholes) or _overlaps(value):
            values[i] = _cloned(graph, value)
            owners[own] -= 1
    output.args = (tuple(values),)


def _overlaps(node: fx.Node) -> bool:
    """Whether several elements of the value may be one place in memory (an expanded gradient)."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return True
    return any(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True))


Memory = tuple[fx.Node, int]


def _memory(node: fx.Node) -> list[Memory]:
    """The result that holds the memory of ``node``, as (node, which of its results).

    A piece of a split holds memory of its own beside the other pieces; what was split follows it in the list.
    """
    found: list[Memory] = []
    while True:
        index = -1
        if node.target is operator.getitem:
            node, index = node.all_input_nodes[0], cast(int, node.args[1])
        source = _viewed(node)
        if source is None or _schema_name(node) in SPLITS:
            found.append((node, index))
        if source is None:
            return found
        node = source


def _viewed(node: fx.Node) -> fx.Node | None:
    """The argument of which ``node`` returns views, or None where its results hold memory of their own."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return None
    if schema.name in UNDECLARED_VIEWS:
        return node.all_input_nodes[0]
    if any(result.alias_info for result in schema.returns):
        for argument, value in zip(schema.arguments, node.args, strict=False):
            if argument.alias_info is not None and isinstance(value, fx.Node):
                return value
    return None


def _schema_name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.name)
