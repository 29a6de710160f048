"""The smallest T whose run is good enough, where a run of T rounds is made with the rates for T."""

from __future__ import annotations

import math
from dataclasses import dataclass

CLOSING = 8  # evaluations after which a bracket is halved whatever the curve promises


@dataclass
class Search:
    """Says which T to try next, and is told the mean that a run of T rounds had; good means at most ``epsilon``.

    The mean falls about as 1/sqrt(T), which leads to the neighbourhood; the answer is a T that was good, above one by
    no more than ``tolerance`` that was not.
    """

    epsilon: float
    rounds: int  # to try next
    tolerance: float = 0.05
    most: int = 1_000_000
    bad: tuple[int, float] | None = None
    good: tuple[int, float] | None = None
    evaluations: int = 0

    def tell(self, mean: float) -> None:
        """A run of ``rounds`` rounds had this mean (infinite where it diverged)."""
        tried, self.evaluations = (self.rounds, mean), self.evaluations + 1
        was_good = mean <= self.epsilon
        if was_good:
            self.good = tried
        else:
            self.bad = tried
        if self.done or self.failed:
            return
        aim = self._aim(tried)
        if self.good is None or self.bad is None or self.evaluations < CLOSING:
            # A little beyond, so that the next run is likely to be of the other kind and to close the bracket.
            aim *= 1 / (1 + self.tolerance / 2) if was_good else 1 + self.tolerance / 2
        low = self.bad[0] + 1 if self.bad else 1
        high = self.good[0] - 1 if self.good else self.most
        self.rounds = min(max(round(aim), low), high)

    def _aim(self, tried: tuple[int, float]) -> float:
        """Where the mean is likely to cross ``epsilon``."""
        rounds, mean = tried
        if self.good is None or self.bad is None:
            share = (mean / self.epsilon) ** 2 if math.isfinite(mean) else 2.0
            return rounds * min(max(share, 1 / 2), 2.0)
        (low, above), (high, below) = self.bad, self.good
        if self.evaluations >= CLOSING or not math.isfinite(above) or below <= 0:
            return math.sqrt(low * high)
        part = math.log(above / self.epsilon) / math.log(above / below)
        return low * math.exp(part * math.log(high / low))

    @property
    def done(self) -> bool:
        """Whether the answer is known to the tolerance."""
        if self.good is None:
            return False
        if self.bad is None:
            return self.good[0] == 1
        low, high = self.bad[0], self.good[0]
        return high - low <= 1 or high <= low * (1 + self.tolerance)

    @property
    def failed(self) -> bool:
        """Whether not even the most rounds were good."""
        return self.good is None and self.bad is not None and self.bad[0] >= self.most
