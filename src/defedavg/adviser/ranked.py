"""A raced candidate in the final ranking, and in words whether and when it reached the target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import counted
from ..jsonio import three_digits
from ..report.tables import score
from .confidence import TimeInterval
from .racing import RacedRun


@dataclass(frozen=True, slots=True)
class MissedRun:
    """A run that missed the target: its time to the target is not known, only that it is above ``seconds``."""

    seed: int
    seconds: float  # the simulated time until which it was trained
    bytes: float  # up and down until then
    metric: float | None  # when it was last evaluated; None if it diverged
    first_hit_seconds: float | None  # if the target was reached, but not held as the study asks
    diverged_at: int | None  # the round

    @classmethod
    def of(cls, seed: int, run: RacedRun, bytes_until: Callable[[float], float]) -> MissedRun:
        """Return what is known of a run that ended, or was stopped, without the target."""
        return cls(
            seed=seed,
            seconds=run.seconds,
            bytes=bytes_until(run.seconds),
            metric=run.value() if run.diverged_at is None else None,
            first_hit_seconds=run.simulation.progress.first_hit_seconds,
            diverged_at=run.diverged_at,
        )

    def text(self, metric: str) -> str:
        """Return how the run missed the target; ``metric`` is the name of what the target is a value of."""
        if self.diverged_at is not None:
            return f"diverged in round {self.diverged_at}"
        how = "not reached" if self.first_hit_seconds is None else "reached, but not held"
        return f"{how} by {three_digits(self.seconds)} s ({metric} {score(self.metric, metric)})"

    def reason(self, metric: str) -> str:
        """Return the same as a reason that is read without the heading of a table."""
        text = self.text(metric)
        return text if self.diverged_at is not None else f"the target was {text}"


@dataclass(frozen=True, slots=True)
class RankedCandidate:
    """A raced candidate in the final ranking; ``reason`` says why it is not the leader, empty for the leader."""

    label: str
    algorithm: str
    values: Mapping[str, Any]
    reached: bool
    time: TimeInterval | None  # to the target, over the seeds that reached it
    missed: tuple[MissedRun, ...]  # on the seeds that did not
    metric: float  # when it was last evaluated on the first seed
    seconds: float  # the simulated time until then
    bytes: float | None  # up and down until the target; None if a seed missed it
    worst_decile: float | None  # of the clients' accuracies at the end; None if a seed missed the target
    staleness: float
    steps_per_second: float
    reason: str
    close: bool = False  # a finalist that the seeds do not separate from the leader

    @property
    def seeds(self) -> int:
        """The seeds that reached the target, and those that missed it."""
        return len(self.missed) + (0 if self.time is None else self.time.seeds)

    @property
    def longest_miss(self) -> MissedRun | None:
        """The missed run that was trained the longest, which bounds the time to the target; None if all diverged."""
        bounds = [each for each in self.missed if each.diverged_at is None]
        return max(bounds, key=lambda each: each.seconds, default=None)

    def time_text(self, metric: str) -> str:
        """Return the time to the target for a table, or how far the candidate came without reaching it."""
        if self.time is None:
            return "; ".join(each.text(metric) for each in self.missed)
        if not self.missed:
            return self.time.text()
        misses = "; ".join(f"on seed {each.seed} {each.text(metric)}" for each in self.missed)
        return f"{self.time.text()} on {self.time.seeds} of {counted(self.seeds, 'seed')}; {misses}"
