"""The search for the smallest horizon T whose run, with the rates for T, reaches ε."""

from __future__ import annotations

import math
from dataclasses import dataclass

INTERPOLATED_TRIALS = 8  # trials after which every step bisects the bracket


@dataclass
class HorizonSearch:
    """A bracketing search: it proposes ``rounds`` and takes the mean squared norm of a run of that many rounds.

    A run succeeds if its mean is at most ``epsilon``. The mean decreases roughly as 1/sqrt(T), which guides the first
    trials. The result is a T that succeeded and exceeds a T that failed by no more than the share ``tolerance``.
    """

    epsilon: float
    rounds: int  # of the next trial
    tolerance: float = 0.05
    max_rounds: int = 1_000_000
    failure: tuple[int, float] | None = None
    success: tuple[int, float] | None = None
    trials: int = 0

    def record(self, mean: float) -> None:
        """Record the mean of a run of ``rounds`` rounds (infinite if it diverged) and choose the next trial."""
        trial, self.trials = (self.rounds, mean), self.trials + 1
        succeeded = mean <= self.epsilon
        if succeeded:
            self.success = trial
        else:
            self.failure = trial
        if self.done or self.failed:
            return
        rounds = self._crossing(trial)
        if self.success is None or self.failure is None or self.trials < INTERPOLATED_TRIALS:
            # Overshoot a little, so that the next run is likely to have the other outcome and to close the bracket.
            rounds *= 1 / (1 + self.tolerance / 2) if succeeded else 1 + self.tolerance / 2
        low = self.failure[0] + 1 if self.failure else 1
        high = self.success[0] - 1 if self.success else self.max_rounds
        self.rounds = min(max(round(rounds), low), high)

    def _crossing(self, trial: tuple[int, float]) -> float:
        """Estimate the T at which the mean crosses ``epsilon``."""
        rounds, mean = trial
        if self.success is None or self.failure is None:
            factor = (mean / self.epsilon) ** 2 if math.isfinite(mean) else 2.0
            return rounds * min(max(factor, 1 / 2), 2.0)
        (low, above), (high, below) = self.failure, self.success
        if self.trials >= INTERPOLATED_TRIALS or not math.isfinite(above) or below <= 0:
            return math.sqrt(low * high)
        part = math.log(above / self.epsilon) / math.log(above / below)
        return low * math.exp(part * math.log(high / low))

    @property
    def done(self) -> bool:
        """Whether the result is known to the tolerance."""
        if self.success is None:
            return False
        if self.failure is None:
            return self.success[0] == 1
        low, high = self.failure[0], self.success[0]
        return high - low <= 1 or high <= low * (1 + self.tolerance)

    @property
    def failed(self) -> bool:
        """Whether a run of ``max_rounds`` failed."""
        return self.success is None and self.failure is not None and self.failure[0] >= self.max_rounds
