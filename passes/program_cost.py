"""The step time and peak memory of an emitted program: its nodes as events, run through the timeline.

What is priced is the program that runs, so :func:`predict` serves ``plan.predicted`` and ``autopar simulate`` alike.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch import fx

from autopar.cost_models.cluster import Cluster, LinkLevel, Span
from autopar.cost_models.collectives import Collective, CollectiveModel, Transfer
from autopar.cost_models.compute import KernelModel, Op, memory_op
from autopar.cost_models.memory import Buffer, Peak, alive, peak
from autopar.cost_models.timeline import COMPUTE, Event, Timeline, simulate
from autopar.passes.base import InputKind, OutputKind, Phase, Program
from autopar.passes.pricing import base_of, buffers, op_name, price_node, tensor_bytes, tensors

# Where a program is: the sub-program or "", the layer, the phase.
Place = tuple[str, str, str]
# What a value waits for: per stream, the last event it depends on.
_After = dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSpan:
    """When a sub-program computed, in seconds from the start of the step."""

    phase: Phase
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCost:
    """Prediction for one step.

    Attributes:
        step_s: duration, optimizer included.
        peak: the moment of most memory on the rank that needs most, and whose it is; optimizer state included.
        peaks: the most of the first program while it is in each place: a sub-program or "", a layer, a phase.
        timeline: when everything runs.
        optimizer_s: the part of ``step_s`` in which the optimizer updates.
        sent_bytes: per mesh axis group, the bytes of full tensors that a rank communicates.
        flops: floating-point operations of the rank that does most.
        by_bytes: ops without a formula, priced by their bytes alone.
        parts: the first program's sub-programs (a stage's forward or backward of a micro-batch), in order.
    """

    step_s: float
    peak: Peak
    peaks: Mapping[Place, float]
    timeline: Timeline
    optimizer_s: float
    sent_bytes: Mapping[str, float]
    flops: float
    by_bytes: tuple[str, ...]
    parts: tuple[PartSpan, ...] = ()


@dataclass(slots=True, kw_only=True)
class ProgramEvents:
    """The nodes of one program as events, in order.

    Attributes:
        program: what is read.
        rank: its number among the programs simulated together.
        kernels, collectives: what prices computations and communications.
        spans: how each group lies on the cluster.
        events: one a node that takes time.
        sent: bytes of full tensors that the rank communicates, by group.
        unknown: ops priced by their bytes alone.
        parts: (phase, first event, event behind the last) of every sub-program.
        places: for each node of the program's own graph, how many events come before it.
        flops: floating-point operations.
    """

    program: Program
    rank: int
    kernels: KernelModel
    collectives: CollectiveModel
    spans: Mapping[str, Span]
    events: list[Event]
    sent: dict[str, float]
    unknown: set[str]
    messages: Counter[str]
    parts: list[tuple[Phase, int, int]]
    places: list[int]
    flops: float = 0.0

    def graph(self, module: fx.GraphModule, arguments: Sequence[_After]) -> list[_After]:
        """Add the events of ``module``'s graph; returns what each output waits for."""
        after: dict[fx.Node, _After] = {}
        items: dict[fx.Node, list[_After]] = {}
        given = iter(arguments)
        is_whole = module is self.program.graph_module
        for node in module.graph.nodes:
            if is_whole:
                self.places.append(len(self.events))
            if node.op == "placeholder":
                after[node] = next(given, {})
            elif node.op == "call_module":
                inner = module.get_submodule(str(node.target))
                if isinstance(inner, fx.GraphModule):
                    first = len(self.events)
                    items[node] = self.graph(inner, [after[a] for a in node.args if isinstance(a, fx.Node)])
                    after[node] = _latest(items[node])
                    self.parts.append((node.meta.get("phase", Phase.FORWARD), first, len(self.events)))
            elif node.op == "output":
                leaves = node.args[0] if isinstance(node.args[0], tuple | list) else (node.args[0],)
                return [after.get(leaf, {}) if isinstance(leaf, fx.Node) else {} for leaf in leaves]
            elif node.target is operator.getitem and node.args[0] in items:
                after[node] = items[node.args[0]][int(str(node.args[1]))]
            else:
                after[node] = self.node(node, _latest([after.get(a, {}) for a in node.all_input_nodes]))
        return []

    def node(self, node: fx.Node, waits: _After) -> _After:
        """Add the event of one node, if it has one."""
        item = price_node(node)
        if item is None:
            return waits
        if item.by_bytes:
            self.unknown.add(op_name(node))
        meets, level = "", None
        if isinstance(item.cost, Transfer):
            level, seconds = self.transfer(item.cost)
            stream = level.name
            if item.cost.collective is Collective.SEND:
                stream, meets = self.message(node, item.cost.group, stream)
        else:
            stream, seconds = COMPUTE, self.compute(item.cost)
            self.flops += item.cost.flops
        if seconds == 0.0:
            return waits
        self.events.append(
            Event(
                name=f"{node.name} {item.cost.layer}".strip(),
                stream=stream,
                seconds=seconds,
                meets=meets,
                waits=tuple((self.rank, i) for s, i in waits.items() if s != stream),
                slows_compute=level.slows_compute if level else None,
                slowed_by_compute=level.slowed_by_compute if level else 0.0,
            )
        )
        return {**waits, stream: len(self.events) - 1}

    def message(self, node: fx.Node, group: str, stream: str) -> tuple[str, str]:
        """A stream for the direction of a message, and a key that its two ends share.

        Messages of one direction keep their order; a send and a receive do not wait for each other.
        """
        members = self.program.mesh.group_ranks(group, self.program.rank)
        me, peer = members.index(self.program.rank), int(str(node.args[1]))
        source, target = (me, peer) if op_name(node) == "isend" else (peer, me)
        direction = f"{stream} {source}>{target}"
        self.messages[direction] += 1
        return direction, f"{group} {members} {source}>{target} {self.messages[direction]}"

    def compute(self, op: Op) -> float:
        """Seconds of one computation."""
        return self.kernels.eager_seconds(op)

    def transfer(self, transfer: Transfer) -> tuple[LinkLevel, float]:
        """Level and seconds of one communication, which is added to ``sent``."""
        span = self.spans[transfer.group]
        self.sent[transfer.group] = self.sent.get(transfer.group, 0.0) + transfer.bytes
        level = self.collectives.cluster.levels[span.outermost]
        return level, float(self.collectives.seconds(transfer.collective, transfer.bytes, span))


def _latest(values: Sequence[_After]) -> _After:
    """The last event of every stream among ``values``."""
    out: _After = {}
    for value in values:
        for stream, index in value.items():
            out[stream] = max(index, out.get(stream, -1))
    return out


def program_events(
    program: Program, kernels: KernelModel, collectives: CollectiveModel, *, rank: int = 0
) -> ProgramEvents:
    """Events of one rank's program, in order.

    Args:
        program: local shapes; group names are mesh axes.
        kernels: prices computations.
        collectives: prices communications, on the cluster of which the mesh is a part.
        rank: number of the program among those simulated together.
    """
    mesh = dict(zip(program.mesh.axes, program.mesh.sizes, strict=True))
    groups = {g for m in _modules(program.graph_module) for g in _groups(m)}
    spans = {g: collectives.cluster.group_span(mesh, g) for g in groups}
    found = ProgramEvents(
        program=program,
        rank=rank,
        kernels=kernels,
        collectives=collectives,
        spans=spans,
        events=[],
        sent={},
        unknown=set(),
        messages=Counter(),
        parts=[],
        places=[],
    )
    found.graph(program.graph_module, [{} for _ in program.inputs])
    return found


def _modules(module: fx.GraphModule) -> list[fx.GraphModule]:
    return [m for m in module.modules() if isinstance(m, fx.GraphModule)]


def _groups(module: fx.GraphModule) -> set[str]:
    """Group names of the communications in ``module``."""
    found = set()
    for node in module.graph.nodes:
        item = price_node(node)
        if item is not None and isinstance(item.cost, Transfer):
            found.add(item.cost.group)
    return found


def predict(
    programs: Sequence[Program],
    cluster: Cluster,
    *,
    optimizer_bytes_per_parameter_byte: float = 2.0,
    slowdown: float = 0.2,
    memory: bool = False,
) -> ProgramCost:
    """Predict the step of the given programs, one of each pipeline stage (the ranks of a stage are alike).

    Args:
        programs: programs that run together.
        cluster: where.
        optimizer_bytes_per_parameter_byte: state of the optimizer relative to the parameters (2: Adam).
        slowdown: by how much communication lengthens computation beside it, where nobody measured it.
        memory: whether the timeline knows what its events allocate and free (:meth:`Timeline.memory_curve`).

    Returns:
        Time, memory and the timeline.
    """
    kernels = KernelModel(device=cluster.device)
    collectives = CollectiveModel(cluster=cluster)
    rows = [program_events(p, kernels, collectives, rank=i) for i, p in enumerate(programs)]
    held = [_parameter_bytes(p) for p in programs]
    lives = [_lives(p, size * optimizer_bytes_per_parameter_byte) for p, size in zip(programs, held, strict=True)]
    events = [with_memory(*pair) if memory else pair[0].events for pair in zip(rows, lives, strict=True)]
    timeline = simulate(events, slowdown=slowdown)
    state = max(held) * optimizer_bytes_per_parameter_byte
    # Reads gradient, parameter and state; writes parameter and state.
    update = memory_op("optimizer", max(held) * 3 + 2 * state)
    peaks = [peak(of_rank) for of_rank in lives]
    optimizer_s = float(kernels.seconds([update])[0])
    return ProgramCost(
        step_s=timeline.step_s + optimizer_s,
        peak=max(peaks, key=lambda p: p.bytes),
        peaks=_peaks(programs[0], lives[0]),
        timeline=timeline,
        optimizer_s=optimizer_s,
        sent_bytes=rows[0].sent,
        flops=max(row.flops for row in rows),
        by_bytes=tuple(sorted(set().union(*(row.unknown for row in rows)))),
        parts=_part_spans(rows[0], timeline),
    )


def _part_spans(row: ProgramEvents, timeline: Timeline) -> tuple[PartSpan, ...]:
    """When the sub-programs of the first program computed."""
    starts, ends = timeline.starts[row.rank], timeline.ends[row.rank]
    found = []
    for phase, first, last in row.parts:
        inside = [i for i in range(first, last) if row.events[i].stream == COMPUTE]
        if inside:
            found.append(PartSpan(phase=phase, start_s=starts[inside[0]], end_s=ends[inside[-1]]))
    return tuple(found)


def _parameter_bytes(program: Program) -> float:
    """Bytes of the trainable parameters that the rank stores."""
    pairs = zip(program.graph_module.graph.find_nodes(op="placeholder"), program.inputs, strict=False)
    return float(
        sum(
            tensor_bytes(t)
            for n, s in pairs
            if s.kind is InputKind.PARAMETER and s.trainable
            for t in tensors(n.meta.get("val"))
        )
    )


def with_memory(row: ProgramEvents, lives: Sequence[Buffer]) -> list[Event]:
    """The events, with what each takes when it starts and gives back when it ends.

    A buffer is taken by the first event from its birth on, and given back by the last one that uses it.
    """
    ends = [*row.places[1:], len(row.events)]
    last = len(row.events) - 1
    taken: dict[int, float] = defaultdict(float)
    freed: dict[int, float] = defaultdict(float)
    for buffer in lives:
        first = min(row.places[buffer.born], last)
        taken[first] += buffer.bytes
        if buffer.dies < len(row.places):
            freed[max(ends[buffer.dies] - 1, first)] += buffer.bytes
    return [replace(event, allocates_bytes=taken[i], frees_bytes=freed[i]) for i, event in enumerate(row.events)]


def _lives(program: Program, state_bytes: float) -> list[Buffer]:
    """Every storage of the program and the optimizer's state, with their lives."""
    graph = program.graph_module.graph
    placeholders = graph.find_nodes(op="placeholder")
    kinds = {n.name: s.kind.value for n, s in zip(placeholders, program.inputs, strict=False)}
    outputs = graph.output_node().args[0]
    gradients = {
        value: spec.kind
        for value, spec in zip(outputs, program.outputs, strict=True)  # type: ignore[arg-type]
        if isinstance(value, fx.Node) and spec.kind is OutputKind.GRADIENT
    }
    lives = list(buffers(graph, input_kinds=kinds, gradients=set(gradients)))
    lives.append(
        Buffer(name="optimizer state", bytes=state_bytes, born=0, dies=len(graph.nodes), layer="", kind="optimizer")
    )
    return [*lives, *_passing(program.graph_module)]


def _peaks(program: Program, lives: Sequence[Buffer]) -> dict[Place, float]:
    """The most memory in every place."""
    module = program.graph_module
    nodes = list(module.graph.nodes)
    inner: dict[str, dict[Place, float]] = {}
    found: dict[Place, float] = {}
    names = {n.name for n in nodes}
    held = alive([b for b in lives if b.name in names or b.kind == "optimizer"], len(nodes))
    for i, node in enumerate(nodes):
        here = {_place("", node): 0.0}
        if node.op == "call_module":
            name = str(node.target)
            if name not in inner:
                inner[name] = _inner_peaks(name, cast("fx.GraphModule", module.get_submodule(name)))
            here = inner[name] or here
        for place, extra in here.items():
            found[place] = max(found.get(place, 0.0), held[i] + extra)
    return found


def _place(part: str, node: fx.Node) -> Place:
    return part, str(node.meta.get("layer", "")), str(node.meta.get("phase", Phase.FORWARD).value)


def _inner_peaks(name: str, module: fx.GraphModule) -> dict[Place, float]:
    """What a sub-program holds in each of its places, beyond what it takes in and gives back."""
    nodes = list(module.graph.nodes)
    held = alive(_made(module), len(nodes))
    outside = _given_bytes(module)
    found: dict[Place, float] = {}
    for i, node in enumerate(nodes):
        place = _place(name, node)
        found[place] = max(found.get(place, 0.0), held[i] - outside)
    return found


def _made(module: fx.GraphModule) -> list[Buffer]:
    """What a sub-program holds beyond what it takes in."""
    taken = {n.name for n in module.graph.find_nodes(op="placeholder")}
    return [b for b in buffers(module.graph) if b.name not in taken]


def _given_bytes(module: fx.GraphModule) -> float:
    """Bytes of what a sub-program makes and gives back."""
    given = {base_of(v) for v in module.graph.output_node().all_input_nodes}
    return float(sum(tensor_bytes(t) for n in given if n.op != "placeholder" for t in tensors(n.meta.get("val"))))


def _passing(module: fx.GraphModule) -> Iterator[Buffer]:
    """What sub-programs hold while they run, beyond what they take in and give back."""
    needs: dict[str, tuple[float, str]] = {}
    for i, node in enumerate(module.graph.nodes):
        if node.op != "call_module":
            continue
        name = str(node.target)
        if name not in needs:
            needs[name] = _passing_bytes(cast("fx.GraphModule", module.get_submodule(name)))
        size, layer = needs[name]
        if size > 0:
            yield Buffer(name=name, bytes=size, born=i, dies=i, layer=layer, kind="temporary")


def _passing_bytes(module: fx.GraphModule) -> tuple[float, str]:
    """The most that is alive inside beyond its inputs and all of its outputs, and the layer that holds most of it."""
    top = peak(_made(module))
    return top.bytes - _given_bytes(module), top.owners[0][0] if top.owners else ""
