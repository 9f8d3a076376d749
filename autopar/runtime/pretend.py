"""A step in which nobody computes: computations are slept for as long as they should take, communication is real.

Schedules and communication can so be measured with more ranks than processors: a sleep needs none.  What is slept is
what the cost model predicts; tensors have the right shapes and hold zeros.  Every action notes when it ran, by a clock
that the processes of one machine share.
"""

from __future__ import annotations

import enum
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from autopar.cost_models.collectives import Transfer
from autopar.cost_models.compute import KernelModel
from autopar.passes.arrange_stages import ACTION
from autopar.passes.base import Program
from autopar.passes.pricing import price_node
from autopar.passes.torch_ops import IRECV, ISEND, WAIT
from autopar.runtime.bind import group_position
from autopar.runtime.sends import send


class Doing(enum.Enum):
    """What a rank does for a while."""

    COMPUTE = "compute"
    ISSUE = "issue"
    WAIT = "wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Something that a rank did.

    Attributes:
        doing: what kind of thing.
        name: the actions of the schedule that were computed ("1F0"), or the node that communicates.
        start_s, end_s: when, by the clock of the machine.
    """

    doing: Doing
    name: str
    start_s: float
    end_s: float


@dataclass(slots=True, kw_only=True)
class _Sleep:
    """A run of computations without communication in between."""

    seconds: float
    names: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Issue:
    """A communication: ``args`` hold zeros in place of tensors; a receive gets a new buffer each time."""

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wait:
    """A wait for one of the tensors of the ``issue``-th communication."""

    name: str
    result: _Result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """The value of the ``issue``-th communication, or tensor ``index`` of it."""

    issue: int
    index: int | None = None


class PretendedStep:
    """The step of one rank with sleeps in place of computations.

    Args:
        program: the rank's program.
        kernels: says how long each computation takes.
        real_name: the name of the process group behind a name such as "pp" or "dp+tp".

    Computations between two communications are slept at once, since short sleeps are not exact.
    """

    def __init__(self, program: Program, kernels: KernelModel, real_name: Callable[[str], str]) -> None:
        self._kernels, self._real_name = kernels, real_name
        self._actions: list[_Sleep | _Issue | _Wait] = []
        self._issued = 0
        self._zeros: dict[tuple[tuple[int, ...], torch.dtype], torch.Tensor] = {}
        count = len(program.graph_module.graph.find_nodes(op="placeholder"))
        self._read(program.graph_module, [None] * count)

    @property
    def compute_s(self) -> float:
        """What is slept in all."""
        return sum(a.seconds for a in self._actions if isinstance(a, _Sleep))

    def run(self) -> list[Moment]:
        """Run the step; all ranks of its groups must."""
        found: list[Moment] = []
        results: list[Any] = []
        start_s = time.monotonic()
        for action in self._actions:
            if isinstance(action, _Sleep):
                time.sleep(action.seconds)
                doing, name = Doing.COMPUTE, " ".join(action.names)
            elif isinstance(action, _Issue):
                args = (torch.zeros_like(action.args[0]), *action.args[1:]) if action.target is IRECV else action.args
                results.append(action.target(*args, **action.kwargs))
                doing, name = Doing.ISSUE, action.name
            else:
                result = results[action.result.issue]
                WAIT(result if action.result.index is None else result[action.result.index])
                doing, name = Doing.WAIT, action.name
            end_s = time.monotonic()
            found.append(Moment(doing=doing, name=name, start_s=start_s, end_s=end_s))
            start_s = end_s
        return found

    def _read(self, module: fx.GraphModule, inputs: Sequence[Any]) -> object:
        """Note what ``module`` does; a :class:`_Result` for every value of a communication, else None."""
        held: dict[fx.Node, Any] = {}
        feed = iter(inputs)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                held[node] = next(feed)
            elif node.op == "output":
                return map_arg(node.args[0], held.get)
            elif node.op == "call_module" and isinstance(called := module.get_submodule(node.target), fx.GraphModule):
                if ACTION in node.meta:
                    self._computes(0.0, str(node.meta[ACTION]))
                held[node] = self._read(called, map_arg(node.args, held.get))
            elif node.target is operator.getitem:
                held[node] = _item(held.get(node.args[0]), node.args[1])
            elif node.target is WAIT:
                if isinstance(result := held.get(node.args[0]), _Result):
                    self._actions.append(_Wait(name=node.name, result=result))
            elif (position := group_position(node)) is not None:
                held[node] = self._communicates(node, position)
            else:
                self._prices(node)
        return None

    def _prices(self, node: fx.Node) -> None:
        item = price_node(node)
        if item is not None and not isinstance(item.cost, Transfer):
            self._computes(self._kernels.eager_seconds(item.cost))

    def _computes(self, seconds: float, name: str = "") -> None:
        if not self._actions or not isinstance(self._actions[-1], _Sleep):
            self._actions.append(_Sleep(seconds=0.0, names=[]))
        last = self._actions[-1]
        if isinstance(last, _Sleep):
            last.seconds += seconds
            last.names += [name] if name else []

    def _communicates(self, node: fx.Node, group: int) -> _Result:
        args = list(map_arg(node.args, self._stand_in))
        args[group] = self._real_name(str(args[group]))
        target = send if node.target is ISEND else node.target
        kwargs = map_arg(node.kwargs, self._stand_in)
        self._actions.append(_Issue(name=node.name, target=target, args=tuple(args), kwargs=kwargs))  # type: ignore[arg-type]
        self._issued += 1
        return _Result(issue=self._issued - 1)

    def _stand_in(self, node: fx.Node) -> torch.Tensor:
        """Zeros like the value of ``node``, shared by all that read such ones."""
        value = node.meta["val"]
        key = (tuple(value.shape), value.dtype)
        if key not in self._zeros:
            self._zeros[key] = torch.zeros(key[0], dtype=key[1])
        return self._zeros[key]


def _item(value: object, index: Any) -> object:  # noqa: ANN401 - an argument of a node
    if isinstance(value, _Result):
        return _Result(issue=value.issue, index=index)
    return value[index] if isinstance(value, list | tuple) else None


def idle_share(ranks: Sequence[Sequence[Moment]], rank: int) -> float:
    """Share of a step in which ``rank`` computes nothing, from its first start on any rank to its last end.

    >>> def slept(start_s, end_s):
    ...     return Moment(doing=Doing.COMPUTE, name="", start_s=start_s, end_s=end_s)
    >>> idle_share([[slept(0.0, 3.0)], [slept(3.0, 4.0)]], 0)
    0.25
    """
    moments = [moment for line in ranks for moment in line]
    step_s = max(m.end_s for m in moments) - min(m.start_s for m in moments)
    return 1 - sum(m.end_s - m.start_s for m in ranks[rank] if m.doing is Doing.COMPUTE) / step_s
