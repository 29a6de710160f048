"""How long a run that is in progress will still take, from what it has done so far."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

MIN_POINTS = 4
"""Evaluations that a forecast of the time to the target needs."""

MAX_FACTOR = 100.0
"""A target that lies further away than this factor times the time so far is not forecast."""


def seconds_to_rounds(seconds: Sequence[float], rounds: Sequence[float], last: float) -> float | None:
    """Return how long the remaining rounds take at the pace of the last half of the run; None: not known yet."""
    if not rounds or rounds[-1] >= last:
        return 0.0 if rounds else None
    half = len(rounds) // 2
    done, spent = rounds[-1] - rounds[half], seconds[-1] - seconds[half]
    return (last - rounds[-1]) * spent / done if done > 0 and spent > 0 else None


def seconds_to_target(seconds: Sequence[float], values: Sequence[float | None], target: float) -> float | None:
    """Return how long it takes until the metric reaches a target, or None if the curve does not lead there.

    A line through the last half of the values over the logarithm of time is extended to the target.
    """
    known = [(t, value) for t, value in zip(seconds, values, strict=True) if value is not None and t > 0]
    if any(value >= target for _, value in known):
        return 0.0
    known = known[len(known) // 2 :] if len(known) >= 2 * MIN_POINTS else known
    if len(known) < MIN_POINTS or known[-1][0] <= known[0][0]:
        return None
    times, found = np.log([t for t, _ in known]), np.array([value for _, value in known])
    centred = times - times.mean()
    slope = float(centred @ (found - found.mean()) / (centred @ centred))
    if slope <= 0:
        return None
    exponent = float(times.mean() + (target - found.mean()) / slope)
    now = known[-1][0]
    if exponent > math.log(MAX_FACTOR * now):
        return None
    return max(0.0, math.exp(exponent) - now)
