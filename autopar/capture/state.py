"""Fake stand-ins for a model's parameters and buffers, and the promise that the model is untouched afterwards."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopar.cost_models.errors import CaptureError
from autopar.torch_private import FakeTensorMode

Slot = tuple[dict[str, Any], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One distinct tensor that a model holds, under all its names.

    Attributes:
        tensor: the parameter or buffer.
        is_parameter: whether a name of it is a parameter.
        names: dotted names, the canonical one first.
        slots: the dicts and keys of the modules that hold it.
    """

    tensor: torch.Tensor
    is_parameter: bool
    names: list[str] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)


def check_plain(model: object) -> None:
    """Refuse what is not a plain module with allocated (or meta) parameters.

    Raises:
        CaptureError: naming the module and the way out.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(f"the model is of type {type(model).__qualname__}; it must be a torch.nn.Module")
    for path, module in model.named_modules():
        name = path or "the model"
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise CaptureError(f"{name} is a {type(module).__qualname__}: give the plain module inside ({name}.module)")
        if any(nn.parameter.is_lazy(parameter) for parameter in module.parameters(recurse=False)):
            raise CaptureError(
                f"{name} is a {type(module).__qualname__} whose parameters have no shapes yet: call the model once on "
                "real data first"
            )


def held_tensors(model: nn.Module) -> tuple[list[Held], list[Held]]:
    """The distinct parameters and the distinct buffers of a model, each in registration order, ties folded."""
    known: dict[int, Held] = {}
    for is_parameter in (True, False):
        for prefix, module in model.named_modules(remove_duplicate=False):
            table: dict[str, Any] = module._parameters if is_parameter else module._buffers
            for key, tensor in table.items():
                if tensor is None:
                    continue
                held = known.setdefault(id(tensor), Held(tensor=tensor, is_parameter=is_parameter))
                held.names.append(f"{prefix}.{key}" if prefix else key)
                held.slots.append((table, key))
    every = list(known.values())
    return [h for h in every if h.is_parameter], [h for h in every if not h.is_parameter]


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake CPU tensor with the shape, strides, dtype and ``requires_grad`` of any tensor (meta and DTensor too)."""
    if tensor.layout is not torch.strided:
        raise CaptureError(f"a tensor of layout {tensor.layout} cannot be captured: make it dense with .to_dense()")
    with mode, torch.no_grad():
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return fake.requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Give every module of ``model`` back its attributes at the end, whatever happened inside.

    Attributes set in ``forward`` would otherwise keep traced tensors alive in the user's model.
    """
    saved = [(module, dict(module.__dict__), _contents(module.__dict__)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, contents in saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for container, items in contents:
                container.clear()
                container.extend(items) if hasattr(container, "extend") else container.update(items)


def numbers(model: nn.Module) -> dict[str, float]:
    """The plain numbers among the attributes of the modules of ``model``, by dotted path."""
    return {
        f"{path}.{key}" if path else key: value
        for path, module in model.named_modules()
        for key, value in module.__dict__.items()
        if type(value) in (int, float)
    }


def _contents(attributes: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """(container, copy of its items) of every list, dict, set and deque among the attributes."""
    return [(v, v.copy()) for v in attributes.values() if isinstance(v, (list, dict, set, collections.deque))]


@contextlib.contextmanager
def swapped(model: nn.Module, held: list[Held], stand_ins: list[torch.Tensor]) -> Iterator[None]:
    """Let ``model`` hold ``stand_ins`` in place of its own tensors; buffers that it re-assigns are written into them.

    To be used inside :func:`preserved`.

    Raises:
        CaptureError: a buffer was replaced by one of another shape.
    """
    mapping = {id(h.tensor): stand_in for h, stand_in in zip(held, stand_ins, strict=True)}
    for module in model.modules():
        for key, value in list(module.__dict__.items()):
            if key not in ("_parameters", "_buffers", "_modules"):
                module.__dict__[key] = _replace(value, mapping)
    for h, stand_in in zip(held, stand_ins, strict=True):
        for table, key in h.slots:
            table[key] = stand_in
    yield
    for h, stand_in in zip(held, stand_ins, strict=True):
        for table, key in h.slots:
            _write_back(h.names[0], stand_in, table.get(key))


def _replace(value: object, mapping: Mapping[int, torch.Tensor]) -> object:
    """``value`` with the tensors of ``mapping`` replaced, one container deep (an RNN's flat weights, ties)."""
    if isinstance(value, torch.Tensor):
        return mapping.get(id(value), value)
    if type(value) is dict and any(id(item) in mapping for item in value.values()):
        return {key: mapping.get(id(item), item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and any(id(item) in mapping for item in value):
        items = [mapping.get(id(item), item) for item in value]
        return tuple(items) if type(value) is tuple else items if type(value) is list else value
    return value


def _write_back(name: str, stand_in: torch.Tensor, now: object) -> None:
    """Turn ``self.buffer = new`` into an in-place update, which the trace reports as a mutation."""
    if now is stand_in:
        return
    if not isinstance(now, torch.Tensor) or now.shape != stand_in.shape:
        got = f"a tensor of shape {tuple(now.shape)}" if isinstance(now, torch.Tensor) else type(now).__name__
        raise CaptureError(
            f"forward replaced {name} (shape {tuple(stand_in.shape)}) by {got}: a captured step keeps shapes; "
            "allocate it in full and write into it"
        )
    with torch.no_grad():
        stand_in.copy_(now)
