"""Proof that ranks cannot wait for each other, for backends on which a communication blocks until everyone has come.

NCCL, and gloo with large messages, end a send only when its receive has been posted, and run the communications of one
group (between two ranks: of that pair) one after another.  The program order of every rank, that order of every group,
and the meeting of all members give a graph of what happens before what; a cycle in it is a deadlock.
"""

from __future__ import annotations

from collections.abc import Hashable
from graphlib import CycleError, TopologicalSorter

from torch import fx

from autopar.cost_models.errors import VerificationError
from autopar.verify.communication import POINT_TO_POINT, Call, Site
from autopar.verify.meetings import Meeting

Point = tuple[int, int]  # rank, number of its wait


class HappensBefore:
    """Collects what the ranks issue and wait for, and looks for cycles.

    A meeting comes after the last wait before each of its calls, and after the meeting before it in each member's
    queue.  A wait comes after its meeting and after the wait before it.
    """

    def __init__(self) -> None:
        self._before: dict[Hashable, list[Hashable]] = {}
        self._point: dict[int, Point] = {}
        self._last: dict[Hashable, tuple[fx.Node | Site | None, list[Meeting], list[Meeting]]] = {}

    def issued(self, call: Call, meeting: Meeting) -> None:
        """``call`` was issued and belongs to ``meeting``."""
        before = self._before.setdefault(meeting, [])
        if call.rank in self._point:
            before.append(self._point[call.rank])
        queue: Hashable = (call.rank, call.message.group, call.members)
        if call.message.op in POINT_TO_POINT:
            queue = (call.rank, call.message.group, call.members[call.message.peer])
        node, together, earlier = self._last.get(queue, (None, [], []))
        if node is not call.node:  # what one call issues as a batch has no order among itself
            together, earlier = [], together
        before += earlier
        together.append(meeting)
        self._last[queue] = (call.node, together, earlier)

    def waited(self, rank: int, meeting: Meeting) -> None:
        """``rank`` waits for ``meeting``."""
        earlier = self._point.get(rank)
        point = (rank, 0 if earlier is None else earlier[1] + 1)
        self._before[point] = [meeting] if earlier is None else [meeting, earlier]
        self._point[rank] = point

    def check(self) -> None:
        """Look for a cycle.

        Raises:
            VerificationError: with the calls along the cycle.
        """
        try:
            TopologicalSorter(self._before).prepare()
        except CycleError as error:
            raise VerificationError(_described(error.args[1])) from None


def _described(cycle: list[Hashable]) -> str:
    lines = ["deadlock: where a send blocks until it is received, these ranks wait for each other"]
    for item in cycle:
        if isinstance(item, Meeting):
            lines += [f"  {call}" for call in item.calls.values()]
        else:
            lines.append(f"    before it, rank {item[0]} waits")  # type: ignore[index]
    return "\n".join(lines)
