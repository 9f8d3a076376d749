"""What must hold of the prices of emitted programs, whatever the machine."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.capture import capture
from autopar.cost_models.cluster import Cluster
from autopar.cost_models.collectives import Collective
from autopar.cost_models.timeline import COMPUTE
from autopar.lower.program import Lowering
from autopar.passes.base import Program
from autopar.passes.program_cost import ProgramCost, predict
from autopar.plan import Constraints
from autopar.search.planner import Planner

WIDTH, LENGTH = 64, 32
MACHINE = Cluster.parse("8xH100")
PLANS = {
    "ddp": {"dp": 4, "zero": 0},
    "zero3": {"dp": 4, "zero": 3},
    "tp": {"tp": 4},
    "both": {"dp": 2, "tp": 2, "zero": 3, "recompute": "full"},
    "pipeline": {"pp": 2, "dp": 2, "microbatches": 2},
}


class Block(nn.Module):
    """Attention and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Output of the block."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (12, 16)).transpose(1, 2).split(4, dim=1)
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))


@functools.cache
def programs(layers: int = 2, rows: int = 8, **fixed: object) -> tuple[Program, ...]:
    """The programs of the stages of a model of blocks under a plan."""
    model = nn.Sequential(*(Block() for _ in range(layers)))
    step = capture(model, (torch.zeros(rows, LENGTH, WIDTH),), loss_fn=lambda y: y.square().mean())
    plain = {"dp": 1, "tp": 1, "pp": 1, "zero": 0, "microbatches": 1, "recompute": "none", "sequence_parallel": False}
    wishes = Constraints(**{**plain, **fixed})
    size = (wishes.dp or 1) * (wishes.tp or 1) * (wishes.pp or 1)
    plan = Planner(step, MACHINE.resized(size), wishes).best(size)
    lowering = Lowering(step, plan)
    return tuple(lowering.program(stage * (plan.dp * plan.tp)) for stage in range(plan.pp))


def price(cluster: Cluster = MACHINE, layers: int = 2, rows: int = 8, **fixed: object) -> ProgramCost:
    """Price of a step with Adam."""
    return predict(programs(layers, rows, **fixed), cluster)


def faster(links: float = 1.0, compute: float = 1.0) -> Cluster:
    """The machine with more bandwidth, or with faster devices."""
    levels = tuple(dataclasses.replace(lv, port_bytes_per_s=lv.port_bytes_per_s * links) for lv in MACHINE.levels)
    device = MACHINE.device
    device = dataclasses.replace(
        device,
        peak_flops={name: value * compute for name, value in device.peak_flops.items()},
        memory_bytes_per_s=device.memory_bytes_per_s * compute,
    )
    run = dataclasses.replace(MACHINE.devices[0], device=device)
    return dataclasses.replace(MACHINE, devices=(run,), levels=levels)


@pytest.mark.parametrize("plan", ["ddp", "both", "pipeline"])
def test_time_and_memory_grow_with_layers(plan: str) -> None:
    shallow, deep = (price(layers=n, **PLANS[plan]) for n in (2, 3))
    assert shallow.step_s < deep.step_s
    assert shallow.peak.bytes < deep.peak.bytes
    assert shallow.flops < deep.flops


@pytest.mark.parametrize("plan", ["zero3", "tp", "pipeline"])
def test_time_and_memory_grow_with_the_batch(plan: str) -> None:
    small, large = (price(rows=n, **PLANS[plan]) for n in (8, 32))
    assert small.step_s <= large.step_s
    assert small.peak.bytes < large.peak.bytes
    assert small.flops < large.flops


@pytest.mark.parametrize("zero", [0, 3])
def test_time_grows_with_ranks_that_bring_their_own_rows(zero: int) -> None:
    times = [price(rows=4 * dp, dp=dp, zero=zero if dp > 1 else 0).step_s for dp in (1, 2, 4)]
    assert times == sorted(times)


@given(st.floats(1, 20), st.sampled_from(sorted(PLANS)))
@settings(max_examples=40, deadline=None)
def test_more_bandwidth_never_slows(factor: float, plan: str) -> None:
    base = price(**PLANS[plan])
    more = price(faster(links=factor), **PLANS[plan])
    assert more.step_s <= base.step_s * (1 + 1e-9)
    assert more.peak == base.peak


@given(st.floats(1, 20), st.sampled_from(sorted(PLANS)))
@settings(max_examples=40, deadline=None)
def test_faster_devices_never_slow(factor: float, plan: str) -> None:
    assert price(faster(compute=factor), **PLANS[plan]).step_s <= price(**PLANS[plan]).step_s * (1 + 1e-9)


@given(st.sampled_from([c.value for c in Collective]), st.floats(0.1, 0.9))
@settings(max_examples=20, deadline=None)
def test_a_measured_link_that_is_faster_never_slows(collective: str, factor: float) -> None:
    def measured(share: float) -> Cluster:
        curve = ((1e3, 1e-4 * share), (1e8, 1e-1 * share))
        level = dataclasses.replace(
            MACHINE.levels[0], curves={collective: curve}, slows_compute=0.4, slowed_by_compute=1.2
        )
        return dataclasses.replace(MACHINE, levels=(level, *MACHINE.levels[1:]))

    for plan in ("ddp", "zero3", "tp"):
        assert price(measured(factor), **PLANS[plan]).step_s <= price(measured(1.0), **PLANS[plan]).step_s * (1 + 1e-9)


@pytest.mark.parametrize("dp", [2, 4])
def test_more_zero_never_needs_more(dp: int) -> None:
    peaks = [price(dp=dp, zero=zero).peak.bytes for zero in (3, 2, 1, 0)]
    assert peaks == sorted(peaks)


@pytest.mark.parametrize("plan", ["zero3", "tp", "pipeline"])
def test_recompute_never_raises_activation_memory(plan: str) -> None:
    kept = [activations(price(layers=3, **(PLANS[plan] | {"recompute": r}))) for r in ("none", "selective", "full")]
    assert max(kept[1:]) <= kept[0]
    assert kept[2] < kept[0]


def activations(cost: ProgramCost) -> float:
    """Bytes of the peak that are neither state nor gradients."""
    held = {"parameter", "optimizer", "gradient", "batch", "buffer", "seed"}
    return sum(size for _, kind, size in cost.peak.owners if kind not in held)


@pytest.mark.parametrize("plan", PLANS)
def test_the_memory_curve_has_the_peak(plan: str) -> None:
    cost = predict(programs(**PLANS[plan]), MACHINE, memory=True)
    tops = [cost.timeline.peak_bytes(rank) for rank in range(len(cost.timeline.programs))]
    assert max(tops) == pytest.approx(cost.peak.bytes, rel=0.1)
    for rank in range(len(tops)):
        assert min(alive for _, alive in cost.timeline.memory_curve(rank)) >= 0
    assert predict(programs(**PLANS[plan]), MACHINE).timeline.step_s == cost.timeline.step_s


@pytest.mark.parametrize("plan", PLANS)
def test_nothing_is_lost_in_the_timeline(plan: str) -> None:
    cost = price(**PLANS[plan])
    for events, starts, ends in zip(cost.timeline.programs, cost.timeline.starts, cost.timeline.ends, strict=True):
        assert all(
            end >= start + event.seconds * (1 - 1e-9) for event, start, end in zip(events, starts, ends, strict=True)
        )
        waits = [(ends[i], starts[j]) for j, event in enumerate(events) for rank, i in event.waits if rank == 0]
        if len(cost.timeline.programs) == 1:
            assert all(end <= start + 1e-12 for end, start in waits)
    assert cost.step_s >= max(cost.timeline.busy_s(rank, COMPUTE) for rank in range(len(cost.timeline.programs)))
    assert cost.by_bytes == ()
