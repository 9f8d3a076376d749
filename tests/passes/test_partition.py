"""The partitioner on small models: what it emits, where it communicates, what it refuses."""

import dataclasses

import pytest
import torch
from torch import nn

from autopar.cost_models.errors import PartitionError
from autopar.passes.base import OutputKind, Phase
from autopar.passes.options import Choice, replicated
from autopar.passes.partition import Assignment, partition
from autopar.passes.placement import PARTIAL, REPLICATE, Shard
from autopar.passes.rules.row import parse_row
from autopar.passes.torch_ops import is_collective, is_wait
from tests.passes.prepared import Lambda, collectives, mesh_of, ready

COLUMN, ROW = (Shard(1, 1, 2),), (Shard(0, 1, 2),)


def two_linears(batch=4):
    """relu(x @ up) @ down with the hidden width split wherever it appears."""
    model = Lambda(lambda m, x: torch.relu(x @ m.up) @ m.down, up=torch.randn(6, 8), down=torch.randn(8, 6))
    prepared = ready(model, torch.randn(batch, 6, requires_grad=True))
    labels = {}
    for node in prepared.rows:
        values = [*prepared.space.tensors[node], node]
        splits = [(c, zip(values, (*c.inputs, *c.outputs), strict=True)) for c in prepared.space.choices(node, 2)]
        wide = [
            c.label
            for c, placed in splits
            if c.factor and all(v.meta["val"].shape[p.dim] == 8 for v, p in placed if p not in (PARTIAL, REPLICATE))
        ]
        if wide:
            labels[node.name] = wide[:1]
    return prepared, labels


def test_a_column_then_a_row_split_linear_reduce_once_in_each_direction():
    prepared, labels = two_linears()
    programs = prepared.programs(mesh_of(2), labels, {"up": COLUMN, "down": ROW})
    prepared.check(programs)
    assert collectives(programs[0], Phase.FORWARD) == ["all_reduce(x)"]
    assert collectives(programs[0], Phase.BACKWARD) == ["all_reduce(x)"]


def test_nothing_is_moved_where_nothing_is_split():
    prepared, _ = two_linears()
    (program,) = prepared.programs(mesh_of(1))
    assert not collectives(program)
    prepared.check([program])


def test_every_node_says_what_it_is_part_of():
    prepared, labels = two_linears()
    (program, _) = prepared.programs(mesh_of(2), labels, {"up": COLUMN, "down": ROW})
    for node in program.graph_module.graph.nodes:
        if node.op == "output":
            continue
        assert {"val", "layer", "phase", "source"} <= set(node.meta)
        if "layout" in node.meta and node.meta["layout"] == COLUMN:
            assert node.meta["val"].shape[1] * 2 == node.meta["global_shape"][1]
    by_name = {n.name: n for n in program.graph_module.graph.nodes}
    for node in prepared.rows:
        assert by_name[node.name].meta["origin"] == node.name


def test_a_gradient_is_reduced_right_after_its_producer():
    model = Lambda(lambda m, x: torch.relu(x @ m.a) @ m.b, a=torch.randn(6, 6), b=torch.randn(6, 6))
    prepared = ready(model, torch.randn(4, 6))
    products = [prepared.node("aten::mm", i) for i in range(5)]
    labels = {n.name: ["k" if n.meta["phase"] is Phase.BACKWARD and "t" in str(n.args[0]) else "m"] for n in products}
    programs = prepared.programs(mesh_of(2), labels)
    prepared.check(programs)
    nodes = list(programs[0].graph_module.graph.nodes)
    leaving = [n for n in programs[0].graph_module.graph.output_node().all_input_nodes if is_wait(n)]
    assert len(leaving) == 2
    for node in leaving:
        producer = node.args[0].args[0]
        assert producer.target is torch.ops.aten.mm.default
        assert nodes.index(node) == nodes.index(producer) + 2


def test_a_partial_value_is_reduced_once_for_forward_and_backward():
    prepared, labels = two_linears()
    programs = prepared.programs(mesh_of(2), labels, {"up": COLUMN, "down": ROW})
    reduced = [n.args[0].name for n in programs[0].graph_module.graph.nodes if is_collective(n)]
    assert len(set(reduced)) == len(reduced)


def parameters_gathered(prepared, **options):
    programs = prepared.programs(mesh_of(2), {}, {"up": ROW, "down": ROW}, **options)
    prepared.check(programs)
    return collectives(programs[0])


def test_a_parameter_is_gathered_once_a_phase_or_once_a_call():
    prepared, _ = two_linears()
    assert parameters_gathered(prepared).count("all_gather_into_tensor(x)") == 4
    assert parameters_gathered(prepared, gather_once=True).count("all_gather_into_tensor(x)") == 2


def test_frozen_parameters_cost_nothing():
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    model[0].weight.requires_grad_(False)
    prepared = ready(model, torch.randn(4, 6))
    programs = prepared.programs(mesh_of(2), {}, {"0.weight": ROW, "1.weight": ROW})
    prepared.check(programs)
    grads = [s.name for s in programs[0].outputs if s.kind is OutputKind.GRADIENT]
    assert grads == ["1.weight"]


def test_gradients_of_low_precision_are_summed_in_a_wider_one():
    model = Lambda(lambda m, x: x @ m.w, w=torch.randn(6, 6)).bfloat16()
    prepared = ready(model, torch.randn(4, 6, dtype=torch.bfloat16))
    gradient = prepared.node("aten::mm", 1)
    for wide, dtype in ((torch.float32, torch.float32), (None, torch.bfloat16)):
        programs = prepared.programs(mesh_of(2), {gradient.name: ["k"]}, reduce_dtype=wide)
        prepared.check(programs)
        reduced = [n for n in programs[0].graph_module.graph.nodes if is_collective(n)]
        assert {n.meta["val"].dtype for n in reduced} == {dtype}
        assert programs[0].output_tensors[1].dtype == torch.bfloat16


def test_constants_are_whole_on_every_rank():
    table = torch.arange(8.0)
    prepared = ready(Lambda(lambda m, x: (x * table) @ m.w, w=torch.randn(8, 2)), torch.randn(4, 8))
    mul = prepared.node("aten::mul.Tensor")
    label = next(c.label for c in prepared.space.choices(mul, 2) if c.outputs == COLUMN)
    programs = prepared.programs(mesh_of(2), {mul.name: [label]})
    prepared.check(programs)


def test_uneven_parts_on_a_grid():
    prepared, _ = two_linears(batch=7)
    labels = {}
    for node in prepared.rows:
        rows = [c.label for c in prepared.space.choices(node, 3) if c.outputs[:1] == (Shard(0, 1, 7),)]
        if rows:
            labels[node.name] = [rows[0], "R"]
    programs = prepared.programs(mesh_of(3, 2), labels)
    prepared.check(programs)


def test_a_call_without_a_row_is_refused():
    prepared, _ = two_linears()
    node = prepared.node("aten::mm")
    rows = {n: r for n, r in prepared.rows.items() if n is not node}
    with pytest.raises(PartitionError, match="has no row"):
        partition(prepared.normal, rows, Assignment(mesh=mesh_of(2), choices={}), 0)


def test_a_wrong_rule_is_found_where_it_is_used():
    prepared, _ = two_linears()
    node = prepared.node("aten::mm")
    wrong = parse_row("m k, k n -> n m", [(4, 6), (6, 8)])
    choice = Choice(label="m", inputs=((Shard(0, 1, 2)), REPLICATE), outputs=(Shard(1, 1, 2),), factor="m", units=2)
    assignment = Assignment(mesh=mesh_of(2), choices={node.name: (choice,)})
    with pytest.raises(PartitionError, match=r"local shape \(2, 8\) where \(4, 4\) was expected; the rule of aten.mm"):
        partition(prepared.normal, prepared.rows | {node: wrong}, assignment, 0)


def test_two_axes_cannot_split_one_atom():
    prepared, _ = two_linears()
    node = prepared.node("aten::mm")
    choice = prepared.choice(node, "m", 2)
    assignment = Assignment(mesh=mesh_of(2, 2), choices={node.name: (choice, choice)})
    with pytest.raises(PartitionError, match="two axes split the same atom"):
        partition(prepared.normal, prepared.rows, assignment, 0)


def test_choices_of_other_calls_do_not_matter():
    """A call that is not named runs whole, whatever its neighbours do."""
    prepared, _ = two_linears()
    node = prepared.node("aten::mm", 1)
    for label in [c.label for c in prepared.space.choices(node, 2)]:
        prepared.check(prepared.programs(mesh_of(2), {node.name: [label]}))


def test_assignments_are_values():
    assignment = Assignment(mesh=mesh_of(2), choices={})
    with pytest.raises(dataclasses.FrozenInstanceError):
        assignment.gather_once = True
    assert replicated(parse_row("m k, k n -> m n", [(2, 2), (2, 2)])).outputs == (REPLICATE,)
