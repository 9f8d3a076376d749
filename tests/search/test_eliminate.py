"""Variable elimination against trying everything."""

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search.eliminate import Problem

COSTS = st.one_of(st.integers(0, 9).map(float), st.just(math.inf))


@st.composite
def problems(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    problem = Problem()
    for v, size in enumerate(sizes):
        problem.variable(v, np.array(draw(st.lists(st.integers(0, 9), min_size=size, max_size=size)), dtype=float))
    pairs = [(a, b) for a in range(len(sizes)) for b in range(len(sizes))]
    for a, b in draw(st.lists(st.sampled_from(pairs), max_size=8)):
        cells = draw(st.lists(COSTS, min_size=sizes[a] * sizes[b], max_size=sizes[a] * sizes[b]))
        problem.add_pair(a, b, np.array(cells).reshape(sizes[a], sizes[b]))
    return problem


def smallest(problem):
    """The smallest value over all assignments."""
    names = list(problem.unary)
    choices = itertools.product(*(range(len(problem.unary[v])) for v in names))
    return min(problem.value(dict(zip(names, choice, strict=True))) for choice in choices)


@settings(max_examples=300)
@given(problems())
def test_elimination_finds_the_smallest_value(problem):
    solution = problem.solve()
    assert solution.exact
    assert solution.value == smallest(problem)
    assert set(solution.assignment) == set(problem.unary)


@settings(max_examples=150)
@given(problems(), st.integers(1, 12))
def test_where_tables_grow_too_large_the_value_is_an_upper_bound_and_says_so(problem, max_cells):
    solution = problem.solve(max_cells=max_cells)
    best = smallest(problem)
    assert solution.value >= best
    assert solution.value == problem.value(solution.assignment)
    if solution.exact:
        assert solution.value == best


def test_a_long_chain_is_solved_exactly():
    rng = np.random.default_rng(0)
    problem = Problem()
    for v in range(300):
        problem.variable(v, rng.random(8))
    for v in range(299):
        problem.add_pair(v, v + 1, rng.random((8, 8)))
    tables = [problem.pairs[v, v + 1] for v in range(299)]
    best = problem.unary[0]
    for v, table in enumerate(tables, start=1):
        best = (best[:, None] + table).min(axis=0) + problem.unary[v]
    solution = problem.solve()
    assert solution.exact
    assert math.isclose(solution.value, best.min(), rel_tol=1e-12)


def test_tables_of_one_pair_add_up_in_either_order():
    problem = Problem()
    problem.variable("a", np.zeros(2))
    problem.variable("b", np.zeros(3))
    table = np.arange(6.0).reshape(2, 3)
    problem.add_pair("a", "b", table)
    problem.add_pair("b", "a", table.T)
    problem.add_pair("a", "a", np.diag([5.0, 0.0]))
    assert problem.value({"a": 1, "b": 2}) == 2 * table[1, 2]
    assert problem.value({"a": 0, "b": 1}) == 2 * table[0, 1] + 5
