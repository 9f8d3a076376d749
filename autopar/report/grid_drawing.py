"""The grid of a schedule as SVG: a line a rank, a box an action, with a scale of time below."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from xml.sax.saxutils import escape

from autopar.cost_models.schedules import Kind
from autopar.report.grid import NAMES, Block, Grid
from autopar.report.text import duration

_MARGIN = 24
_NAME = 70  # room for the names of the ranks
_SHARE = 90  # room for their idle shares
_ROW, _BAR = 38, 28
_LETTER = 7.3
_NARROWEST, _WIDEST = 900.0, 3200.0
_FILLS: Mapping[Kind | None, str] = {
    Kind.FORWARD: "#9cc3f0",
    Kind.BACKWARD: "#8fd19e",
    Kind.INPUT_GRADIENT: "#8fd19e",
    Kind.WEIGHT_GRADIENT: "#f2c57c",
    None: "#c9b6e4",
}
_TICKS = 8


def as_picture(grid: Grid) -> str:
    """The grid as an SVG picture."""
    width = _width(grid)
    scale = width / grid.step_s if grid.step_s else 1.0
    top = _MARGIN + 92
    bottom = top + _ROW * len(grid.ranks)
    total = round(_MARGIN + _NAME + width + _SHARE + _MARGIN)
    height = round(bottom + 48)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{height}" viewBox="0 0 {total} {height}" '
        'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        _text(_MARGIN, _MARGIN + 14, grid.title, 'font-size="16" font-weight="bold"'),
        _text(_MARGIN, _MARGIN + 36, grid.headline(), 'font-size="13"'),
        *_legend(grid, _MARGIN + 60),
        _text(_MARGIN + _NAME + width + 14, top - 8, "idle", 'fill="#555555"'),
    ]
    for rank, blocks in enumerate(grid.ranks):
        y = top + rank * _ROW
        parts.append(_text(_MARGIN, y + 19, f"rank {rank}", 'font-size="13"'))
        parts.append(_rect(_MARGIN + _NAME, y, width, "#eeeeee", "none"))
        for block in blocks:
            parts += _box(grid, block, _MARGIN + _NAME + block.start_s * scale, y, scale)
        share = f"{grid.idle(rank):.1%}"
        parts.append(_text(_MARGIN + _NAME + width + 14, y + 19, share, 'font-size="13"'))
    parts += _axis(grid, scale, bottom)
    return "\n".join([*parts, "</svg>"])


def _width(grid: Grid) -> float:
    """So wide that most actions have room for their names."""
    needed = sorted(
        (len(grid.label(b.action)) * _LETTER + 6) / (b.end_s - b.start_s)
        for line in grid.ranks
        for b in line
        if b.action is not None and b.end_s > b.start_s
    )
    wanted = needed[3 * (len(needed) - 1) // 4] * grid.step_s if needed else 0.0
    return min(_WIDEST, max(_NARROWEST, wanted))


def _box(grid: Grid, block: Block, x: float, y: float, scale: float) -> Iterator[str]:
    width = (block.end_s - block.start_s) * scale
    kind = block.action.kind if block.action else None
    label = grid.label(block.action) if block.action else ""
    about = f"{label or 'between actions'}: {duration(block.end_s - block.start_s)} from {duration(block.start_s)}"
    yield f"<g><title>{escape(about)}</title>"
    yield _rect(x, y, max(width, 0.5), _FILLS[kind], "#ffffff")
    if len(label) * _LETTER <= width:
        yield _text(x + width / 2, y + 19, label, 'text-anchor="middle"')
    yield "</g>"


def _legend(grid: Grid, y: float) -> Iterator[str]:
    x = float(_MARGIN)
    entries: list[tuple[str, str]] = [(f"{kind.value}  {NAMES[kind]}", _FILLS[kind]) for kind in grid.kinds]
    entries += [("between actions", _FILLS[None]), ("idle", "#eeeeee")]
    for name, fill in entries:
        yield f'<rect x="{x:.1f}" y="{y - 11:.1f}" width="16" height="14" fill="{fill}" stroke="#999999"/>'
        yield _text(x + 22, y, name, "")
        x += 22 + len(name) * _LETTER + 20


def _axis(grid: Grid, scale: float, y: float) -> Iterator[str]:
    step_s = _nice(grid.step_s / _TICKS)
    start = _MARGIN + _NAME
    yield _line(start, y + 4, start + grid.step_s * scale, y + 4)
    for k in range(math.floor(grid.step_s / step_s + 1e-9) + 1 if grid.step_s else 1):
        x = start + k * step_s * scale
        yield _line(x, y + 4, x, y + 9)
        yield _text(x, y + 24, duration(k * step_s) if k else "0", 'text-anchor="middle" fill="#555555"')


def _nice(value: float) -> float:
    """The next number of 1, 2 or 5 times a power of ten.

    >>> _nice(0.0013), _nice(3)
    (0.002, 5.0)
    """
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(round(m * power, 12) for m in (1, 2, 5, 10) if m * power >= value * (1 - 1e-9))


def _rect(x: float, y: float, width: float, fill: str, stroke: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{_BAR}" fill="{fill}" stroke="{stroke}" '
        'stroke-width="0.6"/>'
    )


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#777777"/>'


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
