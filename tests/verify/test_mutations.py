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
from autopar.verify import check_programs, run_lockstep
from autopar.verify.parity import local_inputs
from tests.passes.pipelines import Tied, lowered, programs_of, tokens, values_of

PLANS = [
    (2, {"pp": 2, "microbatches": 4}),
    (4, {"pp": 4, "microbatches": 4, "schedule": "zb"}),
    (2, {"pp": 2, "microbatches": 4, "schedule": "interleaved"}),
    (4, {"pp": 2, "dp": 2, "microbatches": 2, "zero": 2}),
]
FAULTS_PER_PLAN = 130
EVERY = 5  # one in so many faults is run: four plans make 104 of them


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
    """What is communicated gets another shape or dtype, or both."""
    aten, source, value = torch.ops.aten, node.args[0], node.args[0].meta["val"]
    padded = (aten.constant_pad_nd.default, [0, 1])
    calls = [(aten.unsqueeze.default, -1) if random.random() < 0.5 or value.dim() == 0 else padded]
    if random.random() < 0.3:
        calls.append((torch.ops.prims.convert_element_type.default, torch.float64))
    with node.graph.inserting_before(node):
        for call in calls:
            source = node.graph.call_function(call[0], (source, call[1]))
            with value.fake_mode:
                source.meta["val"] = value = call[0](value, call[1])
    node.update_arg(0, source)
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


def refused(check, *args: object) -> bool:
    """Whether ``check`` finds a fault."""
    try:
        check(*args)
    except VerificationError:
        return True
    return False


@pytest.mark.parametrize(("world_size", "wishes"), PLANS)
def test_faults_are_found(world_size, wishes):
    """By the static check, all of them; some are run as well, and every one of those stops with an error, too.

    What only the static check finds are messages of two ranks that pass each other (``test_communication.py``).  None
    of these faults makes such alone: they change what is communicated, so that something does not fit as well.
    """
    model, args = Tied(), tokens()
    lowering, plan = lowered(model, args, world_size, **wishes)
    programs = programs_of(lowering, plan)
    values = values_of(lowering.prepared.step, model, args)
    inputs = [local_inputs(program, values | {"seed[0]": torch.ones(())}) for program in programs]
    check_programs(programs)
    run_lockstep(programs, inputs)
    random, found = Random(0), 0
    while found < FAULTS_PER_PLAN:
        rank = random.randrange(world_size)
        mutant = copied(programs[rank])
        fault = random.choice(FAULTS)
        node = random.choice(communications(mutant))
        name = node.name
        if not fault(node, random):
            continue
        spoilt = [mutant if p.rank == rank else p for p in programs]
        assert refused(check_programs, spoilt), f"{fault.__name__} of {name} on rank {rank} was not found"
        if found % EVERY == 0:
            assert refused(run_lockstep, spoilt, inputs), f"{fault.__name__} of {name} on rank {rank} runs"
        found += 1


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb", "interleaved"])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (2, 7), (3, 2), (3, 9), (4, 16), (8, 4)])
def test_correct_programs_pass(schedule, stages, microbatches):
    check_schedule(schedule, stages, microbatches)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb", "interleaved"])
@pytest.mark.parametrize("stages", range(2, 9))
def test_all_correct_programs_pass(schedule, stages):
    """With 1 to 16 micro-batches; under interleaved every rank has two stages."""
    for microbatches in range(1, 17):
        check_schedule(schedule, stages, microbatches)


def check_schedule(schedule, stages, microbatches):
    """The programs pass, or are refused before there are any: only interleaved asks for a number of micro-batches."""
    model = Tied(depth=2 * stages)
    wishes = {"pp": stages, "microbatches": microbatches, "schedule": schedule}
    try:
        lowering, plan = lowered(model, tokens(rows=microbatches), stages, **wishes)
        programs = programs_of(lowering, plan)
    except ConstraintError:
        assert schedule == "interleaved"
        assert microbatches % stages
        return
    check_programs(programs)
