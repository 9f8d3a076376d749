"""Rows of collectives.csv: lines fitted per curve, and constants shared by all curves of one machine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from autopar.cost_models.cluster import Cluster, DeviceRun, LinkLevel, Span
from autopar.cost_models.collectives import Collective, CollectiveModel
from autopar.cost_models.fit import fit_line, simplex

Curve = tuple[str, str, int, str, int]


def curves(rows: Sequence[Mapping[str, str]]) -> dict[Curve, list[tuple[float, float]]]:
    """(bytes, seconds) by hardware, collective, ranks, library and nodes; rows without a time are left out."""
    out: dict[Curve, list[tuple[float, float]]] = {}
    for row in rows:
        if row["time_us"] and row["size_bytes"]:
            nodes = int(row["n_nodes"] or 1)
            key = (row["hardware"], row["collective"], int(row["n_ranks"]), row["library"].split(" kernel")[0], nodes)
            out.setdefault(key, []).append((float(row["size_bytes"]), float(row["time_us"]) * 1e-6))
    return out


def fitted_errors(found: Mapping[Curve, Sequence[tuple[float, float]]]) -> dict[Curve, float]:
    """Mean relative error of a line through each curve with five sizes or more."""
    return {
        key: fit_line([size for size, _ in points], [time for _, time in points]).error
        for key, points in found.items()
        if len({size for size, _ in points}) >= 5
    }


def shared_errors(found: Mapping[Curve, Sequence[tuple[float, float]]]) -> dict[str, tuple[float, int]]:
    """Mean relative error per hardware with constants that all its collectives, sizes and ranks share, and its points.

    The constants are those of the cluster's own model: the launch time, the weight of the pipeline's fill and, for each
    level of links (in a node, between nodes), latency and bandwidth.  A simplex on their logarithms finds them.
    """
    out = {}
    for hardware in sorted({key[0] for key in found}):
        own = {key: points for key, points in found.items() if key[0] == hardware}
        count = sum(map(len, own.values()))
        if count >= 10:
            out[hardware] = (_fit_machine(own), count)
    return out


def _fit_machine(own: Mapping[Curve, Sequence[tuple[float, float]]]) -> float:
    """The least mean relative error over the constants of one machine, from several first guesses."""
    nodes = max(n for *_, n in own)
    per_node = max(ranks // n for _, _, ranks, _, n in own)

    def error(logs: np.ndarray) -> float:
        model = machine(np.exp(logs), per_node, nodes)
        errors: list[float] = []
        for (_, collective, ranks, _, n), points in own.items():
            sizes, times = np.array(points).T
            span = Span(extents=(ranks // n, n)[: len(model.cluster.levels)])
            errors += list(np.abs(model.seconds(Collective(collective), sizes, span) / times - 1))
        return float(np.mean(errors))

    best = np.inf
    for inside, between in itertools.product((200e9, 400e9), (20e9, 50e9) if nodes > 1 else (0.0,)):
        guess = [5e-6, 0.3, 2e-6, inside, *([5e-6, between] if nodes > 1 else [])]
        start: Sequence[float] = np.log(guess).tolist()
        for _ in range(3):  # a simplex that has shrunk is begun anew
            point, least = simplex(error, start, num_steps=200)
            start, best = point.tolist(), min(best, least)
    return best


def machine(constants: Sequence[float], per_node: int, nodes: int) -> CollectiveModel:
    """A machine of nodes: launch time, weight of the fill, then latency and bandwidth of each level of links."""
    launch_s, fill, *links = map(float, constants)
    fanouts = (per_node, nodes)[: len(links) // 2]
    levels = tuple(
        LinkLevel(name=name, fanout=fanout, latency_s=links[2 * i], port_bytes_per_s=links[2 * i + 1])
        for i, (name, fanout) in enumerate(zip(("node", "network"), fanouts, strict=False))
    )
    runs = (DeviceRun(count=math.prod(fanouts), device=Cluster.parse("1xA100-80GB").device),)
    cluster = Cluster(name="machine", devices=runs, levels=levels)
    return CollectiveModel(cluster=cluster, launch_s=launch_s, fill=fill)
