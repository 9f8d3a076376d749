"""Values for the inputs of a step: a model's own, a caller's, or random ones where a model has none (on meta)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.cost_models.errors import VerificationError
from autopar.passes.base import InputKind, InputSpec, StepGraph

Values = Mapping[str, Any]


def input_values(step: StepGraph, values: Values | int) -> dict[str, Any]:
    """A value for every input of ``step``, by canonical name.

    Args:
        step: the captured step; its placeholders' ``meta["val"]`` give shapes and dtypes.
        values: tensors by name (an alias serves as well), or a seed for random ones.  Gradient seeds may be left out of
            the mapping: they are ones.

    Raises:
        VerificationError: a value is missing or has another shape or dtype than was captured.
    """
    generator = torch.Generator().manual_seed(values if isinstance(values, int) else 0)
    found = {}
    for spec, node in zip(step.inputs, step.placeholders, strict=True):
        example = node.meta.get("val")
        if isinstance(values, int) or (spec.kind is InputKind.SEED and spec.name not in values):
            value = random_value(spec, example, generator)
        else:
            value = _named(spec, values)
            _check_like(spec, value, example)
        found[spec.name] = value
    return found


def model_values(step: StepGraph, model: torch.nn.Module, leaves: Sequence[Any], *, seed: int = 0) -> dict[str, Any]:
    """Values of the inputs of ``step``: the model's parameters and buffers, and the leaves of the call.

    Args:
        step: the captured step.
        model: the model it was captured from.
        leaves: the flattened ``(args, kwargs, targets)``.
        seed: for what has no values (tensors on meta, fake tensors), which gets random ones.
    """
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for spec, node in zip(step.inputs, step.placeholders, strict=True):
        value: Any = None
        if spec.kind in {InputKind.PARAMETER, InputKind.BUFFER}:
            value = _named(spec, tensors)
        elif spec.kind is InputKind.BATCH:
            value = leaves[spec.leaf]
        if value is None or _is_empty_shell(value):
            value = random_value(spec, node.meta.get("val"), generator)
        # The step was captured on CPU, wherever the model lives.
        found[spec.name] = value.detach().cpu() if isinstance(value, torch.Tensor) else value
    return found


def random_value(spec: InputSpec, example: object, generator: torch.Generator) -> object:
    """A random value in the likeness of ``example``: well-conditioned weights, positive buffers, integers 0 and 1.

    The small integers are valid as labels, token numbers and masks of any model.
    """
    if not isinstance(example, torch.Tensor):
        return example
    shape, dtype = tuple(example.shape), example.dtype
    if spec.kind is InputKind.SEED and not shape:
        return torch.ones(shape, dtype=dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 2, shape, generator=generator).to(dtype)
    if spec.kind is InputKind.BUFFER and not dtype.is_complex:
        return (torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5).to(dtype)
    draw = torch.randn(shape, generator=generator, dtype=torch.complex128 if dtype.is_complex else torch.float64)
    if spec.kind is InputKind.PARAMETER:
        draw = draw / math.sqrt(math.prod(shape[1:])) if len(shape) > 1 else 1 + 0.1 * draw
    return draw.to(dtype)


def _named(spec: InputSpec, values: Values) -> object:
    for name in (spec.name, *spec.aliases):
        if name in values:
            return values[name]
    raise VerificationError(f"no value for the {spec.kind.value} {spec.name!r}; the values given are {sorted(values)}")


def _check_like(spec: InputSpec, value: object, example: object) -> None:
    if not isinstance(example, torch.Tensor):
        return
    if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (example.shape, example.dtype):
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise VerificationError(
            f"{spec.name} is {got}; the step was captured with {example.dtype} {list(example.shape)}"
        )


def _is_empty_shell(value: object) -> bool:
    """Whether a tensor has a shape but no data: on meta, or fake."""
    return isinstance(value, torch.Tensor) and (value.is_meta or hasattr(value, "fake_mode"))
