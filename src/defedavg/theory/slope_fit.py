"""The exponent of a power law fitted to repeated measurements, with its 95 % confidence interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

from ..errors import UserError

# The 97.5 % quantile of Student's t for 1, 2, … degrees of freedom; beyond the table the last one, slightly too wide.
STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SlopeFit:
    """The line log y = slope · log x + level, with the confidence interval of the slope."""

    slope: float
    low: float
    high: float
    level: float


def fit(points: Mapping[int, Sequence[tuple[float, float]]]) -> SlopeFit:
    """Fit a line to the logarithms of the points (x, y) of every seed by least squares; return the mean of the lines.

    The interval is Student's, from the spread of the seeds' slopes; with a single seed it is computed from the
    residuals (infinite for two points).
    """
    if not points:
        raise UserError("there is nothing to fit: no seed has a measurement; give at least one seed")
    lines = [_line(seed) for seed in points.values()]
    slope, level = fmean(line[0] for line in lines), fmean(line[1] for line in lines)
    if len(lines) > 1:
        half = _student(len(lines) - 1) * stdev(line[0] for line in lines) / math.sqrt(len(lines))
    else:
        half = lines[0][2]
    return SlopeFit(slope, slope - half, slope + half, level)


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return slope, level, and half the width of the slope's interval."""
    if len({x for x, _ in points}) < 2:
        raise UserError(f"a slope needs two different values of x, but there are {len(points)} point(s) at one value")
    x, y = np.log(np.array(points, float)).T
    centred = x - x.mean()
    slope = float(centred @ y / (centred @ centred))
    residuals = y - y.mean() - slope * centred
    free = len(points) - 2
    error = math.sqrt(float(residuals @ residuals) / free / float(centred @ centred)) if free else math.inf
    return slope, float(y.mean() - slope * x.mean()), (_student(free) * error if free else math.inf)


def _student(free: int) -> float:
    return STUDENT[min(free, len(STUDENT)) - 1]
