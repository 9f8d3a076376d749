"""What a plan runs on: devices in rank order, and levels of links from the innermost (an NVLink island) outwards.

First stage of the cost models: everything that turns bytes or operations into seconds starts from a :class:`Cluster`.
Ranks are numbered so that neighbours share the innermost level; the last axis of a mesh varies fastest and lies there.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.cost_models.errors import ClusterError
from autopar.cost_models.schema import check

_HERE = Path(__file__).parent
_FORMAT = "autopar-cluster-1"

# (work, seconds) of what was measured, in rising order.
Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator (or one CPU process).

    Attributes:
        name: short name, such as ``H100``.
        peak_flops: dense peak in operations per second by dtype name (``fp32``, ``tf32``, ``fp16``, ``bf16``, ``fp8``).
        memory_bytes: capacity.
        memory_bytes_per_s: peak bandwidth of the device memory.
        matmul_efficiency: share of the peak that the best large matmul sustains.
        dtype_efficiency: the same for formats that differ (``fp8``, ``fp4``).
        matmul_ramp_k: inner length of a matmul whose time is lost at the start and end of a tile.
        memory_efficiency: share of the memory bandwidth that a large copy sustains.
        compute_units: processors (SMs) that tiles of a matmul are dealt out to.
        kernel_s: least time a kernel occupies the device.
        dispatch_s: time the host needs to launch one operation from eager PyTorch.
        attention: share of the peak that fused attention sustains for a head of 128, by kernel (``flash1``, ``flash``,
            ``flash_backward``, ``cudnn``, ``cudnn_backward``).
        context_bytes: memory taken by the driver context and library workspaces, outside the allocator.
        curves: measured points (work, seconds) in rising order, which stand in place of the roofline: by ATen name for
            ops that move bytes (work: bytes; ``memory`` serves ops without a curve of their own), ``matmul fp32`` and
            the other formats (work: operations), ``attention`` and ``attention_backward`` (work: operations of a head).
    """

    name: str
    peak_flops: Mapping[str, float]
    memory_bytes: float
    memory_bytes_per_s: float
    matmul_efficiency: float = 0.85
    dtype_efficiency: Mapping[str, float] = field(default_factory=dict)
    matmul_ramp_k: float = 300.0
    memory_efficiency: float = 0.85
    compute_units: int = 108
    kernel_s: float = 3e-6
    dispatch_s: float = 7e-6
    attention: Mapping[str, float] = field(default_factory=dict)
    context_bytes: float = 0.0
    curves: Mapping[str, Curve] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Freeze the table and refuse a device that cannot compute."""
        if not self.peak_flops:
            raise ClusterError(f"device {self.name!r} states no peak; give peak_flops at least for 'fp32'")
        object.__setattr__(self, "peak_flops", MappingProxyType(dict(self.peak_flops)))
        object.__setattr__(self, "dtype_efficiency", MappingProxyType(dict(self.dtype_efficiency)))
        object.__setattr__(self, "attention", MappingProxyType(dict(self.attention)))
        object.__setattr__(self, "curves", as_curves(f"device {self.name!r}", self.curves))

    def peak(self, dtype: str) -> float:
        """Dense peak for ``dtype``, in operations per second; a dtype without units of its own runs at a wider one's.

        Without a figure of its own fp64 takes twice the time of fp32, as on V100, A100 and H100 (NVIDIA data sheets);
        integers go at the pace of fp32.

        >>> Cluster.parse("8xA100-40GB").device.peak("fp8") / 1e12
        312.0
        >>> Cluster.parse("8xA100-40GB").device.peak("fp64") / 1e12
        9.75
        """
        for name in (dtype, *_WIDER.get(dtype, ("fp32",))):
            if name in self.peak_flops:
                slower = 2 if dtype == "fp64" != name else 1
                return self.peak_flops[name] / slower
        raise ClusterError(f"device {self.name!r} has no peak for {dtype!r}; it states {sorted(self.peak_flops)}")

    def matmul_flops(self, dtype: str) -> float:
        """What the best large matmul in ``dtype`` sustains, in operations per second."""
        return self.peak(dtype) * self.dtype_efficiency.get(dtype, self.matmul_efficiency)

    def attention_share(self, kernel: str, *, backward: bool) -> float:
        """Share of the peak that fused attention sustains; where no figure is known, a share of the matmul's.

        >>> Cluster.parse("8xH100").device.attention_share("cudnn", backward=False) > 0.5
        True
        """
        name = f"{kernel}_backward" if backward else kernel
        return self.attention.get(name, self.matmul_efficiency * (0.6 if backward else 0.7))


_WIDER: Mapping[str, tuple[str, ...]] = {
    "fp4": ("fp8", "bf16", "fp16", "tf32", "fp32"),
    "fp8": ("bf16", "fp16", "tf32", "fp32"),
    "bf16": ("fp16", "tf32", "fp32"),
    "fp16": ("bf16", "tf32", "fp32"),
    "tf32": ("fp32",),
}


def as_curves(where: str, curves: Mapping[str, Any]) -> Mapping[str, Curve]:
    """The curves, frozen.

    Raises:
        ClusterError: the work of a curve does not rise, or its seconds fall.
    """
    found = {name: tuple((float(x), float(y)) for x, y in points) for name, points in curves.items()}
    for name, points in found.items():
        pairs = list(itertools.pairwise(points))
        if not points or points[0][0] <= 0 or points[0][1] <= 0 or any(b[0] <= a[0] or b[1] < a[1] for a, b in pairs):
            raise ClusterError(
                f"{where}: the curve {name!r} needs points (work, seconds) above 0 whose work rises and whose seconds "
                f"do not fall; it has {[list(p) for p in points]}"
            )
    return MappingProxyType(found)


def read_curve(curve: Curve, work: ArrayLike) -> NDArray[np.float64]:
    """Seconds at ``work``: straight between points in log scales, proportional to work beyond the last.

    >>> read_curve(((1e3, 1e-6), (1e6, 1e-3)), [10, 1e5, 2e6]).round(9).tolist()
    [1e-06, 0.0001, 0.002]
    """
    x, y = (np.array(column) for column in zip(*curve, strict=True))
    amount = np.maximum(np.asarray(work, np.float64), 1e-300)
    inside = np.exp(np.interp(np.log(amount), np.log(x), np.log(y)))
    seconds: NDArray[np.float64] = np.where(amount > x[-1], y[-1] * amount / x[-1], inside)
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLevel:
    """One level of the network: it joins ``fanout`` units of the level below (devices, for the innermost).

    Attributes:
        name: ``nvlink``, ``network``, ``spine``...
        fanout: units joined.
        port_bytes_per_s: nominal bandwidth of one port, one direction.
        latency_s: time from one rank to another for an empty message.
        devices_per_port: devices that share one port (0.5: each device has two).
        efficiency: share of the nominal bandwidth that a large message reaches.
        topology: ``switch``: a device reaches its whole bandwidth to any peer; ``mesh``: the bandwidth is split evenly
            over a link to each of the other ``fanout - 1`` units, and a small group uses few of them.
        slows_compute: by how much a transfer lengthens computation beside it (1: twice as long); None where nobody
            measured it.
        slowed_by_compute: by how much computation lengthens a transfer beside it.
        curves: measured points (bytes of the full tensor, seconds) in rising order, by collective, for a group of all
            ``fanout`` units; they stand in place of the formulas.
    """

    name: str
    fanout: int
    port_bytes_per_s: float
    latency_s: float
    devices_per_port: float = 1.0
    efficiency: float = 1.0
    topology: str = "switch"
    slows_compute: float | None = None
    slowed_by_compute: float = 0.0
    curves: Mapping[str, Curve] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Freeze the curves."""
        object.__setattr__(self, "curves", as_curves(f"level {self.name!r}", self.curves))

    @property
    def device_bytes_per_s(self) -> float:
        """Sustained bandwidth of one device, one direction, when all devices use the level at once."""
        return self.port_bytes_per_s * self.efficiency / self.devices_per_port


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRun:
    """``count`` equal devices with consecutive ranks."""

    count: int
    device: Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """How a group of ranks lies over the levels: ``extents[i]`` units are touched inside one unit of level i.

    The product of the extents is the number of ranks.  ``stride`` is the distance in ranks between neighbours.
    """

    extents: tuple[int, ...]
    stride: int = 1

    @property
    def num_ranks(self) -> int:
        """Size of the group."""
        return math.prod(self.extents)

    @property
    def outermost(self) -> int:
        """Index of the outermost level that the group crosses (0 for a group of one)."""
        return max((i for i, n in enumerate(self.extents) if n > 1), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices in rank order and the levels that join them, innermost first.

    Attributes:
        name: how it was asked for.
        devices: runs of equal devices.
        levels: link levels; the product of their fanouts is the number of devices.
        sources: where each figure comes from, by field path.
    """

    name: str
    devices: tuple[DeviceRun, ...]
    levels: tuple[LinkLevel, ...]
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse levels that do not hold exactly the devices."""
        joined = math.prod(level.fanout for level in self.levels)
        if joined != self.num_devices:
            raise ClusterError(
                f"cluster {self.name!r}: the fanouts of its levels join {joined} devices, but it lists "
                f"{self.num_devices}; make the product of 'fanout' equal the sum of 'count'"
            )

    @property
    def num_devices(self) -> int:
        """Number of devices, which is the largest world size."""
        return sum(run.count for run in self.devices)

    @property
    def device(self) -> Device:
        """The device that a program spread evenly over the cluster waits for: least peak, and least memory.

        With several kinds, the figures of the slowest compute and of the smallest memory are combined.
        """
        kinds = [run.device for run in self.devices]
        slowest = min(kinds, key=lambda d: d.peak("bf16") * d.matmul_efficiency)
        return dataclasses.replace(slowest, memory_bytes=min(d.memory_bytes for d in kinds))

    def device_at(self, rank: int) -> Device:
        """The device of ``rank``."""
        for run in self.devices:
            if rank < run.count:
                return run.device
            rank -= run.count
        raise ClusterError(f"cluster {self.name!r} has {self.num_devices} devices; rank {rank} is beyond them")

    def axis_levels(self, sizes: Mapping[str, int]) -> dict[str, Span]:
        """Which levels each axis of a mesh crosses.

        Args:
            sizes: axis name to size, outermost axis first; the last axis is laid over neighbouring devices.

        Returns:
            A span an axis.

        Raises:
            ClusterError: the mesh has more ranks than the cluster has devices.

        >>> spans = Cluster.parse("2x8xH100").axis_levels({"dp": 4, "tp": 4})
        >>> spans["tp"].extents, spans["dp"].extents
        ((4, 1), (2, 2))
        """
        total = math.prod(sizes.values())
        if total > self.num_devices:
            raise ClusterError(
                f"mesh {dict(sizes)} needs {total} devices; cluster {self.name!r} has {self.num_devices}: "
                "make the axes smaller or the cluster larger"
            )
        spans: dict[str, Span] = {}
        stride = 1
        for axis, size in reversed(list(sizes.items())):
            spans[axis] = Span(extents=self._extents(size, stride, total), stride=stride)
            stride *= size
        return dict(reversed(spans.items()))

    def group_span(self, sizes: Mapping[str, int], group: str) -> Span:
        """Span of a group over one axis ("tp") or several joined by "+" ("dp+tp").

        >>> Cluster.parse("2x8xH100").group_span({"dp": 4, "tp": 4}, "dp+tp").extents
        (8, 2)
        """
        spans = self.axis_levels(sizes)
        unknown = [a for a in group.split("+") if a not in spans]
        if unknown:
            raise ClusterError(f"group {group!r} names axes {unknown} that the mesh {dict(sizes)} lacks")
        parts = [spans[a] for a in group.split("+")]
        return Span(
            extents=tuple(math.prod(column) for column in zip(*(p.extents for p in parts), strict=True)),
            stride=min(p.stride for p in parts),
        )

    def _extents(self, size: int, stride: int, total: int) -> tuple[int, ...]:
        """Units touched at each level by ``size`` ranks ``stride`` apart in a mesh of ``total`` ranks."""
        extents, left, capacity = [], size, 1
        for i, level in enumerate(self.levels):
            capacity *= level.fanout
            inside = size if total <= capacity or i == len(self.levels) - 1 else math.gcd(size, capacity // stride)
            if capacity % stride and total > capacity and i < len(self.levels) - 1:
                inside = 1
            reached = size // left
            extents.append(max(1, inside // reached))
            left //= extents[-1]
        return tuple(extents)

    def to_json(self) -> dict[str, Any]:
        """The document that :meth:`from_json` reads."""
        runs = [{"count": r.count, "device": _fields(r.device)} for r in self.devices]
        return {
            "format": _FORMAT,
            "name": self.name,
            "devices": runs,
            "levels": [_fields(level) for level in self.levels],
            "sources": dict(self.sources),
        }

    def to_file(self, path: str | Path) -> None:
        """Write the cluster as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def from_json(cls, document: Any, where: str = "cluster") -> Cluster:  # noqa: ANN401 -- whatever a file holds
        """Build a cluster from a decoded JSON document (see ``cluster.schema.json``).

        Raises:
            ClusterError: a field is missing, unknown or of the wrong kind; the message names it.
        """
        check(document, json.loads((_HERE / "cluster.schema.json").read_text(encoding="utf-8")), where)
        return cls(
            name=document["name"],
            devices=tuple(DeviceRun(count=run["count"], device=Device(**run["device"])) for run in document["devices"]),
            levels=tuple(LinkLevel(**level) for level in document["levels"]),
            sources=document.get("sources", {}),
        )

    @classmethod
    def from_file(cls, path: str | Path) -> Cluster:
        """Read a cluster from JSON.

        Raises:
            ClusterError: the file cannot be read, is not JSON or does not fit the schema.
        """
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ClusterError(f"cannot read the cluster file {str(path)!r}: {error}") from error
        except ValueError as error:
            raise ClusterError(f"{str(path)!r} is not JSON: {error}") from error
        return cls.from_json(document, str(path))

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Build a cluster from counts, outermost first, and a device name: ``2x8xH100`` is two nodes of eight.

        Runs of several kinds are joined by ``+`` (equal node sizes): ``2x8xH100+1x8xA100-80GB``.  A count larger than
        the profile's node is split into nodes.  A path ending in ``.json`` is read as a file.

        Raises:
            ClusterError: the text has another form, or no profile has the name.

        >>> cluster = Cluster.parse("4x8xA100-80GB")
        >>> cluster.num_devices, [level.fanout for level in cluster.levels]
        (32, [8, 4])
        >>> Cluster.parse("2x8xH200+2x8xH100").device.memory_bytes / 1e9
        80.0
        """
        if text.endswith(".json"):
            return cls.from_file(text)
        parts = [_parse_run(part) for part in text.replace(" ", "").split("+")]
        if len(parts) == 1:
            return dataclasses.replace(parts[0], name=text)
        return _join(text, parts)

    @classmethod
    def local(cls, num_ranks: int = 1, *, device_name: str = "", path: str | Path | None = None) -> Cluster:
        """This machine as a cluster of ``num_ranks`` devices.

        Args:
            num_ranks: world size.
            device_name: what the driver calls the accelerator (``NVIDIA H100 80GB HBM3``); empty for the CPU.
            path: a file that ``autopar calibrate`` wrote; by default the place where it writes, when a file is there.

        Returns:
            The calibrated cluster resized to ``num_ranks``, else the profile of the device.
        """
        chosen = Path(path) if path is not None else default_calibration_path()
        if path is not None or chosen.exists():
            return cls.from_file(chosen).resized(num_ranks)
        name = device_name if not device_name or device_name in profile_names() else _match_profile(device_name)
        return cls.parse(f"{num_ranks}x{name or 'CPU'}")

    def resized(self, num_devices: int) -> Cluster:
        """The same kind of cluster with ``num_devices`` devices, filling inner levels first.

        Raises:
            ClusterError: it holds several kinds, or the number is not a whole number of inner units.
        """
        if num_devices == self.num_devices:
            return self
        if len(self.devices) > 1:
            raise ClusterError(f"cluster {self.name!r} has several kinds of devices and cannot be resized")
        counts, left = [], num_devices
        for level in self.levels[:-1]:
            counts.append(level.fanout if left % level.fanout == 0 else left)
            left //= counts[-1]
        counts.append(left)
        if math.prod(counts) != num_devices:
            raise ClusterError(f"{num_devices} devices do not fill whole units of cluster {self.name!r}")
        levels = tuple(dataclasses.replace(lv, fanout=n) for lv, n in zip(self.levels, counts, strict=True))
        run = dataclasses.replace(self.devices[0], count=num_devices)
        return dataclasses.replace(self, devices=(run,), levels=levels)


def default_calibration_path() -> Path:
    """Where ``autopar calibrate`` writes and :meth:`Cluster.local` looks."""
    return Path.home() / ".cache" / "autopar" / "cluster.json"


def profile_names() -> tuple[str, ...]:
    """Names that :meth:`Cluster.parse` knows, aliases left out."""
    return tuple(sorted(path.stem for path in (_HERE / "profiles").glob("*.json")))


def load_profile(name: str) -> dict[str, Any]:
    """The profile called ``name`` (case and aliases forgiven): a node of the device, and its figures' sources.

    Raises:
        ClusterError: no profile has that name.
    """
    for stem in profile_names():
        document: dict[str, Any] = json.loads((_HERE / "profiles" / f"{stem}.json").read_text(encoding="utf-8"))
        if name.lower() in {alias.lower() for alias in (stem, *document["aliases"])}:
            return document
    raise ClusterError(
        f"no device profile is called {name!r}; known are {', '.join(profile_names())}; "
        "or describe the cluster in a JSON file (autopar calibrate writes one)"
    )


def _fields(value: Device | LinkLevel) -> dict[str, Any]:
    """The fields that are known, as JSON has them."""
    found = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    found["curves"] = {name: [list(point) for point in curve] for name, curve in value.curves.items()}
    return {k: dict(v) if isinstance(v, Mapping) else v for k, v in found.items() if v is not None}


def _match_profile(driver_name: str) -> str:
    """Profile whose name's words all occur in what the driver calls the device."""
    words = set(re.split(r"[^a-z0-9]+", driver_name.lower()))
    for stem in sorted(profile_names(), key=len, reverse=True):
        if set(re.split(r"[^a-z0-9]+", stem.lower())) <= words:
            return stem
    raise ClusterError(f"no profile for the device {driver_name!r}; run autopar calibrate and pass its file")


def _parse_run(text: str) -> Cluster:
    match = re.fullmatch(r"((?:\d+x)+)([A-Za-z].*)", text)
    if match is None:
        raise ClusterError(
            f"cannot read the cluster {text!r}; write counts, outermost first, and a device: 2x8xH100 "
            f"(devices: {', '.join(profile_names())})"
        )
    counts = [int(n) for n in match.group(1).rstrip("x").split("x")]
    if min(counts) < 1:
        raise ClusterError(f"cluster {text!r}: every count needs to be at least 1")
    profile = load_profile(match.group(2))
    node = profile["levels"][0]["fanout"]
    if counts[-1] > node:
        if counts[-1] % node:
            raise ClusterError(f"cluster {text!r}: {counts[-1]} devices do not fill nodes of {node}")
        counts[-1:] = [counts[-1] // node, node]
    counts.reverse()
    templates = profile["levels"]
    levels = []
    for i, count in enumerate(counts):
        level = LinkLevel(**{**templates[min(i, len(templates) - 1)], "fanout": count})
        levels.append(level if i < len(templates) else dataclasses.replace(level, name=f"{level.name}{i}"))
    device = Device(**profile["device"])
    return Cluster(
        name=text,
        devices=(DeviceRun(count=math.prod(counts), device=device),),
        levels=tuple(levels),
        sources=profile["sources"],
    )


def _join(text: str, parts: list[Cluster]) -> Cluster:
    """Clusters side by side under their outermost level: the slower figures of each level hold for all."""
    inner = [tuple(level.fanout for level in part.levels[:-1]) for part in parts]
    if len(set(inner)) > 1 or not inner[0]:
        raise ClusterError(f"cluster {text!r}: kinds can be joined when their nodes have equal sizes, as 2x8xA+1x8xB")
    levels = []
    for i, column in enumerate(zip(*(part.levels for part in parts), strict=True)):
        slowest = min(column, key=lambda level: level.device_bytes_per_s)
        fanout = sum(level.fanout for level in column) if i == len(inner[0]) else slowest.fanout
        latency_s = max(level.latency_s for level in column)
        levels.append(dataclasses.replace(slowest, fanout=fanout, latency_s=latency_s))
    return Cluster(
        name=text,
        devices=tuple(run for part in parts for run in part.devices),
        levels=tuple(levels),
        sources={f"{p.device.name}: {k}": v for p in parts for k, v in p.sources.items()},
    )
