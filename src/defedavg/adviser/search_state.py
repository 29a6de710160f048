"""What a search knows: the candidates that were started, their runs by seed, and the ranking."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean

from .candidates import AlgorithmGrid, GridCell, PlanShape
from .confidence import TimeInterval, log_deviation, ratio
from .racing import Race, RacedRun
from .ranked import MissedRun
from .screening import PlannedShape, Screening
from .start_order import start_order


@dataclass(eq=False)
class SearchState:
    """The state of a search; ``ended`` says in words why it stopped."""

    race: Race
    grids: Mapping[str, AlgorithmGrid]
    screening: Screening
    seeds: tuple[int, ...]
    key_seed: int
    usual_rate: float | None = None  # local rate at which exploring starts
    excluded: Mapping[GridCell, str] = field(default_factory=dict)
    phase: Callable[[str], None] = lambda _: None
    lost: dict[GridCell, str] = field(default_factory=dict)  # why a raced candidate was dropped
    ended: str = ""

    def __post_init__(self) -> None:
        self.first = self.seeds[0]
        self.tried: dict[GridCell, None] = {}
        self.missed: set[GridCell] = set()  # reached the target on the first seed, and not in time on a further one
        self.postponed: dict[GridCell, None] = {}  # waited while others explored
        plans = self.screening.kept
        self._turns = start_order(self.grids, plans, self.excluded, self.usual_rate, self.key_seed)
        self._queue: list[GridCell] = []

    def run(self, candidate: GridCell, seed: int | None = None) -> RacedRun | None:
        """Return the run of a candidate on a seed, if there is one."""
        return self.race.runs.get((candidate, self.first if seed is None else seed))

    def _complete(self, candidate: GridCell) -> dict[int, RacedRun]:
        """Return the runs of a candidate that ended by themselves, by seed."""
        runs = {seed: run for seed in self.seeds if (run := self.run(candidate, seed)) is not None}
        return {seed: run for seed, run in runs.items() if run.complete}

    def times(self, candidate: GridCell) -> dict[int, float]:
        """Return the time to the target by seed, infinite where a run ended without it."""
        return {seed: math.inf if run.hit is None else run.hit for seed, run in self._complete(candidate).items()}

    def _resolution(self, candidate: GridCell) -> float:
        """Return the standard deviation of the logarithm of a time that is uniform between two evaluations."""
        runs = [run for run in self._complete(candidate).values() if run.hit is not None]
        return math.sqrt(fmean(log_deviation(run.resolution) ** 2 for run in runs)) if runs else 0.0

    def interval(self, candidate: GridCell) -> TimeInterval | None:
        """Return the time to the target over the seeds that reached it; None if none did."""
        hits = [seconds for seconds in self.times(candidate).values() if math.isfinite(seconds)]
        return TimeInterval.of(hits, self._resolution(candidate)) if hits else None

    def traffic(self, candidate: GridCell) -> float | None:
        """Return the mean bytes until the target; None if a seed did not reach it.

        They are those of the plan on the first seed, until the time of every seed.
        """
        hits = self.times(candidate).values()
        if not hits or not all(map(math.isfinite, hits)):
            return None
        return fmean(map(self.planned(candidate).bytes_until, hits))

    def ratio(self, candidate: GridCell, leader: GridCell) -> TimeInterval | None:
        """Return how many times as long as the leader a candidate takes, over the seeds of both."""
        least = math.hypot(self._resolution(candidate), self._resolution(leader))
        return ratio(self.times(candidate), self.times(leader), least)

    def reached(self, candidate: GridCell) -> bool:
        """Return whether every run of a candidate that ended has reached the target, the first one among them."""
        times = self.times(candidate)
        return self.first in times and all(map(math.isfinite, times.values()))

    def missed_runs(self, candidate: GridCell) -> tuple[MissedRun, ...]:
        """Return the runs of a candidate that missed the target.

        On further seeds, a run that was stopped because the budget was spent says nothing: it is none of them.
        """
        runs = {seed: run for seed in self.seeds if (run := self.run(candidate, seed)) is not None and run.hit is None}
        waited = candidate in self.missed
        traffic = self.planned(candidate).bytes_until
        return tuple(
            MissedRun.of(seed, run, traffic)
            for seed, run in runs.items()
            if seed == self.first or run.complete or waited
        )

    @property
    def best_time(self) -> float:
        """The best time to the target on the first seed; infinite if it was not reached."""
        hits = (run.hit for each in self.tried if (run := self.run(each)) is not None and run.hit is not None)
        return min(hits, default=math.inf)

    def rank(self, candidate: GridCell) -> tuple[float, ...]:
        """Return a key by which candidates are sorted, the best first.

        Those that reached the target come first, those with more seeds before others, and then by the geometric mean
        time; those that missed it on a further seed come after them. The others follow by their metric when they were
        last evaluated.
        """
        run = self.run(candidate)
        if run is None or run.diverged_at is not None:
            return 2.0, 0.0
        if self.reached(candidate):
            times = self.times(candidate)
            return float(candidate in self.missed), -len(times), TimeInterval.of(list(times.values())).mean
        return 1.5, -run.value()

    def ranking(self) -> list[GridCell]:
        """Return every candidate that was raced, the best first."""
        return sorted(self.tried, key=lambda each: (*self.rank(each), each.algorithm, each.position))

    def running(self, candidates: Iterable[GridCell]) -> list[GridCell]:
        """Return those that can advance."""
        return [each for each in candidates if (run := self.run(each)) is None or run.running]

    # Starting and dropping.

    def next_arms(self, number: int) -> list[GridCell]:
        """Return the next candidates in the order in which they start."""
        arms: list[GridCell] = []
        while len(arms) < number:
            if not self._queue:
                self._queue = next(self._turns, [])
            if not self._queue:
                break
            candidate = self._queue.pop(0)
            if candidate not in self.tried:
                arms.append(candidate)
        return arms

    def start(self, candidates: Iterable[GridCell]) -> list[GridCell]:
        """Count candidates among those that were tried, and return them."""
        started = list(dict.fromkeys(candidates))
        self.tried.update(dict.fromkeys(started))
        return started

    def postpone(self, candidates: Iterable[GridCell]) -> None:
        """Put candidates of which nothing was trained before those that start next."""
        waiting = list(candidates)
        for each in waiting:
            del self.tried[each]
        self.postponed.update(dict.fromkeys(waiting))
        self._queue = waiting + self._queue

    def drop(self, candidate: GridCell, reason: str) -> None:
        """End the run of a candidate on the first seed, and keep the reason; one that diverged has its own."""
        run = self.run(candidate)
        if run is None or run.hit is not None:
            return
        self.lost[candidate] = reason if run.diverged_at is None else f"diverged in round {run.diverged_at}"
        self.race.drop(candidate, self.first)

    # Plans.

    def shape(self, candidate: GridCell) -> PlanShape:
        """Return the shape of a candidate."""
        return self.grids[candidate.algorithm].shape_of(candidate)

    def planned(self, candidate: GridCell) -> PlannedShape:
        """Return the plan of a candidate."""
        return self.screening.kept[self.shape(candidate)]

    def cost(self, candidate: GridCell, seconds: float) -> float:
        """Return the local steps that a candidate trains in a time, at its mean speed."""
        return self.planned(candidate).steps_per_second * seconds

    def label(self, candidate: GridCell) -> str:
        """Return the name of a candidate."""
        return self.grids[candidate.algorithm].label(candidate.position)
