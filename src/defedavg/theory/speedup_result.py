"""The result of a speedup measurement: trials, points and the fitted slope of one task and algorithm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, geometric_mean, stdev
from typing import Any

import numpy as np

from ..errors import UserError
from .formulas import rounds_to_reach, theorem
from .speedup_cases import SpeedupCase

# The 97.5 % quantile of Student's t for 1, 2, … degrees of freedom; beyond the table the last one, slightly too wide.
STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SpeedupTrial:
    """One run of T rounds with the rates for T; the mean is infinite if the run diverged."""

    task: str
    algorithm: str
    n: int
    seed: int
    rounds: int
    mean: float
    max_staleness: int
    epsilon: float


@dataclass(frozen=True, slots=True)
class SpeedupPoint:
    """The rounds that one n needed: of every seed, and their geometric mean."""

    n: int
    rounds: tuple[int, ...]
    mean_rounds: float
    max_staleness: int
    conditions_hold: bool
    promised_rounds: int  # for which the corrected bound is ε
    first_share: float  # the share of the first term in the corrected bound at the rounds needed


@dataclass(frozen=True, slots=True)
class SlopeFit:
    """The line log y = slope · log x + level, with the confidence interval of the slope."""

    slope: float
    low: float
    high: float
    level: float


@dataclass(frozen=True, slots=True)
class Speedup:
    """The measured speedup of one task and algorithm."""

    case: SpeedupCase
    points: tuple[SpeedupPoint, ...]
    fit: SlopeFit

    def json(self) -> dict[str, Any]:
        """Return the result as data for JSON."""
        return {
            "task": self.case.name,
            "algorithm": self.case.algorithm,
            "slope": self.fit.slope,
            "slope_low": self.fit.low,
            "slope_high": self.fit.high,
            "level": self.fit.level,
            "epsilon": self.case.epsilon,
            "local_steps": self.case.local_steps,
            "num_clients": self.case.task.num_clients,
            "constants": asdict(self.case.estimates),
            "points": [asdict(point) for point in self.points],
        }


def summarise(case: SpeedupCase, ns: Sequence[int], seeds: Sequence[int], trials: Sequence[SpeedupTrial]) -> Speedup:
    """Return the result of the final trials of every n and seed; the trials of one n are in the order of the seeds."""
    points = tuple(_point(case, n, [trial for trial in trials if trial.n == n]) for n in ns)
    lines = {seed: [(point.n, float(point.rounds[i])) for point in points] for i, seed in enumerate(seeds)}
    return Speedup(case, points, fit(lines))


def _point(case: SpeedupCase, n: int, trials: Sequence[SpeedupTrial]) -> SpeedupPoint:
    kind = theorem(case.algorithm)
    constants = [case.constants(n, trial.rounds, trial.max_staleness) for trial in trials]
    bounds = [kind.bound(each) for each in constants]
    return SpeedupPoint(
        n=n,
        rounds=tuple(trial.rounds for trial in trials),
        mean_rounds=geometric_mean(trial.rounds for trial in trials),
        max_staleness=max(trial.max_staleness for trial in trials),
        conditions_hold=all(condition.holds for each in constants for condition in kind.conditions(each)),
        promised_rounds=rounds_to_reach(kind, constants[0], case.epsilon),
        first_share=min(bound.first / bound.total for bound in bounds),
    )


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
        raise UserError(f"a slope needs two different values of x, but all points ({len(points)}) have one value")
    x, y = np.log(np.array(points, float)).T
    centred = x - x.mean()
    slope = float(centred @ y / (centred @ centred))
    residuals = y - y.mean() - slope * centred
    free = len(points) - 2
    error = math.sqrt(float(residuals @ residuals) / free / float(centred @ centred)) if free else math.inf
    return slope, float(y.mean() - slope * x.mean()), (_student(free) * error if free else math.inf)


def _student(free: int) -> float:
    return STUDENT[min(free, len(STUDENT)) - 1]
