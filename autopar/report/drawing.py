"""Boxes and arrows as ``dot`` text and as SVG.

The SVG needs no layout program: operations stand below each other in the order in which they run, under the layer that
they come from, and arrows run in lanes at their left.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from autopar.passes.base import Phase
from autopar.report.diagram import Box
from autopar.report.rows import Kind

_STATES = 4  # parameters that a box names before it counts
_ROW = 24
_LANE = 9
_LETTER = 7.23
_MARGIN = 16
_GAP = 18
_FILLS: Mapping[Kind | None, str] = {
    Kind.COMMUNICATION: "#ffdfb0",
    Kind.BATCH: "#d6f0d6",
    Kind.SEED: "#d6f0d6",
    Kind.OUTPUT: "#e6dcf5",
    Kind.PART: "#dfe7f5",
    None: "#eeeeee",
}
_PLAIN = "#ffffff"
_LINES = ("#4c6ea8", "#3f8f6b", "#8a5ca8", "#a8624c", "#6b7f2a", "#2a8f9e")
_TALK = "#d97706"


def as_dot(functions: Mapping[str, Sequence[Box]], *, title: str) -> str:
    """The boxes as a Graphviz graph; a layer's boxes stand in one cluster."""
    lines = [
        "digraph program {",
        f"  label={_quoted(title)}; labelloc=t; rankdir=TB; newrank=true;",
        '  node [shape=box, style=filled, fontname="monospace", fontsize=10];',
    ]
    for name, boxes in functions.items():
        ids = [f"{name}_{position}" for position in range(len(boxes))]
        groups: dict[str, list[int]] = {}
        for position, box in enumerate(boxes):
            groups.setdefault(_band(box), []).append(position)
        for number, (band, members) in enumerate(groups.items()):
            lines.append(f"  subgraph cluster_{name}_{number} {{")
            lines.append(f"    label={_quoted(band)}; style=dashed;")
            for position in members:
                box = boxes[position]
                label = "\n".join(text for text in (box.title, *_details(box)) if text)
                lines.append(f'    {ids[position]} [label={_quoted(label)}, fillcolor="{_fill(box)}"];')
            lines.append("  }")
        for position, box in enumerate(boxes):
            lines += [f"  {ids[source]} -> {ids[position]};" for source in box.sources]
    return "\n".join([*lines, "}"])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _fill(box: Box) -> str:
    return _FILLS.get(box.kind, _PLAIN)


def _band(box: Box) -> str:
    if box.kind in (Kind.BATCH, Kind.SEED):
        return "inputs"
    layer = box.layer or "outside any layer"
    return f"{box.phase.value} {layer}" if box.phase else layer


def _details(box: Box) -> tuple[str, ...]:
    """The columns of a box beside its title: what else it reads, its result, its layout, its note."""
    prefix = f"{box.layer}."
    state = " ".join(name.removeprefix(prefix) for name in box.state[:_STATES])
    if len(box.state) > _STATES:
        state += f" and {len(box.state) - _STATES} more"
    outside = "".join(f"  <- {name}" for name in box.outside)
    users = "  used by " + ", ".join(box.users) if box.users else ""
    return state, box.shape, box.layout, (box.note + outside + users).strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """One of the SVG's lines of text: a box, or the heading of a layer (``box`` is None)."""

    heading: str = ""
    box: Box | None = None
    position: int = -1


def as_svg(functions: Mapping[str, Sequence[Box]], *, title: str, legend: Sequence[str]) -> str:
    """The boxes as an SVG picture; ``legend`` are lines below its ``title``."""
    body: list[str] = []
    top = _MARGIN + _ROW * (len(legend) + 2)
    width = max(len(text) for text in (title, *legend)) * _LETTER * 1.2
    for name, boxes in functions.items():
        lines = list(_lines(name, boxes))
        sheet = _Sheet(lines=lines, boxes=boxes, top=top)
        body += sheet.draw()
        top += _ROW * len(lines) + _MARGIN
        width = max(width, sheet.width)
    total_width, total_height = round(width + _MARGIN), round(top + _MARGIN)
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total_width}" height="{total_height}" '
        f'viewBox="0 0 {total_width} {total_height}" font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" '
        'font-size="12">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        _text(_MARGIN, _MARGIN + 12, title, 'font-weight="bold" font-size="15"'),
        *(_text(_MARGIN, _MARGIN + 12 + _ROW * (i + 1), text, 'fill="#444444"') for i, text in enumerate(legend)),
    ]
    return "\n".join([*head, *body, "</svg>"])


def _lines(name: str, boxes: Sequence[Box]) -> Iterator[_Line]:
    if name != "step":
        yield _Line(heading=f"part {name}")
    for band, group in itertools.groupby(enumerate(boxes), key=lambda item: _band(item[1])):
        yield _Line(heading=band)
        yield from (_Line(box=box, position=position) for position, box in group)


class _Sheet:
    """The drawing of one function: where every line, lane and column is."""

    def __init__(self, *, lines: Sequence[_Line], boxes: Sequence[Box], top: float) -> None:
        self._lines, self._boxes, self._top = lines, boxes, top
        self._line_of = {line.position: number for number, line in enumerate(lines) if line.box}
        self._users: dict[int, list[int]] = {}
        for position, box in enumerate(boxes):
            for source in box.sources:
                self._users.setdefault(source, []).append(position)
        self._lanes = self._choose_lanes()
        self._left = _MARGIN + _LANE * (max(self._lanes.values(), default=0) + 3)
        cells = [(box.title, *_details(box)) for box in boxes]
        widths = [max((len(row[column]) for row in cells), default=0) * _LETTER for column in range(5)]
        self._columns: list[float] = [self._left + 8]
        for size in widths:
            self._columns.append(self._columns[-1] + (size + _GAP if size else 0))
        self.width = max(self._columns[-1], self._left + 400)

    def _choose_lanes(self) -> dict[int, int]:
        """The lane of each box's arrows: short ones nearest to the boxes, no two that overlap in one lane."""
        taken: list[list[tuple[int, int]]] = []
        lanes = {}
        for source in sorted(self._users, key=lambda s: (max(self._users[s]) - s, s)):
            first, last = source, max(self._users[source])
            lane = next(
                (n for n, spans in enumerate(taken) if all(last <= a or b <= first for a, b in spans)), len(taken)
            )
            if lane == len(taken):
                taken.append([])
            taken[lane].append((first, last))
            lanes[source] = lane
        return lanes

    def draw(self) -> Iterator[str]:
        """The SVG elements: headings, boxes, then arrows over them."""
        for number, line in enumerate(self._lines):
            y = self._top + number * _ROW
            if line.box is None:
                yield _rect(self._left - 4, y + 3, self.width - self._left, _ROW - 4, fill="#e8ecf2", stroke="none")
                yield _text(self._left + 2, y + 16, line.heading, 'font-weight="bold" fill="#334155"')
            else:
                yield from self._box(line.box, y)
        for source, users in self._users.items():
            yield from self._arrows(source, users)

    def _box(self, box: Box, y: float) -> Iterator[str]:
        yield _rect(self._left, y + 1, self.width - self._left - 8, _ROW - 3, fill=_fill(box), stroke="#c3cad5")
        weight = 'font-weight="bold"' if box.kind is not None else 'font-style="italic"'
        yield _text(self._columns[0], y + 16, box.title, weight)
        colours = ("#7c3f00", "#111827", "#1d4ed8", "#b45309")
        for x, text, colour in zip(self._columns[1:], _details(box), colours, strict=False):
            if text:
                yield _text(x, y + 16, text, f'fill="{colour}"')

    def _arrows(self, source: int, users: Sequence[int]) -> Iterator[str]:
        box = self._boxes[source]
        colour = _TALK if box.kind is Kind.COMMUNICATION else _LINES[self._lanes[source] % len(_LINES)]
        x = self._left - _LANE * (self._lanes[source] + 2)
        start = self._centre(source) + 4
        ends = [self._centre(user) - 4 for user in users]
        saved = any(self._boxes[user].phase is not box.phase for user in users) and box.phase is Phase.FORWARD
        dashes = ' stroke-dasharray="4 3"' if saved else ""
        turn = f"M{self._left:.0f} {start:.0f} H{x + 4:.0f} Q{x:.0f} {start:.0f} {x:.0f} {start + 4:.0f}"
        path = f"{turn} V{max(ends) - 4:.0f}"
        yield f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.3"{dashes}/>'
        for end in ends:
            turn = f"M{x:.0f} {end - 4:.0f} Q{x:.0f} {end:.0f} {x + 4:.0f} {end:.0f} H{self._left - 4:.0f}"
            yield f'<path d="{turn}" fill="none" stroke="{colour}" stroke-width="1.3"/>'
            tip = (
                f"M{self._left - 6:.0f} {end - 3:.0f} L{self._left:.0f} {end:.0f} L{self._left - 6:.0f} {end + 3:.0f} Z"
            )
            yield f'<path d="{tip}" fill="{colour}"/>'

    def _centre(self, position: int) -> float:
        return self._top + self._line_of[position] * _ROW + _ROW / 2


def _rect(x: float, y: float, width: float, height: float, *, fill: str, stroke: str) -> str:
    box = f'x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="3"'
    return f"<rect {box} fill={quoteattr(fill)} stroke={quoteattr(stroke)}/>"


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" {style} xml:space="preserve">{escape(text)}</text>'
