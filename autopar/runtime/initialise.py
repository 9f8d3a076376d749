"""Values for models that were built on meta: every layer's own initialiser, one layer at a time, whole, on the CPU."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.cost_models.errors import RuntimeStateError
from autopar.runtime.state import ModelState, Stored
from autopar.runtime.world import World


def initialise(model: nn.Module, state: ModelState, world: World, seed: int) -> None:
    """Give every tensor of the model values.

    Layers are visited from the leaves up.  A layer that has ``reset_parameters`` (or ``_reset_parameters``), or a model
    with Hugging Face's ``_init_weights(layer)``, initialises whole CPU tensors in place of its own, seeded by ``seed``
    and the layer's name; every rank keeps its part.

    Raises:
        RuntimeStateError: naming the tensors that no layer initialises.
    """
    done: set[str] = set()
    for name, module in _from_leaves(model):
        run = _initialiser(model, module)
        if run is None:
            continue
        mine = [entry for entry in state.stored if any(_within(alias, name) for alias in entry.names)]
        wholes = {entry.name: _whole(entry, done) for entry in mine}
        _run(run, mine, wholes, _mixed(seed, name))
        for entry in mine:
            whole = wholes[entry.name]
            first = _within(entry.name, name)  # a tied tensor keeps what its first layer gave it
            if (first or entry.name not in done) and not _untouched(whole):
                state.fill(entry.name, whole.to(world.device))
                done.add(entry.name)
    left = [entry.name for entry in state.stored if entry.name not in done]
    if left:
        raise RuntimeStateError(
            f"no layer initialises {', '.join(left[:6])}{', ...' if len(left) > 6 else ''}: give the module that holds "
            "it a reset_parameters() method, or load values with load_state_dict or autopar.load"
        )


def _from_leaves(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every distinct module with its name, after those inside it."""
    return iter(list(model.named_modules())[::-1])


def _initialiser(model: nn.Module, module: nn.Module) -> Callable[[], object] | None:
    """What initialises ``module``; a model-wide one is asked about the layers that hold tensors themselves."""
    by_model = getattr(model, "_init_weights", None)
    if callable(by_model):
        holds = next(module.parameters(recurse=False), next(module.buffers(recurse=False), None)) is not None
        return (lambda: by_model(module)) if holds else None
    for name in ("reset_parameters", "_reset_parameters"):
        own = getattr(module, name, None)
        if callable(own):
            return own  # type: ignore[no-any-return]
    return None


def _within(tensor_name: str, module_name: str) -> bool:
    return not module_name or tensor_name.startswith(f"{module_name}.")


def _whole(entry: Stored, done: set[str]) -> torch.Tensor:
    """A whole CPU tensor: the values so far where there are some, else marks that show what was not written."""
    if entry.name not in done:
        return torch.full(entry.tensor.shape, _mark(entry.tensor.dtype), dtype=entry.tensor.dtype)
    with torch.no_grad():
        here = entry.tensor.full_tensor() if isinstance(entry.tensor, DTensor) else entry.tensor
        return here.detach().cpu()


def _mark(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return 0 if dtype is torch.bool else torch.iinfo(dtype).min


def _untouched(whole: torch.Tensor) -> bool:
    """Whether some element still has its mark.  A bool has no value to spare for one: it counts as written."""
    if whole.is_floating_point() or whole.is_complex():
        return bool(whole.isnan().any())
    return whole.dtype is not torch.bool and bool((whole == _mark(whole.dtype)).any())


def _run(run: Callable[[], object], entries: list[Stored], wholes: dict[str, torch.Tensor], seed: int) -> None:
    """Let a layer initialise ``wholes`` in place of the tensors it holds."""
    held = [(table, key, entry) for entry in entries for table, key in entry.slots]
    for table, key, entry in held:
        whole = wholes[entry.name]
        table[key] = nn.Parameter(whole, requires_grad=entry.tensor.requires_grad) if entry.is_parameter else whole
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            run()
        for table, key, entry in held:
            wholes[entry.name] = table[key].detach()  # a layer may set a new tensor
    finally:
        for table, key, entry in held:
            table[key] = entry.tensor if entry.present else None


def _mixed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")
