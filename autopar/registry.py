"""Rules of operations that autopar does not know, given by the user: the one table that a process adds to."""

from __future__ import annotations

from collections.abc import Callable

from autopar.cost_models.errors import UsageError
from autopar.passes.rules.row import Call, Row
from autopar.passes.rules.table import RULES, Rule, RuleTable, op_name
from autopar.passes.torch_ops import OpOverload

USER_RULES = RuleTable({})


def register_rule(op: OpOverload | Callable[..., object], row: str | Rule) -> None:
    """Say which splits of a custom operation are correct; without a rule it runs whole on every rank.

    Args:
        op: the operation, such as ``torch.ops.mylib.scale.default`` (``torch.ops.mylib.scale`` stands for its default).
        row: text in factor notation, one group of letters a tensor argument and result (see CONTRIBUTING.md), or a
            function from the call to a :class:`~autopar.passes.rules.row.Row`.

    Raises:
        UsageError: ``op`` is no operation, or the text is no row.

    >>> import torch
    >>> register_rule(torch.ops.aten.special_entr.default, "a")
    Traceback (most recent call last):
    autopar.cost_models.errors.UsageError: 'a' is no rule; write 'inputs -> outputs | clauses', like 'm k, k n -> m n'
    """
    overload = getattr(op, "default", op)
    if not isinstance(overload, OpOverload):
        raise UsageError(
            f"register_rule needs an operation such as torch.ops.mylib.scale.default; got {op!r} ({type(op).__name__})"
        )
    if isinstance(row, str) and "->" not in row:
        raise UsageError(f"{row!r} is no rule; write 'inputs -> outputs | clauses', like 'm k, k n -> m n'")
    USER_RULES.register(overload, row)


class UserTable(RuleTable):
    """The library's rules, with the user's before them."""

    def __init__(self) -> None:
        super().__init__(RULES)

    def row(self, call: Call) -> Row | None:
        """The row of a call: the user's where there is one."""
        return USER_RULES.row(call) if USER_RULES.knows(op_name(call.op)) else super().row(call)


def rule_table() -> RuleTable:
    """The rules in force: the library's and those registered so far."""
    return UserTable()
