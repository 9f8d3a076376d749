"""How far a split run may be from one device, and against which size an error is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar.passes.base import OutputKind, OutputSpec
from autopar.verify.compare import magnitude

# What rounding and another order of summation may cost, by the coarsest dtype that the step computes in.
ALLOWED: Mapping[torch.dtype, float] = {
    torch.float64: 1e-10,
    torch.float32: 5e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 3e-2,
}
COARSER = 0.25  # float8: two bits of mantissa
_GRADIENTS = frozenset({OutputKind.GRADIENT, OutputKind.INPUT_GRADIENT})
_FLOOR = 1e-3


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Allowed relative error, and the size that small tensors are measured against.

    A gradient whose true value is zero (a key bias, a bias before a batch norm) is all rounding of the terms that
    cancel in it.  It is measured against the model's largest gradient: a thousandth of it, or so much that two
    roundings of it are allowed.  Other outputs have no common scale (a buffer of variances says nothing about one of
    means): their floor is a thousandth of the largest of their kind, and never above 1e-3.

    Attributes:
        rtol: allowed error relative to the size.
        eps: relative spacing of the coarsest dtype that the step computes in.
    """

    rtol: float
    eps: float

    @classmethod
    def of(cls, module: fx.GraphModule, rtol: float | None = None) -> Tolerance:
        """The tolerance for what ``module`` computes in; ``rtol`` overrides its allowed error."""
        values = (node.meta.get("val") for node in module.graph.nodes)
        found = {v.dtype for v in values if isinstance(v, torch.Tensor) and v.dtype.is_floating_point}
        coarsest = max(found, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
        return cls(ALLOWED.get(coarsest, COARSER) if rtol is None else rtol, torch.finfo(coarsest).eps)

    def floors(self, specs: Sequence[OutputSpec], wanted: Sequence[object]) -> dict[OutputKind, float]:
        """Smallest size of an output, by kind, from the outputs of one device."""
        largest = dict.fromkeys(OutputKind, 0.0)
        for spec, want in zip(specs, wanted, strict=True):
            if isinstance(want, torch.Tensor) and not is_exact(want):
                largest[spec.kind] = max(largest[spec.kind], magnitude(want))
        noise = max(_FLOOR, 2 * self.eps / self.rtol) if self.rtol else _FLOOR
        return {k: noise * v if k in _GRADIENTS else min(_FLOOR, _FLOOR * v) for k, v in largest.items()}


def is_exact(tensor: torch.Tensor) -> bool:
    """Whether values of this dtype are not rounded, so that they must be equal."""
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
