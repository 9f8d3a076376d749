"""Changing the layout of a value: the steps, their bytes on the wire, and the nodes that carry them out.

:func:`steps` serves the search (prices) and the partitioner (nodes) alike, so that what is priced is what is inserted.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from autopar.cost_models.errors import PartitionError
from autopar.passes.placement import (
    REPLICATE,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    chunk,
    compatible,
)

if TYPE_CHECKING:
    from torch import fx

    from autopar.passes.lowering import Emitter


class StepKind(enum.Enum):
    """What one step does on one mesh axis."""

    SLICE = "slice"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    ALL_GATHER = "all_gather"
    TO_PARTIAL = "to_partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a redistribution: on ``axis``, from layout ``before`` to layout ``after``."""

    kind: StepKind
    axis: int
    before: Layout
    after: Layout


MICROBATCHES = "mb"  # the mesh axis that stands for micro-batches: its "ranks" are run one after another on one rank

# Slices and reduce_scatters first: they make everything after them smaller.
ORDER = list(StepKind)


def kind_of(source: Placement, target: Placement, num_ranks: int) -> StepKind:
    """The step that begins to turn ``source`` into ``target`` on an axis."""
    if isinstance(source, Replicate):
        return StepKind.SLICE if isinstance(target, Shard) else StepKind.TO_PARTIAL
    if isinstance(source, Partial):
        scatters = isinstance(target, Shard) and source.reduce == "sum"
        return StepKind.REDUCE_SCATTER if scatters else StepKind.ALL_REDUCE
    even = isinstance(target, Shard) and source.units == num_ranks == target.units and source.dim != target.dim
    return StepKind.ALL_TO_ALL if even else StepKind.ALL_GATHER


@lru_cache(maxsize=65536)
def steps(source: Layout, target: Layout, shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Step, ...]:
    """The steps from ``source`` to ``target`` for a tensor of global ``shape`` on a mesh of ``sizes``.

    Raises:
        PartitionError: ``target`` splits one atom of a dim over two axes.

    >>> [s.kind.name for s in steps((Partial(), REPLICATE), (Shard(0, 1, 2), Shard(1, 1, 4)), (8, 8), (2, 4))]
    ['SLICE', 'REDUCE_SCATTER']
    """
    if not compatible(target, shape):
        raise PartitionError(f"layout {target} does not fit shape {shape}: two axes split the same atom of a dim")
    out: list[Step] = []
    now = source
    while now != target:
        step = next_step(now, target, shape, sizes)
        out.append(step)
        now = step.after
        if len(out) > 4 * len(source) + 4:
            raise PartitionError(f"no way found from layout {source} to {target} for shape {shape}")
    return tuple(out)


def next_step(now: Layout, target: Layout, shape: tuple[int, ...], sizes: tuple[int, ...]) -> Step:
    """The first step that leads from ``now`` towards ``target``."""
    candidates = []
    for axis, (have, want) in enumerate(zip(now, target, strict=True)):
        if have == want:
            continue
        kind = kind_of(have, want, sizes[axis])
        goal: Placement = REPLICATE if kind in (StepKind.ALL_GATHER, StepKind.ALL_REDUCE) else want
        after = (*now[:axis], goal, *now[axis + 1 :])
        if isinstance(want, Partial) and not isinstance(have, Replicate):
            goal = REPLICATE
            after = (*now[:axis], goal, *now[axis + 1 :])
        candidates.append(Step(kind=kind, axis=axis, before=now, after=after))
    candidates.sort(key=lambda s: ORDER.index(s.kind))
    for step in candidates:
        if compatible(step.after, shape):
            return step
    # Whatever is wanted next collides with a shard that is still there: undo one that has to go.
    for axis, (have, want) in enumerate(zip(now, target, strict=True)):
        if isinstance(have, Shard) and have != want:
            after = (*now[:axis], REPLICATE, *now[axis + 1 :])
            return Step(kind=StepKind.ALL_GATHER, axis=axis, before=now, after=after)
    for axis, (have, want) in enumerate(zip(now, target, strict=True)):
        if isinstance(have, Partial) and have != want:
            after = (*now[:axis], REPLICATE, *now[axis + 1 :])
            return Step(kind=StepKind.ALL_REDUCE, axis=axis, before=now, after=after)
    raise PartitionError(f"no step leads from layout {now} to {target} for shape {shape}")


def wire_bytes(kind: StepKind, num_ranks: int, local_bytes: float) -> float:
    """Bytes that a rank sends for a step, by the ring algorithms.

    Args:
        kind: the step.
        num_ranks: ranks on the axis.
        local_bytes: bytes of the larger of the tensors before and after the step, on one rank.
    """
    share = (num_ranks - 1) / num_ranks
    return {
        StepKind.SLICE: 0.0,
        StepKind.TO_PARTIAL: 0.0,
        StepKind.ALL_GATHER: share * local_bytes,
        StepKind.REDUCE_SCATTER: share * local_bytes,
        StepKind.ALL_REDUCE: 2 * share * local_bytes,
        StepKind.ALL_TO_ALL: share * local_bytes,
    }[kind]


@dataclass(frozen=True, slots=True)
class View:
    """A local tensor seen around one shard: [before, blocks, units, rest, after]."""

    before: int
    blocks: int
    units: int
    rest: int
    after: int

    def with_units(self, units: int) -> list[int]:
        """The five-dim shape with another number of units."""
        return [self.before, self.blocks, units, self.rest, self.after]


def view_around(shape: Sequence[int], shard: Shard, blocks: int, units: int) -> View:
    """View of a local tensor of ``shape`` around ``shard``; ``units`` of its units and ``blocks`` blocks are local."""
    dim = shard.dim
    rest = shape[dim] // (blocks * units) if blocks * units else 0
    return View(math.prod(shape[:dim]), blocks, units, rest, math.prod(shape[dim + 1 :]))


def local_blocks(layout: Layout, axis: int, sizes: tuple[int, ...], coords: tuple[int, ...]) -> int:
    """Blocks of ``layout[axis]`` that are local, given the other axes that split outer atoms of the same dim."""
    shard = layout[axis]
    if not isinstance(shard, Shard):
        raise PartitionError(f"axis {axis} of {layout} is not a shard")
    blocks = shard.blocks
    for other, placement in enumerate(layout):
        if other == axis or not isinstance(placement, Shard) or placement.dim != shard.dim:
            continue
        if placement.blocks * placement.units <= shard.blocks:
            _, length = chunk(placement.units, sizes[other], coords[other])
            blocks = blocks // placement.units * length
    return blocks


class Redistributor:
    """Emits the nodes of a redistribution for one rank."""

    def __init__(
        self, emitter: Emitter, axes: tuple[str, ...], sizes: tuple[int, ...], coords: tuple[int, ...]
    ) -> None:
        self.emitter = emitter
        self.axes = axes
        self.sizes = sizes
        self.coords = coords

    def run(self, node: fx.Node, source: Layout, target: Layout, shape: tuple[int, ...]) -> fx.Node:
        """Emit all steps from ``source`` to ``target``; the result is contiguous."""
        for step in self._steps(source, target, shape):
            node = getattr(self, "_" + step.kind.value)(node, step)
            node.meta["layout"] = step.after
        return node

    def _steps(self, source: Layout, target: Layout, shape: tuple[int, ...]) -> tuple[Step, ...]:
        """Micro-batches are joined first: what other axes then move is moved once, not once a micro-batch."""
        if MICROBATCHES not in self.axes:
            return steps(source, target, shape, self.sizes)
        axis = self.axes.index(MICROBATCHES)
        joined = source
        if source[axis] not in (REPLICATE, target[axis]):
            joined = (*source[:axis], REPLICATE, *source[axis + 1 :])
        return steps(source, joined, shape, self.sizes) + steps(joined, target, shape, self.sizes)

    def _shard(self, layout: Layout, axis: int) -> Shard:
        shard = layout[axis]
        if not isinstance(shard, Shard):
            raise PartitionError(f"axis {axis} of {layout} is not a shard")
        return shard

    def _slice(self, node: fx.Node, step: Step) -> fx.Node:
        shard = self._shard(step.after, step.axis)
        shape = node.meta["val"].shape
        blocks = local_blocks(step.after, step.axis, self.sizes, self.coords)
        start, length = chunk(shard.units, self.sizes[step.axis], self.coords[step.axis])
        view = view_around(shape, shard, blocks, shard.units)
        emit = self.emitter.call
        if blocks == 1:
            out = emit("slice.Tensor", node, shard.dim, start * view.rest, (start + length) * view.rest)
            self.emitter.mark_rank_dependent(out)
            return out if view.before == 1 else self.emitter.contiguous(out)
        wide = emit("reshape", node, view.with_units(shard.units))
        out = emit("slice.Tensor", wide, 2, start, start + length)
        self.emitter.mark_rank_dependent(out)
        target = list(shape)
        target[shard.dim] = blocks * length * view.rest
        return self.emitter.contiguous(emit("reshape", out, target))

    def _all_reduce(self, node: fx.Node, step: Step) -> fx.Node:
        partial = step.before[step.axis]
        how = partial.reduce if isinstance(partial, Partial) else "sum"
        return self.emitter.all_reduce(node, how, self.axes[step.axis])

    def _all_gather(self, node: fx.Node, step: Step) -> fx.Node:
        axis = step.axis
        shard = self._shard(step.before, axis)
        shape = list(node.meta["val"].shape)
        blocks = local_blocks(step.before, axis, self.sizes, self.coords)
        _, length = chunk(shard.units, self.sizes[axis], self.coords[axis])
        widest = chunk(shard.units, self.sizes[axis], 0)[1]
        view = view_around(shape, shard, blocks, length)
        emit, num_ranks = self.emitter.call, self.sizes[axis]
        if widest * num_ranks != shard.units:  # on every rank alike, so that the shapes on the wire agree
            node = emit("reshape", node, view.with_units(length))
            node = emit("constant_pad_nd", node, [0, 0, 0, 0, 0, widest - length])
            self.emitter.mark_rank_dependent(node)
        gathered = self.emitter.all_gather(self.emitter.contiguous(node), num_ranks, self.axes[axis])
        target = list(shape)
        target[shard.dim] = blocks * shard.units * view.rest
        if view.before * blocks == 1:
            out = (
                gathered
                if widest * num_ranks == shard.units
                else emit(
                    "slice.Tensor",
                    emit("reshape", gathered, [num_ranks * widest, view.rest, view.after]),
                    0,
                    0,
                    shard.units,
                )
            )
            return emit("reshape", out, target)
        wide = emit("reshape", gathered, [num_ranks, view.before, blocks, widest, view.rest, view.after])
        moved = emit("permute", wide, [1, 2, 0, 3, 4, 5])
        merged = emit("reshape", moved, view.with_units(num_ranks * widest))
        if num_ranks * widest != shard.units:
            merged = emit("slice.Tensor", merged, 2, 0, shard.units)
        return self.emitter.contiguous(emit("reshape", merged, target))

    def _reduce_scatter(self, node: fx.Node, step: Step) -> fx.Node:
        axis = step.axis
        shard = self._shard(step.after, axis)
        shape = list(node.meta["val"].shape)
        blocks = local_blocks(step.after, axis, self.sizes, self.coords)
        num_ranks = self.sizes[axis]
        _, length = chunk(shard.units, num_ranks, self.coords[axis])
        widest = chunk(shard.units, num_ranks, 0)[1]
        view = view_around(shape, shard, blocks, shard.units)
        emit = self.emitter.call
        if view.before * blocks == 1 and widest * num_ranks == shard.units:
            flat = emit("reshape", node, [num_ranks * widest, view.rest * view.after])
        else:
            wide = emit("reshape", node, view.with_units(shard.units))
            if widest * num_ranks != shard.units:
                wide = emit("constant_pad_nd", wide, [0, 0, 0, 0, 0, widest * num_ranks - shard.units])
            split = emit("reshape", wide, [view.before, blocks, num_ranks, widest, view.rest, view.after])
            flat = emit("permute", split, [2, 0, 1, 3, 4, 5])
        scattered = self.emitter.reduce_scatter(self.emitter.contiguous(flat), num_ranks, self.axes[axis])
        target = list(shape)
        target[shard.dim] = blocks * length * view.rest
        if widest * num_ranks != shard.units:
            scattered = emit("reshape", scattered, [view.before, blocks, widest, view.rest, view.after])
            scattered = emit("slice.Tensor", scattered, 2, 0, length)
            self.emitter.mark_rank_dependent(scattered)
        return self.emitter.contiguous(emit("reshape", scattered, target))

    def _all_to_all(self, node: fx.Node, step: Step) -> fx.Node:
        axis, num_ranks = step.axis, self.sizes[step.axis]
        have, want = self._shard(step.before, axis), self._shard(step.after, axis)
        shape = list(node.meta["val"].shape)
        emit = self.emitter.call
        # Cut the dim that becomes split into [blocks, ranks, rest] and bring the ranks to the front ...
        blocks = local_blocks(step.after, axis, self.sizes, self.coords)
        rest = shape[want.dim] // (blocks * num_ranks)
        cut = [*shape[: want.dim], blocks, num_ranks, rest, *shape[want.dim + 1 :]]
        order = [want.dim + 1, *(i for i in range(len(cut)) if i != want.dim + 1)]
        sent = self.emitter.contiguous(emit("permute", emit("reshape", node, cut), order))
        got = self.emitter.all_to_all(sent, num_ranks, self.axes[axis])
        # ... then let the ranks of the received pieces fill the dim that was split.
        piece = list(shape)
        piece[want.dim] = blocks * rest
        old_blocks = local_blocks(step.before, axis, self.sizes, self.coords)
        old_rest = piece[have.dim] // old_blocks
        parts = [num_ranks, *piece[: have.dim], old_blocks, old_rest, *piece[have.dim + 1 :]]
        target_at = have.dim + 1
        order = [*range(1, target_at + 1), 0, *range(target_at + 1, len(parts))]
        moved = emit("permute", emit("reshape", got, parts), order)
        target = list(piece)
        target[have.dim] = piece[have.dim] * num_ranks
        return self.emitter.contiguous(emit("reshape", moved, target))

    def _to_partial(self, node: fx.Node, step: Step) -> fx.Node:
        """The identity on the first rank of the axis, zeros elsewhere; one node either way, so that ranks agree."""
        partial = step.after[step.axis]
        if isinstance(partial, Partial) and partial.reduce != "sum":
            return node
        op = "alias" if self.coords[step.axis] == 0 else "zeros_like"
        out = self.emitter.call(op, node)
        self.emitter.mark_rank_dependent(out)
        return out
