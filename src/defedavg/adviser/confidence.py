"""Confidence intervals over seeds: of a time to the target, and of the ratio of two times on the same seeds.

Times to a target are positive and vary by factors, so the intervals are Student's on the logarithms: a geometric mean
and factors around it. A time is known up to the evaluation before it, so the standard deviation has a least value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from ..jsonio import three_digits

LEVEL = 0.9
"""The level of the two-sided intervals."""

QUANTILES = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
"""The 95 % quantiles of Student's distribution with 1, 2, … degrees of freedom."""
NORMAL = 1.645
SMALL = 0.02
"""Below this, 1 - (h / sinh h)² loses digits, and its series up to h⁶ has an error of 10⁻¹² of it at most."""


@dataclass(frozen=True, slots=True)
class TimeInterval:
    """A geometric mean over seeds and its interval; without one, for a single seed, ``low`` and ``high`` are None."""

    mean: float
    low: float | None
    high: float | None
    seeds: int

    @classmethod
    def of(cls, times: Sequence[float], least: float = 0.0) -> TimeInterval:
        """Return the interval of one time per seed; ``least`` is the least standard deviation of the logarithms."""
        logs = [math.log(max(seconds, 1e-300)) for seconds in times]
        centre = fmean(logs)
        if len(logs) < 2:
            return cls(math.exp(centre), None, None, len(logs))
        width = quantile(len(logs) - 1) * max(least, stdev(logs)) / math.sqrt(len(logs))
        return cls(math.exp(centre), math.exp(centre - width), math.exp(centre + width), len(logs))

    def text(self) -> str:
        """Return the mean and the interval for a table."""
        if self.low is None or self.high is None:
            return f"{three_digits(self.mean)} s"
        return f"{three_digits(self.mean)} s [{three_digits(self.low)}, {three_digits(self.high)}]"


def quantile(degrees: int) -> float:
    """Return the 95 % quantile of Student's distribution."""
    return QUANTILES[degrees - 1] if degrees <= len(QUANTILES) else NORMAL + (1.812 - NORMAL) * 10 / degrees


def log_deviation(share: float) -> float:
    """Return the standard deviation of log U, where U is uniform on [a, 1] and ``share`` is 1 - a.

    From the integrals of log u and of its square, the variance is 1 - a (log a)² / (1 - a)², which is
    1 - (h / sinh h)² with h = -(log a) / 2.
    """
    if share >= 1.0:
        return 1.0
    half = -math.log1p(-share) / 2
    if half < SMALL:
        variance = half**2 / 3 - half**4 / 15 + 2 * half**6 / 189
    else:
        variance = 1.0 - (half / math.sinh(half)) ** 2
    return math.sqrt(variance)


def ratio(times: Mapping[int, float], leader: Mapping[int, float], least: float = 0.0) -> TimeInterval | None:
    """Return the interval of the ratio to the leader's times, over the seeds that both have; None if there is none."""
    seeds = [seed for seed in times if seed in leader]
    if not seeds:
        return None
    return TimeInterval.of([max(times[seed], 1e-300) / max(leader[seed], 1e-300) for seed in seeds], least)
