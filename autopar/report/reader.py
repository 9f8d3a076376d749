"""Reads the nodes of a program into rows."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import fx

from autopar.cost_models.collectives import Algorithm, Collective, N, S, formula
from autopar.passes.base import InputKind, Mesh, OutputKind, OutputSpec, Program
from autopar.plan import format_placement
from autopar.report.rows import Communication, Kind, LocalTensor, Row, View
from autopar.report.text import VIEWS
from autopar.verify.communication import WAIT, communication_name, read_arguments, read_messages

_DTYPES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}
_COLLECTIVES = {
    "all_reduce": (Collective.ALL_REDUCE, Algorithm.RING),
    "all_gather_into_tensor": (Collective.ALL_GATHER, Algorithm.RING),
    "reduce_scatter_tensor": (Collective.REDUCE_SCATTER, Algorithm.RING),
    "all_to_all_single": (Collective.ALL_TO_ALL, Algorithm.DIRECT),
    "broadcast": (Collective.BROADCAST, Algorithm.TREE),
    "isend": (Collective.SEND, Algorithm.DIRECT),
    "irecv": (Collective.SEND, Algorithm.DIRECT),
}
_COPIES = frozenset({"aten.clone", "aten._to_copy", "aten.cat", "aten.constant_pad_nd", "prims.convert_element_type"})
_INPUTS = {
    InputKind.PARAMETER: Kind.PARAMETER,
    InputKind.BUFFER: Kind.BUFFER,
    InputKind.BATCH: Kind.BATCH,
    InputKind.SEED: Kind.SEED,
}
_ROLES = {
    OutputKind.LOSS: "loss",
    OutputKind.GRADIENT: "gradient of {}",
    OutputKind.INPUT_GRADIENT: "gradient of {}",
    OutputKind.MUTATION: "new value of {}",
    OutputKind.RESULT: "{}",
}


def view_program(program: Program) -> View:
    """All rows of ``program``."""
    top = list(_Reader(program=program, graph_module=program.graph_module).rows())
    parts = {}
    for name, inner in program.graph_module.named_children():
        if isinstance(inner, fx.GraphModule):
            bare = dataclasses.replace(program, graph_module=inner, inputs=(), outputs=())
            parts[name] = tuple(_Reader(program=bare, graph_module=inner).rows())
    return View(mesh=program.mesh, rank=program.rank, rows=tuple(top), parts=parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """Reads the nodes of one graph of a program."""

    program: Program
    graph_module: fx.GraphModule

    def rows(self) -> Iterator[Row]:
        specs = iter(self.program.inputs)
        roles, labels = self._roles(), self._input_labels()
        for node in self.graph_module.graph.nodes:
            if _part_of(node) is not None:
                continue
            kind, label = _kind(node), ""
            if node.op == "placeholder":
                spec = next(specs, None)
                if spec is not None:
                    kind, label = _INPUTS[spec.kind], " = ".join((spec.name, *spec.aliases))
            is_state = kind in (Kind.PARAMETER, Kind.BUFFER)
            yield Row(
                name=node.name,
                kind=kind,
                call=_call(node),
                arguments=_arguments(node),
                inputs=tuple(dict.fromkeys((_part_of(n) or n).name for n in node.all_input_nodes)),
                label=label,
                layer=label.split(" = ")[0].rpartition(".")[0] if is_state else node.meta.get("layer", ""),
                phase=node.meta.get("phase"),
                source=str(node.meta.get("source", "")),
                layout=self._layout(node),
                local=tuple(_tensors(node.meta.get("val"))),
                global_shape=_global_shape(node),
                communication=self._communication(node, roles, labels),
                roles=roles.get(node, ()),
            )

    def _roles(self) -> dict[fx.Node, tuple[str, ...]]:
        """What of the step's outputs each value is."""
        found: dict[fx.Node, tuple[str, ...]] = {}
        values = self.graph_module.graph.output_node().args[0]
        if not self.program.outputs or not isinstance(values, Sequence):
            return found
        for spec, value in zip(self.program.outputs, values, strict=True):
            if isinstance(value, fx.Node):
                place = _part_of(value) or value
                found[place] = (*found.get(place, ()), _role(spec))
        return found

    def _layout(self, node: fx.Node) -> tuple[str, ...]:
        layout, mesh = node.meta.get("layout"), self.program.mesh
        if not isinstance(layout, tuple):
            return ()
        axes = _work_axes(mesh, len(layout))
        sizes = [mesh.axis_size(axis) if axis in mesh.axes else 1 for axis in axes]
        return tuple(
            f"{axis}:{format_placement(placement, size)}"
            for axis, size, placement in zip(axes, sizes, layout, strict=True)
            if size > 1
        )

    def _communication(
        self, node: fx.Node, roles: Mapping[fx.Node, tuple[str, ...]], labels: Mapping[str, str]
    ) -> Communication | None:
        name = communication_name(node)
        if name is None or name == WAIT:
            return None
        values = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
        messages = read_messages(node, read_arguments(node, *values))
        size = len(self.program.mesh.group_ranks(messages[0].group, self.program.rank))
        moved_bytes = sum(_moved_bytes(m.op, m.shapes, m.dtypes, size) for m in messages)
        return Communication(
            op=name,
            group=messages[0].group,
            num_ranks=size,
            moved_bytes=moved_bytes,
            serves=_served(node, roles, labels),
        )

    def _input_labels(self) -> dict[str, str]:
        placeholders = [n for n in self.graph_module.graph.nodes if n.op == "placeholder"]
        return {n.name: spec.name for n, spec in zip(placeholders, self.program.inputs, strict=False)}


def _work_axes(mesh: Mesh, num_axes: int) -> tuple[str, ...]:
    """The axes over which work is split: not the stages, and the micro-batches where a layout has an entry more.

    >>> _work_axes(Mesh(axes=("pp", "dp", "tp"), sizes=(2, 2, 2)), 3)
    ('dp', 'mb', 'tp')
    """
    axes = tuple(axis for axis in mesh.axes if axis != "pp")
    return axes if num_axes == len(axes) else (*axes[:-1], "mb", *axes[-1:])


def _role(spec: OutputSpec) -> str:
    return _ROLES[spec.kind].format(spec.name)


def _kind(node: fx.Node) -> Kind:
    fixed = {
        "placeholder": Kind.SEED,
        "get_attr": Kind.CONSTANT,
        "output": Kind.OUTPUT,
        "call_module": Kind.PART,
    }
    if node.op in fixed:
        return fixed[node.op]
    name = communication_name(node)
    if name is not None:
        return Kind.WAIT if name == WAIT else Kind.COMMUNICATION
    word = _call(node).split(".")[min(1, _call(node).count("."))]
    return Kind.VIEW if word in VIEWS else Kind.COMPUTATION


def _call(node: fx.Node) -> str:
    """``aten.mm`` for ``aten.mm.default``; other overloads keep their names."""
    if node.op in ("placeholder", "output"):
        return ""
    if node.op in ("get_attr", "call_module", "call_method"):
        return f"self.{node.target}"
    text = str(node.target) if isinstance(node.target, torch.nn.Module) else getattr(node.target, "__name__", "")
    if hasattr(node.target, "namespace"):
        text = f"{node.target.namespace}.{text}"
    return text.removesuffix(".default")


def _arguments(node: fx.Node) -> str:
    if node.op in ("placeholder", "get_attr"):
        return ""
    if node.op == "output":
        return _text(node.args[0])
    return ", ".join([*_texts(node.args), *(f"{key}={_text(value)}" for key, value in node.kwargs.items())])


def _part_of(node: fx.Node) -> fx.Node | None:
    """The call of a sub-program of which ``node`` is one result; such results are not shown as nodes of their own."""
    if _call(node) != "getitem":
        return None
    source = node.args[0]
    return source if isinstance(source, fx.Node) and source.op == "call_module" else None


def _texts(values: Sequence[object]) -> list[str]:
    """Arguments as Python text; neighbouring results of one sub-program become ``*part[3:7]``."""
    texts: list[str] = []
    for (part, shift), group in itertools.groupby(enumerate(values), key=lambda item: _run_of(*item)):
        items = list(group)
        if part is None or len(items) == 1:
            texts += [_text(value) for _, value in items]
        else:
            texts.append(f"*{part.name}[{items[0][0] + shift}:{items[-1][0] + shift + 1}]")
    return texts


def _run_of(position: int, value: object) -> tuple[fx.Node | None, int]:
    """What neighbouring results of one sub-program have in common: the call, and their index less their position."""
    if not isinstance(value, fx.Node) or (part := _part_of(value)) is None:
        return None, 0
    return part, int(str(value.args[1])) - position


def _text(value: object) -> str:
    """An argument as Python text."""
    match value:
        case fx.Node():
            part = _part_of(value)
            text = value.name if part is None else f"{part.name}[{value.args[1]}]"
        case Mapping():
            text = "{" + ", ".join(f"{key!r}: {_text(item)}" for key, item in value.items()) + "}"
        case tuple():
            text = "(" + ", ".join(_texts(value)) + ("," if len(value) == 1 else "") + ")"
        case list():
            text = "[" + ", ".join(_texts(value)) + "]"
        case torch.device():
            text = repr(str(value))
        case float() if not math.isfinite(value):
            text = f"float('{value}')"
        case _:
            text = repr(value)
    return text


def _is_sequence(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, list | tuple)


def _tensors(value: object) -> Iterator[LocalTensor]:
    if isinstance(value, torch.Tensor):
        yield LocalTensor(
            dtype=_short_dtype(value.dtype), shape=tuple(value.shape), num_bytes=value.numel() * value.element_size()
        )
    elif _is_sequence(value):
        for item in value:
            yield from _tensors(item)


def _short_dtype(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    stem = name.rstrip("0123456789")
    return _DTYPES[stem] + name[len(stem) :] if stem in _DTYPES else name


def _global_shape(node: fx.Node) -> tuple[int, ...] | None:
    shape = node.meta.get("global_shape")
    return tuple(shape) if isinstance(shape, Sequence) and all(isinstance(size, int) for size in shape) else None


def _moved_bytes(op: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], num_ranks: int) -> int:
    """Bytes over one link in one direction; the formulas of ``cost_models.collectives`` take the full tensor's size."""
    num_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    op = op.removesuffix("_coalesced")
    full_bytes = num_bytes * num_ranks if op == "all_gather_into_tensor" else num_bytes
    return round(full_bytes * _moved_share(op, num_ranks))


@functools.cache
def _moved_share(op: str, num_ranks: int) -> float:
    """Bytes over one link for each byte of the full tensor."""
    return float(formula(*_COLLECTIVES[op]).moved.subs({N: num_ranks, S: 1}))


def _served(node: fx.Node, roles: Mapping[fx.Node, tuple[str, ...]], labels: Mapping[str, str]) -> tuple[str, ...]:
    """The tensors that a communication is for: inputs, outputs of the step, else the values that it takes in."""
    sources = dict.fromkeys(_sources(node))
    named = [labels[source.name] for source in sources if source.op == "placeholder" and source.name in labels]
    if len(named) == len(sources):
        return tuple(named)
    returned = [role for user in dict.fromkeys(_uses(node)) for role in roles.get(user, ())]
    return tuple(returned or map(_origin, sources))


def _origin(node: fx.Node) -> str:
    layer = node.meta.get("layer", "")
    return str(node.meta.get("origin", node.name)) + (f" of {layer}" if layer else "")


def _passes_on(node: fx.Node) -> bool:
    """Whether a node's result is its arguments' data, moved, joined or looked at otherwise."""
    return _kind(node) in (Kind.VIEW, Kind.WAIT, Kind.COMMUNICATION) or _call(node) in _COPIES


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    """Where the data of a node that passes it on was made."""
    for source in node.all_input_nodes:
        if _passes_on(source):
            yield from _sources(source)
        else:
            yield source


def _uses(node: fx.Node) -> Iterator[fx.Node]:
    """The node and all that pass its data on."""
    yield node
    for user in node.users:
        if _passes_on(user):
            yield from _uses(user)
