"""What a call passes: its leaves in the order that capture gave them, and a signature that is cheap to compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.capture.call import CONSTANT_TYPES, flatten_tree

Leaves = list[Any]
Signature = list[Any]
META = torch.device("meta")


def read_call(args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[Any]) -> tuple[Leaves, Signature]:
    """The leaves of a call and its signature.

    Two calls with equal signatures are served by one program: their structure, constants and the shape, strides, dtype,
    device, ``requires_grad`` and layout of their tensors are equal.

    >>> leaves, signature = read_call((1, [2.0]), {"b": None, "a": "x"}, ())
    >>> leaves, signature == read_call((1, [2.0]), {"a": "x", "b": None}, ())[1]
    ([1, 2.0, 'x', None], True)
    >>> signature == read_call((True, [2.0]), {"a": "x", "b": None}, ())[1]
    False
    """
    leaves: Leaves = []
    signature: Signature = [len(args), len(targets)]
    for value in args:
        _read(value, leaves, signature)
    for key in sorted(kwargs) if len(kwargs) > 1 else kwargs:
        signature.append(key)
        _read(kwargs[key], leaves, signature)
    for value in targets:
        _read(value, leaves, signature)
    return leaves, signature


def on_device(signature: Signature, device: torch.device) -> Signature:
    """The signature of the same call with its meta tensors on ``device``."""
    return [
        (*item[:2], device, *item[3:]) if isinstance(item, tuple) and item[2:3] == (META,) else item
        for item in signature
    ]


def _described(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a program depends on; a trace takes other paths for strides that are not contiguous."""
    strides = None if tensor.is_contiguous() else tensor.stride()
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, strides


def _read(value: Any, leaves: Leaves, signature: Signature) -> None:  # noqa: ANN401 - whatever users pass
    kind = type(value)
    if kind is torch.Tensor or kind is nn.Parameter:
        leaves.append(value)
        signature.append(_described(value))
    elif kind is list or kind is tuple:
        signature += (kind, len(value))
        for item in value:
            _read(item, leaves, signature)
    elif kind is dict:
        signature += (kind, tuple(value))
        for item in value.values():
            _read(item, leaves, signature)
    elif isinstance(value, (torch.Tensor, *CONSTANT_TYPES)):
        _read_leaf(value, leaves, signature)
    else:
        pairs, spec = flatten_tree(value)
        signature.append(spec)
        for _, leaf in pairs:
            _read_leaf(leaf, leaves, signature)


def _read_leaf(value: Any, leaves: Leaves, signature: Signature) -> None:  # noqa: ANN401 - whatever users pass
    leaves.append(value)
    if isinstance(value, torch.Tensor):
        signature.append(_described(value))
        if isinstance(value, DTensor):
            signature += (value.placements, value.device_mesh)
    elif not isinstance(value, CONSTANT_TYPES):
        signature.append(object())  # equal to nothing: capture refuses it by name
    elif isinstance(value, float) and value != value:
        signature.append("nan")
    else:
        signature += (type(value), value)
