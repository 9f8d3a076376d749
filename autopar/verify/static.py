"""The static check: do the communications of all ranks fit?  Nothing is run; shapes come from ``meta["val"]``."""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from autopar.cost_models.errors import VerificationError
from autopar.passes.base import Mesh, Program
from autopar.verify.communication import (
    WAIT,
    Call,
    Message,
    Site,
    communication_name,
    read_arguments,
    read_messages,
    where,
)
from autopar.verify.happens_before import HappensBefore
from autopar.verify.meetings import Handle, Switchboard, Tensors, Waits, check_ranks, run_together


@dataclass(frozen=True, slots=True)
class Event:
    """A communication is issued (``message``) or waited for (``awaits``: number of the issue, index of its tensor)."""

    site: Site
    message: Message | None = None
    awaits: tuple[int, int] = (-1, -1)

    @property
    def signature(self) -> object:
        """What ranks that communicate alike have in common."""
        return self.message or self.awaits


Outline = list[Event]


@dataclass(frozen=True, slots=True)
class _Pending:
    """A value that is the result of the ``issue``-th communication."""

    issue: int
    index: int


def check_programs(programs: Sequence[Program]) -> None:
    """Check, without running anything, that the communications of all ranks fit together.

    In every group the k-th collectives of all members must agree in op, shapes, dtypes, reduce op and layer, every send
    must meet its receive, and no order of waits may make the ranks wait for each other, even where a send blocks until
    it is received.  Of ranks that communicate alike along an axis of the mesh, one is looked at.

    Args:
        programs: the programs of ranks 0, 1, ... of one mesh.

    Raises:
        VerificationError: the first difference: ranks, ops, nodes, layers, source lines; or the deadlock.
    """
    mesh = check_ranks(programs)
    cache: dict[int, Outline] = {}
    outlines = []
    for program in programs:
        if id(program.graph_module) not in cache:
            cache[id(program.graph_module)] = outline(program)
        outlines.append(cache[id(program.graph_module)])
    check_outlines(mesh, outlines)


def outline(program: Program) -> Outline:
    """What a program issues and waits for, in order, as ranks can tell each other.

    Raises:
        VerificationError: the result of a communication is used before it is waited for.
    """
    reader = _Reader(program.rank)
    module = program.graph_module
    reader.read(module, [None] * len(module.graph.find_nodes(op="placeholder")), outermost=True)
    return reader.events


def digest(outline: Outline) -> str:
    """A checksum that ranks have in common where they communicate alike."""
    return hashlib.blake2b(repr([event.signature for event in outline]).encode(), digest_size=16).hexdigest()


def check_outlines(mesh: Mesh, outlines: Sequence[Outline]) -> None:
    """As :func:`check_programs`, from the outlines of the programs of ranks 0, 1, ... of ``mesh``."""
    chosen = _representatives(mesh, outlines)
    board = Switchboard(mesh, _no_results, present=frozenset(chosen))
    order = HappensBefore()
    run_together({rank: _walk(rank, outlines[rank], board, order) for rank in chosen}, board)
    order.check()


def _representatives(mesh: Mesh, events: Sequence[Outline]) -> list[int]:
    """Ranks that stand for all.

    An axis of the mesh is folded where ranks along it communicate alike, and where messages in groups along it name no
    ranks: then such ranks do the same at the same time, each meeting is joined by all of them or by none, and what
    waits for what is the same for each.
    """
    chosen = list(range(mesh.size))
    for i, axis in enumerate(mesh.axes):
        firsts = [rank for rank in chosen if mesh.coords(rank)[i] == 0]
        stride = math.prod(mesh.sizes[i + 1 :])
        if _name_no_rank(axis, [events[rank] for rank in firsts]) and all(
            _alike(events[first], events[first + step * stride]) for first in firsts for step in range(1, mesh.sizes[i])
        ):
            chosen = firsts
    return chosen


def _name_no_rank(axis: str, events: Sequence[Outline]) -> bool:
    """Whether no message in a group along ``axis`` names a rank."""
    different = {id(own): own for own in events}.values()
    messages = (event.message for own in different for event in own if event.message is not None)
    return all(message.symmetric for message in messages if axis in message.group.split("+"))


def _alike(one: Outline, other: Outline) -> bool:
    """Whether two ranks communicate and wait in the same way."""
    if one is other:
        return True
    return len(one) == len(other) and all(a.signature == b.signature for a, b in zip(one, other, strict=True))


def _walk(rank: int, events: Outline, board: Switchboard, order: HappensBefore) -> Waits[None]:
    issued: list[list[Handle]] = []
    for event in events:
        if event.message is not None:
            call = board.call(event.message, rank, event.site)
            issued.append(board.post(call, []))
            order.issued(call, issued[-1][0].meeting)
            continue
        issue, _ = event.awaits
        handle = issued[issue][0]
        order.waited(rank, handle.meeting)
        if not handle.done:
            yield handle


def _no_results(calls: Sequence[Call], tensors: Sequence[Tensors]) -> list[Tensors]:
    return [[] for _ in calls]


class _Reader:
    """Walks a program and the graphs it calls, and collects what it issues and waits for."""

    def __init__(self, rank: int) -> None:
        self.events: Outline = []
        self._rank = rank
        self._issued = 0
        self._silent: dict[int, bool] = {}

    def read(self, module: fx.GraphModule, inputs: Sequence[Any], *, outermost: bool) -> object:
        """Result of the graph: a _Pending for every value of a communication that was not waited for, else None."""
        pending: dict[fx.Node, Any] = {}
        feed = iter(inputs)
        for node in module.graph.nodes:
            name = communication_name(node)
            if name == WAIT:
                self._wait(node, pending.get(node.args[0]))
                continue
            if name is not None:
                value: Any = self._issue(node)
            elif node.op == "placeholder":
                value = next(feed)
            elif node.op == "call_module":
                value = self._call(module, node, pending)
            elif node.target is operator.getitem:
                holder = pending.get(node.args[0])
                value = holder[node.args[1]] if isinstance(holder, list | tuple) else None
            elif node.op == "output" and not outermost:
                return map_arg(node.args[0], pending.get)
            else:
                continue
            if value is not None:
                pending[node] = value
                self._refuse_unfinished(module, node, value, outermost=outermost)
        return None

    def _call(self, module: fx.GraphModule, node: fx.Node, pending: dict[fx.Node, Any]) -> object:
        """Result of a called graph; one in which nothing is communicated is not read for every call."""
        called = module.get_submodule(str(node.target))
        if not isinstance(called, fx.GraphModule):
            return None
        given = map_arg(node.args, pending.get)
        if id(called) not in self._silent:
            self._silent[id(called)] = _is_silent(called)
        if self._silent[id(called)] and all(value is None for value in given):
            return None
        return self.read(called, given, outermost=False)

    def _wait(self, node: fx.Node, value: object) -> None:
        if isinstance(value, _Pending):
            self.events.append(Event(Site.of(node), awaits=(value.issue, value.index)))

    def _issue(self, node: fx.Node) -> _Pending | list[_Pending]:
        arguments = read_arguments(node, *map_arg((node.args, node.kwargs), self._example))
        results, site = [], Site.of(node)
        for message in read_messages(node, arguments):
            self.events.append(Event(site, message=message))
            results += [_Pending(self._issued, i) for i in range(len(message.shapes))]
            self._issued += 1
        return results if isinstance(arguments["tensors"], list | tuple) else results[0]

    def _example(self, node: fx.Node) -> torch.Tensor:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            raise VerificationError(f"rank {self._rank}: meta['val'] holds no tensor, got {value!r} {where(node)}")
        return value

    def _refuse_unfinished(self, module: fx.GraphModule, source: fx.Node, value: object, *, outermost: bool) -> None:
        """Refuse that the result of a communication is used before it was waited for."""
        if not isinstance(value, _Pending):
            return
        for node in source.users:
            passes_on = node.op == "output" and not outermost
            if node.op == "call_module":
                passes_on = isinstance(module.get_submodule(str(node.target)), fx.GraphModule)
            if not passes_on and node.target is not operator.getitem and communication_name(node) != WAIT:
                raise VerificationError(
                    f"rank {self._rank}: {node.target} uses the result of a communication that was never waited for "
                    f"{where(node)}; put wait_tensor after {where(source)}"
                )


def _is_silent(module: fx.GraphModule) -> bool:
    """Whether nothing is communicated in ``module`` and the graphs it calls."""
    graphs = (m.graph for m in module.modules() if isinstance(m, fx.GraphModule))
    return all(communication_name(node) is None for graph in graphs for node in graph.nodes)
