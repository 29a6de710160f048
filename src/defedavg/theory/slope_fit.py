"""The slope of a power law from repeated measurements, with its 95 % interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

from ..errors import UserError

# Student's t, 97.5 %, for 1, 2, … degrees of freedom; beyond the table the last one, which is a little too wide.
STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SlopeFit:
    """log y = slope · log x + level, with the interval of the slope."""

    slope: float
    low: float
    high: float
    level: float


def fit(points: Mapping[int, Sequence[tuple[float, float]]]) -> SlopeFit:
    """Least squares on logarithms: a line through the points (x, y) of every seed, then the mean of the lines.

    The interval is Student's, from the spread of the seeds' slopes; with a single seed, from the distances of its
    points from its line (infinite for two points).
    """
    if not points:
        raise UserError("there is nothing to fit: no seed has a measurement")
    lines = [_line(own) for own in points.values()]
    slope, level = fmean(line[0] for line in lines), fmean(line[1] for line in lines)
    if len(lines) > 1:
        half = _student(len(lines) - 1) * stdev(line[0] for line in lines) / math.sqrt(len(lines))
    else:
        half = lines[0][2]
    return SlopeFit(slope, slope - half, slope + half, level)


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Slope, level, and half the width of the slope's interval."""
    if len({x for x, _ in points}) < 2:
        raise UserError(f"a slope needs at least two different values, not {len(points)} point(s)")
    x, y = np.log(np.array(points, float)).T
    apart = x - x.mean()
    slope = float(apart @ y / (apart @ apart))
    rest = y - y.mean() - slope * apart
    free = len(points) - 2
    error = math.sqrt(float(rest @ rest) / free / float(apart @ apart)) if free else math.inf
    return slope, float(y.mean() - slope * x.mean()), (_student(free) * error if free else math.inf)


def _student(free: int) -> float:
    return STUDENT[min(free, len(STUDENT)) - 1]
