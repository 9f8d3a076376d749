"""Measures this machine, and the world of ranks it runs in, and describes both as a cluster.

Run alone it measures computation; under torchrun it also measures every collective within a host and between hosts, and
all ranks compute at the same time, as they do in a step.  All ranks call :func:`calibrate`; all return the same cluster
(rank 0's measurements).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from autopar.calibrate_kernels import (
    ATTENTION,
    DTYPES,
    ELEMENTS,
    MATMUL_SIZES,
    Note,
    attention_curves,
    kernel_curves,
    kernel_table,
    matmul_curves,
)
from autopar.calibrate_links import MESSAGE_BYTES, measure_links, num_measurements
from autopar.cost_models.cluster import Cluster, Curve, Device, DeviceRun, LinkLevel
from autopar.cost_models.fit import fit_line
from autopar.stopwatch import Stopwatch

Report = Callable[[str, float], None]

REFERENCE_SIZE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One thing that was timed: what, its size in bytes (of the full tensor) or the side of a square, and seconds."""

    name: str
    size: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured.

    Attributes:
        matmul: sides of the square matmuls.
        elements: sizes of the inputs of element-wise and other memory-bound operations.
        message_bytes: sizes of the messages.
    """

    matmul: Sequence[int] = MATMUL_SIZES
    elements: Sequence[int] = ELEMENTS
    message_bytes: Sequence[int] = MESSAGE_BYTES

    def count(self, num_levels: int) -> int:
        """Number of measurements."""
        kernels = len(DTYPES) * len(self.matmul) + len(kernel_table()) * len(self.elements) + 2 * len(ATTENTION)
        return kernels + 2 + num_levels * num_measurements(self.message_bytes)


def calibrate(
    *,
    device: torch.device | str = "cpu",
    sizes: Sizes = Sizes(),
    repeats: int = 8,
    report: Report | None = None,
) -> tuple[Cluster, tuple[Measurement, ...]]:
    """Measure, and describe what was measured.

    Args:
        device: where tensors live.
        sizes: what is measured.
        repeats: runs of each; the first quartile counts.
        report: called with a name and the share that is done after each measurement.

    Returns:
        A cluster of this world's size, and the measurements behind it.
    """
    place = torch.device(device)
    world = dist.get_world_size() if dist.is_initialized() else 1
    watch = Stopwatch(place=place, repeats=repeats, group=dist.group.WORLD if world > 1 else None)
    total = sizes.count(int(world > 1))
    rows: list[Measurement] = []

    def note(name: str, size: int, seconds: float) -> None:
        rows.append(Measurement(name=name, size=size, seconds=seconds))
        if report is not None:
            report(name, min(len(rows) / total, 1.0))

    chip = _measure_device(watch, sizes, note)
    levels = measure_links(watch, sizes.message_bytes, note) if world > 1 else [_alone()]
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


def reference_seconds(watch: Stopwatch) -> float:
    """Time of one matmul of 512 in fp32: the unit in which times of one machine at two moments are compared."""
    a, b = (torch.randn(REFERENCE_SIZE, REFERENCE_SIZE, device=watch.place) for _ in range(2))
    return watch.seconds(partial(torch.mm, a, b))


def _alone() -> LinkLevel:
    """Stands for the links of a machine that was measured with one rank: nothing is known of them."""
    profile = Cluster.parse("1xCPU").levels[0]
    return LinkLevel(
        name=profile.name, fanout=1, port_bytes_per_s=profile.port_bytes_per_s, latency_s=profile.latency_s
    )


def _measure_device(watch: Stopwatch, sizes: Sizes, note: Note) -> Device:
    place = watch.place
    products = matmul_curves(watch, note, sizes.matmul)
    peaks = {name: max(flops / s for flops, s in products[f"matmul {name}"]) for name in DTYPES}
    kernels = kernel_curves(watch, note, sizes.elements)
    mixing = attention_curves(watch, note)
    line = fit_line(*zip(*kernels["memory"], strict=True))
    largest_bytes, largest_s = kernels["memory"][-1]
    small = torch.ones(4, device=place)
    dispatch_s = watch.seconds(lambda: small + small)
    note("dispatch", 4, dispatch_s)
    note("reference", REFERENCE_SIZE, reference_seconds(watch))
    return Device(
        name=torch.cuda.get_device_name(place) if place.type == "cuda" else "CPU",
        peak_flops=peaks,
        memory_bytes=_memory_bytes(place),
        memory_bytes_per_s=1 / line.seconds_per_byte if line.seconds_per_byte else largest_bytes / largest_s,
        matmul_efficiency=1.0,
        memory_efficiency=1.0,
        matmul_ramp_k=0.0 if place.type == "cpu" else 300.0,
        compute_units=torch.cuda.get_device_properties(place).multi_processor_count if place.type == "cuda" else 1,
        kernel_s=dispatch_s if place.type == "cpu" else 3e-6,
        dispatch_s=dispatch_s,
        attention=_attention_shares(mixing, peaks["fp32"]),
        curves={**products, **kernels, **mixing},
    )


def _memory_bytes(place: torch.device) -> float:
    if place.type == "cuda":
        return float(torch.cuda.get_device_properties(place).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _attention_shares(curves: dict[str, Curve], peak: float) -> dict[str, float]:
    """Share of the fp32 peak that attention reaches on the longest sequence, forward and backward."""
    names = {"flash": "attention", "flash_backward": "attention_backward"}
    return {share: min(1.0, curves[name][-1][0] / curves[name][-1][1] / peak) for share, name in names.items()}
