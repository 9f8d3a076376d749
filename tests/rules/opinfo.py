"""Samples of torch's own operator database as modules that can be captured."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

LOOKED_AT, LARGEST = 250, 20_000


class Sample(nn.Module):
    """One call of an operation: what varies are its tensors, the rest is fixed."""

    def __init__(self, op: OpInfo, arguments: object) -> None:
        super().__init__()
        self.op = op
        self.leaves, self.spec = pytree.tree_flatten(arguments)
        self.places = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.leaves[i] for i in self.places]

    def forward(self, *tensors: torch.Tensor) -> object:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            # Operations of the database may write to their arguments; a step may not write to its batch.
            leaves[place] = tensor.clone()
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.op.op(*args, **kwargs)

    def __repr__(self) -> str:
        shown = [f"{tuple(x.shape)}" if isinstance(x, torch.Tensor) else repr(x) for x in self.leaves]
        return f"{full_name(self.op)}({', '.join(shown)})"


def full_name(op: OpInfo) -> str:
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def operations() -> dict[str, OpInfo]:
    """The database by name, in its order."""
    return {full_name(op): op for op in op_db}


def weight(sample: Sample) -> tuple[bool, int, int]:
    """Samples with many dims that can be split come first, small ones before large ones, empty ones last."""
    dims = sum(n > 1 for t in sample.tensors for n in t.shape)
    return any(t.numel() == 0 for t in sample.tensors), -dims, sum(t.numel() for t in sample.tensors)


def kind(sample: Sample) -> tuple[object, ...]:
    """What a sample has in common with others: the shapes of its tensors, which other arguments it has, their types."""
    shapes = tuple(t.shape for t in sample.tensors)
    return (shapes, str(sample.spec), *(type(leaf) for leaf in sample.leaves))


def samples(op: OpInfo, limit: int) -> list[Sample]:
    """At most ``limit`` samples of float32 (or what comes nearest): the first one, and those with the most dims.

    Of samples of a kind only the first is taken while there are others.
    """
    found = list(islice(_usable(op), LOOKED_AT))
    seen: dict[tuple[object, ...], int] = {}
    turns = []
    for sample in sorted(found[1:], key=weight):
        seen[kind(sample)] = seen.get(kind(sample), -1) + 1
        turns.append((seen[kind(sample)], sample))
    return [*found[:1], *(s for _, s in sorted(turns, key=lambda turn: turn[0]))][:limit]


def dtype_of(op: OpInfo) -> torch.dtype:
    kinds = op.supported_dtypes("cpu")
    liked = (torch.float32, torch.int64, torch.complex64, *sorted(kinds, key=str))
    return next((d for d in liked if d in kinds), torch.float32)


def _usable(op: OpInfo) -> Iterator[Sample]:
    dtype = dtype_of(op)
    grad = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        for given in _until_error(op.sample_inputs("cpu", dtype, requires_grad=grad)):
            sample = Sample(op, ((given.input, *given.args), given.kwargs))
            if all(t.numel() <= LARGEST for t in sample.tensors):
                yield sample


def _until_error(items: Iterable[SampleInput]) -> Iterator[SampleInput]:
    """At most 500 of the items; the database itself fails where an entry needs a device, or sizes, of another kind."""
    iterator = iter(items)
    with contextlib.suppress(Exception):
        for _ in range(500):
            yield next(iterator)
