"""The static check: do the communications of all ranks fit?  Nothing is run; shapes come from ``meta["val"]``."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from autopar.cost_models.errors import VerificationError
from autopar.passes.base import Program
from autopar.verify.communication import (
    WAIT,
    Call,
    Message,
    check_alone,
    communication_name,
    read_arguments,
    read_messages,
    where,
)
from autopar.verify.happens_before import HappensBefore
from autopar.verify.meetings import Handle, Switchboard, Tensors, Waits, check_ranks, run_together


@dataclass(frozen=True, slots=True)
class _Event:
    """A communication is issued (``message``) or waited for (``awaits``: number of the issue, index of its tensor)."""

    node: fx.Node
    message: Message | None = None
    awaits: tuple[int, int] = (-1, -1)

    @property
    def signature(self) -> object:
        return self.message or self.awaits


@dataclass(frozen=True, slots=True)
class _Pending:
    """A value that is the result of the ``issue``-th communication."""

    issue: int
    index: int


def check_programs(programs: Sequence[Program]) -> None:
    """Check, without running anything, that the communications of all ranks fit together.

    In every group the k-th collectives of all members must agree in op, shapes, dtypes, reduce op and layer, every send
    must meet its receive, and no order of waits may make the ranks wait for each other, even where a send blocks until
    it is received.  Programs that communicate alike are folded into one.

    Args:
        programs: the programs of ranks 0, 1, ... of one mesh.

    Raises:
        VerificationError: the first difference: ranks, ops, nodes, layers, source lines; or the deadlock.
    """
    mesh = check_ranks(programs)
    cache: dict[int, list[_Event]] = {}
    events = []
    for program in programs:
        if id(program.graph_module) not in cache:
            cache[id(program.graph_module)] = _communications(program.graph_module, program.rank)
        events.append(cache[id(program.graph_module)])
    board = Switchboard(mesh, _no_results)
    if _all_alike(events):
        for event in events[0]:
            if event.message is not None:
                check_alone(board.call(event.message, 0, event.node))
        return
    order = HappensBefore()
    run_together([_walk(rank, own, board, order) for rank, own in enumerate(events)], board)
    order.check()


def _all_alike(events: Sequence[list[_Event]]) -> bool:
    """Whether every rank does the same, and no message names a rank: then everything meets."""
    if not all(e.message is None or e.message.symmetric for e in events[0]):
        return False
    first = [e.signature for e in events[0]]
    others = {id(own): own for own in events}.values()
    return all([e.signature for e in own] == first for own in others)


def _walk(rank: int, events: list[_Event], board: Switchboard, order: HappensBefore) -> Waits[None]:
    issued: list[list[Handle]] = []
    for event in events:
        if event.message is not None:
            call = board.call(event.message, rank, event.node)
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


def _communications(module: fx.GraphModule, rank: int) -> list[_Event]:
    reader = _Reader(rank)
    inputs = [None] * sum(n.op == "placeholder" for n in module.graph.nodes)
    reader.read(module, inputs, outermost=True)
    return reader.events


class _Reader:
    """Walks a program and the graphs it calls, and collects what it issues and waits for."""

    def __init__(self, rank: int) -> None:
        self.events: list[_Event] = []
        self._rank = rank
        self._issued = 0

    def read(self, module: fx.GraphModule, inputs: Sequence[Any], *, outermost: bool) -> object:
        """Result of the graph: a _Pending for every value of a communication that was not waited for, else None."""
        pending: dict[fx.Node, Any] = {}
        feed = iter(inputs)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                pending[node] = next(feed)
                continue
            name = communication_name(node)
            if name == WAIT:
                self._wait(node, pending.get(node.args[0]))
            elif name is not None:
                self._refuse_unfinished(node, pending)
                pending[node] = self._issue(node)
            elif node.op == "call_module" and isinstance(called := module.get_submodule(node.target), fx.GraphModule):
                pending[node] = self.read(called, map_arg(node.args, pending.get), outermost=False)
            elif node.target is operator.getitem:
                holder = pending.get(node.args[0])
                pending[node] = holder[node.args[1]] if isinstance(holder, list | tuple) else None
            elif node.op == "output" and not outermost:
                return map_arg(node.args[0], pending.get)
            else:
                self._refuse_unfinished(node, pending)
        return None

    def _wait(self, node: fx.Node, value: object) -> None:
        if isinstance(value, _Pending):
            self.events.append(_Event(node, awaits=(value.issue, value.index)))

    def _issue(self, node: fx.Node) -> _Pending | list[_Pending]:
        arguments = read_arguments(node, *map_arg((node.args, node.kwargs), self._example))
        results = []
        for message in read_messages(node, arguments):
            self.events.append(_Event(node, message=message))
            results += [_Pending(self._issued, i) for i in range(len(message.shapes))]
            self._issued += 1
        return results if isinstance(arguments["tensors"], list | tuple) else results[0]

    def _example(self, node: fx.Node) -> torch.Tensor:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            raise VerificationError(f"rank {self._rank}: meta['val'] holds no tensor, got {value!r} {where(node)}")
        return value

    def _refuse_unfinished(self, node: fx.Node, pending: dict[fx.Node, Any]) -> None:
        for used in node.all_input_nodes:
            if isinstance(pending.get(used), _Pending):
                raise VerificationError(
                    f"rank {self._rank}: {node.target} uses the result of a communication that was never waited for "
                    f"{where(node)}; put wait_tensor after {where(used)}"
                )
