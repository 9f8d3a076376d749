"""The dump of a rank's program in every format, narrowed and compared."""

from __future__ import annotations

from autopar.cost_models.errors import UsageError
from autopar.passes.base import Program
from autopar.report.diagram import boxes_of
from autopar.report.document import as_json
from autopar.report.drawing import as_dot, as_svg
from autopar.report.listing import as_text, summary
from autopar.report.reader import view_program
from autopar.report.rows import Only, select

FORMATS = ("text", "json", "dot", "svg")
_FOLD_ABOVE = 400


def dump(
    program: Program,
    format: str = "text",
    *,
    layer: str | None = None,
    only: str | None = None,
    folds: bool | None = None,
) -> str:
    """The program of one rank for people and machines.

    Args:
        program: what to show.
        format: "text" (readable Python), "json" (see :mod:`autopar.report.document`), "dot" (Graphviz) or "svg".
        layer: pattern of layer names (``blocks.*.mlp``; ``**`` for any number of components), or None for all.
        only: "collectives", "parameters", "buffers", "inputs", "gradients" or "computation", or None for all.
        folds: leave out copies of a block that was shown; by default where more than 400 nodes are to be shown.
            JSON is never folded.

    Raises:
        UsageError: an unknown format or filter.
    """
    if format not in FORMATS:
        raise UsageError(f"format {format!r} is unknown; use one of {', '.join(FORMATS)}")
    if only is not None and only not in {choice.value for choice in Only}:
        raise UsageError(f"only {only!r} is unknown; use one of {', '.join(choice.value for choice in Only)}")
    whole = view_program(program)
    shown = select(whole, layer=layer, only=Only(only) if only else None)
    if folds is None:
        folds = sum(len(rows) for rows in (shown.rows, *shown.parts.values())) > _FOLD_ABOVE
    if format == "json":
        return as_json(shown)
    if format == "text":
        return as_text(shown, folds=folds)
    boxes = boxes_of(whole, shown, folds=folds)
    headline, *legend = summary(shown)
    if format == "dot":
        return as_dot(boxes, title=headline)
    return as_svg(boxes, title=headline, legend=legend)
