"""Uniform plans: the price moves the way physics says."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.cluster import Cluster
from autopar.cost_models.collectives import Collective, CollectiveModel, Transfer
from autopar.cost_models.compute import KernelModel, matmul
from autopar.cost_models.errors import ClusterError
from autopar.cost_models.stack import StackProfile
from autopar.cost_models.step import LayerCost, StepModel, UniformPlan

TOKENS, HIDDEN = 4096, 4096


def block(tp: int = 1) -> LayerCost:
    forward = tuple(matmul(TOKENS, n // tp, HIDDEN, "bf16") for n in (3 * HIDDEN, HIDDEN, 4 * HIDDEN, 4 * HIDDEN))
    reductions = (Transfer(collective=Collective.ALL_REDUCE, group="tp", bytes=2.0 * TOKENS * HIDDEN),) * 2
    return LayerCost(
        name="block",
        forward=forward,
        backward=forward * 2,
        again=forward,
        forward_transfers=reductions if tp > 1 else (),
        backward_transfers=reductions if tp > 1 else (),
        num_parameters=12.0 * HIDDEN**2 / tp,
    )


def model(cluster: str = "2x8xH100", **habits: object) -> StepModel:
    machine = Cluster.parse(cluster)
    return StepModel(
        cluster=machine,
        kernels=KernelModel(device=machine.device),
        collectives=CollectiveModel(cluster=machine),
        stack=StackProfile(name="test", **habits),  # type: ignore[arg-type]
    )


def step_s(plan: UniformPlan, layers: int = 8, machine: StepModel | None = None) -> float:
    stages = [[(block(plan.tp), layers // (plan.pp * plan.num_chunks))] for _ in range(plan.pp * plan.num_chunks)]
    return (machine or model()).step(stages, plan).step_s


@given(st.integers(1, 16), st.integers(1, 8))
def test_cost_grows_with_layers_and_micro_batches(layers: int, microbatches: int) -> None:
    plan = UniformPlan(dp=8, num_microbatches=microbatches)
    assert step_s(plan, layers) < step_s(plan, layers + 1)
    assert step_s(plan, layers) < step_s(dataclasses.replace(plan, num_microbatches=microbatches + 1), layers)


def test_recompute_costs_a_forward() -> None:
    plan = UniformPlan(num_microbatches=4)
    none, full = step_s(plan), step_s(dataclasses.replace(plan, recompute="full"))
    assert full / none == pytest.approx(4 / 3, rel=0.02)


def test_tensor_parallelism_across_nodes_is_slow() -> None:
    inside = step_s(UniformPlan(tp=8, dp=2, num_microbatches=16))
    across = step_s(UniformPlan(tp=16, num_microbatches=32))  # the same batch
    assert across > inside


def test_pipelines_pay_their_bubble() -> None:
    short, long = (step_s(UniformPlan(pp=4, num_microbatches=m)) / m for m in (4, 32))
    assert short / long == pytest.approx((7 / 4) / (35 / 32), rel=0.05)
    inter = UniformPlan(pp=4, num_microbatches=4, num_chunks=2, schedule="interleaved")
    assert step_s(inter) < step_s(UniformPlan(pp=4, num_microbatches=4))


def test_zero_3_hides_behind_computation_when_overlapped() -> None:
    plan = UniformPlan(dp=16, zero=3, num_microbatches=2)
    hidden, bare = (step_s(plan, machine=model(fsdp_overlap=o)) for o in (True, False))
    assert hidden < bare


def test_overlap_of_gradients_helps() -> None:
    plan = UniformPlan(dp=16)
    assert step_s(plan, machine=model(dp_overlap=0.9)) < step_s(plan)


def test_hosts_pace_small_models() -> None:
    assert step_s(UniformPlan(), machine=model(dispatch_s=1e-2)) > 10 * step_s(UniformPlan())


@given(st.floats(1, 50))
def test_bandwidth_never_slows(factor: float) -> None:
    base = model()
    levels = tuple(dataclasses.replace(lv, port_bytes_per_s=lv.port_bytes_per_s * factor) for lv in base.cluster.levels)
    cluster = dataclasses.replace(base.cluster, levels=levels)
    faster = dataclasses.replace(base, cluster=cluster, collectives=CollectiveModel(cluster=cluster))
    for plan in (UniformPlan(tp=8, dp=2), UniformPlan(dp=16, zero=3), UniformPlan(pp=2, dp=8, send_bytes=1e7)):
        assert step_s(plan, machine=faster) <= step_s(plan) * (1 + 1e-9)


def test_a_gain_may_not_hide_a_wrong_model() -> None:
    with pytest.raises(ClusterError, match="find the cause"):
        StackProfile(name="x", gain=1.3)
