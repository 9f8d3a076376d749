"""A program as Python text: one line a node; comments say where it comes from, its layout and what it moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.report.fold import Run, fold, fold_title, runs
from autopar.report.rows import Kind, Row, View
from autopar.report.text import plural, quantity

_CODE_WIDTH = 72
_SHAPES = 6  # results whose shapes a comment tells before it counts
_NAMED = 3  # tensors that a communication's comment names before it counts
_ARGUMENTS_WIDTH = 96


def as_text(view: View, *, folds: bool) -> str:
    """``view`` as Python source; ``folds`` leaves out copies of a block that was printed."""
    lines = [f"# {line}" for line in summary(view)]
    for name, rows in {"step": view.rows, **view.parts}.items():
        repeats = name == "step" and bool(view.parts)
        found = fold(rows, repeats=repeats) if folds else list(runs(rows))
        lines += ["", "", *_function(name, rows, found)]
    return "\n".join(lines)


def summary(view: View) -> Iterator[str]:
    """The headline of a dump: whose program it is, and what it communicates."""
    rows = [row for group in (view.rows, *view.parts.values()) for row in group]
    talks = [row.communication for row in rows if row.communication]
    moved = quantity(sum(talk.moved_bytes for talk in talks), "B")
    yield f"{view.title}: {plural(len(rows), 'node')}, {plural(len(talks), 'communication')} moving {moved}"
    kinds: dict[tuple[str, str], list[int]] = {}
    for talk in talks:
        kinds.setdefault((talk.op, talk.group), []).append(talk.moved_bytes)
    for (op, group), sizes in kinds.items():
        yield f"  {len(sizes)} x {op} over {group}: {quantity(sum(sizes), 'B')}"


def _function(name: str, rows: Sequence[Row], found: Sequence[Run]) -> Iterator[str]:
    arguments = ", ".join(row.name for row in rows if is_input(row))
    yield f"def {name}({arguments}):" if len(arguments) <= _ARGUMENTS_WIDTH else f"def {name}(*inputs):"
    place = source = ""
    for run in found:
        if run.like:
            yield from ("", f"    # ---- {_phase(run)}{fold_title(run)}")
            place = source = ""
            continue
        for row in run.rows:
            if row.kind is not Kind.OUTPUT and _place(row) != place:
                place = _place(row)
                yield from ("", f"    # ---- {place}")
            if row.source not in ("", source) and not is_input(row):
                yield f"    # {row.source}"
            source = row.source or source
            yield f"    {code(row):<{_CODE_WIDTH}}  # {comment(row)}".rstrip(" #")


def is_input(row: Row) -> bool:
    """Whether a row is an argument of the program."""
    return row.kind in (Kind.PARAMETER, Kind.BUFFER, Kind.BATCH, Kind.SEED)


def _phase(run: Run) -> str:
    return f"{run.phase.value} " if run.phase else ""


def _place(row: Row) -> str:
    if is_input(row):
        return f"inputs of {row.layer}" if row.layer and row.label else "inputs"
    return f"{row.phase.value if row.phase else 'step'} {row.layer or '(outside any layer)'}"


def code(row: Row) -> str:
    """The statement of a row."""
    if is_input(row):
        return row.name
    if row.kind is Kind.OUTPUT:
        return f"return {row.arguments}"
    if row.kind is Kind.CONSTANT:
        return f"{row.name} = {row.call}"
    if row.call == "getitem":
        value, _, index = row.arguments.rpartition(", ")
        return f"{row.name} = {value}[{index}]"
    return f"{row.name} = {row.call}({row.arguments})"


def comment(row: Row) -> str:
    """What a row is: label, local and global shape, layout, bytes moved, what it is for."""
    parts = [f"{row.kind.value} {row.label}" if row.label else "", shapes(row), " ".join(row.layout)]
    if row.communication:
        parts.append(communication_text(row))
    if row.roles:
        parts.append("-> " + ", ".join(row.roles))
    return "  ".join(part for part in parts if part)


def shapes(row: Row) -> str:
    """Local shapes, and the global one where it differs."""
    if len(row.local) > _SHAPES:
        return f"{len(row.local)} tensors, {quantity(sum(tensor.num_bytes for tensor in row.local), 'B')}"
    local = ", ".join(map(str, row.local))
    if row.global_shape is None or len(row.local) != 1 or row.local[0].shape == row.global_shape:
        return local
    return f"{local} of {list(row.global_shape)}"


def communication_text(row: Row) -> str:
    """Bytes moved, the group and the tensor served."""
    talk = row.communication
    if talk is None:
        return ""
    ranks = plural(talk.num_ranks, "rank")
    served = ", ".join(talk.serves[:_NAMED])
    more = f" and {len(talk.serves) - _NAMED} more" if len(talk.serves) > _NAMED else ""
    return f"moves {quantity(talk.moved_bytes, 'B')} over {talk.group} ({ranks}) for {served}{more}"
