"""The plans that a search weighed, as a table for people and a document for machines."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from autopar.report.text import duration, quantity, table

if TYPE_CHECKING:
    from autopar.search.uniform import Ranking, Weighed

SHOWN = 10


def weighed_table(ranking: Ranking, shown: int = SHOWN) -> str:
    """The best plans, what they cost, and why all but the first lose."""
    rows = [["", "plan", "step", "peak", "most of it", "why not"]]
    for number, weighed in enumerate(ranking.weighed[:shown], 1):
        price = weighed.price
        rows.append(
            [
                f"  {number}",
                weighed.candidate.text(),
                duration(price.step_s) if price else "-",
                quantity(price.peak_bytes, "B") if price else "-",
                price.owner if price else "-",
                weighed.reason or ("chosen" if weighed.fits else "the smallest peak"),
            ]
        )
    text = (
        f"{ranking.considered} uniform plans considered, {len(ranking.weighed)} priced"
        f"{'' if ranking.complete else ' (the time was over)'}; a rank may use {quantity(ranking.budget_bytes, 'B')}"
    )
    return "\n".join([text, *table(rows, right=(2, 3))])


def weighed_document(ranking: Ranking, assumptions: str) -> dict[str, Any]:
    """All plans that were priced: ``considered``, ``complete``, ``budget_bytes``, ``assumptions`` and ``plans``."""
    return {
        "considered": ranking.considered,
        "complete": ranking.complete,
        "budget_bytes": ranking.budget_bytes,
        "assumptions": assumptions,
        "plans": [dict(_described(weighed)) for weighed in ranking.weighed],
    }


def _described(weighed: Weighed) -> Iterator[tuple[str, Any]]:
    yield from dataclasses.asdict(weighed.candidate).items()
    price = weighed.price
    yield "step_time_s", None if price is None else price.step_s
    yield "peak_bytes", None if price is None else price.peak_bytes
    yield "peak_owner", None if price is None else price.owner
    yield "parts_s", None if price is None else dict(price.parts)
    yield "fits", weighed.fits
    yield "reason", weighed.reason
