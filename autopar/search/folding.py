"""A deep step in shallow ones: blocks that are copies of each other are taken out of the graph and counted.

What a step costs is linear in the number of blocks.  The step with a few blocks of every group, and for each group the
step with one block more, give the cost of the whole.

A block in the middle is taken out by its neighbours: what later calls read of it they read of the block before, and
what the backward of an earlier block reads of it is read of the block behind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.passes.base import OutputKind, Phase, StepGraph

WORTH = 6  # a group of fewer blocks stays whole
ENDS = ((2, 1), (2, 2), (3, 3))  # blocks that stay at the start and the end: the first that lie between equal ones


@dataclass(frozen=True, kw_only=True)
class Folds:
    """A step in numbers of blocks.

    Attributes:
        base: the step with few blocks.
        deeper: for each group, ``base`` with one more of its blocks.
        left_out: for each group, how many blocks the whole step has more than ``base``.
        kept: for each group, how many blocks ``base`` has.
    """

    base: StepGraph
    deeper: tuple[StepGraph, ...]
    left_out: tuple[int, ...]
    kept: tuple[int, ...]

    @property
    def steps(self) -> tuple[StepGraph, ...]:
        """All shallow steps, ``base`` first."""
        return (self.base, *self.deeper)

    def total(self, figures: Sequence[float]) -> float:
        """A figure of the whole step, from the same figure of ``steps``."""
        return figures[0] + sum(n * (f - figures[0]) for n, f in zip(self.left_out, figures[1:], strict=True))


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Blocks of which some can be taken out: the calls of each, in order; ``start`` and ``end`` blocks stay."""

    paths: tuple[str, ...]
    calls: tuple[tuple[fx.Node, ...], ...]
    start: int
    end: int

    def dropped(self, more: int) -> range:
        """Numbers of the blocks that go when ``more`` than the ends stay."""
        return range(self.start + more, len(self.paths) - self.end)

    def stand_ins(self, more: int) -> dict[fx.Node, fx.Node]:
        """For every call of the blocks that go, the call that is read instead."""
        gone = self.dropped(more)
        before, behind = self.calls[gone.start - 1], self.calls[gone.stop]
        found = {}
        for number in gone:
            for call, earlier, later in zip(self.calls[number], before, behind, strict=True):
                found[call] = later if call.meta.get("phase") is Phase.BACKWARD else earlier
        return found


def fold(step: StepGraph) -> Folds | None:
    """The shallow steps of a step, or None where it has no long row of equal blocks."""
    places = {path: i for i, group in enumerate(step.repeated) if len(group) >= WORTH for path in group}
    members: dict[str, list[fx.Node]] = {path: [] for path in places}
    for node in step.graph.nodes:
        path = _block(str(node.meta.get("layer", "")), members) if node.op == "call_function" else None
        if path is not None:
            members[path].append(node)
    groups = [g for group in step.repeated if len(group) >= WORTH and (g := _group(group, members)) is not None]
    if not groups:
        return None
    return Folds(
        base=_without(step, groups, None),
        deeper=tuple(_without(step, groups, i) for i in range(len(groups))),
        left_out=tuple(len(g.dropped(0)) for g in groups),
        kept=tuple(g.start + g.end for g in groups),
    )


def _block(layer: str, members: Container[str]) -> str | None:
    """The block that a layer lies in."""
    parts = layer.split(".")
    return next((p for n in range(1, len(parts) + 1) if (p := ".".join(parts[:n])) in members), None)


def _group(paths: Sequence[str], members: dict[str, list[fx.Node]]) -> _Group | None:
    """The blocks ``paths``, if those in the middle make equal calls."""
    calls = tuple(tuple(members[path]) for path in paths)
    kinds = [[(n.target, n.meta.get("phase"), _shapes(n)) for n in block] for block in calls]
    for start, end in ENDS:
        alike = kinds[start - 1 : len(paths) - end + 1]
        if len(paths) > start + end + 1 and all(kind == alike[0] for kind in alike):
            return _Group(paths=tuple(paths), calls=calls, start=start, end=end)
    return None


def _shapes(node: fx.Node) -> object:
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    return tuple((getattr(v, "shape", None), getattr(v, "dtype", None)) for v in values)


def _without(step: StepGraph, groups: Sequence[_Group], deeper: int | None) -> StepGraph:
    """The step without the middle of every group; of group ``deeper`` one more block stays."""
    instead: dict[fx.Node, fx.Node] = {}
    gone_paths: set[str] = set()
    for i, group in enumerate(groups):
        instead |= group.stand_ins(int(i == deeper))
        gone_paths |= {group.paths[k] for k in group.dropped(int(i == deeper))}
    unused = {
        node
        for node in step.placeholders
        if node.users and all(user in instead or user.op == "output" for user in node.users)
    }
    gone_names = {spec.name for spec, node in zip(step.inputs, step.placeholders, strict=True) if node in unused}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def copy_of(node: fx.Node) -> fx.Node:
        return copies[instead.get(node, node)]

    kept_outputs = [
        i
        for i, spec in enumerate(step.outputs)
        if spec.kind not in (OutputKind.GRADIENT, OutputKind.MUTATION) or spec.name not in gone_names
    ]
    for node in step.graph.nodes:
        if node.op == "output":
            graph.output(tuple(fx.map_arg(step.results[i], copy_of) for i in kept_outputs))
        elif node not in instead and node not in unused:
            copies[node] = graph.node_copy(node, copy_of)
    return dataclasses.replace(
        step,
        graph_module=fx.GraphModule(step.graph_module, graph),
        inputs=tuple(spec for spec in step.inputs if spec.name not in gone_names),
        outputs=tuple(step.outputs[i] for i in kept_outputs),
        checkpoints=tuple(path for path in step.checkpoints if _block(path, gone_paths) is None),
        repeated=tuple(tuple(path for path in paths if path not in gone_paths) for paths in step.repeated),
    )
