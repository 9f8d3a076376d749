"""Hooks of the submodules: what was there when a module was compiled is part of its program; later ones cannot run."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from torch import nn

from autopar.cost_models.errors import RuntimeStateError

TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class FixedHooks(OrderedDict[Any, Any]):
    """A table of hooks that refuses new ones while it is closed.  Copies of it are plain tables."""

    closed = False

    def __setitem__(self, key: Any, value: Any) -> None:  # noqa: ANN401 - torch's ids and hooks
        if self.closed:
            raise RuntimeStateError(
                "a hook was added to a submodule of a compiled module, where it would never run: add it before "
                "autopar.compile, or to the compiled module itself"
            )
        super().__setitem__(key, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (list(self.items()),)


def close_hooks(model: nn.Module) -> None:
    """Make registering a hook on ``model`` or a submodule raise; the hooks that are there stay."""
    for module in model.modules():
        for name in TABLES:
            table = FixedHooks(vars(module)[name])
            table.closed = True
            vars(module)[name] = table


@contextlib.contextmanager
def open_hooks(model: nn.Module) -> Iterator[None]:
    """Let hooks be registered inside: capture labels layers with them."""
    tables = [t for m in model.modules() for n in TABLES if isinstance(t := vars(m)[n], FixedHooks) and t.closed]
    for table in tables:
        table.closed = False
    try:
        yield
    finally:
        for table in tables:
            table.closed = True
