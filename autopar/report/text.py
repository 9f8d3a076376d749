"""Plain-text building blocks of the reports: quantities, tables and folded lists of numbered names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_SCALES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
# Operations that only look at their argument in another shape.
VIEWS = frozenset(
    """view reshape _unsafe_view transpose permute t expand unsqueeze squeeze slice select detach alias unflatten
    as_strided split split_with_sizes narrow flatten unbind getitem""".split()  # noqa: SIM905 - words read best so
)
_NUMBER = re.compile(r"(?<![A-Za-z0-9_])\d+(?![A-Za-z0-9_])")


def quantity(value: float, unit: str) -> str:
    """``value`` with an SI prefix and three digits.

    >>> quantity(1_234_567, "B"), quantity(999, "B"), quantity(2.5e12, "FLOP")
    ('1.23 MB', '999 B', '2.5 TFLOP')
    """
    for scale, prefix in _SCALES:
        if abs(value) >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def duration(seconds: float) -> str:
    """A time in the unit that reads best.

    >>> duration(0.01234), duration(3.2e-6), duration(75)
    ('12.3 ms', '3.2 us', '75 s')
    """
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def plural(count: int, noun: str) -> str:
    """``count`` and its noun.

    >>> plural(1, "rank"), plural(4, "rank")
    ('1 rank', '4 ranks')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def table(rows: Sequence[Sequence[str]], *, indent: str = "", right: Iterable[int] = ()) -> list[str]:
    """Rows of cells as aligned lines; the columns in ``right`` are flushed right.

    >>> table([["a", "10"], ["long", "9"]], right=[1])
    ['a     10', 'long   9']
    """
    if not rows:
        return []
    flushed = set(right)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in flushed else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def family(name: str) -> str:
    """``name`` with its numbers replaced by ``#``: names of copies of one block have one family.

    >>> family("blocks.3.attn.q.weight")
    'blocks.#.attn.q.weight'
    """
    return _NUMBER.sub("#", name)


def numbers(name: str) -> tuple[int, ...]:
    """The numbers that :func:`family` replaced.

    >>> numbers("blocks.3.experts.12.weight")
    (3, 12)
    """
    return tuple(int(found) for found in _NUMBER.findall(name))


def span(values: Iterable[int]) -> str:
    """A set of numbers as ranges.

    >>> span([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def folded(names: Sequence[str]) -> str:
    """One text for names of one family: each place that varies shows the numbers that occur there.

    >>> folded(["blocks.0.up.weight", "blocks.1.up.weight", "blocks.2.up.weight"])
    'blocks.{0-2}.up.weight'
    >>> folded(["blocks.0#2", "blocks.1#2"])
    'blocks.{0-1}#2'
    """
    places = list(zip(*(numbers(name) for name in names), strict=True))
    texts = iter(span(place) if len(set(place)) == 1 else "{" + span(place) + "}" for place in places)
    return _NUMBER.sub(lambda _: next(texts), names[0])
