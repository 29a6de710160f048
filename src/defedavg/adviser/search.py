"""The search: explore with successive halving, refine around the leaders, confirm over seeds.

1. *Explore.* Candidates of every algorithm start on one seed and are compared at doubling simulated times. The better
   part continues, and for a while the best of each algorithm. After the first has reached the target, no candidate is
   trained much beyond that time, because it could not win.
2. *Refine.* The neighbours of the best candidates on the grid are raced against them, until none is better.
3. *Confirm.* The best candidates are run on further seeds. It ends when the leader's interval excludes the others, when
   all seeds are used, or when the budget is spent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..rng import key, permutation
from .candidates import RATES, AlgorithmGrid, GridCell, PlanShape
from .confidence import TimeInterval, ratio
from .racing import BudgetSpentError, Race, RacedRun
from .screening import PlannedShape, Screening

FIRST_RUNG, GROWTH = 1 / 64, 2.0
"""The first comparison, as a share of the horizon, and the factor from one to the next."""
KEPT = 0.5
"""The share of the candidates that continues after a comparison."""
LEAST_PROGRESS, LEAST_ROUNDS = 0.1, 2
"""No candidate is dropped before the best has covered this share of the way from the initial metric to the target, nor
before its own second round."""
PROTECTED = 1 / 32
"""Up to this share of the horizon, the best candidate of every algorithm continues."""
EXPLORE, REFINE = 0.35, 0.7
"""Shares of the budget after which exploring and refining end."""
MARGIN = 1.1
"""Candidates are trained up to this multiple of the best time to the target: another seed may change the order."""
HALVING_COST = 0.06
"""Cost of exploring per candidate, in runs to the horizon: Σ KEPT^r · (share of the time up to the next rung)."""
LEAST_ARMS = 2
"""Of every algorithm; if the budget is small, most of them are dropped after the first comparison."""
CENTRES = 4
"""Leaders, of different algorithms, around which the search refines."""
COMPARABLE = 1.6
"""Only candidates within this multiple of the best time are such leaders, if two or more are."""
FURTHER = 16
"""Candidates that start together after the neighbours of the leaders."""
FINALISTS = 6
NEAR = 1.6
"""A candidate whose time is within this multiple of the leader's is a finalist."""
INTERRUPTED = "it was interrupted"
SEEDS = 5
"""Seeds of a finalist, at most."""
PATIENCE = 1.5
"""On further seeds, a finalist may take this multiple of the longest time of the leader."""
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
        time. The others follow by their metric when they were last evaluated.
        """
        run = self.run(candidate)
        if run is None or run.diverged_at is not None:
            return 2.0, 0.0
        if self.reached(candidate):
            times = self.times(candidate)
            return 0.0, -len(times), TimeInterval.of(list(times.values())).mean
        return 1.0, -run.value()

    def ranking(self) -> list[GridCell]:
        """Return every candidate that was raced, the best first."""
        return sorted(self.tried, key=lambda each: (*self.rank(each), each.algorithm, each.position))

    # The phases.

    def search(self) -> None:
        """Run all phases until the leader is separated or the budget is spent."""
        try:
            self._explore(self._first_arms())
            self._refine()
            self._confirm()
        except BudgetSpentError:
            self.ended = "the budget is spent"
        except KeyboardInterrupt:
            self.ended = INTERRUPTED

    @property
    def best_time(self) -> float:
        """The best time to the target on the first seed; infinite if it was not reached."""
        hits = (run.hit for each in self.tried if (run := self.run(each)) is not None and run.hit is not None)
        return min(hits, default=math.inf)

    def _limit(self) -> float:
        return min(self.race.horizon, MARGIN * self.best_time)

    def cost(self, shape: PlanShape) -> float:
        """Return the local steps of a run to the horizon."""
        return self.screening.kept[shape].steps_per_second * self.race.horizon

    def _first_arms(self) -> list[GridCell]:
        """Return the candidates that start: as many as the budget allows, equally many of every algorithm."""
        kept = list(self.screening.kept)
        mean = sum(map(self.cost, kept)) / len(kept)
        steps = self.race.budget.steps
        most = 12 * len(self.grids) if math.isinf(steps) else int(EXPLORE * steps / (HALVING_COST * mean))
        return list(itertools.islice(self._in_turn(), max(most, LEAST_ARMS * len(self.grids))))

    def _in_turn(self) -> Iterator[GridCell]:
        """Yield all candidates, one of every algorithm in turn."""
        for turn in itertools.zip_longest(*map(self._order, self.grids)):
            yield from (each for each in turn if each is not None)

    def _order(self, algorithm: str) -> list[GridCell]:
        """Return the candidates of an algorithm in the order in which they start: usual rates with varied shapes."""
        grid = self.grids[algorithm]
        shapes = [shape for shape in self.screening.kept if shape.algorithm == algorithm]
        if not shapes:
            return []
        shuffled = [shapes[i] for i in permutation(key(self.key_seed, "advise.order"), len(shapes)).tolist()]
        rates = sorted(grid.rate_positions(), key=lambda position: self._distance(grid, position))
        order: dict[GridCell, None] = {}
        for offset in range(len(shuffled)):
            for turn, rate in enumerate(rates):
                shape = shuffled[(turn + offset) % len(shuffled)]
                candidate = GridCell(algorithm, (*shape.position, *rate))
                if candidate not in self.excluded:
                    order[candidate] = None
        return list(order)

    def _distance(self, grid: AlgorithmGrid, position: tuple[int, ...]) -> float:
        """Return how far rates are from the usual ones: a global rate of 1, and a local rate that suits L."""
        axes = grid.axes[len(grid.shape_axes) :]
        total = 0.0
        for axis, i in zip(axes, position, strict=True):
            usual = 1.0 if axis.name == RATES[0] and len(axes) == 2 else self.usual_rate
            if usual is None or not axis.values[0] <= usual <= axis.values[-1]:
                usual = axis.values[(len(axis.values) - 1) // 2]
            total += abs(math.log(axis.values[i] / usual))
        return total

    def _start(self, candidates: Iterable[GridCell]) -> list[GridCell]:
        started = list(dict.fromkeys(candidates))
        self.tried.update(dict.fromkeys(started))
        return started

    def _explore(self, arms: Sequence[GridCell]) -> None:
        alive, share, before = self._start(arms), FIRST_RUNG, 0.0
        while alive:
            until = min(share * self.race.horizon, self._limit())
            alive = self._affordable(alive, before, until)
            self.phase(f"exploring: {len(alive)} candidates to {until:.3g} s")
            self.race.advance([(each, self.first) for each in alive], until)
            if until >= self._limit():
                break
            alive, before = self._halve(alive, until, protect=share <= PROTECTED), until
            share *= GROWTH

    def _affordable(self, alive: Sequence[GridCell], before: float, until: float) -> list[GridCell]:
        """Return the best candidates that the rest of the budget for exploring can advance, at least two."""
        left = EXPLORE * self.race.budget.steps - self.race.steps
        ordered = sorted(alive, key=lambda each: -self._value(each, before)) if before else list(alive)
        kept: list[GridCell] = []
        for each in ordered:
            left -= self.planned(each).steps_per_second * (until - before)
            if left < 0 and len(kept) >= 2:
                self._drop(each, ordered[0], before)
                self.lost[each] = f"was not trained beyond {before:.3g} s: the budget is for better ones"
            else:
                kept.append(each)
        return kept

    def _halve(self, alive: Sequence[GridCell], until: float, *, protect: bool) -> list[GridCell]:
        """Drop the worse candidates at a simulated time, and return those that continue."""
        ordered = sorted(alive, key=lambda each: -self._value(each, until))
        if self._progress(ordered[0], until) < LEAST_PROGRESS:
            return self._running(alive)
        kept = dict.fromkeys(ordered[: math.ceil(KEPT * len(ordered))])
        kept.update(dict.fromkeys(each for each in ordered if self._rounds(each) < LEAST_ROUNDS))
        if protect:
            best: dict[str, GridCell] = {}
            for each in ordered:
                best.setdefault(each.algorithm, each)
            kept.update(dict.fromkeys(best.values()))
        for each in ordered:
            run = self.run(each)
            if run is not None and not run.running:
                kept.pop(each, None)
            if each not in kept:
                self._drop(each, ordered[0], until)
        return list(kept)

    def _running(self, alive: Sequence[GridCell]) -> list[GridCell]:
        return [each for each in alive if (run := self.run(each)) is None or run.running]

    def _rounds(self, candidate: GridCell) -> int:
        run = self.run(candidate)
        return 0 if run is None else run.simulation.progress.rounds

    def _progress(self, candidate: GridCell, until: float) -> float:
        """Return the share of the way from the initial metric to the target; comparisons before say nothing."""
        run = self.run(candidate)
        if run is None or not run.simulation.progress.evaluations:
            return 0.0
        start = run.simulation.progress.evaluations[0].accuracy or 0.0
        target = run.simulation.settings.stop.target_accuracy
        return (self._value(candidate, until) - start) / max(target - start, 1e-9)

    def _value(self, candidate: GridCell, until: float) -> float:
        run = self.run(candidate)
        if run is None:
            return -1.0
        hit = run.hit is not None and run.hit <= until
        return 2.0 - (run.hit or 0.0) / self.race.horizon if hit else run.value(until)

    def _drop(self, candidate: GridCell, best: GridCell, until: float) -> None:
        run, other = self.run(candidate), self.run(best)
        if run is None or other is None or run.hit is not None:
            return
        if run.diverged_at is not None:
            self.lost[candidate] = f"diverged in round {run.diverged_at}"
        else:
            self.lost[candidate] = (
                f"had {run.value(until):.3f} after {until:.3g} s, when {self.label(best)} had {other.value(until):.3f}"
            )
        self.race.drop(candidate, self.first)

    def label(self, candidate: GridCell) -> str:
        """Return the name of a candidate."""
        return self.grids[candidate.algorithm].label(candidate.position)

    def _refine(self) -> None:
        """Race the neighbours of the leaders until none of them is better, and then further candidates."""
        done: set[GridCell] = set()
        further = self._in_turn()
        while self.race.spent_share < REFINE:
            centre = next((each for each in self._leaders() if each not in done), None)
            if centre is None:
                leader = self.ranking()[0]
                new = list(itertools.islice((each for each in further if each not in self.tried), FURTHER))
                if not new:
                    return
                self.phase(f"exploring: {len(new)} further candidates against {self.label(leader)}")
                self._race_against(leader, self._start(new))
                continue
            done.add(centre)
            near = [GridCell(centre.algorithm, p) for p in self.grids[centre.algorithm].neighbours(centre.position)]
            new = [each for each in near if each not in self.tried and self._may_start(each)]
            if new:
                self.phase(f"refining: {len(new)} neighbours of {self.label(centre)}")
                self._race_against(centre, self._start(new))

    def _leaders(self) -> list[GridCell]:
        """Return the best candidates of the best algorithms."""
        best: dict[str, GridCell] = {}
        for each in self.ranking():
            best.setdefault(each.algorithm, each)
        leaders = list(best.values())[:CENTRES]
        times = [self.times(each).get(self.first, math.inf) for each in leaders]
        return [each for i, each in enumerate(leaders) if i < 2 or times[i] <= COMPARABLE * self.best_time]

    def _may_start(self, candidate: GridCell) -> bool:
        return candidate not in self.excluded and self._shape(candidate) in self.screening.kept

    def _shape(self, candidate: GridCell) -> PlanShape:
        return self.grids[candidate.algorithm].shape_of(candidate)

    def _race_against(self, centre: GridCell, new: Sequence[GridCell]) -> None:
        alive = list(new)
        for share in (1 / 4, 1 / 2, 1.0):
            until = share * self._limit()
            self.race.advance([(each, self.first) for each in alive], until)
            if share < 1.0:
                ordered = sorted(alive, key=lambda each: -self._value(each, until))
                best = max((centre, ordered[0]), key=lambda each: self._value(each, until))
                for each in ordered[math.ceil(len(ordered) / 2) :]:
                    self._drop(each, best, until)
                alive = ordered[: math.ceil(len(ordered) / 2)]

    def _confirm(self) -> None:
        """Run finalists on further seeds until the leader is separated."""
        leader = self.ranking()[0]
        if not self.reached(leader):
            self.ended = "no candidate reached the target"
            return
        finalists = self._finalists(NEAR * self.times(leader)[self.first])
        for seed in self.seeds[1:]:
            self.phase(f"confirming: {len(finalists)} finalists on seed {seed}")
            self._run_seed(finalists, seed, PATIENCE * max(self.times(leader).values()))
            finalists = [each for each in finalists if seed in self.times(each) and self.reached(each)] or [leader]
            leader = min(finalists, key=self.rank)
            finalists = [each for each in finalists if each == leader or not self.separated(each, leader)]
            if len(finalists) == 1:
                self.ended = f"the leader is separated after {len(self.times(leader))} seeds"
                return
        self.ended = f"all {len(self.seeds)} seeds are used, and {len(finalists)} candidates are not separated"

    def _finalists(self, limit: float) -> list[GridCell]:
        """Return the best candidates that reached the target by a time on the first seed."""
        reached = [each for each in self.ranking() if self.reached(each)]
        return [each for each in reached if self.times(each)[self.first] <= limit][:FINALISTS]

    def _run_seed(self, finalists: Sequence[GridCell], seed: int, until: float) -> None:
        """Run finalists on one more seed; those that need much longer than the leader are not waited for."""
        entries = [(each, seed) for each in finalists]
        self.race.advance(entries, min(until, self.race.horizon))
        if not any(seed in self.times(each) for each in finalists):
            self.race.advance(entries, self.race.horizon)
        for each in finalists:
            if seed not in self.times(each):
                self.lost[each] = f"missed the target on seed {seed} within {until:.3g} s"

    def separated(self, candidate: GridCell, leader: GridCell) -> bool:
        """Return whether a candidate is slower than the leader at the level of the intervals, or as good for sure."""
        found = ratio(self.times(candidate), self.times(leader))
        if found is None or found.low is None or found.high is None:
            return False
        return found.low > 1.0 or (found.low > 1 / TIE and found.high < TIE)

    def planned(self, candidate: GridCell) -> PlannedShape:
        """Return the plan of a candidate."""
        return self.screening.kept[self._shape(candidate)]
