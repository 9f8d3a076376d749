"""What the links between ranks take: the communication's part of a calibration.

Collectives run in the forms in which the runtime calls them.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.calibrate_kernels import Note, rising
from autopar.cost_models.cluster import LinkLevel
from autopar.cost_models.collectives import Algorithm, Collective, N, S, formula
from autopar.cost_models.errors import ClusterError
from autopar.cost_models.fit import fit_line
from autopar.passes.torch_ops import ALL_GATHER_COALESCED, ALL_REDUCE_IN_PLACE, ALL_TO_ALL, WAIT
from autopar.stopwatch import Stopwatch, first_quartile

MESSAGE_BYTES = (1 << 12, 1 << 16, 1 << 19, 1 << 22, 1 << 24)
SLOW_S = 0.1  # collectives that take longer are run once a sample
BESIDE_BYTES = 1 << 23
BESIDE_S = 0.3  # how long computation and communication run beside each other


def _all_reduce(t: Tensor, group: dist.ProcessGroup) -> object:
    return WAIT(ALL_REDUCE_IN_PLACE(t, "sum", group.group_name))


def _all_gather(t: Tensor, group: dist.ProcessGroup) -> object:
    ranks = dist.get_world_size(group)
    (out,) = ALL_GATHER_COALESCED([t[: t.numel() // ranks]], ranks, group.group_name)
    return WAIT(out)


def _all_to_all(t: Tensor, group: dist.ProcessGroup) -> Tensor:
    ranks = dist.get_world_size(group)
    parts = [t.numel() // ranks] * ranks
    out: Tensor = WAIT(ALL_TO_ALL(t, parts, parts, group.group_name))
    return out


def _reduce_scatter(t: Tensor, group: dist.ProcessGroup) -> object:
    ranks = dist.get_world_size(group)
    if t.device.type == "cpu":  # as the runtime does it there
        return _all_to_all(t, group).view(ranks, -1).sum(0)
    out = torch.empty(t.numel() // ranks, dtype=t.dtype, device=t.device)
    return dist.reduce_scatter_tensor(out, t, group=group)


def _send(t: Tensor, group: dist.ProcessGroup) -> None:
    """There and back between the first two ranks."""
    me = dist.get_rank(group)
    if me == 0:
        dist.send(t, group=group, group_dst=1)
        dist.recv(t, group=group, group_src=1)
    elif me == 1:
        dist.recv(t, group=group, group_src=0)
        dist.send(t, group=group, group_dst=0)


_COLLECTIVES: dict[Collective, Callable[[Tensor, dist.ProcessGroup], object]] = {
    Collective.ALL_REDUCE: _all_reduce,
    Collective.ALL_GATHER: _all_gather,
    Collective.REDUCE_SCATTER: _reduce_scatter,
    Collective.ALL_TO_ALL: _all_to_all,
    Collective.BROADCAST: lambda t, group: dist.broadcast(t, group_src=0, group=group),
    Collective.SEND: _send,
}


def num_measurements(sizes: Sequence[int] = MESSAGE_BYTES) -> int:
    """How many measurements a level takes."""
    return len(_COLLECTIVES) * len(sizes) + 1


def measure_links(watch: Stopwatch, sizes: Sequence[int], note: Note) -> list[LinkLevel]:
    """One level within a host and one between hosts, where the world has them.  All ranks call it.

    Raises:
        ClusterError: the hosts run different numbers of ranks.
    """
    hosts = ranks_by_host()
    counts = {len(ranks) for ranks in hosts}
    if len(counts) > 1:
        raise ClusterError(f"hosts run {sorted(counts)} ranks; start equally many on each")
    per_host = counts.pop()
    me = dist.get_rank()
    levels = []
    if per_host > 1:
        inside = [dist.new_group(ranks) for ranks in hosts]
        mine = next(g for g, ranks in zip(inside, hosts, strict=True) if me in ranks)
        levels.append(_level("loopback", per_host, mine, watch, sizes, note))
    else:
        levels.append(LinkLevel(name="loopback", fanout=1, port_bytes_per_s=1e9, latency_s=5e-5))
    if len(hosts) > 1:
        columns = list(zip(*hosts, strict=True))
        across = [dist.new_group(list(ranks)) for ranks in columns]
        group = across[next(i for i, ranks in enumerate(columns) if me in ranks)]
        levels.append(_level("network", len(hosts), group, watch, sizes, note))
    return levels


def ranks_by_host() -> list[list[int]]:
    """The ranks of every host; hosts differ in the network namespace or the name."""
    names: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(names, host_name())
    hosts: dict[object, list[int]] = {}
    for rank, name in enumerate(names):
        hosts.setdefault(name, []).append(rank)
    return list(hosts.values())


def host_name() -> str:
    """The host's name and, on Linux, its network namespace: containers of one machine may share a name."""
    namespace = Path("/proc/self/ns/net")
    return f"{socket.gethostname()} {namespace.stat().st_ino if namespace.exists() else 0}"


def _level(
    name: str, fanout: int, group: dist.ProcessGroup, watch: Stopwatch, sizes: Sequence[int], note: Note
) -> LinkLevel:
    """The curves of the collectives, and the latency and bandwidth that explain them (the median of what each says)."""
    watch = Stopwatch(place=watch.place, repeats=watch.repeats, group=group)
    curves, latencies, bandwidths = {}, [], []
    for collective, run in _COLLECTIVES.items():
        points = []
        for size in sizes:
            t = torch.zeros(size // 4 // fanout * fanout, device=watch.place)
            seconds = _shared(_timed(partial(run, t, group), watch), group, watch.place)
            seconds /= 2 if collective is Collective.SEND else 1
            note(f"{name} {collective.value}", size, seconds)
            points.append((float(size), seconds))
        curves[collective.value] = rising(points)
        line = fit_line(*zip(*points, strict=True))
        moved, steps = _ring(collective, fanout)
        latencies.append(max(line.start_s, 1e-7) / steps)
        if line.seconds_per_byte > 0:
            bandwidths.append(moved / line.seconds_per_byte)
    slows, slowed = _beside(group, watch)
    note(f"{name} beside a matmul", BESIDE_BYTES, slows)
    return LinkLevel(
        name=name,
        fanout=fanout,
        port_bytes_per_s=statistics.median(bandwidths),
        latency_s=statistics.median(latencies),
        slows_compute=slows,
        slowed_by_compute=slowed,
        curves=curves,
    )


def _timed(run: Callable[[], object], watch: Stopwatch) -> float:
    """Time of a collective; one that takes long is run fewer times (all ranks decide alike)."""
    a = torch.randn(256, 256, device=watch.place)
    before = partial(torch.mm, a, a)
    run()
    first_s = _shared(watch.sample(run, 1), watch.group, watch.place)
    if first_s > SLOW_S:
        return Stopwatch(place=watch.place, repeats=3, group=watch.group).seconds_together(run, before, calls=1)
    return watch.seconds_together(run, before)


def _shared(seconds: float, group: dist.ProcessGroup | None, place: torch.device) -> float:
    """The slowest rank's time, on every rank."""
    box = torch.tensor(seconds, dtype=torch.float64, device=place)
    dist.all_reduce(box, dist.ReduceOp.MAX, group=group)
    return float(box)


def _beside(group: dist.ProcessGroup, watch: Stopwatch) -> tuple[float, float]:
    """(by how much transfers lengthen computation, by how much computation lengthens transfers).

    All ranks multiply small matrices while all_reduces run, one after another.  Where other work shares the machine,
    computation is not blamed on the transfers beyond the processor time that their threads took.
    """
    message = torch.zeros(BESIDE_BYTES // 4, device=watch.place)
    a = torch.randn(256, 256, device=watch.place)
    compute_s = watch.seconds(partial(torch.mm, a, a))
    alone_s = _shared(_timed(partial(_all_reduce, message, group), watch), group, watch.place)
    rounds = max(2, min(24, round(BESIDE_S / alone_s)))
    times, products, main_s, others_s = [], 0, 0.0, 0.0
    for _ in range(rounds):
        watch.meet()
        start, main, everything = time.perf_counter(), time.thread_time(), time.process_time()
        work = dist.all_reduce(message, group=group, async_op=True)
        while not work.is_completed():
            torch.mm(a, a)
            watch.wait()
            products += 1
        work.wait()
        times.append(time.perf_counter() - start)
        main_s += time.thread_time() - main
        others_s += time.process_time() - everything
    others_s -= main_s
    share = max(products * compute_s / sum(times), 1e-3)
    if watch.place.type == "cpu":
        share = max(share, main_s / (main_s + others_s))
    slows, slowed = 1 / min(share, 1.0) - 1, max(first_quartile(times) / alone_s - 1, 0.0)
    return _shared(slows, group, watch.place), _shared(slowed, group, watch.place)


def _ring(collective: Collective, ranks: int) -> tuple[float, float]:
    """(share of the message on a link, steps) of the algorithm that serves large messages."""
    direct = collective in (Collective.ALL_TO_ALL, Collective.SEND)
    f = formula(collective, Algorithm.DIRECT if direct else Algorithm.RING)
    return float(f.moved.subs({N: ranks, S: 1})), float(f.steps.subs({N: ranks}))
