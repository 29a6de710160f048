"""The result of a speedup measurement: trials, points and the fitted slope of one task and algorithm."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .formulas import theorem
from .required_rounds import rounds_to_reach
from .slope_fit import SlopeFit, fit
from .speedup_cases import SpeedupCase


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
        mean_rounds=statistics.geometric_mean(trial.rounds for trial in trials),
        max_staleness=max(trial.max_staleness for trial in trials),
        conditions_hold=all(condition.holds for each in constants for condition in kind.conditions(each)),
        promised_rounds=rounds_to_reach(kind, constants[0], case.epsilon),
        first_share=min(bound.first / bound.total for bound in bounds),
    )
