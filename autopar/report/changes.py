"""What differs between two programs of one model: by layer, with copies of a block told once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from autopar.passes.base import Phase, Program
from autopar.report.diagram import title_of
from autopar.report.listing import is_input, shapes
from autopar.report.reader import view_program
from autopar.report.rows import Kind, Row, View, select
from autopar.report.text import family, folded, quantity

_Place = tuple[Phase | None, str]


def diff_programs(old: Program, new: Program, *, layer: str | None = None) -> str:
    """The operations that ``new`` adds to ``old`` (+) and those it lacks (-), by phase and layer.

    Views and waits are left out, and so are names, which differ wherever something was inserted before.  Empty where
    the programs do the same.
    """
    before, after = (_by_place(select(view_program(program), layer=layer)) for program in (old, new))
    groups: dict[tuple[Phase | None, str, str], list[str]] = {}
    for phase, path in dict.fromkeys([*before, *after]):
        changes = _changes(before.get((phase, path), ()), after.get((phase, path), ()))
        if changes:
            groups.setdefault((phase, family(path), changes), []).append(path)
    return "\n".join(
        f"{f'{phase.value} ' if phase else ''}{folded(paths) or 'outside any layer'}\n{changes}"
        for (phase, _, changes), paths in groups.items()
    )


def _by_place(view: View) -> dict[_Place, list[str]]:
    places: dict[_Place, list[str]] = {}
    for row in (row for rows in (view.rows, *view.parts.values()) for row in rows):
        if row.kind not in (Kind.VIEW, Kind.WAIT, Kind.OUTPUT, Kind.CONSTANT) and row.call != "aten.clone":
            places.setdefault((None if is_input(row) else row.phase, row.layer), []).append(_line(row))
    return places


def _line(row: Row) -> str:
    talk = row.communication
    moved = f"{quantity(talk.moved_bytes, 'B')} over {talk.group}" if talk else ""
    name = family(row.label.removeprefix(f"{row.layer}.")) if is_input(row) else title_of(row)
    layout = " ".join(text for text in row.layout if not text.endswith(":R"))
    return "  ".join(text for text in (name, shapes(row), layout, moved) if text)


def _changes(before: Iterable[str], after: Iterable[str]) -> str:
    compared = difflib.ndiff(list(before), list(after))
    return "\n".join(f"  {line}" for line in compared if line[0] in "+-")
