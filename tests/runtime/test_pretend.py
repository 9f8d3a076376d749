"""Steps that sleep in place of computing: what is slept is what is predicted, communication stays as it is."""

import pytest

from autopar.cost_models.cluster import Cluster
from autopar.cost_models.compute import KernelModel
from autopar.passes.program_cost import predict
from autopar.runtime.pretend import Doing, PretendedStep
from tests.passes.pipelines import Tied, lowered, programs_of, tokens

KERNELS = KernelModel(device=Cluster.parse("1xH100").device)


def pretended(world_size, **wishes):
    lowering, plan = lowered(Tied(), tokens(), world_size, **wishes)
    programs = programs_of(lowering, plan)
    return programs, [PretendedStep(p, KERNELS, lambda name: name) for p in programs]


@pytest.mark.parametrize("schedule", ["1f1b", "zb", "interleaved"])
def test_as_much_is_slept_as_the_simulator_computes(schedule):
    programs, steps = pretended(2, pp=2, microbatches=4, schedule=schedule)
    timeline = predict(programs, Cluster.parse("2xH100"), slowdown=0.0).timeline
    for rank, step in enumerate(steps):
        assert step.compute_s == pytest.approx(timeline.busy_s(rank))


def test_a_step_without_communication():
    _, (step,) = pretended(1, microbatches=3)
    (moment,) = step.run()
    assert (moment.doing, moment.name) == (Doing.COMPUTE, "0F0 0B0 0F1 0B1 0F2 0B2")
    assert moment.end_s - moment.start_s >= step.compute_s
