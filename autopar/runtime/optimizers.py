"""Optimizers that were made before compiling: they are given the parameters that took the place of theirs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from autopar.cost_models.errors import RuntimeStateError
from autopar.runtime.state import Pair


def adopt(pairs: Sequence[Pair], lay_out: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Give every living optimizer that holds an old parameter the new one, with its state.

    A Parameter cannot become a DTensor in place (their objects are laid out differently), so compiling makes new ones.

    Args:
        pairs: (old, new) parameters; new is None where another pipeline stage holds it: it is dropped.
        lay_out: (new parameter, whole state tensor of its shape) -> the state laid out like the parameter.
    """
    new = {id(old): replacement for old, replacement in pairs}
    if not new:
        return
    for optimizer in [o for o in gc.get_objects() if issubclass(type(o), Optimizer)]:
        for group in optimizer.param_groups:
            held = list(group["params"])
            group["params"][:] = [p for old in held if (p := new.get(id(old), old)) is not None]
            for old in held:
                if id(old) in new and old in optimizer.state:
                    state, replacement = optimizer.state.pop(old), new[id(old)]
                    if replacement is not None:
                        optimizer.state[replacement] = _moved(state, replacement, lay_out)


def _moved(
    state: Any,  # noqa: ANN401 - what an optimizer keeps for one parameter
    parameter: torch.Tensor,
    lay_out: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Any:  # noqa: ANN401
    if not isinstance(state, dict):
        return state
    return {
        key: lay_out(parameter, value) if isinstance(value, torch.Tensor) and value.shape == parameter.shape else value
        for key, value in state.items()
    }


def refuse_stale(pairs: Sequence[Pair]) -> RemovableHandle:
    """Make the step of an optimizer that is later given an old parameter raise: it would train a dead tensor.

    Args:
        pairs: (old, new) parameters.

    Returns:
        the handle that ends this.
    """
    stale = weakref.WeakValueDictionary({id(old): old for old, _ in pairs})

    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ANN401 - torch's signature
        if not stale:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if stale.get(id(parameter)) is parameter:
                    raise RuntimeStateError(
                        f"this {type(optimizer).__name__} holds parameters from before autopar.compile, which are no "
                        "longer trained: make the optimizer from the compiled module's parameters()"
                    )

    handle: RemovableHandle = register_optimizer_step_pre_hook(check)
    return handle
