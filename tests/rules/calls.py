"""Recorded calls of ATen operations, as data: ``calls.json`` holds up to four calls of every operation.

Tensors are kept as shape and dtype; integers also by their values, because indices must be valid.  ``record.py`` writes
the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FILE = Path(__file__).parent / "calls.json"
CONSTANTS = {
    str(c): c
    for c in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.chalf),
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d),
        *(torch.strided,),
    )
}


@dataclass(frozen=True, slots=True)
class Recorded:
    """One call: its operation and its arguments in order, as JSON values."""

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def make(self, generator: torch.Generator) -> tuple[list[Any], dict[str, Any]]:
        """Arguments with fresh random tensors."""
        args = [decode(a, generator) for a in self.args]
        kwargs = {k: decode(v, generator) for k, v in self.kwargs.items()}
        prepare, count = PREPARED.get(self.op, (torch.clone, 0))
        return [*map(prepare, args[:count]), *args[count:]], kwargs

    def __str__(self) -> str:
        parts = [brief(a) for a in self.args] + [f"{k}={brief(v)}" for k, v in self.kwargs.items()]
        return f"{self.op}({', '.join(parts)})"


def brief(item: object) -> str:
    if isinstance(item, dict):
        return (
            "x".join(map(str, item["shape"])) + ":" + item["dtype"].removeprefix("torch.")
            if "shape" in item
            else str(*item.values())
        )
    return "[" + ", ".join(map(brief, item)) + "]" if isinstance(item, list) else str(item)


def encode(item: object, keep_values: bool = True) -> object:
    """A JSON value for an argument."""
    if isinstance(item, torch.Tensor) and str(item.dtype) in CONSTANTS:
        spec: dict[str, Any] = {"shape": list(item.shape), "dtype": str(item.dtype)}
        if keep_values and not item.dtype.is_floating_point and not item.dtype.is_complex:
            spec["values"] = item.reshape(-1).long().tolist()
        return spec
    if isinstance(item, (list, tuple)):
        return [encode(i, keep_values) for i in item]
    if isinstance(item, (torch.dtype, torch.memory_format, torch.layout)):
        return {"constant": str(item)}
    if isinstance(item, torch.device):
        return {"device": str(item)}
    if isinstance(item, complex):
        return {"complex": [item.real, item.imag]}
    if isinstance(item, float) and item in (float("inf"), float("-inf")):
        return {"float": str(item)}
    if item is None or isinstance(item, (bool, int, float, str)):
        return item
    raise TypeError(f"cannot record {item!r} of type {type(item).__name__}")


def decode(item: object, generator: torch.Generator) -> object:
    """The argument of a JSON value; floating-point tensors are drawn anew, integers are those recorded."""
    if isinstance(item, list):
        return [decode(i, generator) for i in item]
    if not isinstance(item, dict):
        return item
    if "constant" in item:
        return CONSTANTS[item["constant"]]
    if "device" in item:
        return torch.device(item["device"])
    if "complex" in item:
        return complex(*item["complex"])
    if "float" in item:
        return float(item["float"])
    dtype = CONSTANTS[item["dtype"]]
    if "values" in item:
        return torch.tensor(item["values"], dtype=torch.int64).reshape(item["shape"]).to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(item["shape"], generator=generator, dtype=wide).to(dtype)


def load() -> dict[str, list[Recorded]]:
    """All recorded calls by operation."""
    data = json.loads(FILE.read_text())
    return {op: [Recorded(op, tuple(c["args"]), c["kwargs"]) for c in calls] for op, calls in data.items()}


def positive_definite(x: torch.Tensor) -> torch.Tensor:
    return x @ x.mH + x.shape[-1] * torch.eye(x.shape[-1], dtype=x.dtype)


def triangular(x: torch.Tensor) -> torch.Tensor:
    return (x / x.shape[-1]).tril() + 2 * torch.eye(x.shape[-1], dtype=x.dtype)


# Operations that are defined on some numbers or matrices only: what their first arguments are put through.
PREPARED: Mapping[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "aten::binary_cross_entropy": (torch.sigmoid, 2),
    "aten::cholesky": (positive_definite, 1),
    "aten::linalg_cholesky_ex": (positive_definite, 1),
    "aten::_linalg_eigh": (positive_definite, 1),
    "aten::linalg_ldl_factor_ex": (positive_definite, 1),
    "aten::cholesky_inverse": (triangular, 1),
    "aten::linalg_solve_triangular": (triangular, 1),
}
