"""Collectives: the textbook formulas, and the shape of what the model returns."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import sympy as sp
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.cluster import Cluster, Span
from autopar.cost_models.collectives import Algorithm, Collective, CollectiveModel, N, S, algorithms, formula
from autopar.cost_models.errors import ClusterError

MODEL = CollectiveModel(cluster=Cluster.parse("4x8xH100"))
KINDS = list(Collective)


@pytest.mark.parametrize("n", [2, 3, 8, 64])
def test_ring_all_reduce_moves_twice_the_rest(n: int) -> None:
    f = formula(Collective.ALL_REDUCE, Algorithm.RING)
    assert sp.simplify(f.moved.subs(N, n) - sp.Rational(2 * (n - 1), n) * S) == 0
    assert f.steps.subs(N, n) == 2 * (n - 1)


@pytest.mark.parametrize(("n", "steps"), [(2, 2), (8, 6), (64, 12)])
def test_tree_all_reduce_takes_two_log_steps(n: int, steps: int) -> None:
    assert sp.simplify(formula(Collective.ALL_REDUCE, Algorithm.TREE).steps.subs(N, n)) == steps


@pytest.mark.parametrize("kind", [Collective.ALL_GATHER, Collective.REDUCE_SCATTER])
def test_gather_and_scatter_of_an_activation(kind: Collective) -> None:
    b, s, h, itemsize, p = 4, 2048, 8192, 2, 8
    moved = formula(kind, Algorithm.RING).moved.subs({N: p, S: b * s * h * itemsize})
    assert moved == sp.Rational(p - 1, p) * b * s * h * itemsize


def test_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    both = sum(formula(k, Algorithm.RING).seconds for k in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER))
    assert sp.simplify(formula(Collective.ALL_REDUCE, Algorithm.RING).seconds - both) == 0


def test_unknown_algorithm_is_refused() -> None:
    with pytest.raises(ClusterError, match="no tree algorithm"):
        formula(Collective.ALL_TO_ALL, Algorithm.TREE)
    assert algorithms(Collective.SEND) == (Algorithm.DIRECT,)


@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize(
    ("kind", "leaving"),
    [  # bytes that have to leave every node (the root's, for broadcast) in units of the full tensor, for n nodes of 8
        (Collective.ALL_TO_ALL, lambda n: 8 * (n - 1) / n),
        (Collective.ALL_GATHER, lambda n: 1 / n),
        (Collective.REDUCE_SCATTER, lambda n: (n - 1) / n),
        (Collective.ALL_REDUCE, lambda n: 2 * (n - 1) / n),
        (Collective.BROADCAST, lambda n: 1),
        (Collective.SEND, lambda n: 1 / 8),
    ],
)
def test_what_has_to_leave_a_node_passes_its_ports(kind, leaving, nodes) -> None:
    size = 1e11
    port = 8 * MODEL.cluster.levels[1].device_bytes_per_s
    seconds = float(MODEL.seconds(kind, size, Span(extents=(8, nodes))))
    assert seconds >= 0.999 * leaving(nodes) * size / port


@given(
    st.sampled_from(KINDS),
    st.integers(1, 10**10),
    st.integers(1, 10**9),
    st.sampled_from([(2, 1), (8, 1), (1, 4), (8, 4)]),
)
def test_cost_grows_with_bytes(kind: Collective, size: int, more: int, extents: tuple[int, int]) -> None:
    less_s, more_s = MODEL.seconds(kind, [size, size + more], Span(extents=extents))
    assert 0 < less_s <= more_s


@given(st.sampled_from([k for k in KINDS if k is not Collective.SEND]), st.floats(1, 1e10))
def test_cost_grows_with_nodes(kind: Collective, size: float) -> None:
    times = [float(MODEL.seconds(kind, size, Span(extents=(8, nodes)))) for nodes in (1, 2, 4)]
    assert times == sorted(times)


@given(st.sampled_from(KINDS), st.floats(1, 1e10), st.floats(1, 100), st.integers(0, 1))
def test_more_bandwidth_never_slows(kind: Collective, size: float, factor: float, which: int) -> None:
    levels = list(MODEL.cluster.levels)
    levels[which] = dataclasses.replace(levels[which], port_bytes_per_s=levels[which].port_bytes_per_s * factor)
    faster = dataclasses.replace(MODEL, cluster=dataclasses.replace(MODEL.cluster, levels=tuple(levels)))
    span = Span(extents=(8, 4))
    assert faster.seconds(kind, size, span) <= MODEL.seconds(kind, size, span) * (1 + 1e-12)


def test_groups_that_share_a_nic_slow_each_other() -> None:
    shared = Cluster.parse("2x8xV100")  # four ports for eight devices
    model = CollectiveModel(cluster=shared)
    span = Span(extents=(1, 2), stride=8)
    alone_s = model.seconds(Collective.ALL_REDUCE, 1e9, span, alone=True)
    assert model.seconds(Collective.ALL_REDUCE, 1e9, span) > 1.9 * alone_s


def test_a_group_across_nodes_uses_all_nics_of_its_ranks() -> None:
    one = MODEL.seconds(Collective.ALL_REDUCE, 1e9, Span(extents=(1, 4)))
    eight = MODEL.seconds(Collective.ALL_REDUCE, 1e9, Span(extents=(8, 4)))
    assert one > 5 * eight


def test_one_rank_or_no_bytes_costs_nothing() -> None:
    assert MODEL.seconds(Collective.ALL_REDUCE, 1e9, Span(extents=(1, 1))) == 0
    assert MODEL.seconds(Collective.ALL_REDUCE, 0, Span(extents=(8, 1))) == 0


def test_mesh_pairs_get_one_link() -> None:
    model = CollectiveModel(cluster=Cluster.parse("8xMI300X"))
    pair = model.seconds(Collective.ALL_REDUCE, 1e9, Span(extents=(2,)))
    level = model.cluster.levels[0]
    assert pair == pytest.approx(1e9 / (64e9 * level.efficiency), rel=0.05)


def test_vectorised_prices_are_fast_enough() -> None:
    sizes = np.linspace(1, 1e9, 1_000_000)
    assert MODEL.seconds(Collective.ALL_GATHER, sizes, Span(extents=(8, 4))).shape == sizes.shape
