"""What may become of an operation in a sweep."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Verdict(Enum):
    """From the least to the most telling: of several samples the last in this order counts."""

    NO_SAMPLE = "no sample"
    REFUSED = "refused"
    REPLICATED = "replicated"
    SPLIT = "split"
    WRONG = "WRONG"
    CRASH = "CRASH"


@dataclass(slots=True)
class Outcome:
    """What became of one operation over its samples.

    Attributes:
        name: the operation's name in the database.
        verdict: the most telling of the samples' verdicts: one sample that is split is enough for "split".
        splits: (call, choice) pairs that ran and were right.
        whole: calls of the forward that had something to split and could not.
        parallel: whether the plain operation gives parts of its outputs for parts of its inputs in some dim.
        note: why.
    """

    name: str
    verdict: Verdict = Verdict.NO_SAMPLE
    splits: int = 0
    whole: dict[str, None] = field(default_factory=dict)
    parallel: bool = False
    note: str = ""

    def add(self, verdict: Verdict, note: str = "") -> None:
        """Take one more verdict into account."""
        order = list(Verdict)
        if order.index(verdict) > order.index(self.verdict):
            self.verdict, self.note = verdict, note or self.note
