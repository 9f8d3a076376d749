"""Where the communications of the ranks meet, and the scheduler that advances all ranks in one process.

Every rank is a generator that yields the :class:`Handle` it has to wait for.  The k-th collective of a rank in a group
meets the k-th of the group's other members; the k-th send from one rank to another in a group meets the k-th receive.
Issuing never blocks, waiting does: when nobody can go on, that is a deadlock and is reported, never a hang.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from autopar.cost_models.errors import VerificationError
from autopar.passes.base import Mesh, Program
from autopar.verify.communication import POINT_TO_POINT, Call, Message, Site, check_alone, check_pair, group_members

T = TypeVar("T")
Tensors = list[torch.Tensor]
Results = dict[int, Tensors]
Key = tuple[Any, ...]
_MOST_SHOWN = 8


def check_ranks(programs: Sequence[Program]) -> Mesh:
    """The mesh of ``programs``, which must be one program for every rank of it, in order."""
    if not programs:
        raise VerificationError("no programs were given; one for every rank of the mesh is needed")
    mesh = programs[0].mesh
    found = [p.rank for p in programs]
    if found != list(range(mesh.size)):
        raise VerificationError(f"got programs of ranks {found}; ranks 0 to {mesh.size - 1} are needed, in order")
    strangers = [p.rank for p in programs if p.mesh != mesh]
    if strangers:
        raise VerificationError(f"programs of ranks {strangers} are for another mesh than rank 0's {mesh}")
    return mesh


@dataclass(slots=True, eq=False)
class Meeting:
    """The calls that belong together; ``results`` holds what every rank gets once all have come."""

    position: int
    participants: tuple[int, ...]
    calls: dict[int, Call] = field(default_factory=dict)
    tensors: dict[int, Tensors] = field(default_factory=dict)
    results: Results | None = None
    waiters: list[int] = field(default_factory=list)

    @property
    def missing(self) -> list[int]:
        """Ranks that have not come yet."""
        return [r for r in self.participants if r not in self.calls]


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """The value of a communication that may not have happened yet: tensor ``index`` of a rank's results."""

    meeting: Meeting
    rank: int
    index: int

    @property
    def done(self) -> bool:
        """Whether the communication has happened."""
        return self.meeting.results is not None

    @property
    def value(self) -> torch.Tensor:
        """The tensor that this rank gets."""
        if self.meeting.results is None:
            raise VerificationError(f"the value is not there yet: {self.meeting.calls[self.rank]}")
        return self.meeting.results[self.rank][self.index]


Waits = Generator[Handle, None, T]


class Switchboard:
    """Matches the calls of all ranks of ``mesh`` and computes their results with ``compute``.

    Where ``present`` is given, only its ranks are waited for: they stand for the others.
    """

    def __init__(
        self,
        mesh: Mesh,
        compute: Callable[[Sequence[Call], Sequence[Tensors]], list[Tensors]],
        present: frozenset[int] | None = None,
    ) -> None:
        self._mesh = mesh
        self._compute = compute
        self._absent = frozenset() if present is None else frozenset(range(mesh.size)) - present
        self._issued: Counter[tuple[int, Key]] = Counter()
        self._open: dict[tuple[int, Key], Meeting] = {}
        self._members: dict[tuple[str, int], tuple[int, ...]] = {}
        self.woken: deque[int] = deque()

    def call(self, message: Message, rank: int, node: torch.fx.Node | Site) -> Call:
        """``message`` as a call of ``rank``."""
        key = (message.group, rank)
        if key not in self._members:
            self._members[key] = group_members(self._mesh, message.group, rank, node)
        return Call(message=message, rank=rank, members=self._members[key], node=node)

    def post(self, call: Call, tensors: Tensors) -> list[Handle]:
        """Issue ``call``: match it, check it, complete the meeting if it was the last; one handle a tensor."""
        check_alone(call)
        key, participants = _meeting_key(call)
        if self._absent:
            participants = tuple(rank for rank in participants if rank not in self._absent)
        position = self._issued[call.rank, key]
        self._issued[call.rank, key] += 1
        meeting = self._open.setdefault((position, key), Meeting(position, participants))
        for other in meeting.calls.values():
            try:
                check_pair(other, call)
            except VerificationError as error:
                raise VerificationError(f"{_label(call, position)} does not match: {error}") from None
            if call.message.symmetric:
                break  # equality is transitive: comparing with the first to come is enough
        meeting.calls[call.rank] = call
        meeting.tensors[call.rank] = tensors
        if len(meeting.calls) == len(participants):
            del self._open[position, key]
            ordered = [meeting.calls[r] for r in participants]
            outcome = self._compute(ordered, [meeting.tensors[r] for r in participants])
            meeting.results = dict(zip(participants, outcome, strict=True))
            meeting.tensors.clear()
            self.woken.extend(meeting.waiters)
        return [Handle(meeting, call.rank, i) for i in range(max(len(tensors), 1))]

    @property
    def unmet(self) -> list[Meeting]:
        """Meetings that somebody has not come to."""
        return list(self._open.values())


def _meeting_key(call: Call) -> tuple[Key, tuple[int, ...]]:
    message = call.message
    if message.op not in POINT_TO_POINT:
        return (message.group, call.members), call.members
    peer = call.members[message.peer]
    ends = (call.rank, peer) if message.op == "isend" else (peer, call.rank)
    return (message.group, call.members, ends), ends


def _label(call: Call, position: int) -> str:
    if call.message.op in POINT_TO_POINT:
        _, ends = _meeting_key(call)
        return f"transfer {position} from rank {ends[0]} to rank {ends[1]} in group {call.message.group!r}"
    return f"collective {position} of group {call.message.group!r} (ranks {', '.join(map(str, call.members))})"


def run_together(ranks: Mapping[int, Waits[T]], board: Switchboard) -> dict[int, T]:
    """Advance all ranks until each has returned; what they returned, by rank.

    Raises:
        VerificationError: the ranks wait for each other for ever, or a communication was issued that others never join.
    """
    results: dict[int, T] = {}
    waiting: dict[int, Handle] = {}
    ready = deque(ranks)
    while ready:
        rank = ready.popleft()
        waiting.pop(rank, None)
        try:
            handle = next(ranks[rank])
        except StopIteration as stop:
            results[rank] = stop.value
        else:
            waiting[rank] = handle
            handle.meeting.waiters.append(rank)
        ready.extend(board.woken)
        board.woken.clear()
    if waiting:
        raise VerificationError(_deadlock(waiting, finished=set(results)))
    if board.unmet:
        raise VerificationError(_unmet(board.unmet))
    return {rank: results[rank] for rank in ranks}


def _deadlock(waiting: dict[int, Handle], finished: set[int]) -> str:
    lines = ["deadlock: a real run of these programs would hang"]
    for rank, handle in sorted(waiting.items())[:_MOST_SHOWN]:
        meeting = handle.meeting
        call = meeting.calls[rank]
        lines.append(f"  {call}")
        lines.append(f"    waits in {_label(call, meeting.position)}")
        for other in meeting.missing[:_MOST_SHOWN]:
            if other in finished:
                lines.append(f"    for rank {other}, which has finished")
            else:
                lines.append(f"    for rank {other}, which waits at {waiting[other].meeting.calls[other]}")
    if len(waiting) > _MOST_SHOWN:
        lines.append(f"  and {len(waiting) - _MOST_SHOWN} more ranks wait")
    return "\n".join(lines)


def _unmet(meetings: list[Meeting]) -> str:
    lines = ["communications were issued that other ranks never join"]
    for meeting in meetings[:_MOST_SHOWN]:
        call = next(iter(meeting.calls.values()))
        absent = ", ".join(map(str, meeting.missing[:_MOST_SHOWN]))
        lines.append(f"  {call}\n    {_label(call, meeting.position)}: rank {absent} never comes")
    return "\n".join(lines)
