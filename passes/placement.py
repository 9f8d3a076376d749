"""Placements: how one tensor lies on one mesh axis, and what a rank holds of it.

A layout is a tuple of placements, one per mesh axis.  A tensor dim is an ordered list of atoms; ``Shard(dim, blocks,
units)`` views the dim as ``[blocks, units, rest]`` and hands out the units: packed weights (``[Q|K|V]`` has 3 blocks),
flattened ``(batch sequence)`` dims and heads are all of this form.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models.errors import PartitionError


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the axis holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank holds a tensor of full shape; the true value is the reduction of them (``sum``, ``max``, ``min``)."""

    reduce: str = "sum"

    def __str__(self) -> str:
        return f"P({self.reduce})"


@dataclass(frozen=True, slots=True)
class Shard:
    """Dim ``dim`` seen as ``[blocks, units, rest]``; the units are handed out in chunks of ``ceil(units / ranks)``.

    In canonical form ``units`` equals the number of ranks when the pieces are even, so equal layouts compare equal.
    """

    dim: int
    blocks: int = 1
    units: int = 0

    def __str__(self) -> str:
        return f"S({self.dim})" if self.blocks == 1 else f"S({self.dim},{self.blocks})"


Placement = Replicate | Partial | Shard
Layout = tuple[Placement, ...]
REPLICATE = Replicate()
PARTIAL = Partial()


def chunk(units: int, num_ranks: int, index: int) -> tuple[int, int]:
    """(start, length) of rank ``index``'s part of ``units``, as ``torch.chunk`` cuts.

    >>> [chunk(7, 4, i) for i in range(4)]
    [(0, 2), (2, 2), (4, 2), (6, 1)]
    """
    step = -(-units // num_ranks)
    start = min(index * step, units)
    return start, min(step, units - start)


def can_split(units: int, num_ranks: int) -> bool:
    """Whether every rank gets at least one unit."""
    return units > 0 and -(-units // num_ranks) * (num_ranks - 1) < units


def make_shard(dim: int, blocks: int, units: int, num_ranks: int) -> Shard:
    """The canonical shard: even splits name the number of ranks as their units."""
    if not can_split(units, num_ranks):
        raise PartitionError(f"{units} units cannot be handed out to {num_ranks} ranks")
    return Shard(dim, blocks, num_ranks if units % num_ranks == 0 else units)


def shards_of_dim(layout: Layout, dim: int) -> list[tuple[int, Shard]]:
    """(axis index, shard) of every axis that splits ``dim``, outermost atom first."""
    found = [(a, p) for a, p in enumerate(layout) if isinstance(p, Shard) and p.dim == dim]
    return sorted(found, key=lambda item: (item[1].blocks, item[1].units))


def compatible(layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether the shards of each dim split disjoint atoms that divide the dim."""
    for dim, size in enumerate(shape):
        end = 1
        for _, shard in shards_of_dim(layout, dim):
            if shard.blocks % end or size % (shard.blocks * shard.units):
                return False
            end = shard.blocks * shard.units
    return True


def local_shape(
    shape: tuple[int, ...], layout: Layout, sizes: tuple[int, ...], coords: tuple[int, ...]
) -> tuple[int, ...]:
    """Shape of what the rank at ``coords`` holds of a tensor of global ``shape``.

    >>> local_shape((96, 32), (Shard(0, 3, 2), REPLICATE), (2, 4), (1, 0))
    (48, 32)
    """
    out = list(shape)
    for axis, placement in enumerate(layout):
        if isinstance(placement, Shard):
            _, length = chunk(placement.units, sizes[axis], coords[axis])
            out[placement.dim] = out[placement.dim] // placement.units * length if shape[placement.dim] else 0
    return tuple(out)


def local_view(
    shape: tuple[int, ...], layout: Layout, axis: int, sizes: tuple[int, ...], coords: tuple[int, ...]
) -> tuple[int, int, int, int]:
    """The dim split by ``axis`` as this rank sees it: (dim, blocks, units, rest).

    ``layout[axis]`` must be a Shard.  ``blocks`` and ``rest`` are local with respect to the other axes; ``units`` is
    the full number of units of this axis's shard.
    """
    shard = layout[axis]
    if not isinstance(shard, Shard):
        raise PartitionError(f"axis {axis} of {layout} is not a shard")
    blocks, rest = shard.blocks, shape[shard.dim] // (shard.blocks * shard.units)
    for other, placement in shards_of_dim(layout, shard.dim):
        if other == axis:
            continue
        _, length = chunk(placement.units, sizes[other], coords[other])
        if placement.blocks * placement.units <= shard.blocks:
            blocks = blocks // placement.units * length
        else:
            rest = rest // placement.units * length
    return shard.dim, blocks, shard.units, rest
