"""What a verification found: one row an output of the step, and where the first difference arises."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.passes.base import Mesh, OutputKind, Phase
from autopar.report.text import plural, table


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One output of the step, compared over all ranks with one device.

    Attributes:
        kind, name: which output.
        error: largest absolute difference over the size of the tensor (see :func:`autopar.verify.verify_programs`).
        tolerance: what ``error`` may be.
        ok: whether the output is right.
        worst_rank: rank with the largest error; None where no rank is off.
        drift: largest difference between copies that ranks hold of the same values, on the same scale; 0 is bit-equal.
        note: what else is wrong: shape, dtype, None where one device has a tensor.
    """

    kind: OutputKind
    name: str
    error: float
    tolerance: float
    ok: bool
    worst_rank: int | None = None
    drift: float = 0.0
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """The first value of the step, in the order of one device, that the ranks compute differently.

    Attributes:
        origin: name of the node in the single-device graph.
        op: what it computes.
        layer, phase, source: where it comes from.
        layout: how the value lies on the mesh.
        ranks: ranks whose part is wrong.
        error: largest difference relative to the value's largest entry.
        note: what is wrong besides the numbers (a shape).
    """

    origin: str
    op: str
    layer: str
    phase: Phase | None
    source: str
    layout: str
    ranks: tuple[int, ...]
    error: float
    note: str = ""

    def __str__(self) -> str:
        places = [f"layer {self.layer}" if self.layer else "", self.phase.value if self.phase else "", self.source]
        what = self.note or f"off by {self.error:.2g} of its largest entry"
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        where = ", ".join(p for p in places if p)
        return f"{self.origin} = {self.op}, layout ({self.layout}), {ranks}: {what}" + (f" [{where}]" if where else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Result of a comparison of the programs of all ranks with one device.

    Attributes:
        ok: whether every output is right.
        rows: one an output.
        mesh: the ranks.
        first_mismatch: where the first wrong value arises; None when all is right, or no node says what it computes.
    """

    ok: bool
    rows: tuple[Row, ...]
    mesh: Mesh
    first_mismatch: Mismatch | None = None

    @property
    def worst(self) -> Row | None:
        """The row that is nearest to its tolerance or farthest beyond it."""
        return max(self.rows, key=lambda r: (not r.ok, r.error / r.tolerance if r.tolerance else r.error), default=None)

    def text(self) -> str:
        """The table of all outputs, a summary, and the first mismatch."""
        cells = [["output", "name", "error", "allowed", "drift", "rank", ""]]
        for row in self.rows:
            verdict = "ok" if row.ok else row.note or "WRONG"
            rank = "" if row.worst_rank is None else str(row.worst_rank)
            numbers = [f"{row.error:.1e}", f"{row.tolerance:.0e}", f"{row.drift:.0e}" if row.drift else "0", rank]
            cells.append([row.kind.value, row.name, *numbers, verdict])
        axes = " ".join(f"{a}={s}" for a, s in zip(self.mesh.axes, self.mesh.sizes, strict=True))
        wrong = sum(not r.ok for r in self.rows)
        verdict = f"{wrong} WRONG" if wrong else "all equal to one device"
        lines = table(cells, right=(2, 3, 4, 5))
        lines.append(f"{plural(self.mesh.size, 'rank')} ({axes}), {plural(len(self.rows), 'output')}: {verdict}")
        if self.worst is not None:
            lines.append(f"worst: {self.worst.kind.value} {self.worst.name}, {self.worst.error:.1e}")
        if self.first_mismatch is not None:
            lines.append(f"first wrong value: {self.first_mismatch}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()
