"""From global tensors to the parts that ranks hold, and back; and how far two tensors are apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce

import torch

from autopar.cost_models.errors import VerificationError
from autopar.passes.base import Mesh
from autopar.passes.placement import (
    REPLICATE,
    Layout,
    Partial,
    Replicate,
    Shard,
    chunk,
    local_shape,
    shards_of_dim,
)

_Grid = dict[tuple[int, ...], torch.Tensor]
_REDUCE: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def shard_tensor(tensor: torch.Tensor, layout: Layout, sizes: tuple[int, ...], coords: tuple[int, ...]) -> torch.Tensor:
    """What the rank at ``coords`` of a mesh of ``sizes`` holds of the global ``tensor``.

    A partial sum is the tensor itself on the axis's first rank and zeros on the others; other partials are the tensor
    everywhere.  The result is contiguous where the layout splits, and shares memory with ``tensor`` where it does not.

    >>> shard_tensor(torch.arange(12), (Shard(0, 3, 2),), (2,), (1,)).tolist()
    [2, 3, 6, 7, 10, 11]
    """
    if not len(layout) == len(sizes) == len(coords):
        raise VerificationError(
            f"layout {layout}, mesh {sizes} and coordinates {coords} differ in their number of axes"
        )
    for axis, shard in _shards(layout, tensor.dim())[::-1]:  # inner atoms first: outer views stay valid
        tensor = _narrow(tensor, shard, *chunk(shard.units, sizes[axis], coords[axis]))
    if any(isinstance(p, Partial) and p.reduce == "sum" and c for p, c in zip(layout, coords, strict=True)):
        return torch.zeros_like(tensor)
    return tensor


def assemble(
    locals_: Sequence[torch.Tensor],
    layout: Layout,
    mesh: Mesh,
    shape: tuple[int, ...],
    *,
    tolerance: float = 0.0,
) -> torch.Tensor:
    """The global tensor of ``shape`` whose parts ranks 0, 1, ... of ``mesh`` hold.

    Args:
        locals_: one part a rank.
        layout: how the tensor lies on the mesh.
        mesh: the grid of ranks.
        shape: of the global tensor.
        tolerance: how far copies on different ranks may differ, relative to their largest entry.

    Raises:
        VerificationError: a part has the wrong shape, or copies differ; the message names the ranks.
    """
    check_local_shapes(locals_, layout, mesh, shape)
    parts, layout = reduce_partials(locals_, layout, mesh)
    grid = {mesh.coords(rank): part for rank, part in enumerate(parts) if part is not None}
    for axis, placement in enumerate(layout):
        if isinstance(placement, Replicate):
            grid = _merge(grid, axis, partial(_one_of, mesh=mesh, tolerance=tolerance))
    for axis, shard in _shards(layout, len(shape)):  # outer atoms first: the reverse of shard_tensor
        grid = _merge(grid, axis, partial(_join, shard=shard))
    (whole,) = grid.values()
    return whole


def check_local_shapes(
    locals_: Sequence[torch.Tensor | None], layout: Layout, mesh: Mesh, shape: tuple[int, ...]
) -> None:
    """Raise VerificationError where a part has not the shape that the layout gives it."""
    if len(locals_) != mesh.size:
        raise VerificationError(f"got parts of {len(locals_)} ranks; the mesh {mesh.sizes} has {mesh.size}")
    for rank, part in enumerate(locals_):
        wanted = local_shape(shape, layout, mesh.sizes, mesh.coords(rank))
        if part is not None and tuple(part.shape) != wanted:
            names = ", ".join(map(str, layout))
            raise VerificationError(
                f"rank {rank} holds {list(part.shape)} of a tensor of global shape {list(shape)}; layout ({names}) on "
                f"{mesh.axes} {mesh.sizes} gives it {list(wanted)}"
            )


def reduce_partials(
    parts: Sequence[torch.Tensor | None], layout: Layout, mesh: Mesh
) -> tuple[list[torch.Tensor | None], Layout]:
    """Reduce over the axes where ``layout`` is partial, in rank order; every rank gets the true value of its part."""
    found = list(parts)
    for axis, placement in enumerate(layout):
        if not isinstance(placement, Partial):
            continue
        if placement.reduce not in _REDUCE:
            raise VerificationError(f"unknown reduction {placement}; known are {sorted(_REDUCE)}")
        for rank in range(mesh.size):
            if mesh.coords(rank)[axis]:
                continue
            members = mesh.group_ranks(mesh.axes[axis], rank)
            held = [t for m in members if (t := found[m]) is not None]
            if held:
                total = reduce(_REDUCE[placement.reduce], held)
                for member in members:
                    found[member] = total
    return found, tuple(REPLICATE if isinstance(p, Partial) else p for p in layout)


def part_differences(
    parts: Sequence[torch.Tensor | None], layout: Layout, mesh: Mesh, want: torch.Tensor
) -> tuple[dict[int, float], float]:
    """Largest absolute difference of every rank's part from its part of ``want``, and between copies of one part.

    Partial parts are reduced first.  Ranks without a part (None) are left out.
    """
    reduced, layout = reduce_partials(parts, layout, mesh)
    split = [axis for axis, placement in enumerate(layout) if isinstance(placement, Shard)]
    expected: dict[tuple[int, ...], torch.Tensor] = {}
    first: dict[tuple[int, ...], torch.Tensor] = {}
    apart: dict[int, float] = {}
    drift = 0.0
    for rank, part in enumerate(reduced):
        if part is None:
            continue
        coords = mesh.coords(rank)
        place = tuple(coords[axis] for axis in split)
        if place not in expected:
            expected[place] = shard_tensor(want, layout, mesh.sizes, coords)
        apart[rank] = difference(part, expected[place])
        drift = max(drift, difference(part, first.setdefault(place, part)))
    return apart, drift


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest absolute difference; infinite where shapes, or positions of NaN and infinity, differ."""
    if got.shape != want.shape:
        return math.inf
    if not want.numel():
        return 0.0
    got, want = _as_double(got), _as_double(want)
    distance = (got - want).abs()
    same = (got == want) | (got.isnan() & want.isnan())
    return float(distance.masked_fill(same, 0.0).nan_to_num(nan=math.inf, posinf=math.inf).max())


def magnitude(tensor: torch.Tensor) -> float:
    """Largest absolute value among the finite entries; 0 for none."""
    values = _as_double(tensor).abs()
    values = values[values.isfinite()]
    return float(values.max()) if values.numel() else 0.0


def relative(distance: float, scale: float) -> float:
    """``distance`` in units of ``scale``; no distance is 0 on every scale, any distance is infinite on scale 0."""
    if not distance:
        return 0.0
    return distance / scale if scale else math.inf


def _as_double(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()).double() if tensor.is_complex() else tensor.double()


def _shards(layout: Layout, num_dims: int) -> list[tuple[int, Shard]]:
    """(axis, shard) of every split, outer atoms of a dim before inner ones."""
    return [item for dim in range(num_dims) for item in shards_of_dim(layout, dim)]


def _view(tensor: torch.Tensor, shard: Shard, units: int) -> torch.Tensor:
    """``tensor`` with the shard's dim viewed as [blocks, units, rest]."""
    size = tensor.shape[shard.dim]
    count = shard.blocks * units
    if count == 0 or size % count:
        raise VerificationError(f"{shard} needs a dim that divides into {count} parts, got {list(tensor.shape)}")
    return tensor.reshape(
        *tensor.shape[: shard.dim], shard.blocks, units, size // count, *tensor.shape[shard.dim + 1 :]
    )


def _narrow(tensor: torch.Tensor, shard: Shard, start: int, length: int) -> torch.Tensor:
    part = _view(tensor, shard, shard.units).narrow(shard.dim + 1, start, length)
    return part.flatten(shard.dim, shard.dim + 2).contiguous()


def _join(pieces: _Grid, shard: Shard) -> torch.Tensor:
    views = []
    for index, piece in enumerate(pieces.values()):
        _, length = chunk(shard.units, len(pieces), index)
        if length:
            views.append(_view(piece, shard, length))
    return torch.cat(views, dim=shard.dim + 1).flatten(shard.dim, shard.dim + 2)


def _merge(grid: _Grid, axis: int, combine: Callable[[_Grid], torch.Tensor]) -> _Grid:
    """Combine the parts along ``axis``; what is left has coordinate 0 there."""
    lines: dict[tuple[int, ...], _Grid] = {}
    for coords, part in sorted(grid.items(), key=lambda item: item[0]):
        lines.setdefault((*coords[:axis], 0, *coords[axis + 1 :]), {})[coords] = part
    return {corner: combine(line) for corner, line in lines.items()}


def _one_of(copies: _Grid, mesh: Mesh, tolerance: float) -> torch.Tensor:
    (first, kept), *others = copies.items()
    for coords, copy in others:
        apart = difference(copy, kept)
        if apart > tolerance * max(magnitude(kept), magnitude(copy)):
            raise VerificationError(
                f"ranks {mesh.rank(first)} and {mesh.rank(coords)} hold copies of one tensor that are {apart:.3g} apart"
            )
    return kept
