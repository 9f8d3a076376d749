"""What communication costs: one formula a collective and algorithm, the cheapest chosen per size and topology.

Second stage of the cost models.  A formula is a pair of sympy expressions in the number of ranks ``n``, the bytes ``S``
of the message and the fraction that one link has to carry; :func:`formula` shows it, :class:`CollectiveModel` evaluates
it through numpy.  ``S`` is always the size of the *full* tensor: what all_reduce reduces, what all_gather returns, what
reduce_scatter takes in, what all_to_all holds per rank, what a send moves.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import sympy as sp
from numpy.typing import ArrayLike, NDArray

from autopar.cost_models.cluster import Cluster, LinkLevel, Span, read_curve
from autopar.cost_models.errors import ClusterError

N, S, ALPHA, BETA = sp.symbols("n S alpha beta", positive=True)
Floats = NDArray[np.float64]


class Collective(enum.Enum):
    """What a communication does."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    SEND = "send"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One communication of a program.

    Attributes:
        collective: what is done.
        group: mesh axis (several joined by "+") whose ranks take part.
        bytes: size of the full tensor.
        layer: dotted path of the module it belongs to.
    """

    collective: Collective
    group: str
    bytes: float
    layer: str = ""


class Algorithm(enum.Enum):
    """How it does it."""

    RING = "ring"
    TREE = "tree"
    HALVING = "recursive_halving"
    DIRECT = "direct"


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """Cost of one collective by one algorithm over one level of links.

    Attributes:
        steps: messages that have to follow each other; each pays the latency.
        moved: bytes that the busiest link carries, in one direction.
    """

    steps: sp.Expr
    moved: sp.Expr

    @property
    def seconds(self) -> sp.Expr:
        """``alpha`` (latency of a step) and ``beta`` (seconds a byte) in one expression."""
        return self.steps * ALPHA + self.moved * BETA


@functools.cache
def _formulas() -> dict[tuple[Collective, Algorithm], Formula]:
    """Thakur, Rabenseifner and Gropp, *Optimization of collective communication operations in MPICH* (2005)."""
    log = sp.log(N, 2)
    part = (N - 1) / N * S
    c, a = Collective, Algorithm
    return {
        (c.ALL_REDUCE, a.RING): Formula(steps=2 * (N - 1), moved=2 * part),
        (c.ALL_REDUCE, a.TREE): Formula(steps=2 * log, moved=2 * S),
        (c.ALL_REDUCE, a.HALVING): Formula(steps=2 * log, moved=2 * part),
        (c.ALL_GATHER, a.RING): Formula(steps=N - 1, moved=part),
        (c.ALL_GATHER, a.HALVING): Formula(steps=log, moved=part),
        (c.REDUCE_SCATTER, a.RING): Formula(steps=N - 1, moved=part),
        (c.REDUCE_SCATTER, a.HALVING): Formula(steps=log, moved=part),
        (c.ALL_TO_ALL, a.DIRECT): Formula(steps=N - 1, moved=part),
        (c.BROADCAST, a.RING): Formula(steps=N - 1, moved=S),
        (c.BROADCAST, a.TREE): Formula(steps=log, moved=S),
        (c.SEND, a.DIRECT): Formula(steps=sp.Integer(1), moved=S),
    }


def formula(collective: Collective, algorithm: Algorithm) -> Formula:
    """The formula of ``collective`` by ``algorithm``.

    Raises:
        ClusterError: the algorithm does not exist for it.

    >>> formula(Collective.ALL_REDUCE, Algorithm.RING).moved
    2*S*(n - 1)/n
    >>> formula(Collective.ALL_REDUCE, Algorithm.TREE).steps.subs(N, 8).simplify()
    6
    """
    table = _formulas()
    if (collective, algorithm) not in table:
        known = [a.value for c, a in table if c is collective]
        raise ClusterError(f"{collective.value} has no {algorithm.value} algorithm; it has {known}")
    return table[collective, algorithm]


def algorithms(collective: Collective) -> tuple[Algorithm, ...]:
    """Algorithms that ``collective`` has."""
    return tuple(a for c, a in _formulas() if c is collective)


@functools.cache
def _compiled(collective: Collective) -> tuple[tuple[Algorithm, Callable[..., float], Callable[..., float]], ...]:
    """(algorithm, steps(n), moved(n, 1)) as plain functions."""
    out = []
    for algorithm in algorithms(collective):
        f = formula(collective, algorithm)
        out.append((algorithm, sp.lambdify(N, f.steps, "numpy"), sp.lambdify(N, f.moved / S, "numpy")))
    return tuple(out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How a collective runs over a span: the algorithm of each level that it crosses.

    Attributes:
        algorithms: one a level (one in all for a flat ring).
        start_s: time of an empty message.
        seconds_per_byte: time per byte of the full tensor on the busiest link.
    """

    algorithms: tuple[Algorithm, ...]
    start_s: float
    seconds_per_byte: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveModel:
    """Prices collectives on one cluster.

    Attributes:
        cluster: the levels.
        launch_s: time before the first byte leaves: the kernel launch and the meeting of the ranks.
        fill: weight of the pipeline-fill term ``sqrt(start * transfer)``, which is what the best chunk size leaves of
            the product of a chunk's latency and its transfer.
    """

    cluster: Cluster
    launch_s: float = 10e-6
    fill: float = 0.2

    def seconds(self, collective: Collective, num_bytes: ArrayLike, span: Span, *, alone: bool = False) -> Floats:
        """Time of ``collective`` over ``span``, the cheapest algorithm per size.

        Args:
            collective: what is done.
            num_bytes: size of the full tensor, in bytes; any shape.
            span: where the ranks are (:meth:`Cluster.axis_levels`).
            alone: whether no other group uses the shared ports at the same time.

        Returns:
            Seconds, of the shape of ``num_bytes``.  Zero for a group of one rank or for no bytes.
        """
        size = np.asarray(num_bytes, dtype=np.float64)
        if span.num_ranks <= 1:
            return np.zeros_like(size)
        measured = self._measured(collective, size, span)
        if measured is not None:
            return np.where(size > 0, measured, 0.0)
        best = np.full_like(size, np.inf)
        for route in self.routes(collective, span, alone=alone):
            transfer_s = size * route.seconds_per_byte
            best = np.minimum(best, route.start_s + transfer_s + self.fill * np.sqrt(route.start_s * transfer_s))
        return np.where(size > 0, best, 0.0)

    def _measured(self, collective: Collective, size: Floats, span: Span) -> Floats | None:
        """Time by the curve of the one level that the span crosses, where there is one.

        A smaller group than was measured takes its share of the ring's time.
        """
        crossed = [i for i, extent in enumerate(span.extents) if extent > 1]
        level = self.cluster.levels[crossed[0]]
        curve = level.curves.get(collective.value)
        if curve is None or len(crossed) > 1:
            return None
        _, steps, moved = _compiled(collective)[0]
        extent, whole = span.extents[crossed[0]], level.fanout
        if extent == whole or collective is Collective.SEND:
            return read_curve(curve, size)
        start_s = curve[0][1]
        fewer, less = float(steps(extent)) / float(steps(whole)), float(moved(extent)) / float(moved(whole))
        return start_s * fewer + np.maximum(read_curve(curve, size) - start_s, 0.0) * less

    def routes(self, collective: Collective, span: Span, *, alone: bool = False) -> tuple[Route, ...]:
        """The candidate routes: each algorithm hierarchically (a stage a level), and flat rings over all levels.

        What all_to_all sends out of a unit has that many different receivers: no ring carries it once for all.
        """
        if collective is Collective.SEND:
            level = self.cluster.levels[span.outermost]
            return (self._send(level, alone=alone),)
        crossed = [i for i, extent in enumerate(span.extents) if extent > 1]
        rings = len(crossed) > 1 and collective is not Collective.ALL_TO_ALL
        found = [self._flat(collective, span, crossed, alone=alone)] if rings else []
        choices = range(len(algorithms(collective)))
        found.extend(self._hierarchical(collective, span, crossed, choice, alone=alone) for choice in choices)
        return tuple(found)

    def _send(self, level: LinkLevel, *, alone: bool) -> Route:
        return Route(
            algorithms=(Algorithm.DIRECT,),
            start_s=self.launch_s + level.latency_s,
            seconds_per_byte=1 / _bandwidth(level, 2, alone=alone),
        )

    def _hierarchical(
        self, collective: Collective, span: Span, crossed: Sequence[int], choice: int, *, alone: bool
    ) -> Route:
        """Inner levels first; what leaves a unit is split over its ranks.  The levels' stages are pipelined."""
        start_s, slowest, share = self.launch_s, 0.0, 1.0
        names = []
        table = _compiled(collective)
        for i in crossed:
            level, extent = self.cluster.levels[i], span.extents[i]
            algorithm, steps, moved = table[choice]
            names.append(algorithm)
            if collective is Collective.ALL_TO_ALL:
                # Of n equal parts, this level carries those for ranks that share its unit but not the next inner one.
                carried = (extent - 1) * math.prod(span.extents[:i]) / span.num_ranks
            else:
                carried = float(moved(extent)) * share
            start_s += float(steps(extent)) * level.latency_s
            slowest = max(slowest, carried / _bandwidth(level, extent, alone=alone))
            if collective is not Collective.BROADCAST:
                share /= extent
        return Route(algorithms=tuple(names), start_s=start_s, seconds_per_byte=slowest)

    def _flat(self, collective: Collective, span: Span, crossed: Sequence[int], *, alone: bool) -> Route:
        """One ring through all ranks, several channels: each unit's ranks share the bytes that leave the unit."""
        algorithm, steps, moved = _compiled(collective)[0]
        carried = float(moved(span.num_ranks))
        slowest, inner = 0.0, 1
        for i in crossed:
            rate = _bandwidth(self.cluster.levels[i], span.extents[i], alone=alone)
            slowest = max(slowest, carried / (rate * inner))
            inner *= span.extents[i]
        latency_s = max(self.cluster.levels[i].latency_s for i in crossed)
        return Route(
            algorithms=(algorithm,),
            start_s=self.launch_s + float(steps(span.num_ranks)) * latency_s,
            seconds_per_byte=slowest,
        )


def _bandwidth(level: LinkLevel, extent: int, *, alone: bool) -> float:
    """Bytes per second that one device gets on ``level`` for a group that touches ``extent`` of its units."""
    rate = level.port_bytes_per_s * level.efficiency if alone else level.device_bytes_per_s
    rate = max(rate, level.device_bytes_per_s)
    if level.topology == "mesh" and level.fanout > 2:
        rate *= (extent - 1) / (level.fanout - 1)
    return rate
