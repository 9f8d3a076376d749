"""The same operations through torch's DTensor: how many it splits, for comparison.

DTensors of two ranks are simulated in this process.  Every combination of replicated and split inputs is tried on
samples whose sizes divide (where there are none, on others); an operation counts as split where at least one
combination is right and stays split.  Draws of random numbers are left out: those of DTensor are not one device's.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal import common_methods_invocations as database
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.passes.torch_ops import OpOverload
from tests.rules.opinfo import LOOKED_AT, OpInfo, Sample, samples
from tests.rules.verdict import Outcome, Verdict

RANKS, MOST_COMBINATIONS = 2, 24
EVEN_SIZES = {"L": 24, "M": 12, "S": 4, "XS": 2}  # as DTensor's own suite sets them


@contextlib.contextmanager
def simulated_mesh() -> Iterator[DeviceMesh]:
    """A mesh of ranks that live in this process, and samples of sizes that divide."""
    kept = {name: getattr(database, name) for name in EVEN_SIZES}
    for name, size in EVEN_SIZES.items():
        setattr(database, name, size)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        with LocalTensorMode(frozenset(range(RANKS))):
            yield DeviceMesh("cpu", torch.arange(RANKS))
    finally:
        dist.destroy_process_group()
        for name, size in kept.items():
            setattr(database, name, size)


def placements(tensor: torch.Tensor, *, even: bool = True) -> list[Any]:
    """Whole, or split in a dim (one that divides where ``even``)."""
    fitting = [d for d, n in enumerate(tensor.shape) if n > 1 and not (even and n % RANKS)]
    return [Replicate(), *(Shard(d) for d in fitting if tensor.dtype != torch.bool)]


class Draws(TorchDispatchMode):
    """Notes whether random numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        self.found |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def check_operation(op: OpInfo, name: str, limit: int) -> Outcome:
    """How DTensor fares over the samples of one operation."""
    outcome = Outcome(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with simulated_mesh() as mesh:
            known = samples(op, LOOKED_AT)
            even = any(len(placements(t)) > 1 for s in known for t in s.tensors)
            options = ((s, [placements(t, even=even) for t in s.tensors]) for s in known)
            fitting = ((s, o) for s, o in options if any(len(each) > 1 for each in o))
            for sample, each in itertools.islice(fitting, limit):
                for chosen in itertools.islice(itertools.product(*each), MOST_COMBINATIONS):
                    if any(isinstance(p, Shard) for p in chosen):
                        outcome.add(*try_combination(sample, chosen, mesh))
    return outcome


def try_combination(sample: Sample, chosen: Sequence[Any], mesh: DeviceMesh) -> tuple[Verdict, str]:
    """What becomes of one call with inputs placed as told: forward, and backward where there is one."""
    try:
        with Draws() as mode:
            want, want_grads = run(sample, sample.tensors)
        if mode.found:
            return Verdict.NO_SAMPLE, "draws random numbers"
    except Exception as error:  # noqa: BLE001 -- the operation itself refuses
        return Verdict.NO_SAMPLE, str(error)
    try:
        spread = [distribute_tensor(t.detach(), mesh, [p]) for t, p in zip(sample.tensors, chosen, strict=True)]
        spread = [d.requires_grad_(t.requires_grad) for d, t in zip(spread, sample.tensors, strict=True)]
        got, got_grads = run(sample, spread)
        split = any(isinstance(g, DTensor) and not g.placements[0].is_replicate() for g in got)
        pairs = zip([*got, *got_grads], [*want, *want_grads], strict=True)
        right = all(same(g, w) for g, w in pairs)
    except Exception as error:  # noqa: BLE001 -- DTensor refuses in many ways
        return Verdict.REFUSED, f"{type(error).__name__}: {error}"
    if not right:
        return Verdict.WRONG, f"{sample} with {chosen}"
    return (Verdict.SPLIT if split else Verdict.REPLICATED), ""


def run(sample: Sample, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(results, gradients of the sum of the results)."""
    leaves = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
    results = [t for t in pytree.tree_leaves(sample(*leaves)) if isinstance(t, torch.Tensor)]
    wanted = [t for t in leaves if t.requires_grad]
    sums = [r.sum() for r in results if r.requires_grad and r.is_floating_point()]
    grads = torch.autograd.grad(sum(sums), wanted, allow_unused=True) if sums and wanted else ()
    return results, [g for g in grads if g is not None]


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    if isinstance(got, DTensor):
        got = got.full_tensor()
    if hasattr(got, "reconcile"):
        got = got.reconcile()
    return torch.allclose(got, want, rtol=1e-3, atol=1e-4, equal_nan=True) if got.shape == want.shape else False
