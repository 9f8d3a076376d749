"""Faults put into correct programs are found by the static check, before anything runs."""

from __future__ import annotations

import copy
import dataclasses
from random import Random

import pytest
import torch
from torch import fx

from autopar.cost_models.errors import ConstraintError, VerificationError
from autopar.passes.base import Program
from autopar.passes.torch_ops import IRECV, ISEND, WAIT, is_collective
from autopar.verify import check_programs
from tests.passes.pipelines import Tied, lowered, programs_of, tokens

PLANS = [
    (2, {"pp": 2, "microbatches": 4}),
    (4, {"pp": 4, "microbatches": 4, "schedule": "zb"}),
    (2, {"pp": 2, "microbatches": 4, "schedule": "interleaved"}),
    (4, {"pp": 2, "dp": 2, "microbatches": 2, "zero": 2}),
]
FAULTS_PER_PLAN = 130


def copied(program: Program) -> Program:
    """A program with a graph of its own; sub-programs are shared."""
    module = fx.GraphModule(program.graph_module, copy.deepcopy(program.graph_module.graph))
    return dataclasses.replace(program, graph_module=module)


def communications(program: Program) -> list[fx.Node]:
    """Sends, receives and collectives of one tensor in the program's own graph."""
    found = [n for n in program.graph_module.graph.nodes if n.target in (ISEND, IRECV) or is_collective(n)]
    return [n for n in found if isinstance(n.args[0], fx.Node)]


def drop(node: fx.Node, _: Random) -> bool:
    """The communication is left out; who waited for it gets what it was given."""
    for user in list(node.users):
        user.replace_all_uses_with(node.args[0])
        node.graph.erase_node(user)
    node.graph.erase_node(node)
    return True


def duplicate(node: fx.Node, _: Random) -> bool:
    with node.graph.inserting_after(node):
        again = node.graph.node_copy(node)
    with node.graph.inserting_after(again):
        done = node.graph.call_function(WAIT, (again,))
    again.meta, done.meta = dict(node.meta), dict(node.meta)
    return True


def retarget(node: fx.Node, random: Random) -> bool:
    if node.target not in (ISEND, IRECV):
        return False
    others = [p for p in range(-1, 5) if p != node.args[1]]
    node.update_arg(1, random.choice(others))
    return True


def retag(node: fx.Node, random: Random) -> bool:
    if node.target not in (ISEND, IRECV):
        return False
    node.update_arg(2, node.args[2] + random.choice([-1, 1, 7]))
    return True


def reshape(node: fx.Node, random: Random) -> bool:
    source = node.args[0]
    value = source.meta["val"]
    with node.graph.inserting_before(node):
        other = node.graph.call_function(torch.ops.aten.clone.default, (source,))
    with value.fake_mode:
        longer = random.random() < 0.5 or value.dim() == 0
        shape = [*value.shape, 1] if longer else [*value.shape[:-1], value.shape[-1] + 1]
        dtype = value.dtype if random.random() < 0.7 else torch.float64
        other.meta["val"] = torch.empty(shape, dtype=dtype)
    node.update_arg(0, other)
    return True


def swap(node: fx.Node, random: Random) -> bool:
    """Two messages to (or from) one rank change places."""
    if node.target not in (ISEND, IRECV):
        return False
    others = [n for n in node.graph.nodes if n.target is node.target and n.args[1] == node.args[1] and n is not node]
    if not others:
        return False
    other = random.choice(others)
    mine, theirs = node.args[2], other.args[2]
    node.update_arg(2, theirs)
    other.update_arg(2, mine)
    return True


FAULTS = [drop, duplicate, retarget, retag, reshape, swap]


@pytest.mark.parametrize(("world_size", "wishes"), PLANS)
def test_faults_are_found(world_size, wishes):
    lowering, plan = lowered(Tied(), tokens(), world_size, **wishes)
    programs = programs_of(lowering, plan)
    check_programs(programs)
    random, found = Random(0), 0
    while found < FAULTS_PER_PLAN:
        rank = random.randrange(world_size)
        mutant = copied(programs[rank])
        fault = random.choice(FAULTS)
        node = random.choice(communications(mutant))
        name = node.name
        if not fault(node, random):
            continue
        try:
            check_programs([mutant if p.rank == rank else p for p in programs])
        except VerificationError:
            found += 1
        else:
            pytest.fail(f"{fault.__name__} of {name} on rank {rank} was not found")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb", "interleaved"])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (2, 7), (3, 2), (3, 9), (4, 16), (8, 4)])
def test_correct_programs_pass(schedule, stages, microbatches):
    try:
        lowering, plan = lowered(
            Tied(depth=8), tokens(rows=16), stages, pp=stages, microbatches=microbatches, schedule=schedule
        )
        programs = programs_of(lowering, plan)
    except ConstraintError:
        assert schedule == "interleaved" or microbatches == 7 or microbatches == 9  # refused before anything runs
        return
    check_programs(programs)
