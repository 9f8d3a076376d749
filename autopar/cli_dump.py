"""``autopar dump --schedule``: the grid of a plan's schedule."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost_models.cluster import Cluster
from autopar.cost_models.errors import UsageError
from autopar.lower import Lowering
from autopar.passes.base import StepGraph
from autopar.plan import SCHEDULES, Plan
from autopar.report.grid import as_lines, grid_of
from autopar.report.grid_drawing import as_picture

GRID_FORMATS = ("text", "svg")


def draw_schedule(step: StepGraph, plan: Plan, cluster: Cluster, format: str) -> str:
    """The grid of the plan's schedule as text or SVG, with the times predicted for ``cluster``.

    Raises:
        UsageError: another format, or a plan without a schedule.
    """
    if format not in GRID_FORMATS:
        raise UsageError(f"a schedule is drawn as {' or '.join(GRID_FORMATS)}, not as {format!r}")
    lowering = Lowering(step, plan)
    programs = [lowering.program(stage * plan.dp * plan.tp) for stage in range(plan.pp)]
    grid = grid_of(plan, programs, cluster)
    return as_picture(grid) if format == "svg" else as_lines(grid)


def with_grid_flag(arguments: Sequence[str]) -> list[str]:
    """``dump``'s arguments with a ``--schedule`` that names none, which asks for the drawing, as ``--grid``.

    >>> with_grid_flag(["dump", "gpt2", "--schedule", "zb", "--schedule"])
    ['dump', 'gpt2', '--schedule', 'zb', '--grid']
    """
    found = list(arguments)
    if found[:1] == ["dump"]:
        for i, word in enumerate(found):
            if word == "--schedule" and (i + 1 == len(found) or found[i + 1] not in SCHEDULES):
                found[i] = "--grid"
    return found
