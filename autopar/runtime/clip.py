"""Gradient clipping by the norm that one device would see."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.cost_models.errors import UsageError
from autopar.passes.base import Mesh
from autopar.passes.placement import Shard
from autopar.runtime.module import ParallelModule
from autopar.runtime.state import Stored
from autopar.torch_private import foreach_mul_, foreach_norm


def clip_grad_norm_(module: ParallelModule, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale the gradients of ``module`` so that their norm is at most ``max_norm``.

    The norm is that of all gradients as one vector, as on one device: parts are put together, copies and tied
    parameters count once.  All ranks must call this.

    Args:
        module: a compiled module after ``backward``.
        max_norm: largest norm that is left.
        norm_type: order of the norm; may be infinite.

    Returns:
        the norm before clipping, a 0-d tensor that is equal on all ranks.

    Raises:
        UsageError: ``module`` is not compiled, or the order is not positive.
    """
    if not isinstance(module, ParallelModule):
        raise UsageError(
            f"clip_grad_norm_ takes the compiled module and was given a {type(module).__name__}; for other parameters "
            "there is torch.nn.utils.clip_grad_norm_"
        )
    if not norm_type > 0:
        raise UsageError(f"norm_type={norm_type} is not possible; use a positive number or math.inf")
    engine = module.engine
    mesh = None if engine.groups is None else engine.groups.mesh
    with torch.no_grad():
        gradients = _gradients(engine.state.parameters, mesh)
        total = _partial(gradients, norm_type, engine.world.device)
        if engine.groups is not None:
            how = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
            dist.all_reduce(total, how, group=engine.groups.group_of_all())
        norm = total if math.isinf(norm_type) else total ** (1.0 / norm_type)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # torch's own constant
        for tensors in gradients.values():
            foreach_mul_(tensors, factor)
    return norm


def _gradients(parameters: list[Stored], mesh: Mesh | None) -> dict[int, list[torch.Tensor]]:
    """Local gradients by the number of ranks that hold the same part."""
    found: dict[int, list[torch.Tensor]] = defaultdict(list)
    for entry in parameters:
        gradient = entry.tensor.grad
        if gradient is None:
            continue
        copies = entry.holders
        if mesh is not None:
            pairs = zip(entry.layout, mesh.sizes, strict=True)
            copies *= math.prod(size for placement, size in pairs if not isinstance(placement, Shard))
        found[copies].append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    return found


def _partial(gradients: dict[int, list[torch.Tensor]], order: float, device: torch.device) -> torch.Tensor:
    """This rank's share of the sum of powers; its largest entry where the order is infinite."""
    double = any(t.dtype is torch.float64 for tensors in gradients.values() for t in tensors)
    dtype = torch.float64 if double else torch.float32
    total = torch.zeros((), dtype=dtype, device=device)
    for copies, tensors in gradients.items():
        filled = [t for t in tensors if t.numel()]
        if not filled:
            continue
        norms = torch.stack([norm.to(dtype) for norm in foreach_norm(filled, order)])
        total = torch.maximum(total, norms.max()) if math.isinf(order) else total + (norms**order).sum() / copies
    return total
