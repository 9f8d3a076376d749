"""The oracle of rules: wrong splits, and right ones that no rule offers.

A split is wrong where the operation, run on the parts as a rule says, does not give what it gives whole.  A split is
missing where the plain operation gives the right parts for parts of its inputs, and no rule says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, islice, product

import torch

from autopar.passes.base import Mesh
from autopar.passes.options import Choice
from autopar.passes.placement import REPLICATE, Partial, Placement, Shard, can_split, chunk, make_shard
from autopar.passes.rules.table import UNSUMMED
from autopar.passes.torch_ops import resolve
from autopar.verify.compare import difference, magnitude, shard_tensor
from tests.rules.calls import Recorded
from tests.rules.single import Single

PAIR = Mesh(axes=("x",), sizes=(2,))
TRIPLE = Mesh(axes=("x",), sizes=(3,))
Run = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
DRAWS, MORE_DRAWS, MOST_CANDIDATES = 2, 10, 2000


def single(call: Recorded, seed: int = 0, *, shuffle: bool = False) -> Single:
    """The call with fresh random numbers; with ``shuffle``, its integers in another order."""
    generator = torch.Generator().manual_seed(seed)
    args, kwargs = call.make(generator)
    made = Single(resolve(call.op.removeprefix("aten::")), args, kwargs)
    if shuffle:
        made.tensors = [shuffled(t, generator) for t in made.tensors]
    return made


def shuffled(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor
    order = torch.randperm(tensor.numel(), generator=generator)
    return tensor.reshape(-1)[order].reshape(tensor.shape)


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal but for rounding (of the coarser of the dtypes), NaN where NaN."""
    if (got.shape, got.dtype, got.layout) != (want.shape, want.dtype, torch.strided):
        return False
    if not (want.is_floating_point() or want.is_complex()):
        return torch.equal(got, want)
    return difference(got, want) <= 200 * torch.finfo(want.dtype).eps * max(magnitude(want), 1e-12)


def wrong_splits(call: Recorded) -> Iterator[str]:
    """What is wrong with the choices offered for a call, on 2 and 3 ranks, contiguous and strided."""
    made = single(call)
    want = made.run([t.clone() for t in made.tensors])
    for mesh in (PAIR, TRIPLE):
        for choice in made.space.choices(made.node, mesh.size):
            for strided in (False, True):
                got = made.run_split(choice, mesh, strided=strided)
                bad = [i for i, (g, w) in enumerate(zip(got, want, strict=True)) if not close(g, w)]
                if bad:
                    yield f"{call}, {choice.label} on {mesh.size} ranks, strided {strided}: outputs {bad}"


def candidates(shapes: Sequence[torch.Size]) -> Iterator[tuple[Placement, ...]]:
    """Placements of tensors, each whole or split in one dim; dims that are split have one size."""
    for size in sorted({n for shape in shapes for n in shape if can_split(n, PAIR.size)}):
        units = make_shard(0, 1, size, PAIR.size).units
        options = [[REPLICATE, *(Shard(d, 1, units) for d, n in enumerate(shape) if n == size)] for shape in shapes]
        for chosen in islice(product(*options), MOST_CANDIDATES):
            if any(isinstance(p, Shard) for p in chosen):
                yield chosen


def forms(parts: Sequence[torch.Tensor], whole: torch.Tensor) -> set[Placement]:
    """The placements under which the ranks' outputs make up the whole one."""
    found: set[Placement] = set()
    if whole.layout is not torch.strided:
        return found
    if not whole.numel():
        return {REPLICATE}
    if all(close(p, whole) for p in parts):
        found.add(REPLICATE)
    if all(p.shape == whole.shape for p in parts) and whole.dtype not in (torch.bool, *UNSUMMED):
        if close(parts[0] + parts[1], whole):
            found.add(Partial("sum"))
        if not whole.is_complex() and close(torch.maximum(*parts), whole):
            found.add(Partial("max"))
        if not whole.is_complex() and close(torch.minimum(*parts), whole):
            found.add(Partial("min"))
    for dim in range(whole.dim()):
        pieces = [p.shape[dim] for p in parts if p.dim() == whole.dim()]
        if len(pieces) == len(parts) and sum(pieces) == whole.shape[dim] and min(pieces) > 0:
            others = [p.shape[:dim] + p.shape[dim + 1 :] for p in (*parts, whole)]
            if others.count(others[0]) == len(others) and close(torch.cat(list(parts), dim), whole):
                found.update(shards(dim, pieces))
    return found


def shards(dim: int, pieces: Sequence[int]) -> list[Shard]:
    """The shards of a dim, seen as units of any size, that cut it into ``pieces``."""
    size = sum(pieces)
    fitting = []
    for units in range(2, size + 1):
        if size % units == 0 and can_split(units, len(pieces)):
            rest = size // units
            if [chunk(units, len(pieces), i)[1] * rest for i in range(len(pieces))] == list(pieces):
                fitting.append(make_shard(dim, 1, units, len(pieces)))
    return fitting


def outcome(run: Run, tensors: Sequence[torch.Tensor], chosen: Sequence[Placement]) -> list[set[Placement]]:
    """What the outputs may be said to be when a plain operation runs on parts; nothing where it refuses to."""
    try:
        whole = run([t.clone() for t in tensors])
        parts = [
            run([shard_tensor(t, (p,), PAIR.sizes, (rank,)).clone() for t, p in zip(tensors, chosen, strict=True)])
            for rank in range(PAIR.size)
        ]
    except (RuntimeError, IndexError, ValueError, TypeError, AssertionError):
        return []
    if any(len(p) != len(whole) for p in parts):
        return []
    return [forms(pair, w) for *pair, w in zip(*parts, whole, strict=True)]


def has_parallel_dim(run: Run, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether some split of the inputs makes a plain operation give parts, or terms, of its outputs."""
    return any(says_something(outcome(run, tensors, c)) for c in candidates([t.shape for t in tensors]))


def missing_splits(call: Recorded) -> Iterator[str]:
    """Splits that are right for the plain operation on many draws and that no choice offers."""
    first = single(call)
    offered = first.space.choices(first.node, PAIR.size)
    draws = [first, *(single(call, seed, shuffle=True) for seed in range(1, DRAWS + MORE_DRAWS))]
    for chosen in candidates([t.shape for t in first.tensors]):
        found = agreed(draws[:DRAWS], chosen)
        if not says_something(found) or any(covers(choice, chosen, found) for choice in offered):
            continue
        found = agreed(draws, chosen)  # small numbers may agree by chance
        if says_something(found) and not any(covers(choice, chosen, found) for choice in offered):
            outputs = ", ".join("|".join(sorted(map(str, f))) for f in found)
            yield f"{call}: " + ", ".join(map(str, chosen)) + " -> " + outputs


def agreed(draws: Sequence[Single], chosen: Sequence[Placement]) -> list[set[Placement]]:
    """What holds of the outputs on all draws; nothing where the operation refuses."""
    found: list[set[Placement]] = []
    for made in draws:
        now = outcome(made.run, made.tensors, chosen)
        found = [a & b for a, b in zip(found, now, strict=True)] if found and now else now
        if not found or not all(found):
            return []
    return found


def says_something(found: Sequence[set[Placement]]) -> bool:
    """Whether a split reaches the outputs: inputs that do not matter may be split in any way."""
    return bool(found) and all(found) and not all(REPLICATE in f for f in found)


def covers(choice: Choice, chosen: Sequence[Placement], found: Sequence[set[Placement]]) -> bool:
    """Whether an offered choice splits at least the inputs that a candidate splits, to an outcome that is right."""
    inputs = all(a in (b, REPLICATE) for a, b in zip(chosen, choice.inputs, strict=True))
    outputs = [o for o in choice.outputs if o is not None]
    return (
        inputs
        and len(outputs) == len(found)
        and all(o in f or f == {REPLICATE} for o, f in zip(outputs, found, strict=True))
    )


def missing_linearity(call: Recorded) -> Iterator[str]:
    """Sets of one or two inputs in which the operation is linear on many draws, where the row does not say so."""
    first = single(call)
    floating = [i for i, t in enumerate(first.tensors) if t.is_floating_point() and t.numel() > 1]
    offered = set(first.row.linear)
    for group in [*combinations(floating, 1), *combinations(floating, 2)]:
        if any(known <= set(group) or known >= set(group) for known in offered):
            continue
        if all(is_linear(call, group, seed) for seed in range(DRAWS + MORE_DRAWS)):
            yield f"{call}: linear in {group}"


def is_linear(call: Recorded, group: Sequence[int], seed: int) -> bool:
    """Whether the operation's result of a sum, in the inputs of ``group``, is the sum of the results."""
    made, other = single(call, seed), single(call, seed + 1000)
    mixed = [o if i in group else t for i, (t, o) in enumerate(zip(made.tensors, other.tensors, strict=True))]
    summed = [t + m if i in group else t for i, (t, m) in enumerate(zip(made.tensors, mixed, strict=True))]
    terms = [made.run([t.clone() for t in tensors]) for tensors in (made.tensors, mixed, summed)]
    if not all(t.is_floating_point() or t.is_complex() for t in terms[0]):
        return False
    if not any(bool(t.count_nonzero()) for t in terms[2]):
        return False  # what is zero whatever goes in is linear and of no use
    return all(close(a + b, both) and bool(both.isfinite().all()) for a, b, both in zip(*terms, strict=True))
