"""Run the programs of all ranks in one process, without process groups: collectives are computed where they meet.

The values are what a real job computes (sums in rank order), so a program can be compared with one device, and tests of
a mesh of any size need one process.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import reduce
from typing import Any, cast

import torch
from torch import fx
from torch.fx.node import map_arg

from autopar.cost_models.errors import VerificationError
from autopar.passes.base import Program
from autopar.verify.communication import (
    WAIT,
    Call,
    communication_name,
    read_arguments,
    read_messages,
    tensors_of,
    where,
)
from autopar.verify.meetings import Handle, Switchboard, Tensors, Waits, check_ranks, run_together

Observer = Callable[[int, fx.Node, Any], None]

_COMBINE: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def run_lockstep(
    programs: Sequence[Program],
    inputs: Sequence[Sequence[Any]],
    *,
    observer: Observer | None = None,
) -> list[tuple[Any, ...]]:
    """Run one program a rank together and return the output tuple of each.

    Args:
        programs: the programs of ranks 0, 1, ... of one mesh.
        inputs: for each rank the values of its placeholders, in order (the random seed last, if there is one).
        observer: called with (rank, node, value) after every node of a program's own graph whose value is there.

    Random ops draw from the default CPU generator: every rank starts from the state it has at the call, as if it ran
    alone, and the state is put back at the end.

    Raises:
        VerificationError: collectives do not match, the ranks deadlock, a value is used before it was waited for, or a
            node fails; the message names rank, node, layer and source line.
    """
    mesh = check_ranks(programs)
    board = Switchboard(mesh, _exchange)
    start = torch.get_rng_state()
    orders: dict[int, _Order] = {}
    ranks = {}
    for program, values in zip(programs, inputs, strict=True):
        state = start if draws_random_numbers(program.graph_module) else None
        ranks[program.rank] = _Rank(program, board, observer, orders, state).run(values)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.callback(torch.set_rng_state, start)
        return list(run_together(ranks, board).values())


def draws_random_numbers(module: fx.GraphModule) -> bool:
    """Whether a node of ``module``, or of a graph it calls, draws from the default generator."""
    for node in module.graph.nodes:
        if node.op == "call_function" and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return True
        if node.op == "call_module":
            called = module.get_submodule(node.target)
            if isinstance(called, fx.GraphModule) and draws_random_numbers(called):
                return True
    return False


_Order = list[tuple[fx.Node, tuple[fx.Node, ...]]]
_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]


def _execution_order(graph: fx.Graph) -> _Order:
    """Every node with the values that are used by it for the last time (itself, when nobody uses it)."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        last[node] = node
        for used in node.all_input_nodes:
            last[used] = node
    dead: dict[fx.Node, list[fx.Node]] = {}
    for used, node in last.items():
        dead.setdefault(node, []).append(used)
    return [(node, tuple(dead.get(node, ()))) for node in graph.nodes]


class _Rank:
    """One rank's walk over its program; yields the handles it has to wait for."""

    def __init__(
        self,
        program: Program,
        board: Switchboard,
        observer: Observer | None,
        orders: dict[int, _Order],
        random_state: torch.Tensor | None,
    ) -> None:
        self._program = program
        self._rank = program.rank
        self._board = board
        self._observer = observer
        self._orders = orders
        self._random_state = random_state

    def run(self, inputs: Sequence[Any]) -> Waits[tuple[Any, ...]]:
        if self._random_state is not None:
            torch.set_rng_state(self._random_state)
        result = yield from self._run_graph(self._program.graph_module, inputs, outermost=True)
        return tuple(result)

    def _run_graph(self, module: fx.GraphModule, inputs: Sequence[Any], *, outermost: bool) -> Waits[Any]:
        graph = module.graph
        if id(graph) not in self._orders:
            self._orders[id(graph)] = _execution_order(graph)
        feed = self._feed(graph, inputs)
        values: dict[fx.Node, Any] = {}
        for node, dead in self._orders[id(graph)]:
            if node.op == "placeholder":
                value = next(feed)
            elif node.op == "get_attr":
                value = _attribute(module, str(node.target))
            else:
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                if node.op == "output":
                    if outermost:
                        self._refuse_unfinished(node, args)
                    return args[0]
                value = yield from self._run_node(module, node, args, kwargs)
            values[node] = value
            if self._observer is not None and outermost and not isinstance(value, Handle | list):
                self._observer(self._rank, node, value)
            for name in dead:
                del values[name]
        raise VerificationError(f"rank {self._rank}: the program has no output node")

    def _feed(self, graph: fx.Graph, inputs: Sequence[Any]) -> Iterator[Any]:
        wanted = sum(n.op == "placeholder" for n in graph.nodes)
        if wanted != len(inputs):
            raise VerificationError(f"rank {self._rank}: got {len(inputs)} inputs for a graph of {wanted} placeholders")
        return iter(inputs)

    def _run_node(self, module: fx.GraphModule, node: fx.Node, args: _Args, kwargs: _Kwargs) -> Waits[Any]:
        name = communication_name(node)
        if name == WAIT:
            return (yield from self._wait(args[0]))
        if name is not None:
            return self._communicate(node, args, kwargs)
        if node.op == "call_module":
            called = module.get_submodule(str(node.target))
            if isinstance(called, fx.GraphModule):
                return (yield from self._run_graph(called, args, outermost=False))
            return self._compute(node, called, args, kwargs)
        if node.op == "call_method":
            return self._compute(node, getattr(args[0], str(node.target)), args[1:], kwargs)
        return self._compute(node, cast("Callable[..., Any]", node.target), args, kwargs)

    def _wait(self, value: object) -> Waits[Any]:
        if not isinstance(value, Handle):
            return value
        if not value.done:
            state = None if self._random_state is None else torch.get_rng_state()
            yield value
            if state is not None:
                torch.set_rng_state(state)
        return value.value

    def _communicate(self, node: fx.Node, args: _Args, kwargs: _Kwargs) -> Handle | list[Handle]:
        self._refuse_unfinished(node, (args, kwargs))
        arguments = read_arguments(node, args, kwargs)
        tensors = tensors_of(arguments)
        messages = read_messages(node, arguments)
        pieces = [[t] for t in tensors] if "ops" in arguments else [tensors]
        handles = [
            handle
            for message, piece in zip(messages, pieces, strict=True)
            for handle in self._board.post(self._board.call(message, self._rank, node), piece)
        ]
        return handles if isinstance(arguments["tensors"], list | tuple) else handles[0]

    def _compute(self, node: fx.Node, function: Callable[..., Any], args: _Args, kwargs: _Kwargs) -> object:
        if function is not operator.getitem:  # coalesced communications return lists of unfinished values
            self._refuse_unfinished(node, (args, kwargs))
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise VerificationError(
                f"rank {self._rank}: {node.target} failed on {_shapes((args, kwargs))} {where(node)}: {error}"
            ) from error

    def _refuse_unfinished(self, node: fx.Node, values: object) -> None:
        for value in _leaves(values):
            if isinstance(value, Handle):
                raise VerificationError(
                    f"rank {self._rank}: {node.target} uses the result of a communication that was never waited for "
                    f"{where(node)}; put wait_tensor between it and {value.meeting.calls[self._rank]}"
                )


def _leaves(value: object) -> list[object]:
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def _shapes(values: object) -> str:
    return ", ".join(
        f"{str(v.dtype).removeprefix('torch.')}{list(v.shape)}" for v in _leaves(values) if isinstance(v, torch.Tensor)
    )


def _attribute(module: torch.nn.Module, path: str) -> object:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _exchange(calls: Sequence[Call], tensors: Sequence[Tensors]) -> list[Tensors]:
    """What every member of a meeting gets, as fresh contiguous tensors, in the order of ``calls``."""
    message = calls[0].message
    if message.op in {"isend", "irecv"}:
        sent, buffer = tensors[0][0], tensors[1][0]
        # A receive writes into the buffer it was given, and returns it.
        return [[sent.new_empty(0)], [buffer.copy_(sent)]]
    columns = [_exchange_one(calls, [own[i] for own in tensors]) for i in range(len(tensors[0]))]
    return [list(row) for row in zip(*columns, strict=True)]


def _exchange_one(calls: Sequence[Call], tensors: Tensors) -> Tensors:
    message, size = calls[0].message, len(calls)
    op = message.op.removesuffix("_coalesced")
    if op == "all_reduce":
        total = _combined(message.reduce_op, tensors)
        return [_fresh(total) for _ in calls]
    if op == "all_gather_into_tensor":
        whole = torch.cat(tensors)
        return [_fresh(whole) for _ in calls]
    if op == "reduce_scatter_tensor":
        return [_fresh(part) for part in _combined(message.reduce_op, tensors).tensor_split(size)]
    if op == "broadcast":
        return [_fresh(tensors[message.root]) for _ in calls]
    if op == "all_to_all_single":
        sent = [torch.split(t, list(c.message.sends)) for t, c in zip(tensors, calls, strict=True)]
        return [torch.cat([pieces[i] for pieces in sent]) for i in range(size)]
    raise VerificationError(f"no way to compute {message.op}: {calls[0]}")


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _combined(reduce_op: str, tensors: Tensors) -> torch.Tensor:
    total = reduce(_COMBINE[reduce_op], tensors)
    return total / len(tensors) if reduce_op == "avg" else total
