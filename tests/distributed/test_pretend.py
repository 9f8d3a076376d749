"""Ranks that sleep in place of computing: their messages are real."""

import torch

from autopar.cost_models.cluster import Cluster
from autopar.cost_models.compute import KernelModel
from autopar.passes.torch_ops import IRECV, ISEND, WAIT
from autopar.runtime.groups import groups_for
from autopar.runtime.pretend import Doing, PretendedStep
from autopar.runtime.world import connect
from tests.passes.pipelines import Tied, lowered, tokens


def step():
    """What this rank did, and the names of its program's communications and waits."""
    world = connect(torch.device("cpu"))
    lowering, _ = lowered(Tied(), tokens(), 2, pp=2, microbatches=3)
    program = lowering.program(world.rank)
    groups = groups_for(world, program.mesh)
    kernels = KernelModel(device=Cluster.parse("1xH100").device)
    pretended = PretendedStep(program, kernels, lambda name: str(groups.group(name).group_name))
    nodes = program.graph_module.graph.nodes
    return pretended.run(), [node.name for node in nodes if node.target in (ISEND, IRECV, WAIT)]


def test_messages_are_real(ranks):
    (first, wanted_first), (second, wanted_second) = ranks(2, step)
    for moments, wanted in ((first, wanted_first), (second, wanted_second)):
        assert [m.name for m in moments if m.doing is not Doing.COMPUTE] == wanted

    def computed(moments, action):
        return next(m for m in moments if m.doing is Doing.COMPUTE and action in m.name.split())

    for number in range(3):
        assert computed(second, f"1F{number}").start_s >= computed(first, f"0F{number}").end_s
        assert computed(first, f"0B{number}").start_s >= computed(second, f"1B{number}").end_s
