"""Autocast of an accelerator, captured on fake CPU tensors as the casts that the accelerator would make."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autopar.torch_private import redirected_autocast

ACCELERATORS = ("cuda", "xpu", "mps", "hpu")
# The functions that autocast on an accelerator runs in float32 (torch's "Automatic Mixed Precision" page).  The CPU's
# own list is shorter: there softmax and the norms stay in the lower precision.
FLOAT32_FUNCTIONS = frozenset(
    "__pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits cosh cosine_embedding_loss cdist "
    "cosine_similarity cross_entropy cumprod cumsum dist erfinv exp expm1 group_norm hinge_embedding_loss kl_div l1_loss "
    "layer_norm log log10 log_softmax log1p log2 margin_ranking_loss mse_loss multilabel_margin_loss multi_margin_loss "
    "nll_loss norm normalize pdist poisson_nll_loss pow prod reciprocal rsqrt sinh smooth_l1_loss soft_margin_loss "
    "softmax softmin softplus sum renorm tan triplet_margin_loss".split()
)
LOW_PRECISION = (torch.float16, torch.bfloat16)


@contextlib.contextmanager
def accelerator_autocast(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let autocast regions of accelerators act on the fake CPU tensors that stand for the accelerator's.

    Args:
        tensors: the model's and the call's tensors.  Where all are on the CPU nothing changes; ``meta`` stands for the
            accelerator to come.
    """
    if all(tensor.device.type == "cpu" for tensor in tensors):
        yield
        return
    ambient = [d for d in ACCELERATORS if torch.amp.is_autocast_available(d) and torch.is_autocast_enabled(d)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(redirected_autocast(ACCELERATORS))
        if ambient:
            stack.enter_context(torch.autocast("cpu", dtype=torch.get_autocast_dtype(ambient[0])))
        stack.enter_context(_Float32Functions())
        yield


class _Float32Functions(TorchFunctionMode):
    """Inside an autocast region, gives float32 arguments to the functions that accelerators run in float32."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``, on upcast arguments where autocast would upcast them."""
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in FLOAT32_FUNCTIONS and torch.is_autocast_enabled("cpu"):
            args = tuple(_float32(a) for a in args)
            kwargs = {key: _float32(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _float32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in LOW_PRECISION else value
