"""Redistribution: whatever the layouts, what the ranks hold afterwards is the same tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.cost_models.errors import PartitionError
from autopar.passes.base import InputKind, InputSpec, Mesh, OutputKind, OutputSpec, Program, ProgramTensor
from autopar.passes.lowering import Emitter
from autopar.passes.placement import PARTIAL, REPLICATE, Layout, Partial, Shard, compatible, local_shape
from autopar.passes.redistribute import Redistributor, StepKind, steps, wire_bytes
from autopar.passes.torch_ops import COLLECTIVES
from autopar.verify import assemble, check_programs, run_lockstep, shard_tensor
from tests.passes.layouts import layouts, meshes, shapes


def moving_program(shape, dtype, source: Layout, target: Layout, mesh: Mesh, rank: int) -> Program:
    """A program that only moves its one input from ``source`` to ``target``."""
    graph, mode = fx.Graph(), FakeTensorMode()
    node = graph.placeholder("x")
    with mode:
        node.meta["val"] = torch.empty(local_shape(shape, source, mesh.sizes, mesh.coords(rank)), dtype=dtype)
    mover = Redistributor(Emitter(graph, mode), mesh.axes, mesh.sizes, mesh.coords(rank))
    out = mover.run(node, source, target, shape)
    assert out.meta["val"].is_contiguous()
    graph.output((out,))
    held = [ProgramTensor(layout=layout, shape=shape, dtype=dtype) for layout in (source, target)]
    return Program(
        graph_module=fx.GraphModule({}, graph),
        inputs=(InputSpec(kind=InputKind.BATCH, name="x"),),
        outputs=(OutputSpec(kind=OutputKind.RESULT, name="result[0]"),),
        input_tensors=(held[0],),
        output_tensors=(held[1],),
        mesh=mesh,
        rank=rank,
    )


def pieces(tensor: torch.Tensor, layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    """What ``rank`` may hold of ``tensor``: terms of a partial are all different, and combine to the tensor."""
    value = tensor.clone()
    for axis, placement in enumerate(layout):
        if not isinstance(placement, Partial):
            continue
        num_ranks, here = mesh.sizes[axis], mesh.coords(rank)[axis]
        terms = [tensor * (i + 3 * axis + 1) for i in range(num_ranks - 1)]
        if placement.reduce == "sum":
            value = terms[here] if here < num_ranks - 1 else value - sum(terms)
        elif here != tensor.numel() % num_ranks:
            value = value - 5 if placement.reduce == "max" else value + 5
        tensor = value
    shards = tuple(p if isinstance(p, Shard) else REPLICATE for p in layout)
    return shard_tensor(value, shards, mesh.sizes, mesh.coords(rank)).contiguous()


def move(tensor: torch.Tensor, source: Layout, target: Layout, mesh: Mesh) -> list[Program]:
    """Run the redistribution on all ranks and check what it gives."""
    shape = tuple(tensor.shape)
    programs = [moving_program(shape, tensor.dtype, source, target, mesh, rank) for rank in range(mesh.size)]
    check_programs(programs)
    held = run_lockstep(programs, [[pieces(tensor, source, mesh, rank)] for rank in range(mesh.size)])
    assert torch.equal(assemble([h[0] for h in held], target, mesh, shape), tensor)
    return programs


@settings(max_examples=150)
@given(st.data())
def test_any_layout_can_become_any_other(data):
    mesh, shape = data.draw(meshes()), data.draw(shapes())
    source = data.draw(layouts(shape, mesh))
    target = data.draw(layouts(shape, mesh))
    move(torch.arange(1, 1 + torch.Size(shape).numel()).view(shape), source, target, mesh)


@settings(max_examples=50)
@given(st.data())
def test_partial_maxima_and_minima_are_reduced(data):
    mesh, shape = data.draw(meshes()), data.draw(shapes())
    how = data.draw(st.sampled_from(("max", "min")))
    source = data.draw(layouts(shape, mesh, partials=(how,)))
    target = data.draw(layouts(shape, mesh, partials=(how,)))
    move(torch.arange(1, 1 + torch.Size(shape).numel()).view(shape), source, target, mesh)


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.float16, torch.int8])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (REPLICATE, Shard(1, 1, 2)),
        (Shard(0, 1, 2), REPLICATE),
        (Shard(1, 3, 2), Shard(0, 1, 2)),
        (Shard(1, 1, 2), PARTIAL),
        (REPLICATE, PARTIAL),
    ],
)
def test_all_dtypes_travel(dtype, source, target):
    tensor = (torch.arange(24).view(4, 6) % 5 - 1).to(dtype)
    move(tensor, (source,), (target,), Mesh(axes=("x",), sizes=(2,)))


@pytest.mark.parametrize(
    ("source", "target", "kinds"),
    [
        ((REPLICATE,), (Shard(0, 1, 4),), [StepKind.SLICE]),
        ((PARTIAL,), (REPLICATE,), [StepKind.ALL_REDUCE]),
        ((PARTIAL,), (Shard(1, 1, 4),), [StepKind.REDUCE_SCATTER]),
        ((Partial("max"),), (Shard(1, 1, 4),), [StepKind.ALL_REDUCE, StepKind.SLICE]),
        ((Shard(0, 1, 4),), (Shard(1, 1, 4),), [StepKind.ALL_TO_ALL]),
        ((Shard(0, 1, 4),), (Shard(0, 2, 4),), [StepKind.ALL_GATHER, StepKind.SLICE]),
        ((Shard(0, 1, 4),), (REPLICATE,), [StepKind.ALL_GATHER]),
        ((Shard(0, 1, 4),), (PARTIAL,), [StepKind.ALL_GATHER, StepKind.TO_PARTIAL]),
        ((PARTIAL,), (PARTIAL,), []),
    ],
)
def test_the_cheapest_step_is_taken(source, target, kinds):
    assert [s.kind for s in steps(source, target, (8, 8), (4,))] == kinds


def test_splitting_comes_before_gathering():
    """What is split first makes what is gathered afterwards smaller."""
    found = steps((Shard(0, 1, 2), REPLICATE), (REPLICATE, Shard(1, 1, 4)), (8, 8), (2, 4))
    assert [s.kind for s in found] == [StepKind.SLICE, StepKind.ALL_GATHER]


def test_one_atom_cannot_be_split_twice():
    with pytest.raises(PartitionError, match="two axes split the same atom"):
        steps((REPLICATE, REPLICATE), (Shard(0, 1, 2), Shard(0, 1, 2)), (8,), (2, 2))


@settings(max_examples=200)
@given(st.data())
def test_steps_end_where_they_should_and_stay_legal(data):
    mesh, shape = data.draw(meshes()), data.draw(shapes())
    source = data.draw(layouts(shape, mesh))
    target = data.draw(layouts(shape, mesh))
    now = source
    for step in steps(source, target, shape, mesh.sizes):
        assert step.before == now
        changed = [a for a, (b, c) in enumerate(zip(step.before, step.after, strict=True)) if b != c]
        assert changed == [step.axis]
        assert compatible(step.after, shape)
        now = step.after
    assert now == target


def test_every_rank_communicates_alike_whatever_it_holds():
    """Uneven parts are padded, so that shapes on the wire agree."""
    mesh = Mesh(axes=("x",), sizes=(4,))
    programs = move(torch.arange(7 * 3).view(7, 3), (Shard(0, 1, 7),), (REPLICATE,), mesh)
    sent = [n.args[0] for p in programs for n in p.graph_module.graph.nodes if n.target in COLLECTIVES]
    wire = {tuple(n.meta["val"].shape) for n in sent}
    assert wire == {(1, 1, 2, 1, 3)}


def test_bytes_on_the_wire_are_those_of_rings():
    sent = {kind: wire_bytes(kind, 4, 1000.0) for kind in StepKind}
    assert sent[StepKind.ALL_REDUCE] == 2 * sent[StepKind.ALL_GATHER] == 2 * sent[StepKind.REDUCE_SCATTER] == 1500
    assert sent[StepKind.SLICE] == sent[StepKind.TO_PARTIAL] == 0
