"""autopar turns a plain PyTorch model into a program for many devices."""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

from autopar.cost_models.errors import AutoparError

if TYPE_CHECKING:
    from autopar.api import compile as compile
    from autopar.cost_models.cluster import Cluster as Cluster
    from autopar.plan import Constraints as Constraints
    from autopar.plan import Plan as Plan
    from autopar.registry import register_rule as register_rule
    from autopar.runtime.clip import clip_grad_norm_ as clip_grad_norm_
    from autopar.runtime.module import ParallelModule as ParallelModule

__version__ = "0.1.0"

# Public name -> module that defines it.  They are imported when they are first asked for: torch takes seconds.
EXPORTS = {
    "Cluster": "autopar.cost_models.cluster",
    "Constraints": "autopar.plan",
    "ParallelModule": "autopar.runtime.module",
    "Plan": "autopar.plan",
    "clip_grad_norm_": "autopar.runtime.clip",
    "compile": "autopar.api",
    "plan": "autopar.api",
    "register_rule": "autopar.registry",
    "verify": "autopar.verify.api",
}

__all__ = [
    "AutoparError",
    "Cluster",
    "Constraints",
    "ParallelModule",
    "Plan",
    "clip_grad_norm_",
    "compile",
    "plan",
    "register_rule",
    "verify",
]


class _Package(types.ModuleType):
    """This package: ``autopar.plan`` and ``autopar.verify`` are functions, though submodules have these names."""

    def __setattr__(self, name: str, value: object) -> None:
        # Importing a submodule binds it in its package; the functions win, `from autopar.plan import ...` still works.
        if not (name in EXPORTS and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the name stands for
    if name not in EXPORTS:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    value = getattr(importlib.import_module(EXPORTS[name]), name)
    setattr(sys.modules[__name__], name, value)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *EXPORTS})


sys.modules[__name__].__class__ = _Package
