"""Kernels: the roofline's corners, alignment, attention forms, launch-bound runs."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.cluster import Cluster
from autopar.cost_models.compute import KernelModel, Op, OpKind, matmul, memory_op, unfused_attention
from autopar.cost_models.errors import ClusterError

H100 = KernelModel(device=Cluster.parse("8xH100").device)


def seconds(op: Op, model: KernelModel = H100) -> float:
    return float(model.seconds([op])[0])


def attention(heads: int = 32, length: int = 4096, d: int = 128, *, backward: bool = False) -> Op:
    shape = (1, heads, length, d)
    return Op(
        name="attention",
        kind=OpKind.ATTENTION_BACKWARD if backward else OpKind.ATTENTION,
        shapes=(shape, shape),
        dtype="bf16",
        flops=(10 if backward else 4) * heads * length**2 * d / 2,
        bytes=4.0 * heads * length * d * 2,
    )


def test_a_large_matmul_runs_near_what_the_device_sustains() -> None:
    op = matmul(8192, 8192, 8192, "bf16")
    rate = op.flops / seconds(op)
    assert 0.85 < rate / H100.device.matmul_flops("bf16") <= 1


def test_a_thin_matmul_is_bound_by_memory() -> None:
    op = matmul(1, 8192, 8192, "bf16")
    floor = op.bytes / H100.device.memory_bytes_per_s
    assert floor < seconds(op) < 2 * floor


def test_copies_are_bound_by_memory() -> None:
    device = H100.device
    expected = 1e9 / (device.memory_bytes_per_s * device.memory_efficiency) + device.kernel_s
    assert seconds(memory_op("copy", 1e9)) == pytest.approx(expected)


@given(st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 4096))
def test_doubling_a_matmul_never_makes_it_faster(m: int, n: int, k: int) -> None:
    once, twice = H100.seconds([matmul(8 * m, 8 * n, 8 * k, "bf16"), matmul(16 * m, 8 * n, 8 * k, "bf16")])
    assert once <= twice * (1 + 1e-9)


@pytest.mark.parametrize("d", [108, 150])
def test_head_dimensions_off_the_grid_are_slow(d: int) -> None:
    near = (d + 7) // 8 * 8
    slow, fast = (matmul(2048, 2048, k, "fp16", batch=16, is_linear=False) for k in (d, near))
    assert seconds(slow) > 2 * seconds(fast)


def test_fp8_is_faster_for_large_matmuls_and_costs_a_cast() -> None:
    fp8 = dataclasses.replace(H100, linear_dtype="fp8")
    op = matmul(8192, 8192, 8192, "bf16")
    assert [o.name for o in fp8.expand([op])] == ["quantize", "mm"]
    assert fp8.total_seconds([op]) < 0.75 * H100.total_seconds([op])


def test_unfused_attention_writes_the_scores() -> None:
    ops = unfused_attention(attention(), dropout=True)
    scores = 32 * 4096 * 4096
    assert sum(o.bytes for o in ops if o.kind is OpKind.MEMORY) == scores * (4 + 5)
    assert sum(o.flops for o in ops) == pytest.approx(2 * attention().flops)
    backward = unfused_attention(attention(backward=True), dropout=True)
    assert sum(o.flops for o in backward) == pytest.approx(4 * attention().flops)
    unfused = dataclasses.replace(H100, attention="unfused")
    assert unfused.total_seconds([attention()]) > 2 * H100.total_seconds([attention()])


def test_attention_kernels_rank_as_measured() -> None:
    times = [
        dataclasses.replace(H100, attention=kind).total_seconds([attention()]) for kind in ("cudnn", "flash", "flash1")
    ]
    assert times == sorted(times)
    with pytest.raises(ClusterError, match="unknown"):
        KernelModel(device=H100.device, attention="sparse")


def test_small_ops_wait_for_the_host() -> None:
    tiny = [memory_op("add", 1e3)] * 100
    assert H100.total_seconds(tiny, dispatch_s=1e-5) == pytest.approx(1e-3)


@given(st.floats(1, 10), st.sampled_from(["memory_bytes_per_s", "matmul_efficiency"]))
def test_a_better_device_is_never_slower(factor: float, name: str) -> None:
    better = dataclasses.replace(H100.device, **{name: getattr(H100.device, name) * factor})
    ops = [matmul(512, 4096, 1024, "bf16"), attention(), memory_op("x", 1e6)]
    assert (dataclasses.replace(H100, device=better).seconds(ops) <= H100.seconds(ops) * (1 + 1e-12)).all()
