"""What a step costs under an assignment, from sizes alone: work, bytes moved, bytes held."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from autopar.cost_models.cluster import Cluster
from autopar.lower.prepare import Prepared
from autopar.passes.base import InputKind, Mesh, OutputKind, Phase
from autopar.passes.options import Value, replicated, shape_of, value_of
from autopar.passes.partition import Assignment, fake_of
from autopar.passes.placement import REPLICATE, Layout, Partial, Shard
from autopar.passes.redistribute import MICROBATCHES, steps, wire_bytes
from autopar.passes.rules.row import Call
from autopar.search.first_choice import row_flops

# Bytes of optimizer state per byte of parameter.
STATE_BYTES: Mapping[str, float] = {"sgd": 0.0, "momentum": 1.0, "adam": 2.0, "adamw": 2.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Cost of one step on one rank: seconds, peak bytes, bytes sent, floating-point operations."""

    step_time_s: float
    peak_bytes: float
    comm_bytes: float
    flops: float


def local_bytes(value: Value, layout: Layout, sizes: tuple[int, ...]) -> float:
    """Bytes of a value on one rank."""
    fake = fake_of(value)
    total = float(math.prod(fake.shape) * fake.dtype.itemsize)
    return total / math.prod(n for p, n in zip(layout, sizes, strict=True) if isinstance(p, Shard))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Stages and micro-batches: what they do to time and memory, for stages of equal cost.

    Attributes:
        stages: number of stages.
        microbatches: number of micro-batches.
        all_forward: all forwards come before any backward (gpipe).
    """

    stages: int = 1
    microbatches: int = 1
    all_forward: bool = False

    @property
    def time_share(self) -> float:
        """Time of a step, bubble included, in times of the whole step on one stage."""
        return (self.microbatches + self.stages - 1) / (self.microbatches * self.stages)

    @property
    def saved_share(self) -> float:
        """Share of the saved activations that a rank holds at once."""
        alive = self.microbatches if self.all_forward else min(self.stages, self.microbatches)
        return alive / (self.microbatches * self.stages)


def without_microbatches(assignment: Assignment) -> Assignment:
    """The assignment on the real axes alone: what a whole batch costs."""
    mesh = assignment.mesh
    kept = [a for a, axis in enumerate(mesh.axes) if axis != MICROBATCHES]
    return replace(
        assignment,
        mesh=Mesh(axes=tuple(mesh.axes[a] for a in kept), sizes=tuple(mesh.sizes[a] for a in kept)),
        choices={n: tuple(c[a] for a in kept) for n, c in assignment.choices.items()},
        storage={n: tuple(p[a] for a in kept) for n, p in assignment.storage.items()},
    )


def estimate(
    prepared: Prepared,
    assignment: Assignment,
    cluster: Cluster,
    optimizer: str,
    zero: int,
    pipeline: Pipeline = Pipeline(),
) -> Estimate:
    """Roofline of the work, plus the time of every redistribution that is not hidden, plus what is held at the peak."""
    assignment = without_microbatches(assignment)
    book = Ledger(prepared, assignment)
    book.run()
    device = cluster.device
    dtype = "bf16" if book.low_precision else "fp32"
    work_s = book.flops / (device.peak(dtype) * device.matmul_efficiency)
    axes = {"pp": pipeline.stages} if pipeline.stages > 1 else {}
    spans = cluster.axis_levels(axes | dict(zip(assignment.mesh.axes, assignment.mesh.sizes, strict=True)))
    move_s = 0.0
    for axis, sent in book.sent.items():
        level = cluster.levels[spans[axis].outermost] if assignment.mesh.axis_size(axis) > 1 else cluster.levels[0]
        move_s += sent / level.device_bytes_per_s + book.collectives[axis] * level.latency_s
    touch_s = book.touched / (device.memory_bytes_per_s * device.memory_efficiency)
    held = (book.parameters * (1 + STATE_BYTES.get(optimizer, 2.0)) + book.gradients) / pipeline.stages
    held += book.saved * pipeline.saved_share
    return Estimate(
        step_time_s=(work_s + touch_s + move_s) * pipeline.time_share,
        peak_bytes=held,
        comm_bytes=sum(book.sent.values()),
        flops=book.flops,
    )


class Ledger:
    """Walks the step once and books what every call and every redistribution costs one rank."""

    def __init__(self, prepared: Prepared, assignment: Assignment) -> None:
        self.prepared, self.assignment = prepared, assignment
        self.mesh = assignment.mesh
        self.whole: Layout = tuple(REPLICATE for _ in self.mesh.axes)
        self.layouts: dict[Value, Layout] = {}
        self.moved: set[tuple[Value, Layout, Phase | None]] = set()
        self.flops = self.touched = self.saved = self.parameters = self.gradients = 0.0
        self.sent = dict.fromkeys(self.mesh.axes, 0.0)
        self.collectives = dict.fromkeys(self.mesh.axes, 0)
        self.low_precision = False

    def run(self) -> None:
        """Book everything."""
        normal = self.prepared.normal
        for node, spec in zip(normal.placeholders, normal.inputs, strict=True):
            layout = self.assignment.storage.get(spec.name, self.whole)
            self.layouts[(node, 0)] = layout
            if spec.kind is InputKind.PARAMETER:
                size = local_bytes((node, 0), layout, self.mesh.sizes)
                self.parameters += size
                self.gradients += size if spec.trainable else 0.0
        for node in normal.graph.nodes:
            if node.op == "get_attr":
                self.layouts[(node, 0)] = self.whole
            elif node in self.prepared.rows:
                self._call(node)
        for output, result in zip(normal.outputs, normal.results, strict=True):
            if isinstance(result, fx.Node) and isinstance(result.meta.get("val"), torch.Tensor):
                value = value_of(result)
                if output.kind in (OutputKind.LOSS, OutputKind.RESULT):
                    target: Layout = tuple(REPLICATE if isinstance(p, Partial) else p for p in self.layouts[value])
                else:
                    target = self.assignment.storage.get(output.name, self.whole)
                self._move(value, target, None)

    def _call(self, node: fx.Node) -> None:
        row = self.prepared.rows[node]
        choices = self.assignment.choices.get(node.name) or tuple(replicated(row) for _ in self.mesh.axes)
        split = math.prod(n for c, n in zip(choices, self.mesh.sizes, strict=True) if c.factor is not None)
        phase = node.meta.get("phase", Phase.FORWARD)
        self.flops += row_flops(node, row) / split
        for i, source in enumerate(Call(node).tensors):
            value = value_of(source)
            layout = tuple(c.inputs[i] for c in choices)
            self._move(value, layout, phase)
            size = local_bytes(value, layout, self.mesh.sizes)
            self.touched += size
            self._save(value, node, phase, size)
            if row_flops(node, row) and fake_of(value).dtype in (torch.bfloat16, torch.float16):
                self.low_precision = True
        for index, dims in enumerate(row.outputs):
            if dims is not None:
                layout = tuple(c.outputs[index] or REPLICATE for c in choices)
                self.layouts[(node, index)] = layout
                self.touched += local_bytes((node, index), layout, self.mesh.sizes)

    def _save(self, value: Value, reader: fx.Node, phase: Phase, size: float) -> None:
        """A forward value that the backward reads is held from one to the other."""
        producer = value[0]
        forward = producer.op == "call_function" and producer.meta.get("phase") is Phase.FORWARD
        key = (value, self.whole, None)
        if forward and phase is Phase.BACKWARD and key not in self.moved:
            self.moved.add(key)
            self.saved += size

    def _move(self, value: Value, target: Layout, phase: Phase | None) -> None:
        have = self.layouts[value]
        if have == target or (value, target, phase) in self.moved:
            return
        self.moved.add((value, target, phase))
        for step in steps(have, target, shape_of(value), self.mesh.sizes):
            size = max(local_bytes(value, lay, self.mesh.sizes) for lay in (step.before, step.after))
            axis = self.mesh.axes[step.axis]
            sent = wire_bytes(step.kind, self.mesh.sizes[step.axis], size)
            self.sent[axis] += sent
            self.collectives[axis] += 1 if sent else 0
