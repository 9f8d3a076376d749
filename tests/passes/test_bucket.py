"""Buckets: gradients travel together, and are what they were."""

from random import Random

import pytest
import torch
from torch import nn

from autopar.passes.bucket import Bucket
from autopar.passes.overlap import Overlap
from autopar.passes.partition import partition
from autopar.passes.placement import Shard
from autopar.passes.torch_ops import is_collective, is_wait
from autopar.search.first_choice import AxisWish, choose
from autopar.verify import check_programs
from tests.passes.placements import random_assignment
from tests.passes.prepared import collectives, mesh_of, ready


def data_parallel(model, *args, num_ranks=2):
    """Programs of plain data parallelism."""
    prepared = ready(model, *args)
    wish = AxisWish(name="x", size=num_ranks, role="data")
    assignment, _ = choose(prepared.normal, prepared.rows, [wish])
    return prepared, [partition(prepared.normal, prepared.rows, assignment, rank) for rank in range(num_ranks)]


def scattered(model, *args, num_ranks=2):
    """Programs in which every call is split in its first dim, whatever its neighbours do."""
    prepared = ready(model, *args)
    labels = {}
    for node in prepared.rows:
        choices = prepared.space.choices(node, num_ranks)
        labels[node.name] = [c.label for c in choices if c.factor and Shard(0, 1, num_ranks) in c.outputs][:1] or ["R"]
    return prepared, prepared.programs(mesh_of(num_ranks), labels)


def gradients(program):
    return [n for n in program.graph_module.graph.output_node().all_input_nodes if n.meta["val"].dim()]


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.mark.parametrize("make", [data_parallel, scattered])
@pytest.mark.parametrize("max_bytes", [1, 300, 10**9])
def test_numbers_stay(make, max_bytes):
    prepared, programs = make(mlp(), torch.randn(8, 6))
    programs = [Bucket(max_bytes=max_bytes)(p) for p in programs]
    check_programs(programs)
    prepared.check(programs)


def test_gradients_of_one_bucket_are_reduced_together():
    _, (program, _) = data_parallel(mlp(), torch.randn(8, 6))
    before = collectives(program)
    shapes = [tuple(g.meta["val"].shape) for g in gradients(program)]
    Bucket()(program)
    after = collectives(program)
    assert len(before) >= 6
    assert after.count("all_reduce(x)") < before.count("all_reduce(x)")
    assert [tuple(g.meta["val"].shape) for g in gradients(program)] == shapes


def test_a_bucket_is_as_large_as_it_may_be():
    graph = torch.fx.Graph()
    sizes = {graph.placeholder(f"x{i}"): size for i, size in enumerate([40, 40, 40, 500, 40])}
    cut = Bucket(max_bytes=100).cut(list(sizes), sizes)
    assert [[sizes[n] for n in bucket] for bucket in cut] == [[40, 40], [40], [500], [40]]


def test_ranks_with_uneven_parts_fill_their_buckets_alike():
    model = nn.Sequential(nn.Linear(6, 11), nn.ReLU(), nn.Linear(11, 7), nn.ReLU(), nn.Linear(7, 5))
    prepared = ready(model, torch.randn(8, 6))
    for seed in (4, 7, 20, 27, 36):
        assignment = random_assignment(Random(seed), prepared.normal, prepared.space, (2, 2))
        programs = [partition(prepared.normal, prepared.rows, assignment, rank) for rank in range(4)]
        check_programs([Bucket(max_bytes=200)(p) for p in programs])


def test_what_is_used_inside_the_step_is_left_alone():
    _, (program, _) = data_parallel(mlp(), torch.randn(8, 6))
    graph = program.graph_module.graph
    loss = graph.output_node().args[0][0]
    assert is_wait(loss)
    Bucket()(program)
    assert graph.output_node().args[0][0] is loss


@pytest.mark.parametrize("make", [data_parallel, scattered])
def test_waits_move_down_to_the_first_use(make):
    prepared, programs = make(mlp(), torch.randn(8, 6))
    order = [n.name for n in programs[0].graph_module.graph.nodes]
    programs = [Overlap(prefetch=False)(p) for p in programs]
    check_programs(programs)
    prepared.check(programs)
    nodes = list(programs[0].graph_module.graph.nodes)
    assert sorted(order) == sorted(n.name for n in nodes)
    for node in nodes:
        if is_wait(node) and node.users:
            first = min(nodes.index(user) for user in node.users)
            assert not any(is_collective(n) for n in nodes[nodes.index(node) + 1 : first])


def test_gradient_reductions_run_beside_the_backward():
    _, (program, _) = data_parallel(mlp(), torch.randn(8, 6))
    Overlap()(program)
    nodes = list(program.graph_module.graph.nodes)
    products = [i for i, n in enumerate(nodes) if n.target is torch.ops.aten.mm.default]
    leaving = [n for n in gradients(program) if is_wait(n)]
    assert leaving
    assert all(nodes.index(n) > products[-1] for n in leaving)


def test_both_passes_together():
    prepared, programs = scattered(mlp(), torch.randn(8, 6), num_ranks=4)
    programs = [Overlap()(Bucket(max_bytes=200)(p)) for p in programs]
    check_programs(programs)
    prepared.check(programs)
