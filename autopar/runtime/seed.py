"""The gradient seed: what the program's backward starts from, and how its gradients are scaled when they are released.

The program runs before anyone knows which gradient will arrive at the loss.  It starts from the last one that did (1 at
first), so that a GradScaler's scale enters a low-precision backward, and what it computed is scaled by arrived over
assumed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from autopar.torch_private import foreach_norm


class GradientSeed:
    """The seed of the next call of one module."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.value: float | torch.Tensor = 1.0
        self._made: dict[torch.dtype, torch.Tensor] = {}

    @property
    def is_one(self) -> bool:
        """Whether the seed is known to be 1 without asking the device."""
        return isinstance(self.value, float) and self.value == 1.0

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """The seed as the 0-d tensor that a program takes."""
        if isinstance(self.value, torch.Tensor):
            return self.value.to(dtype)
        if dtype not in self._made:
            self._made[dtype] = torch.full((), self.value, dtype=dtype, device=self.device)
        return self._made[dtype]

    def arrived(self, incoming: torch.Tensor, used: torch.Tensor) -> float | torch.Tensor:
        """Note the gradient that arrived at the loss.

        Args:
            incoming: 0-d gradient of the loss.
            used: the seed that the program started from.

        Returns:
            incoming over used; a 0-d tensor where reading it would make the host wait for the device.
        """
        if incoming.device.type == "cpu":
            value, before = float(incoming), float(used)
            if math.isfinite(value) and value != 0.0:
                if value != self.value:
                    self._made.clear()
                self.value = value
            return value / before
        arrived, assumed = incoming.detach().float(), used.float()
        sound = torch.isfinite(arrived) & (arrived != 0)
        self.value = torch.where(sound, arrived, assumed)
        return arrived / assumed


def pressure(gradients: Sequence[torch.Tensor], group: dist.ProcessGroup | None, device: torch.device) -> torch.Tensor:
    """How near the gradients of all ranks are to overflow: the largest entry over the largest number of its dtype.

    Not-a-number and infinity count as infinity.  Every rank gets the same answer, so that all skip a step together.
    """
    largest = torch.zeros((), dtype=torch.float32, device=device)
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        if gradient.numel() and gradient.is_floating_point():
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for dtype, tensors in by_dtype.items():
        norms = torch.stack(foreach_norm(tensors, math.inf)).float() / torch.finfo(dtype).max
        largest = torch.maximum(largest, torch.nan_to_num(norms, nan=math.inf, posinf=math.inf).max())
    if group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest


def poisoned(factor: float | torch.Tensor, near: torch.Tensor) -> float | torch.Tensor:
    """The factor, or infinity where scaling by it makes some rank's gradient overflow.

    Args:
        factor: what the gradients are going to be scaled by.
        near: their :func:`pressure`.
    """
    if isinstance(factor, float) and near.device.type == "cpu":
        return factor if float(near) * abs(factor) <= 1.0 else math.inf
    scale = torch.as_tensor(factor, dtype=torch.float32, device=near.device)
    return torch.where(near * scale.abs() <= 1.0, scale, torch.full_like(scale, math.inf))
