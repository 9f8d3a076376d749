"""A program as boxes and arrows, as ``dot`` and ``svg`` draw it.

Views, waits and copies are passed through; parameters are named in the boxes that they enter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.passes.base import Phase
from autopar.report.fold import Run, fold, fold_title, runs
from autopar.report.listing import communication_text, is_input, shapes
from autopar.report.rows import Kind, Row, View

_PASSED = frozenset({Kind.VIEW, Kind.WAIT, Kind.CONSTANT})
_COPIES = frozenset({"aten.clone"})
_STATE = frozenset({Kind.PARAMETER, Kind.BUFFER})


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One thing that happens.

    Attributes:
        title: the operation, or what is folded here.
        kind: what it is; None for a folded repetition of layers.
        layer, phase: where it comes from.
        state: parameters and buffers that it reads.
        shape, layout: its result on this rank.
        note: bytes moved, and what of the step it returns.
        sources: positions of the boxes that it reads.
        outside: what it reads of operations that are not shown.
        users: layers that are not shown and read it.
    """

    title: str
    kind: Kind | None
    layer: str = ""
    phase: Phase | None = None
    state: tuple[str, ...] = ()
    shape: str = ""
    layout: str = ""
    note: str = ""
    sources: tuple[int, ...] = ()
    outside: tuple[str, ...] = ()
    users: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Carried:
    """What reaches a value through rows that are not drawn; dicts keep the order."""

    boxes: dict[int, None] = dataclasses.field(default_factory=dict)
    state: dict[str, None] = dataclasses.field(default_factory=dict)
    outside: dict[str, None] = dataclasses.field(default_factory=dict)

    def add(self, other: _Carried) -> None:
        self.boxes.update(other.boxes)
        self.state.update(other.state)
        self.outside.update(other.outside)


def boxes_of(whole: View, shown: View, *, folds: bool) -> dict[str, list[Box]]:
    """Boxes of the rows of ``shown``, a selection of ``whole``, by function; ``folds`` draws a repeated layer once."""
    functions = {"step": (whole.rows, shown.rows)}
    functions |= {name: (rows, shown.parts[name]) for name, rows in whole.parts.items()}
    drawn = {
        name: _Drawing(rows, {r.name for r in part}, folds=folds).boxes for name, (rows, part) in functions.items()
    }
    return {name: boxes for name, boxes in drawn.items() if boxes or name == "step"}


class _Drawing:
    """Turns rows into boxes, one after the other."""

    def __init__(self, rows: Sequence[Row], shown: set[str], *, folds: bool) -> None:
        self.boxes: list[Box] = []
        self._carried: dict[str, _Carried] = {}
        self._users: dict[int, dict[str, None]] = {}
        self._shown = shown
        for run in fold(rows) if folds else runs(rows):
            if run.like and not all(row.kind in _STATE for row in run.rows):
                self._folded(run)
                continue
            for row in run.rows:
                self._row(row)
        self.boxes = [
            dataclasses.replace(box, users=tuple(self._users.get(position, ())))
            for position, box in enumerate(self.boxes)
        ]

    def _row(self, row: Row) -> None:
        reads = self._reads(row)
        if row.kind in _STATE:
            self._carried[row.name] = _Carried(state={row.label.split(" = ")[0]: None})
        elif row.kind in _PASSED or row.call in _COPIES:
            self._carried[row.name] = reads
            if len(reads.boxes) == 1:
                self._describe(next(iter(reads.boxes)), row)
        elif row.name not in self._shown:
            for position in reads.boxes if row.kind is not Kind.OUTPUT else ():
                self._users.setdefault(position, {})[row.layer or title_of(row)] = None
            where = f" of {row.layer}" if row.layer else ""
            name = row.label or f"{title_of(row)}{where}"
            self._carried[row.name] = _Carried(outside={name: None})
        else:
            self._carried[row.name] = _Carried(boxes={len(self.boxes): None})
            self.boxes.append(_box(row, reads))

    def _describe(self, position: int, row: Row) -> None:
        """Tell a box what a row that is passed through knows of its result: roles, and the layout of a first output."""
        box = self.boxes[position]
        if row.roles and not all(role in box.note for role in row.roles):
            box = dataclasses.replace(box, note=f"{box.note}  {_roles(row)}".strip())
        if row.call == "getitem" and not box.layout and row.layout:
            box = dataclasses.replace(box, layout=" ".join(row.layout), shape=shapes(row))
        self.boxes[position] = box

    def _folded(self, run: Run) -> None:
        inside = {row.name for row in run.rows}
        reads = _Carried()
        for name in (name for row in run.rows for name in row.inputs if name not in inside):
            reads.add(self._carried.get(name, _Carried()))
        self._carried |= {name: _Carried(boxes={len(self.boxes): None}) for name in inside}
        self.boxes.append(
            Box(title=fold_title(run), kind=None, layer=run.like, phase=run.phase, sources=tuple(reads.boxes))
        )

    def _reads(self, row: Row) -> _Carried:
        reads = _Carried()
        for name in row.inputs:
            reads.add(self._carried.get(name, _Carried(outside={name: None})))
        return reads


def _box(row: Row, reads: _Carried) -> Box:
    notes = [communication_text(row), _roles(row)]
    return Box(
        title=title_of(row),
        kind=row.kind,
        layer=row.layer,
        phase=row.phase,
        state=tuple(reads.state),
        shape=shapes(row),
        layout=" ".join(row.layout),
        note="  ".join(note for note in notes if note),
        sources=tuple(reads.boxes),
        outside=tuple(reads.outside),
    )


def _roles(row: Row) -> str:
    return "-> " + ", ".join(row.roles) if row.roles else ""


def title_of(row: Row) -> str:
    """A short name of what a row does.

    ``aten.add.Tensor`` becomes ``add``, ``_c10d_functional.all_gather_into_tensor`` becomes ``all_gather``.
    """
    if is_input(row):
        return row.label or row.name
    if row.kind is Kind.OUTPUT:
        return "outputs"
    if row.kind is Kind.PART:
        return row.call.removeprefix("self.")
    word = row.call.split(".")[min(1, row.call.count("."))]
    return word.removesuffix("_into_tensor").removesuffix("_tensor").removesuffix("_single").lstrip("_")
