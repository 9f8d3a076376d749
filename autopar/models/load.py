"""What a command line's MODEL may be: a built-in name, ``file.py:factory``, or a ``config.json`` of transformers."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.cost_models.errors import UsageError
from autopar.models.catalogue import build, names
from autopar.models.huggingface import from_config

_PIECES = (3, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model and one call of it.

    Attributes:
        name: how it was asked for.
        model: the module.
        args, kwargs: of the call, on the global batch.
        loss_fn: makes a loss of what the call returns; None where the call returns its loss.
    """

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss_fn: Callable[..., Any] | None = None


def load_model(
    spec: str,
    *,
    batch: int | None = None,
    sequence: int | None = None,
    device: str = "meta",
    dtype: torch.dtype | None = None,
) -> LoadedModel:
    """The model that ``spec`` names.

    Args:
        spec: ``file.py:factory``, a built-in name, or the path of a ``config.json``.  A factory returns
            ``(model, args, kwargs)`` or that and ``loss_fn``; it is given ``batch`` and ``sequence`` where it has
            arguments of these names.
        batch: rows of the global batch; None leaves a factory's own, and is 8 for other models.
        sequence: tokens in a row; None leaves the model's own.
        device: where built-in and configured models are made; a factory decides for itself.
        dtype: of the parameters of built-in and configured models; None takes the usual one.

    Raises:
        UsageError: there is no such model, or it cannot be built.
    """
    path, colon, factory = spec.rpartition(":")
    if colon and path.endswith(".py"):
        return LoadedModel(name=spec, **_from_factory(Path(path), factory, {"batch": batch, "sequence": sequence}))
    size: dict[str, Any] = {"batch": 8 if batch is None else batch, "sequence": sequence}
    if spec.endswith(".json"):
        made = from_config(_read_config(Path(spec)), **size, device=device, dtype=dtype)
    elif spec in names() or not Path(spec).suffix:
        made = build(spec, **size, device=device, dtype=dtype)
    else:
        hint = f"{spec}:FUNCTION" if spec.endswith(".py") else "file.py:FUNCTION"
        raise UsageError(f"{spec!r} is no model: give {hint}, a config.json, or one of {', '.join(names())}")
    model, args, kwargs, loss_fn = made
    return LoadedModel(name=spec, model=model, args=args, kwargs=kwargs, loss_fn=loss_fn)


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as a model's configuration: {error}") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path} does not hold a JSON object; is it a config.json of transformers?")
    return document


def _from_factory(path: Path, name: str, size: Mapping[str, int | None]) -> dict[str, Any]:
    factory = getattr(_import(path), name, None)
    if not callable(factory):
        raise UsageError(f"{path} has no function {name!r}")
    accepted = inspect.signature(factory).parameters
    wanted = {key: value for key, value in size.items() if value is not None}
    if refused := [key for key in wanted if key not in accepted]:
        raise UsageError(f"{path}:{name} takes no {' and no '.join(refused)}: add the argument or leave the option out")
    try:
        made = factory(**wanted)
    except Exception as error:
        raise UsageError(f"{path}:{name} failed: {type(error).__name__}: {error}") from error
    if not isinstance(made, tuple) or len(made) not in _PIECES or not isinstance(made[0], nn.Module):
        wanted_text = "(model, args, kwargs) or (model, args, kwargs, loss_fn)"
        raise UsageError(f"{path}:{name} returned {_kinds(made)}; it must return {wanted_text}")
    return dict(zip(("model", "args", "kwargs", "loss_fn"), made, strict=False))


def _kinds(made: object) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(type(item).__name__ for item in made)})"
    return type(made).__name__


def _import(path: Path) -> object:
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    name = f"autopar_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module
