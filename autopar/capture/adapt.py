"""Modules of torch whose ``forward`` cannot be traced as it stands, given an equivalent one for the trace."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def adapt_modules(model: nn.Module) -> None:
    """Replace the ``forward`` of such modules on the instance; the caller restores the modules' attributes.

    ``SyncBatchNorm`` communicates by itself: the captured step is on the global batch, where it is a BatchNorm.
    ``momentum=None`` reads a counter as a Python number: the average is taken with tensors instead.
    Classes that override ``forward`` are left alone.
    """
    plain = nn.BatchNorm1d.forward
    for module in model.modules():
        if not isinstance(module, BATCH_NORMS) or type(module).forward not in (plain, nn.SyncBatchNorm.forward):
            continue
        if module.momentum is None and module.training and module.num_batches_tracked is not None:
            module.__dict__["forward"] = functools.partial(_cumulative_batch_norm, module)
        elif isinstance(module, nn.SyncBatchNorm):
            module.__dict__["forward"] = functools.partial(plain, module)


def _cumulative_batch_norm(module: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 -- any of BATCH_NORMS
    """Batch normalisation whose running statistics are the plain average over all calls.

    With momentum 1 the running statistics become those of this batch; with factor ``1 / calls`` they are averaged in.
    """
    kept: tuple[torch.Tensor, torch.Tensor] = (module.running_mean, module.running_var)
    module.running_mean, module.running_var = map(torch.zeros_like, kept)
    module.momentum = 1.0
    try:
        out = nn.BatchNorm1d.forward(module, x)
        batch: tuple[torch.Tensor, torch.Tensor] = (module.running_mean, module.running_var)
    finally:
        module.running_mean, module.running_var = kept
        module.momentum = None
    with torch.no_grad():
        for running, now in zip(kept, batch, strict=True):
            factor = 1.0 / module.num_batches_tracked.to(running.dtype)
            running.mul_(1 - factor).add_(now * factor)
    return out
