"""Rows of collectives.csv: lines fitted per curve, and constants shared by all curves of one machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autopar.cost_models.collectives import Algorithm, Collective, N, S, formula
from autopar.cost_models.fit import fit_line, simplex

Curve = tuple[str, str, int, str]


def curves(rows: Sequence[Mapping[str, str]]) -> dict[Curve, list[tuple[float, float]]]:
    """(bytes, seconds) by hardware, collective, ranks and library; rows without a time are left out."""
    out: dict[Curve, list[tuple[float, float]]] = {}
    for row in rows:
        if row["time_us"] and row["size_bytes"]:
            key = (row["hardware"], row["collective"], int(row["n_ranks"]), row["library"].split(" kernel")[0])
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
    """Mean relative error per hardware with one launch time, one latency a step and one bandwidth, and its points.

    Only ring formulas; the constants are found by a simplex on their logarithms.
    """
    out = {}
    for hardware in sorted({key[0] for key in found}):
        table = []
        for (machine, collective, ranks, _), points in found.items():
            if machine == hardware:
                kind = Collective(collective)
                ring = formula(kind, Algorithm.DIRECT if kind is Collective.ALL_TO_ALL else Algorithm.RING)
                steps, moved = float(ring.steps.subs({N: ranks})), float(ring.moved.subs({N: ranks, S: 1}))
                table += [(1.0, steps, moved * size, time) for size, time in points]
        data = np.array(table)
        if len(data) < 10:
            continue

        def error(logs: np.ndarray, data: np.ndarray = data) -> float:
            launch, latency, per_byte = np.exp(logs)
            predicted = launch + latency * data[:, 1] + per_byte * data[:, 2]
            return float(np.mean(np.abs(predicted / data[:, 3] - 1)))

        start = np.log([20e-6, 5e-6, 1 / 200e9])
        point, _ = simplex(error, start, num_steps=300)
        out[hardware] = (simplex(error, point, num_steps=300)[1], len(data))
    return out
