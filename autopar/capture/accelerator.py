"""A model written for an accelerator, captured on fake CPU tensors: its device names and autocast regions, translated.

The nodes of the graph then name the CPU; where the step runs, that stands for the device it runs on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.overrides import TorchFunctionMode

from autopar.torch_private import cuda_calls_ignored, redirected_autocast

ACCELERATORS = ("cuda", "xpu", "mps", "hpu")
LOW_PRECISION = (torch.float16, torch.bfloat16)
# The functions that autocast on an accelerator runs in float32 (torch's page on automatic mixed precision).  The CPU's
# own list is shorter: there softmax and the norms stay in the lower precision.
FLOAT32_FUNCTIONS = frozenset({
    "__pow__", "__rdiv__", "__rpow__", "__rtruediv__", "acos", "asin", "binary_cross_entropy_with_logits", "cdist",
    "cosh", "cosine_embedding_loss", "cosine_similarity", "cross_entropy", "cumprod", "cumsum", "dist", "erfinv", "exp",
    "expm1", "group_norm", "hinge_embedding_loss", "kl_div", "l1_loss", "layer_norm", "log", "log10", "log1p", "log2",
    "log_softmax", "margin_ranking_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss", "nll_loss", "norm",
    "normalize", "pdist", "poisson_nll_loss", "pow", "prod", "reciprocal", "renorm", "rsqrt", "sinh", "smooth_l1_loss",
    "soft_margin_loss", "softmax", "softmin", "softplus", "sum", "tan", "triplet_margin_loss",
})  # fmt: skip


@contextlib.contextmanager
def stand_in_for_accelerator(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let the CPU stand for the accelerator that the model is on.

    Args:
        tensors: the model's and the call's tensors.  Where all are on the CPU nothing changes; ``meta`` stands for the
            accelerator to come.
    """
    with contextlib.ExitStack() as stack:
        if any(tensor.device.type != "cpu" for tensor in tensors):
            ambient = [d for d in ACCELERATORS if torch.amp.is_autocast_available(d) and torch.is_autocast_enabled(d)]
            stack.enter_context(redirected_autocast(ACCELERATORS))
            if ambient:
                stack.enter_context(torch.autocast("cpu", dtype=torch.get_autocast_dtype(ambient[0])))
            stack.enter_context(cuda_calls_ignored())
            stack.enter_context(_Translation())
        # An ambient default device (``with torch.device("meta")``) is not where the fake tensors are.
        stack.enter_context(torch.device("cpu"))
        yield


class _Translation(TorchFunctionMode):
    """Names the CPU where a call names an accelerator, and upcasts what an accelerator's autocast upcasts."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run ``func`` on translated arguments."""
        name = getattr(func, "__name__", "")
        if name in ACCELERATORS and args and isinstance(args[0], torch.Tensor):
            return args[0]
        convert = _float32 if name in FLOAT32_FUNCTIONS and torch.is_autocast_enabled("cpu") else _on_cpu
        return func(*map(convert, args), **{key: convert(value) for key, value in (kwargs or {}).items()})


def _float32(value: object) -> object:
    """A half-precision tensor in float32; anything else as it is."""
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in LOW_PRECISION else value


def _on_cpu(value: object) -> object:
    """The CPU for the name of an accelerator; anything else as it is."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type in ACCELERATORS else value
    if isinstance(value, str):
        return "cpu" if value.partition(":")[0] in ACCELERATORS else value
    return value
