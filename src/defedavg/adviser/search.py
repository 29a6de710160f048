"""The search: explore with successive halving, confirm the best on a second seed, refine around them, confirm further.

1. *Explore.* Every shape starts on one seed with its usual rates, and with others as far as the budget allows.
   Candidates are compared at growing simulated times by their test loss, and the worse ones are dropped. After the
   first has reached the target, no candidate is trained much beyond that time, because it could not win.
2. *Confirm.* The best candidates are run on a second seed: the first to reach the target may only have been lucky.
3. *Refine.* The neighbours of the best on the grid, and then further candidates, are raced against the leader. One is
   dropped when the leader had the same loss much earlier.
4. *Confirm.* The best candidates are run on further seeds. It ends when the leader's interval excludes the others, when
   all seeds are used, or when the budget is spent.
5. *Compare.* What is left of the budget trains the best of the others to the target. They cannot win any more, but show
   what the leader's time costs in bytes and in accuracy of the worst-served clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from .candidates import AlgorithmGrid, GridCell, PlanShape
from .confidence import TimeInterval, ratio
from .racing import BudgetSpentError, Race, RacedRun
from .screening import PlannedShape, Screening
from .start_order import start_order

FIRST_ROUNDS, GROWTH = 2, 1.2
"""The first comparison is when the median shape has merged this many rounds; the factor from one time to the next."""
START = 0.2
"""The share of the budget until the first comparison."""
TIMED_TURNS = 4
"""Rates that every shape starts with where the budget is real time, whose steps are not known yet."""
KEPT, LEAST_KEPT = 0.7, 6
"""The share of the candidates that continues after a comparison, and their least number where the budget is short."""
LEAST_ROUNDS = 2
"""No candidate is dropped before its second round."""
EXPLORE, REFINE = 0.8, 0.9
"""Shares of the budget after which exploring and refining end."""
RUNG = 0.7
"""The share of the rest of the budget for exploring that may be spent until the next comparison."""
MARGIN = 1.1
"""Candidates are trained up to this multiple of the best time to the target: another seed may change the order."""
CENTRES, FURTHER = 2, 0.02
"""Leaders around which the search refines, and the share of the rest of the budget for a group of others."""
CHECKS = (1 / 8, 1 / 4, 1 / 2)
"""When candidates are compared with the leader while refining, as shares of its time to the target."""
LAG = 1.3
"""A candidate is dropped if the leader had its loss in less than 1/LAG of the time."""
FINALISTS = 6
NEAR = 1.3
"""A candidate whose time on the first seed is within this multiple of the leader's is a finalist."""
INTERRUPTED = "it was interrupted"
SEEDS = 5
"""Seeds of a finalist, at most."""
PATIENCE = 1.3
"""On further seeds, a finalist may take this multiple of the longest time of the leader."""
COMPARED = 2.0
"""At the end, others may take this multiple of the leader's time to the target."""
TIE = 1.02
"""Two candidates whose ratio of times is surely below this are equally good."""


@dataclass(eq=False)
class AdviceSearch:
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
        plans = self.screening.kept
        self._turns = start_order(self.grids, plans, self.excluded, self.usual_rate, self.key_seed)
        self._queue: list[GridCell] = []

    # Results.

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

    def reached(self, candidate: GridCell) -> bool:
        """Return whether every run of a candidate that ended has reached the target, the first one among them."""
        times = self.times(candidate)
        return self.first in times and all(map(math.isfinite, times.values()))

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

    # The phases.

    def search(self) -> None:
        """Run all phases until the leader is separated or the budget is spent."""
        try:
            self._explore(self._first_arms())
            while self._no_hit() and (arms := self._next_arms(len(self.screening.kept))):
                self._explore(arms)
            self._confirm(self.seeds[1:2])
            self._refine()
            self._confirm(self.seeds[1:])
            self._compare()
        except BudgetSpentError:
            self.ended = "the budget is spent"
        except KeyboardInterrupt:
            self.ended = INTERRUPTED

    @property
    def best_time(self) -> float:
        """The best time to the target on the first seed; infinite if it was not reached."""
        hits = (run.hit for each in self.tried if (run := self.run(each)) is not None and run.hit is not None)
        return min(hits, default=math.inf)

    def _no_hit(self) -> bool:
        return math.isinf(self.best_time) and self.race.spent_share < EXPLORE

    def _limit(self) -> float:
        return min(self.race.horizon, MARGIN * self.best_time)

    def _first_time(self) -> float:
        """Return when candidates are first compared: after some rounds, or before if these cost too much."""
        plans = self.screening.kept.values()
        seconds = sorted(each.stats.seconds_per_round for each in plans)
        until, earliest = FIRST_ROUNDS * seconds[len(seconds) // 2], min(each.first_round for each in plans)
        while until > earliest and sum(each.steps_until(until) for each in plans) > START * self.race.budget.steps:
            until /= GROWTH
        return max(until, earliest)

    def _next_arms(self, number: int) -> list[GridCell]:
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

    def _first_arms(self) -> list[GridCell]:
        """Return every shape with its usual rates, and candidates with further rates as far as the budget allows."""
        shapes = len(self.screening.kept)
        until, arms = self._first_time(), self._next_arms(shapes)
        if math.isinf(self.race.budget.steps):
            return arms + self._next_arms((TIMED_TURNS - 1) * shapes)
        left = START * self.race.budget.steps - sum(self._cost(each, until) for each in arms)
        while left > 0 and (more := self._next_arms(1)):
            arms += more
            left -= self._cost(more[0], until)
        return arms

    def _cost(self, candidate: GridCell, seconds: float) -> float:
        """Return the local steps that a candidate trains in a time, at its mean speed."""
        return self.planned(candidate).steps_per_second * seconds

    def _start(self, candidates: Iterable[GridCell]) -> list[GridCell]:
        started = list(dict.fromkeys(candidates))
        self.tried.update(dict.fromkeys(started))
        return started

    def _explore(self, arms: Sequence[GridCell]) -> None:
        alive, until = self._start(arms), min(self._first_time(), self._limit())
        while alive:
            self.phase(f"exploring: {len(alive)} candidates to {until:.3g} s")
            self.race.advance([(each, self.first) for each in alive], until)
            if until >= self._limit():
                break
            after = min(GROWTH * until, self._limit())
            alive, until = self._better(alive, until, after), after

    def _better(self, alive: Sequence[GridCell], until: float, after: float) -> list[GridCell]:
        """Drop the worse candidates at a simulated time, and return those that continue to a later one."""
        ordered = sorted(alive, key=lambda each: self._score(each, until))
        kept = dict.fromkeys(ordered[: math.ceil(KEPT * len(ordered))])
        kept.update(dict.fromkeys(each for each in ordered if self._rounds(each) < LEAST_ROUNDS))
        left = RUNG * self.race.steps_left(EXPLORE)
        continuing: dict[GridCell, None] = {}
        for each in self._running(kept):
            plan = self.planned(each)
            left -= plan.steps_until(after) - plan.steps_until(until)
            if left < 0 and len(continuing) >= LEAST_KEPT:
                break
            continuing[each] = None
        for each in ordered:
            if each not in continuing and self._rounds(each):
                self._drop(each, ordered[0], until)
        postponed = [each for each in ordered if each not in continuing and not self._rounds(each)]
        for each in postponed:  # nothing of it was trained
            del self.tried[each]
        self._queue = postponed + self._queue
        return list(continuing)

    def _running(self, candidates: Iterable[GridCell]) -> list[GridCell]:
        return [each for each in candidates if (run := self.run(each)) is None or run.running]

    def _rounds(self, candidate: GridCell) -> int:
        run = self.run(candidate)
        return 0 if run is None else run.rounds

    def _score(self, candidate: GridCell, until: float) -> tuple[float, float]:
        """Return a key by which candidates are sorted at a simulated time: the time to the target, or the loss."""
        run = self.run(candidate)
        if run is None:
            return 2.0, 0.0
        return (0.0, run.hit) if run.hit is not None and run.hit <= until else (1.0, run.loss(until))

    def _drop(self, candidate: GridCell, best: GridCell, until: float) -> None:
        run, other = self.run(candidate), self.run(best)
        if run is None or other is None or run.hit is not None:
            return
        if run.diverged_at is not None:
            self.lost[candidate] = f"diverged in round {run.diverged_at}"
        elif other.hit is not None and other.hit <= until:
            self.lost[candidate] = f"had not reached the target after {until:.3g} s, when {self.label(best)} had"
        else:
            had = f"when {self.label(best)} had {other.loss(until):.3g}"
            self.lost[candidate] = f"had a test loss of {run.loss(until):.3g} after {until:.3g} s, {had}"
        self.race.drop(candidate, self.first)

    def label(self, candidate: GridCell) -> str:
        """Return the name of a candidate."""
        return self.grids[candidate.algorithm].label(candidate.position)

    def _refine(self) -> None:
        """Race the neighbours of the leaders until none of them is better, and then further candidates."""
        done: set[GridCell] = set()
        while self.race.spent_share < REFINE:
            leader = self.ranking()[0]
            if not self.reached(leader):
                return
            centre = next((each for each in self.ranking()[:CENTRES] if each not in done), None)
            if centre is None:
                new = self._further(leader)
                if not new:
                    return
            else:
                done.add(centre)
                near = (GridCell(centre.algorithm, p) for p in self.grids[centre.algorithm].neighbours(centre.position))
                new = [each for each in near if each not in self.tried and self._may_start(each)]
            if new:
                what = "further candidates" if centre is None else f"neighbours of {self.label(centre)}"
                self.phase(f"refining: {len(new)} {what} against {self.label(leader)}")
                self._race_against(leader, self._start(new))

    def _further(self, leader: GridCell) -> list[GridCell]:
        """Return the next candidates, as many as a small share of the budget trains until they are first compared."""
        until = CHECKS[0] * self.times(leader)[self.first]
        new, left = self._next_arms(LEAST_KEPT), FURTHER * self.race.steps_left(1.0)
        while left > 0 and len(new) < len(self.screening.kept) and (more := self._next_arms(1)):
            new += more
            left -= self._cost(more[0], until)
        return new

    def _may_start(self, candidate: GridCell) -> bool:
        return candidate not in self.excluded and self._shape(candidate) in self.screening.kept

    def _shape(self, candidate: GridCell) -> PlanShape:
        return self.grids[candidate.algorithm].shape_of(candidate)

    def _race_against(self, leader: GridCell, new: Sequence[GridCell]) -> None:
        """Train candidates for as long as the leader took on the first seed, except those that fall behind it."""
        alive, best, limit = list(new), self.run(leader), self.times(leader)[self.first]
        assert best is not None
        for until in (*(share * limit for share in CHECKS), limit):
            self.race.advance([(each, self.first) for each in alive], until)
            for each in self._running(alive):
                run = self.run(each)
                if run is not None and run.rounds >= LEAST_ROUNDS and until > LAG * best.seconds_to_loss(run.loss()):
                    self._drop(each, leader, until)
            alive = self._running(alive)

    def _confirm(self, seeds: Sequence[int]) -> None:
        """Run finalists on further seeds until the leader is separated."""
        if not self.reached(self.ranking()[0]):
            self.ended = "no candidate reached the target"
            return
        for seed in seeds:
            finalists, leader = self._finalists(), self.ranking()[0]
            if len(self.times(leader)) > 1 and all(self.separated(each, leader) for each in finalists[1:]):
                break
            self.phase(f"confirming: {len(finalists)} finalists on seed {seed}")
            self._run_seed(finalists, seed, PATIENCE * max(self.times(leader).values()))
        leader, seen = self.ranking()[0], len(self.times(self.ranking()[0]))
        close = [each for each in self._finalists()[1:] if not self.separated(each, leader)]
        self.ended = f"the leader is separated after {seen} seeds"
        if close or seen < 2:
            self.ended = f"all {len(self.seeds)} seeds are used, and {len(close) + 1} candidates are not separated"

    def _finalists(self) -> list[GridCell]:
        """Return the best candidates whose times on the first seed are near the leader's, the leader first."""
        reached = [each for each in self.ranking() if self.reached(each) and each not in self.missed]
        if not reached:
            return self.ranking()[:1]
        limit = NEAR * self.times(reached[0])[self.first]
        return [each for each in reached if self.times(each)[self.first] <= limit][:FINALISTS]

    def _run_seed(self, finalists: Sequence[GridCell], seed: int, until: float) -> None:
        """Run finalists on one more seed; those that need much longer than the leader are not waited for."""
        entries = [(each, seed) for each in finalists]
        self.race.advance(entries, min(until, self.race.horizon))
        if not any(seed in self.times(each) for each in finalists):
            self.race.advance(entries, self.race.horizon)
        for each in finalists:
            if seed not in self.times(each):
                self.missed.add(each)
                self.lost[each] = f"missed the target on seed {seed} within {until:.3g} s"

    def _compare(self) -> None:
        """Train the best of the others to the target with the rest of the budget, for the Pareto front."""
        leader = self.ranking()[0]
        if not self.reached(leader):
            return
        until = min(COMPARED * max(self.times(leader).values()), self.race.horizon)
        others = sorted(self._running(self.tried), key=lambda each: self._score(each, until))[:FINALISTS]
        self.phase(f"comparing: {len(others)} candidates to {until:.3g} s")
        with suppress(BudgetSpentError):
            self.race.advance([(each, self.first) for each in others], until)

    def separated(self, candidate: GridCell, leader: GridCell) -> bool:
        """Return whether a candidate is slower than the leader at the level of the intervals, or as good for sure."""
        found = ratio(self.times(candidate), self.times(leader))
        if found is None or found.low is None or found.high is None:
            return False
        return found.low > 1.0 or (found.low > 1 / TIE and found.high < TIE)

    def planned(self, candidate: GridCell) -> PlannedShape:
        """Return the plan of a candidate."""
        return self.screening.kept[self._shape(candidate)]
