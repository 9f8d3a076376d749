"""Repeated layers of a program: runs of rows that do the same as an earlier copy of their block are folded away."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autopar.passes.base import Phase
from autopar.report.rows import Kind, Row
from autopar.report.text import family, folded

_HEADING = 2  # a run of fewer rows is no longer than what would stand in its place
_BLOCK = re.compile(r"^(?:.*?\.)??\d+(?=\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Neighbouring rows of one block and phase.

    Attributes:
        block: path of the repeated block, or of the layer where there is none.
        phase: forward, backward, or None for inputs and outputs.
        rows: the rows.
        like: path of the block whose earlier run did the same, so that this run need not be shown; or "". It may be one
            of ``blocks``: a later micro-batch.
        blocks: blocks that are folded here, this run's own first.
    """

    block: str
    phase: Phase | None
    rows: tuple[Row, ...]
    like: str = ""
    blocks: tuple[str, ...] = ()


def block_of(layer: str) -> str:
    """The path up to the first number: the copies of a block differ in it.

    >>> block_of("model.blocks.3.attn.q"), block_of("head")
    ('model.blocks.3', 'head')
    """
    found = _BLOCK.match(layer)
    return found[0] if found else layer


def runs(rows: Iterable[Row]) -> Iterator[Run]:
    """``rows`` cut where the block or the phase changes."""
    for (block, phase), group in itertools.groupby(rows, key=lambda row: (block_of(row.layer), row.phase)):
        yield Run(block=block, phase=phase, rows=tuple(group))


def fold(rows: Iterable[Row], *, repeats: bool = False) -> list[Run]:
    """Runs of ``rows``; one that does what an earlier run of another copy of its block did is folded.

    With ``repeats`` so is what one block does again, as in a step of several micro-batches, where it communicates
    nothing and is longer than its heading. Neighbouring folded runs of copies of one block become one.
    """
    seen: dict[object, str] = {}
    out: list[Run] = []
    for run in runs(rows):
        key = _signature(run)
        first = key not in seen
        like = seen.setdefault(key, run.block)
        if first or (like == run.block and not (repeats and _is_long_and_local(run))):
            out.append(run)
            continue
        last = out[-1]
        kept: tuple[Row, ...] = run.rows
        blocks: tuple[str, ...] = (run.block,)
        if last.like == like and last.phase == run.phase:
            out.pop()
            kept, blocks = (*last.rows, *kept), (*last.blocks, *blocks)
        out.append(Run(block=run.block, phase=run.phase, rows=kept, like=like, blocks=blocks))
    return out


def fold_title(run: Run) -> str:
    """What a folded run stands for, such as ``blocks.{1-11}: as blocks.0``."""
    again = " of an earlier micro-batch" if run.like in run.blocks else ""
    return f"{folded(run.blocks)}: as {run.like}{again}"


def _is_long_and_local(run: Run) -> bool:
    return len(run.rows) > _HEADING and not any(row.communication for row in run.rows)


def _signature(run: Run) -> object:
    return family(run.block), run.phase, tuple(map(row_signature, run.rows))


def row_signature(row: Row) -> tuple[object, ...]:
    """What a row does, without names: equal in copies of one block."""
    call = "" if row.kind in (Kind.CONSTANT, Kind.PART) else row.call
    communication = row.communication and (row.communication.group, row.communication.moved_bytes)
    return row.kind, call, family(row.layer), family(row.label), row.local, row.layout, row.global_shape, communication
