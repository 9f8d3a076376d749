"""Exact minimisation of a sum of unary and pairwise tables by variable elimination.

minimise  sum_i  u_i(x_i)  +  sum_(i,j)  t_ij(x_i, x_j)   over x_i in {0 .. n_i - 1}

Joint graphs of training steps are long and thin (forward and backward run along each other), so the tables that appear
while variables are eliminated in order of fewest neighbours stay small.  Where a table would pass ``max_cells``, the
neighbour whose own costs are clearest is fixed first, and the result is marked as not exact.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The assignment found, its value, and whether it is proven to be the smallest."""

    assignment: Mapping[Hashable, int]
    value: float
    exact: bool


class Problem:
    """Unary and pairwise costs over named variables."""

    def __init__(self) -> None:
        self.unary: dict[Hashable, Table] = {}
        self.pairs: dict[tuple[Hashable, Hashable], Table] = {}

    def variable(self, name: Hashable, costs: Table) -> None:
        """Add a variable with one cost per value."""
        self.unary[name] = np.asarray(costs, dtype=np.float64)

    def add_pair(self, a: Hashable, b: Hashable, table: Table) -> None:
        """Add a table of shape [values of a, values of b]; tables of one pair add up."""
        if a == b:
            self.unary[a] = self.unary[a] + np.diagonal(table)
            return
        if (b, a) in self.pairs:
            self.pairs[(b, a)] = self.pairs[(b, a)] + table.T
        elif (a, b) in self.pairs:
            self.pairs[(a, b)] = self.pairs[(a, b)] + table
        else:
            self.pairs[(a, b)] = np.asarray(table, dtype=np.float64)

    def value(self, assignment: Mapping[Hashable, int]) -> float:
        """Cost of an assignment."""
        total = sum(float(u[assignment[v]]) for v, u in self.unary.items())
        return total + sum(float(t[assignment[a], assignment[b]]) for (a, b), t in self.pairs.items())

    def solve(self, max_cells: int = 2_000_000) -> Solution:
        """Minimise by elimination."""
        return Elimination(self, max_cells).run()


class Elimination:
    """One run of variable elimination over a :class:`Problem`."""

    def __init__(self, problem: Problem, max_cells: int) -> None:
        self.problem, self.max_cells, self.exact = problem, max_cells, True
        self.sizes = {v: len(u) for v, u in problem.unary.items()}
        self.tables: dict[Hashable, list[tuple[tuple[Hashable, ...], Table]]] = {v: [] for v in self.sizes}
        self.neighbours: dict[Hashable, dict[Hashable, None]] = {v: {} for v in self.sizes}
        self.order = {v: i for i, v in enumerate(self.sizes)}
        for v, u in problem.unary.items():
            self.tables[v].append(((v,), u))
        for (a, b), t in problem.pairs.items():
            self._add(((a, b), t))
        self.fixed: dict[Hashable, int] = {}
        self.decisions: list[tuple[Hashable, tuple[Hashable, ...], NDArray[np.int64]]] = []

    def _add(self, entry: tuple[tuple[Hashable, ...], Table]) -> None:
        names = entry[0]
        for v in names:
            self.tables[v].append(entry)
            for w in names:
                if w is not v and w != v:
                    self.neighbours[v][w] = None

    def run(self) -> Solution:
        """Eliminate all variables, then read the decisions backwards."""
        heap = [(len(n), self.order[v], v) for v, n in self.neighbours.items()]
        heapq.heapify(heap)
        done: set[Hashable] = set()
        while heap:
            degree, position, v = heapq.heappop(heap)
            if v in done or degree != len(self.neighbours[v]):
                continue
            cells = self.sizes[v] * math.prod(self.sizes[w] for w in self.neighbours[v])
            if cells > self.max_cells and self.neighbours[v]:
                self.exact = False
                touched = self._fix(max(self.neighbours[v], key=self._clearness))
            else:
                touched = self._eliminate(v)
                done.add(v)
            for w in touched:
                if w not in done and w not in self.fixed:
                    heapq.heappush(heap, (len(self.neighbours[w]), self.order[w], w))
            if v not in done and v not in self.fixed:
                heapq.heappush(heap, (len(self.neighbours[v]), position, v))
            done.update(self.fixed)
        assignment = dict(self.fixed)
        for v, others, best in reversed(self.decisions):
            assignment[v] = int(best[tuple(assignment[w] for w in others)])
        return Solution(assignment=assignment, value=self.problem.value(assignment), exact=self.exact)

    def _local_costs(self, v: Hashable) -> Table:
        costs = np.zeros(self.sizes[v])
        for names, table in self.tables[v]:
            axes = tuple(i for i, w in enumerate(names) if w != v)
            costs = costs + table.min(axis=axes) if axes else costs + table
        return costs

    def _clearness(self, v: Hashable) -> float:
        costs = np.sort(self._local_costs(v))
        return float(costs[1] - costs[0]) if len(costs) > 1 and math.isfinite(costs[1]) else math.inf

    def _fix(self, v: Hashable) -> list[Hashable]:
        best = int(self._local_costs(v).argmin())
        self.fixed[v] = best
        touched = list(self.neighbours[v])
        entries, self.tables[v] = self.tables[v], []
        for names, table in entries:
            rest = tuple(w for w in names if w != v)
            smaller = np.take(table, best, axis=names.index(v))
            for w in rest:
                self.tables[w] = [e for e in self.tables[w] if e[0] is not names]
            if rest:
                for w in rest:
                    self.tables[w].append((rest, smaller))
        for w in touched:
            self.neighbours[w].pop(v, None)
        self.neighbours[v] = {}
        return touched

    def _eliminate(self, v: Hashable) -> list[Hashable]:
        others = tuple(self.neighbours[v])
        scope = (*others, v)
        shape = tuple(self.sizes[w] for w in scope)
        total = np.zeros(shape)
        position = {w: i for i, w in enumerate(scope)}
        for names, table in self.tables[v]:
            order = sorted(range(len(names)), key=lambda i: position[names[i]])
            moved = table.transpose(order)
            view = [1] * len(scope)
            for i in order:
                view[position[names[i]]] = table.shape[i]
            total = total + moved.reshape(view)
            for w in names:
                if w != v:
                    self.tables[w] = [e for e in self.tables[w] if e[0] is not names]
        best = total.argmin(axis=-1)
        self.decisions.append((v, others, best))
        self.tables[v] = []
        for w in others:
            self.neighbours[w].pop(v, None)
        if others:
            self._add((others, total.min(axis=-1)))
        return list(others)
