"""From the joint graph that was traced to a :class:`~autopar.passes.base.StepGraph`."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar.capture.call import Result
from autopar.capture.labels import Region
from autopar.capture.refuse import LOCAL_ADVICE
from autopar.cost_models.errors import CaptureError
from autopar.passes.base import InputKind, InputSpec, OutputKind, OutputSpec, Phase, StepGraph
from autopar.passes.torch_ops import LazyGraphModule
from autopar.torch_private import (
    FakeTensor,
    gradient_of,
    mutated_tangent_of,
    mutation_of,
    plain_input,
    plain_output,
    tangent_of,
    traced_backward,
)

OUTPUT_COPY = "autopar_output_copy"
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
SAME_VALUE = (
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.lift_fresh_copy.default,
)
# Some kernels lay their results out otherwise than their fake forms say: then a view has to copy, which reshape does.
STRICT_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def convert(
    joint: fx.GraphModule,
    inputs: Sequence[InputSpec],
    result: Result,
    *,
    regions: Sequence[Region],
    repeated: tuple[tuple[str, ...], ...],
) -> StepGraph:
    """Put the traced graph into the form that the passes work on.

    Args:
        joint: what :func:`autopar.torch_private.joint_graph` returned.
        inputs: the traced arguments, in order: parameters, buffers, batch.
        result: what the call returned; its tensors are the traced outputs.
        regions: the checkpoint blocks.
        repeated: groups of equal layers.

    Raises:
        CaptureError: the model communicates, changes its inputs, or lost every gradient.
    """
    _check_local(joint.graph)
    sources, seeds = _placeholders(joint.graph, inputs, result)
    inputs = (*inputs, *seeds)
    outputs, values = _outputs(joint.graph, inputs, result)
    graph, constants = _copy(joint, inputs, sources, values)
    step = StepGraph(
        graph_module=LazyGraphModule(constants, graph, class_name="Step"),
        inputs=inputs,
        outputs=outputs,
        result_spec=result.spec,
        result_constants=result.constants,
        training=bool(seeds),
        loss_leaf=result.loss_leaf,
        checkpoints=_extents(graph, regions),
        repeated=repeated,
    )
    _check_gradients(step)
    return step


def _placeholders(
    graph: fx.Graph, inputs: Sequence[InputSpec], result: Result
) -> tuple[list[fx.Node], list[InputSpec]]:
    """The traced placeholders in the order of the step's inputs, and the seeds among those inputs."""
    arguments: dict[int, fx.Node] = {}
    tangents: dict[int, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        desc = node.meta.get("desc")
        argument, tangent = plain_input(desc), tangent_of(desc)
        if argument is not None:
            arguments[argument] = node
        elif tangent is not None:
            tangents[tangent] = node
        else:
            changed = mutated_tangent_of(desc)
            if changed is not None:
                raise _in_place(inputs[changed])
            raise CaptureError(f"the model needs an input of a kind that is not supported: {desc}")
    seeds = [InputSpec(kind=InputKind.SEED, name=f"seed[{result.tensor_leaves[i]}]") for i in sorted(tangents)]
    return [arguments[i] for i in range(len(inputs))] + [tangents[i] for i in sorted(tangents)], seeds


def _outputs(
    graph: fx.Graph, inputs: Sequence[InputSpec], result: Result
) -> tuple[tuple[OutputSpec, ...], list[fx.Node | None]]:
    """The outputs in the step's order (loss, results, gradients, input gradients, mutations) and their nodes."""
    node = graph.output_node()
    values = node.args[0]
    found: dict[tuple[OutputKind, int], fx.Node | None] = {}
    for value, desc in zip(values, node.meta["desc"], strict=True):  # type: ignore[arg-type]
        output, gradient, mutation = plain_output(desc), gradient_of(desc), mutation_of(desc)
        if output is not None:
            found[OutputKind.RESULT, output] = value
        elif gradient is not None:
            found[OutputKind.GRADIENT, gradient] = value
        elif mutation is not None:
            found[OutputKind.MUTATION, mutation] = value
        elif value is not None:
            raise CaptureError(f"the model has an output of a kind that is not supported: {desc}")

    specs: list[tuple[OutputSpec, fx.Node | None]] = []
    for i, leaf in enumerate(result.tensor_leaves):
        kind, name = (OutputKind.LOSS, "loss") if leaf == result.loss_leaf else (OutputKind.RESULT, f"result[{leaf}]")
        specs.append((OutputSpec(kind=kind, name=name, leaf=leaf), found[OutputKind.RESULT, i]))
    specs.sort(key=lambda pair: pair[0].kind is not OutputKind.LOSS)
    seeded = any(spec.kind is InputKind.SEED for spec in inputs)
    for i, spec in enumerate(inputs):
        if spec.trainable and seeded:
            kind = OutputKind.INPUT_GRADIENT if spec.kind is InputKind.BATCH else OutputKind.GRADIENT
            specs.append((OutputSpec(kind=kind, name=spec.name), found.get((OutputKind.GRADIENT, i))))
    specs.sort(key=lambda pair: pair[0].kind is OutputKind.INPUT_GRADIENT)
    for i, spec in enumerate(inputs):
        if (OutputKind.MUTATION, i) not in found:
            continue
        if spec.kind is InputKind.BATCH:
            raise _in_place(spec)
        specs.append((OutputSpec(kind=OutputKind.MUTATION, name=spec.name), found[OutputKind.MUTATION, i]))
    return tuple(spec for spec, _ in specs), [value for _, value in specs]


def _in_place(spec: InputSpec) -> CaptureError:
    """The refusal of a model that changes a parameter or a batch input in place."""
    advice = "let it work on a copy (x = x.clone()) or use the out-of-place form of the operation"
    if spec.kind is InputKind.PARAMETER:
        advice = "change parameters outside forward, or compute a new tensor from them"
    return CaptureError(f"the model changes its {spec.kind.value} {spec.name} in place: {advice}")


def _copy(
    joint: fx.GraphModule, inputs: Sequence[InputSpec], sources: Sequence[fx.Node], results: Sequence[fx.Node | None]
) -> tuple[fx.Graph, dict[str, Any]]:
    """A new graph with the step's placeholders, the traced nodes and one output tuple; and the constants it reads."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    constants: dict[str, Any] = {}
    for spec, source in zip(inputs, sources, strict=True):
        node = graph.placeholder(re.sub(r"\W+", "_", spec.name).strip("_") or "x")
        node.target = node.name
        phase = Phase.BACKWARD if spec.kind is InputKind.SEED else Phase.FORWARD
        node.meta = {"val": source.meta["val"], "layer": "", "phase": phase, "source": ""}
        new[source] = node
    layers = dict.fromkeys(Phase, "")
    for source in joint.graph.nodes:
        if source.op in ("placeholder", "output"):
            continue
        same = _same_value(source)
        if same is not None:
            new[source] = new[same]
            continue
        node = new[source] = graph.node_copy(source, new.__getitem__)
        if node.target in STRICT_VIEWS:
            node.target = torch.ops.aten.reshape.default
        if source.op == "get_attr":
            constants[source.target] = _constant(joint, source)
        node.meta = _meta(source, new, layers)
    graph.output(tuple(None if value is None else new[value] for value in results))
    graph.output_node().meta = {"layer": "", "phase": Phase.BACKWARD, "source": ""}
    graph.eliminate_dead_code()
    return graph, {name: constants[name] for name in {n.target for n in graph.find_nodes(op="get_attr")}}


def _meta(source: fx.Node, new: Mapping[fx.Node, fx.Node], layers: dict[Phase, str]) -> dict[str, Any]:
    """What the passes may read from a node.  A node without a layer belongs to the one that was running."""
    late = traced_backward(source) or any(new[n].meta["phase"] is Phase.BACKWARD for n in source.all_input_nodes)
    phase = Phase.BACKWARD if late else Phase.FORWARD
    custom = source.meta.get("custom") or {}
    layers[phase] = custom.get("layer", layers[phase])
    meta = {"val": source.meta.get("val"), "layer": layers[phase], "phase": phase, "source": custom.get("source", "")}
    if "checkpoint" in custom:
        meta["checkpoint"] = custom["checkpoint"]
    return meta


def _same_value(node: fx.Node) -> fx.Node | None:
    """The argument that ``node`` merely repeats, if it does."""
    if node.op != "call_function":
        return None
    target = node.target
    if target in SAME_VALUE:
        return node.args[0]  # type: ignore[return-value]
    if target is torch.ops.aten.clone.default and OUTPUT_COPY in (node.meta.get("custom") or {}):
        return node.args[0]  # type: ignore[return-value]
    if target is torch.ops.aten.copy.default and isinstance(node.args[1], fx.Node):
        want, got = node.meta["val"], node.args[1].meta["val"]
        if (want.shape, want.dtype, want.stride()) == (got.shape, got.dtype, got.stride()):
            return node.args[1]
    return None


def _constant(joint: fx.GraphModule, node: fx.Node) -> torch.Tensor:
    """The real value behind a ``get_attr`` node.

    Raises:
        CaptureError: it has no value, or is no tensor.
    """
    value = operator.attrgetter(str(node.target))(joint)
    source = (node.meta.get("custom") or {}).get("source")
    where = f" used at {source}" if source else ""
    if isinstance(value, FakeTensor):
        value = value.constant
    if not isinstance(value, torch.Tensor) or value.is_meta:
        raise CaptureError(f"a tensor{where} has no value and is not part of the model: register it as a buffer")
    return value.detach()


def _extents(graph: fx.Graph, regions: Sequence[Region]) -> tuple[str, ...]:
    """The layers that the checkpoint blocks cover: the one that opened a block if it lies within blocks as a whole."""
    inside: dict[str, set[int | None]] = {}
    for node in graph.nodes if regions else ():
        if node.op == "call_function" and node.meta["phase"] is Phase.FORWARD:
            parts = node.meta["layer"].split(".")
            for i in range(len(parts) + 1):
                inside.setdefault(".".join(parts[:i]), set()).add(node.meta.get("checkpoint"))
    extents: dict[str, None] = {}
    for region in regions:
        blocks = inside.get(region.owner, {None})
        whole = all(block is not None and regions[block].owner == region.owner for block in blocks)
        extents.update(dict.fromkeys([region.owner] if whole else region.layers))
    return tuple(extents)


def _check_local(graph: fx.Graph) -> None:
    """Refuse collectives of the user: the captured step is that of one device.

    Raises:
        CaptureError: naming the operation, its layer and its line.
    """
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        for op in (node.target, *node.args):
            if getattr(op, "namespace", None) in COLLECTIVES:
                custom = node.meta.get("custom") or {}
                layer, source = custom.get("layer"), custom.get("source")
                where = (f" in layer {layer}" if layer else "") + (f" at {source}" if source else "")
                raise CaptureError(f"the model communicates by itself ({op}){where}: {LOCAL_ADVICE}")


def _check_gradients(step: StepGraph) -> None:
    """Refuse a step whose loss depends on parameters while none of them got a gradient.

    Raises:
        CaptureError: every gradient was lost.
    """
    trainable = {spec.name for spec in step.inputs if spec.kind is InputKind.PARAMETER and spec.trainable}
    gradients = [v for s, v in zip(step.outputs, step.results, strict=True) if s.kind is OutputKind.GRADIENT]
    if not trainable or any(value is not None for value in gradients):
        return
    results = [
        value
        for spec, value in zip(step.outputs, step.results, strict=True)
        if spec.kind is OutputKind.LOSS or (spec.kind is OutputKind.RESULT and step.loss_leaf < 0 and gradients)
    ]
    reached = {n for n in results if n is not None}
    for node in reversed(step.graph.nodes):
        if node in reached:
            reached.update(node.all_input_nodes)
    lost = [s.name for s, n in zip(step.inputs, step.placeholders, strict=True) if s.name in trainable and n in reached]
    if lost:
        raise CaptureError(
            f"the loss depends on {len(lost)} trainable parameters ({lost[0]}, ...) but none of them gets a gradient: "
            "the model or its loss detaches them; capture it under torch.no_grad() if no training is meant"
        )
