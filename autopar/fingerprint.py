"""The name of a captured step: equal graphs have equal fingerprints, in every process and on every machine.

A plan refers to nodes by name, so it holds only for the graph it was made for; its fingerprint says which one that is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import fx

from autopar.passes.base import StepGraph


def fingerprint(step: StepGraph) -> str:
    """SHA-256 of the captured step: operations, arguments, shapes, dtypes, edges, names of inputs and outputs.

    Devices are left out: a plan made on one machine holds for another.
    """
    digest = hashlib.sha256()
    for kind, name in [(s.kind.value, s.name) for s in step.inputs] + [(s.kind.value, s.name) for s in step.outputs]:
        digest.update(f"{kind} {name}\n".encode())
    _hash_graph(digest.update, step.graph_module)
    return digest.hexdigest()


def _hash_graph(update: Callable[[bytes], object], module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        arguments = _canonical((node.args, node.kwargs))
        update(f"{node.op} {node.name} {node.target} {arguments} {_canonical(node.meta.get('val'))}\n".encode())
        if node.op == "get_attr" and isinstance(inner := getattr(module, str(node.target), None), fx.GraphModule):
            _hash_graph(update, inner)


def _canonical(value: object) -> str:
    """A text that is equal for equal arguments in every process."""
    match value:
        case fx.Node():
            text = f"%{value.name}"
        case torch.Tensor():
            text = f"{value.dtype}{list(value.shape)}"
        case list() | tuple():
            text = f"({', '.join(_canonical(item) for item in value)})"
        case Mapping():
            text = f"{{{', '.join(f'{key}={_canonical(value[key])}' for key in sorted(value, key=str))}}}"
        case slice():
            text = f"slice{_canonical((value.start, value.stop, value.step))}"
        case torch.device():
            text = "device"
        case (
            None | bool() | int() | float() | complex() | str() | torch.dtype() | torch.layout() | torch.memory_format()
        ):
            text = repr(value)
        case _:
            text = type(value).__qualname__
    return text
