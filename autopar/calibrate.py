"""Measures this machine, and the world of ranks it runs in, and describes both as a cluster.

Run alone it measures computation; under torchrun it also measures every collective within a host and between hosts.
All ranks call :func:`calibrate`; all return the same cluster (rank 0's measurements).
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from autopar.cost_models.cluster import Cluster, Device, DeviceRun, LinkLevel
from autopar.cost_models.collectives import Algorithm, Collective, N, S, formula
from autopar.cost_models.errors import ClusterError
from autopar.cost_models.fit import fit_line

Report = Callable[[str, float], None]

MATMUL_SIZES = (128, 256, 512, 1024)
COPY_BYTES = (1 << 16, 1 << 20, 1 << 24, 1 << 26)
MESSAGE_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 23)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One thing that was timed: what, its size in bytes (of the full tensor) or the side of a square, and seconds."""

    name: str
    size: int
    seconds: float


def calibrate(
    *,
    device: torch.device | str = "cpu",
    matmul_sizes: Sequence[int] = MATMUL_SIZES,
    message_bytes: Sequence[int] = MESSAGE_BYTES,
    repeats: int = 5,
    report: Report | None = None,
) -> tuple[Cluster, tuple[Measurement, ...]]:
    """Measure, and describe what was measured.

    Args:
        device: where tensors live.
        matmul_sizes: sides of the square matmuls.
        message_bytes: sizes of the messages.
        repeats: runs of each; the median counts.
        report: called with a name and the share that is done after each measurement.

    Returns:
        A cluster of this world's size, and the measurements behind it.
    """
    place = torch.device(device)
    world = dist.get_world_size() if dist.is_initialized() else 1
    total = 2 * len(matmul_sizes) + len(COPY_BYTES) + 3 + (len(_COLLECTIVES) * len(message_bytes) if world > 1 else 0)
    rows: list[Measurement] = []

    def note(name: str, size: int, seconds: float) -> None:
        rows.append(Measurement(name=name, size=size, seconds=seconds))
        if report is not None:
            report(name, len(rows) / total)

    chip = _measure_device(place, matmul_sizes, repeats, note)
    levels = _measure_links(place, message_bytes, repeats, note) if world > 1 else [_alone()]
    cluster = Cluster(
        name="calibrated",
        devices=(DeviceRun(count=world, device=chip),),
        levels=tuple(levels),
        sources={"device": "measured by autopar calibrate", "levels": "measured by autopar calibrate"},
    )
    if world > 1:
        shared: list[object] = [cluster.to_json()]
        dist.broadcast_object_list(shared, src=0)
        cluster = Cluster.from_json(shared[0], "calibrated")
    return cluster, tuple(rows)


def _alone() -> LinkLevel:
    """Stands for the links of a machine that was measured with one rank: nothing is known of them."""
    profile = Cluster.parse("1xCPU").levels[0]
    return LinkLevel(
        name=profile.name, fanout=1, port_bytes_per_s=profile.port_bytes_per_s, latency_s=profile.latency_s
    )


def _seconds(run: Callable[[], object], place: torch.device, repeats: int) -> float:
    """Median duration of ``run``, repeated inside so that a short one is well above the clock's grain."""
    run()
    inner = 1
    while True:
        start = time.perf_counter()
        for _ in range(inner):
            run()
        _wait(place)
        elapsed = time.perf_counter() - start
        if elapsed > 2e-3 or inner >= 4096:
            break
        inner *= 4
    times = [elapsed / inner]
    for _ in range(repeats - 1):
        start = time.perf_counter()
        for _ in range(inner):
            run()
        _wait(place)
        times.append((time.perf_counter() - start) / inner)
    return statistics.median(times)


def _wait(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)


Note = Callable[[str, int, float], None]


def _measure_device(place: torch.device, sizes: Sequence[int], repeats: int, note: Note) -> Device:
    peaks: dict[str, float] = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        rates = []
        for n in sizes:
            a, b = (torch.randn(n, n, device=place).to(dtype) for _ in range(2))
            seconds = _seconds(partial(torch.mm, a, b), place, repeats)
            note(f"matmul {name}", n, seconds)
            rates.append(2 * n**3 / seconds)
        peaks[name] = max(rates)
    sizes_bytes, times = [], []
    for size in COPY_BYTES:
        x = torch.randn(size // 4, device=place)
        out = torch.empty_like(x)
        seconds = _seconds(partial(torch.add, x, 1.0, out=out), place, repeats)
        note("element-wise", size, seconds)
        sizes_bytes.append(2.0 * size)
        times.append(seconds)
    line = fit_line(sizes_bytes, times)
    small = torch.ones(4, device=place)
    dispatch_s = _seconds(lambda: small + small, place, repeats)
    note("dispatch", 4, dispatch_s)
    return Device(
        name=torch.cuda.get_device_name(place) if place.type == "cuda" else "CPU",
        peak_flops=peaks,
        memory_bytes=_memory_bytes(place),
        memory_bytes_per_s=1 / line.seconds_per_byte if line.seconds_per_byte else 2.0 * COPY_BYTES[-1] / times[-1],
        matmul_efficiency=1.0,
        memory_efficiency=1.0,
        matmul_ramp_k=0.0 if place.type == "cpu" else 300.0,
        compute_units=torch.cuda.get_device_properties(place).multi_processor_count if place.type == "cuda" else 1,
        kernel_s=dispatch_s if place.type == "cpu" else 3e-6,
        dispatch_s=dispatch_s,
        attention=_attention_shares(place, peaks["fp32"], repeats, note),
    )


def _memory_bytes(place: torch.device) -> float:
    if place.type == "cuda":
        return float(torch.cuda.get_device_properties(place).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _attention_shares(place: torch.device, peak: float, repeats: int, note: Note) -> dict[str, float]:
    """Share of the fp32 peak that attention reaches, forward and backward."""
    b, h, s, d = 1, 4, 512, 64
    q, k, v = (torch.randn(b, h, s, d, device=place, requires_grad=True) for _ in range(3))
    with torch.no_grad():
        forward_s = _seconds(lambda: F.scaled_dot_product_attention(q, k, v), place, repeats)
    note("attention", s, forward_s)

    def both() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(q, k, v).sum(), (q, k, v))

    backward_s = max(_seconds(both, place, repeats) - forward_s, forward_s)
    note("attention backward", s, backward_s)
    flops = 4.0 * b * h * s * s * d
    return {"flash": min(1.0, flops / forward_s / peak), "flash_backward": min(1.0, 2.5 * flops / backward_s / peak)}


def _all_to_all(t: Tensor, group: dist.ProcessGroup) -> None:
    dist.all_to_all_single(torch.empty_like(t), t, group=group)


def _all_gather(t: Tensor, group: dist.ProcessGroup) -> None:
    n = dist.get_world_size(group)
    dist.all_gather_into_tensor(torch.empty_like(t), t[: t.numel() // n].contiguous(), group=group)


def _reduce_scatter(t: Tensor, group: dist.ProcessGroup) -> None:
    n = dist.get_world_size(group)
    dist.reduce_scatter_tensor(torch.empty(t.numel() // n, dtype=t.dtype, device=t.device), t, group=group)


_COLLECTIVES: dict[Collective, Callable[[Tensor, dist.ProcessGroup], object]] = {
    Collective.ALL_REDUCE: lambda t, group: dist.all_reduce(t, group=group),
    Collective.ALL_GATHER: _all_gather,
    Collective.REDUCE_SCATTER: _reduce_scatter,
    Collective.ALL_TO_ALL: _all_to_all,
    Collective.BROADCAST: lambda t, group: dist.broadcast(t, group_src=0, group=group),
}


def _measure_links(place: torch.device, sizes: Sequence[int], repeats: int, note: Note) -> list[LinkLevel]:
    """One level within a host and one between hosts, where the world has them."""
    hosts = _ranks_by_host()
    counts = {len(ranks) for ranks in hosts}
    if len(counts) > 1:
        raise ClusterError(f"hosts run {sorted(counts)} ranks; start equally many on each")
    per_host = counts.pop()
    me = dist.get_rank()
    levels = []
    inside = [dist.new_group(ranks) for ranks in hosts] if per_host > 1 else []
    mine = next((g for g, ranks in zip(inside, hosts, strict=False) if me in ranks), None)
    if mine is not None:
        levels.append(_level("loopback", per_host, mine, place, sizes, repeats, note))
    else:
        levels.append(LinkLevel(name="loopback", fanout=1, port_bytes_per_s=1e9, latency_s=5e-5))
    if len(hosts) > 1:
        across = [dist.new_group(list(ranks)) for ranks in zip(*hosts, strict=True)]
        group = across[next(i for i, ranks in enumerate(zip(*hosts, strict=True)) if me in ranks)]
        levels.append(_level("network", len(hosts), group, place, sizes, repeats, note))
    return levels


def _ranks_by_host() -> list[list[int]]:
    names: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    hosts: dict[object, list[int]] = {}
    for rank, name in enumerate(names):
        hosts.setdefault(name, []).append(rank)
    return list(hosts.values())


def _level(  # noqa: PLR0913 -- one level, and how to measure it
    name: str,
    fanout: int,
    group: dist.ProcessGroup,
    place: torch.device,
    sizes: Sequence[int],
    repeats: int,
    note: Note,
) -> LinkLevel:
    """Latency and bandwidth that explain the measured collectives, the median of what each says."""
    latencies, bandwidths = [], []
    for collective, run in _COLLECTIVES.items():
        times = []
        for size in sizes:
            t = torch.zeros(size // 4 // fanout * fanout, device=place)
            seconds = _meet_and_time(partial(run, t, group), group, place, repeats)
            note(f"{name} {collective.value}", size, seconds)
            times.append(seconds)
        line = fit_line(sizes, times)
        moved, steps = _ring(collective, fanout)
        latencies.append(max(line.start_s, 1e-7) / steps)
        if line.seconds_per_byte > 0:
            bandwidths.append(moved / line.seconds_per_byte)
    return LinkLevel(
        name=name,
        fanout=fanout,
        port_bytes_per_s=statistics.median(bandwidths),
        latency_s=statistics.median(latencies),
    )


def _ring(collective: Collective, ranks: int) -> tuple[float, float]:
    """(share of the message on a link, steps) of the algorithm that serves large messages."""
    kind = Algorithm.DIRECT if collective is Collective.ALL_TO_ALL else Algorithm.RING
    f = formula(collective, kind)
    return float(f.moved.subs({N: ranks, S: 1})), float(f.steps.subs({N: ranks}))


def _meet_and_time(run: Callable[[], object], group: dist.ProcessGroup, place: torch.device, repeats: int) -> float:
    """Median duration; all ranks make the same number of calls, so that none waits alone."""
    for _ in range(2):
        run()
    times = []
    for _ in range(repeats):
        dist.barrier(group)
        start = time.perf_counter()
        for _ in range(3):
            run()
        _wait(place)
        times.append((time.perf_counter() - start) / 3)
    return statistics.median(times)
