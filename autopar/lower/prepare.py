"""From a captured step to what search and lowering share: the normal form, its rows, and the calls without a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from autopar.passes.base import StepGraph
from autopar.passes.normalize import Normalize
from autopar.passes.options import Choice, OptionSpace
from autopar.passes.rules.row import Row
from autopar.passes.rules.table import RuleTable, rows_of


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A step ready to be split.

    Attributes:
        step: the captured step.
        normal: its normal form.
        rows: the row of every call of ``normal``.
        unknown: calls without a rule: they run replicated.
    """

    step: StepGraph
    normal: StepGraph
    rows: Mapping[fx.Node, Row]
    unknown: tuple[fx.Node, ...]

    def choice(self, space: OptionSpace, node: fx.Node, label: str, num_ranks: int) -> Choice | None:
        """The option of ``node`` that a plan calls ``label`` on an axis of ``num_ranks``, or None."""
        return next((c for c in space.choices(node, num_ranks) if c.label == label), None)


def prepare(step: StepGraph, table: RuleTable, *, split_batch: bool) -> Prepared:
    """Normalize ``step`` and find its rows.

    Args:
        step: a captured step.
        table: the rules.
        split_batch: whether the batch will be split over ranks (training batch norms are then written as sums).
    """
    normal = Normalize(split_batch=split_batch)(step)
    rows, unknown = rows_of(normal.graph, table)
    return Prepared(step=step, normal=normal, rows=rows, unknown=tuple(unknown))
