"""The table of a sweep, as Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from tests.rules.verdict import Outcome, Verdict

README = Path(__file__).parent / "README.md"
COUNTED = (Verdict.SPLIT, Verdict.REPLICATED, Verdict.REFUSED, Verdict.WRONG, Verdict.CRASH, Verdict.NO_SAMPLE)

WHAT = (
    "Written by `python -m tests.rules.sweep` with torch {}. Every operation of "
    "`torch.testing._internal.common_methods_invocations.op_db` is captured (forward, and backward where there is "
    "one), every call of the graph is split over 2 and over 3 ranks in every way that its rule offers, the programs "
    "of all ranks run in lockstep, and every output and gradient is compared with one device. Sizes are mostly odd. "
    "DTensor runs the same operations forward and backward on 2 ranks, with every combination of replicated and split "
    "inputs, on sizes that divide where the database has such; calls that draw random numbers are left out for it."
)
COUNTS = (
    "An operation is split where every call of its forward that computes something has a split on offer, on some "
    "sample. A dim can be split where the plain operation, given parts of its inputs, gives parts or terms of its "
    "outputs (found by trying all dims), or where we split one. DTensor counts as split where one combination is right "
    "and stays split."
)


def table(outcomes: Sequence[Outcome], peers: Sequence[Outcome]) -> str:
    """Counts, the share of operations that are split, and the operations that are not, by reason."""
    parallel = [o for o in outcomes if o.parallel]
    split = [o for o in parallel if o.verdict is Verdict.SPLIT]
    share = 100 * len(split) / max(len(parallel), 1)
    by_name = {p.name: p for p in peers}
    theirs = [by_name[o.name] for o in parallel if by_name[o.name].verdict is not Verdict.NO_SAMPLE]
    their_share = 100 * sum(p.verdict is Verdict.SPLIT for p in theirs) / max(len(theirs), 1)
    lines = [
        "# Operations of torch's database, split in every way that is offered",
        "",
        *paragraph(WHAT.format(torch.__version__)),
        "",
        "| | autopar | DTensor |",
        "| --- | ---: | ---: |",
    ]
    meaning = {
        Verdict.SPLIT: "right and split",
        Verdict.REPLICATED: "right but replicated",
        Verdict.REFUSED: "refused",
        Verdict.WRONG: "wrong",
        Verdict.CRASH: "crash",
        Verdict.NO_SAMPLE: "no sample that fits",
    }
    for verdict in COUNTED:
        ours, other = (sum(o.verdict is verdict for o in side) for side in (outcomes, peers))
        lines.append(f"| {meaning[verdict]} | {ours} | {other} |")
    lines += [
        f"| of those with a dim that can be split, split | {share:.0f} % of {len(parallel)} "
        f"| {their_share:.0f} % of {len(theirs)} |",
        "",
        *paragraph(COUNTS),
        "",
        "## With a dim that can be split, replicated",
        "",
        *listed(
            f"{o.name} ({', '.join(w.removeprefix('aten::') for w in o.whole)})"
            for o in parallel
            if o.verdict is Verdict.REPLICATED
        ),
        "",
        "## Without such a dim",
        "",
        *listed(o.name for o in outcomes if not o.parallel and o.verdict is Verdict.REPLICATED),
        "",
        "## Refused",
        "",
        *(f"- {o.name}: {o.note[:150]}" for o in outcomes if o.verdict is Verdict.REFUSED),
        "",
    ]
    return "\n".join(lines)


def listed(names: Iterable[str]) -> list[str]:
    """Names joined by commas, as a paragraph."""
    return paragraph(", ".join(names)) or ["none"]


def paragraph(text: str) -> list[str]:
    """Lines of at most 118 characters."""
    return textwrap.wrap(text, 118, break_on_hyphens=False, break_long_words=False)
