"""Hypothesis strategies of meshes, shapes and layouts."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from autopar.passes.base import Mesh
from autopar.passes.placement import REPLICATE, Layout, Partial, Placement, can_split, compatible, make_shard

SIZES = (2, 3, 4, 6, 7, 8, 12)


@st.composite
def meshes(draw: st.DrawFn, max_axes: int = 3, max_ranks: int = 12) -> Mesh:
    sizes: list[int] = []
    for _ in range(draw(st.integers(1, max_axes))):
        sizes.append(draw(st.integers(1, min(4, max_ranks // math.prod(sizes)))))
    return Mesh(axes=tuple("xyz"[: len(sizes)]), sizes=tuple(sizes))


@st.composite
def shapes(draw: st.DrawFn, max_dims: int = 3) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.sampled_from((1, *SIZES)), min_size=0, max_size=max_dims)))


def divisors(size: int) -> list[int]:
    return [d for d in range(1, size + 1) if size % d == 0]


def placements(shape: tuple[int, ...], num_ranks: int, partials: tuple[str, ...]) -> list[Placement]:
    """Everything that one axis may do to a tensor: replicate, reduce later, split any atom of any dim."""
    found: dict[Placement, None] = {REPLICATE: None} | {Partial(how): None for how in partials}
    for dim, size in enumerate(shape):
        for blocks in divisors(size):
            for units in divisors(size // blocks):
                if can_split(units, num_ranks):
                    found[make_shard(dim, blocks, units, num_ranks)] = None
    return list(found)


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], mesh: Mesh, partials: tuple[str, ...] = ("sum",)) -> Layout:
    layout: Layout = ()
    for size in mesh.sizes:
        options = [p for p in placements(shape, size, partials) if compatible((*layout, p), shape)]
        layout += (draw(st.sampled_from(options)),)
    return layout
