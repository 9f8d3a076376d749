"""Fitting constants to measurements: straight lines in relative error, and a small simplex search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.cost_models.errors import ClusterError
from autopar.cost_models.stack import GAIN_LIMITS

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """``start_s + bytes * seconds_per_byte``, and the mean absolute relative error of the fit."""

    start_s: float
    seconds_per_byte: float
    error: float


def fit_line(num_bytes: ArrayLike, seconds: ArrayLike) -> Line:
    """The line with non-negative start and slope that is closest in relative error.

    Each equation is divided by its measured time, so that small messages count as much as large ones; three rounds of
    reweighting bring least squares near least absolute error.

    Raises:
        ClusterError: fewer than two sizes.

    >>> line = fit_line([1e3, 1e6, 1e9], [10e-6 + b / 1e9 for b in (1e3, 1e6, 1e9)])
    >>> round(line.start_s * 1e6, 3), round(1 / line.seconds_per_byte / 1e9, 3)
    (10.0, 1.0)
    """
    size, time = np.asarray(num_bytes, np.float64), np.asarray(seconds, np.float64)
    if len(np.unique(size)) < 2:
        raise ClusterError(f"a line needs at least two sizes, got {np.unique(size).tolist()}")
    weights = np.ones_like(time)
    start, slope = 0.0, 0.0
    for _ in range(4):
        rows = np.stack([np.ones_like(size), size], axis=1) / time[:, None] * weights[:, None]
        scale = np.abs(rows).max(axis=0)
        start, slope = np.linalg.lstsq(rows / scale, weights, rcond=None)[0] / scale
        if start < 0:
            start, slope = 0.0, float(np.median(time / size))
        elif slope < 0:
            start, slope = float(np.median(time)), 0.0
        residual = np.abs((start + slope * size) / time - 1)
        weights = 1 / np.sqrt(residual + 1e-3)
    error = float(np.mean(np.abs((start + slope * size) / time - 1)))
    return Line(start_s=float(start), seconds_per_byte=float(slope), error=error)


def fit_gain(ratios: Sequence[float]) -> float:
    """The factor on predicted times that centres ``measured / predicted``, inside the limits.

    >>> fit_gain([1.0, 1.1, 1.2]), fit_gain([2.0])
    (1.1, 1.15)
    """
    return float(np.clip(np.median(ratios), *GAIN_LIMITS))


def simplex(
    cost: Callable[[Floats], float], start: Sequence[float], *, step: float = 0.2, num_steps: int = 200
) -> tuple[Floats, float]:
    """Nelder and Mead's downhill simplex.

    Args:
        cost: what to make small.
        start: first guess.
        step: edge of the first simplex.
        num_steps: moves.

    Returns:
        The best point and its cost.

    >>> point, value = simplex(lambda x: float((x[0] - 3) ** 2 + abs(x[1])), [0.0, 1.0])
    >>> round(float(point[0]), 2)
    3.0
    """
    origin = np.asarray(start, np.float64)
    points = [origin, *(origin + step * row for row in np.eye(len(origin)))]
    values = [cost(p) for p in points]
    for _ in range(num_steps):
        order = np.argsort(values)
        points, values = [points[i] for i in order], [values[i] for i in order]
        middle = np.mean(points[:-1], axis=0)
        away = middle - points[-1]
        reflected = middle + away
        value = cost(reflected)
        if value < values[0]:
            further = middle + 2 * away
            reached = cost(further)
            points[-1], values[-1] = (further, reached) if reached < value else (reflected, value)
        elif value < values[-2]:
            points[-1], values[-1] = reflected, value
        else:
            nearer = middle + (0.5 * away if value < values[-1] else -0.5 * away)
            reached = cost(nearer)
            if reached < min(value, values[-1]):
                points[-1], values[-1] = nearer, reached
            else:
                points = [points[0], *((p + points[0]) / 2 for p in points[1:])]
                values = [values[0], *(cost(p) for p in points[1:])]
    best = int(np.argmin(values))
    return points[best], float(values[best])
