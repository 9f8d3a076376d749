"""Loaders of global batches of which every rank keeps its part."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from autopar.passes.placement import chunk
from autopar.runtime.border import batch_layout
from autopar.runtime.groups import Groups
from autopar.runtime.layout import dtensor_spec, local_part
from autopar.runtime.world import World
from autopar.torch_private import dtensor, pytree

BATCHES_AT_ONCE = 256  # whose rows rank 0 tells the others together


class ShardedLoader:
    """Gives every rank its rows of each global batch, as DTensors that the compiled module takes.

    The rows of a ``DataLoader`` with ``default_collate`` are loaded by the ranks that need them, in the order of the
    sampler of rank 0.  Any other iterable is iterated whole on every rank, which must give the same batches everywhere,
    and cut.  All ranks iterate together.

    Args:
        loader: a DataLoader or another iterable of global batches (tensors in any containers).
        world: the processes.
        groups: the mesh; None alone: batches pass as they are.
    """

    def __init__(self, loader: Iterable[Any], world: World, groups: Groups | None) -> None:
        self.loader, self.world, self.groups = loader, world, groups

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        if self.groups is None:
            return iter(self.loader)
        if isinstance(self.loader, DataLoader) and _loads_rows(self.loader):
            return self._loaded(self.loader, self.groups)
        return (self._cut(batch, self.groups) for batch in self.loader)

    def _loaded(self, loader: DataLoader[Any], groups: Groups) -> Iterator[Any]:
        sampler = _Rows(loader.batch_sampler, self.world, groups)  # type: ignore[arg-type]
        own: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_sampler=sampler,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
        )
        for number, batch in enumerate(own):
            rows = sampler.taken.pop(number)

            def whole(part: Any, rows: int = rows) -> Any:  # noqa: ANN401 - leaves of a batch
                return self._dtensor(part, rows, groups) if isinstance(part, torch.Tensor) else part

            yield pytree.tree_map(whole, batch)

    def _cut(self, batch: Any, groups: Groups) -> Any:  # noqa: ANN401 - whatever the loader gives
        rows = next((t.shape[0] for t in pytree.tree_leaves(batch) if isinstance(t, torch.Tensor) and t.dim()), 0)

        def part(leaf: Any) -> Any:  # noqa: ANN401 - leaves of a batch
            if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != rows:
                return leaf
            mine = local_part(leaf, batch_layout(leaf.shape, groups.mesh), groups.mesh, groups.rank)
            return self._dtensor(mine, rows, groups)

        return pytree.tree_map(part, batch)

    def _dtensor(self, part: torch.Tensor, rows: int, groups: Groups) -> torch.Tensor:
        shape = (rows, *part.shape[1:])
        spec = dtensor_spec(batch_layout(shape, groups.mesh), shape, part.dtype, groups.mesh, groups.device_mesh)
        return dtensor(part.to(self.world.device).contiguous(), spec)


def _loads_rows(loader: DataLoader[Any]) -> bool:
    """Whether a part of a batch can be loaded on its own: by index, and put together row by row."""
    return (
        not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
        and loader.collate_fn is default_collate
    )


class _Rows:
    """Rank 0's batches of indices, cut to the rows of this data rank.

    Attributes:
        taken: rows of each global batch that was handed out and not yet claimed, by its number.
    """

    def __init__(self, batches: Iterable[list[int]], world: World, groups: Groups) -> None:
        self.batches, self.world, self.groups = batches, world, groups
        self.taken: dict[int, int] = {}

    def __iter__(self) -> Iterator[list[int]]:
        mesh = self.groups.mesh
        place, ranks = mesh.coords(self.groups.rank)[mesh.axes.index("dp")], mesh.axis_size("dp")
        source = iter(self.batches) if self.world.rank == 0 else iter(())
        number = 0
        while some := self.world.from_first(list(itertools.islice(source, BATCHES_AT_ONCE))):
            for batch in some:
                start, length = chunk(len(batch), ranks, place)
                self.taken[number] = len(batch)
                number += 1
                yield batch[start : start + length]
