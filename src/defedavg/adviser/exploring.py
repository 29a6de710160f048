"""Exploring: every setting starts with its usual rates on one seed, and those that fall behind are dropped.

Candidates advance to growing simulated times. At each of them, a candidate's *lag* is the factor by which it took
longer to its last evaluations than the fastest candidate to the same: the geometric mean of the factors for the test
loss, which is smooth, and for the metric, which has the target. It is measured at the candidate's own evaluations, so
one whose next round is far away is not behind because of that. The candidates with the least lags continue, as many as
the budget allows.

Algorithms with the same first merge learn much the same from it. Of those, one merges first; the others wait, and start
if its lag leaves them a place.

A small budget, which trains the first rounds of less than half of all shapes, starts with one candidate of every
algorithm and a few more; the others follow when these were explored.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from ..errors import counted
from ..jsonio import three_digits
from .candidates import GridCell
from .racing import RacedRun
from .screening import PlannedShape
from .search_state import SearchState

FIRST_ROUNDS, GROWTH = 2, 1.2
"""The first comparison is when the median shape has merged this many rounds; the factor from one time to the next."""
START, FURTHER_RATES = 0.1, 0.05
"""Shares of the budget until the first comparison: of all shapes, and of all candidates that start."""
SMALL, FEW = 0.5, 0.5
"""A budget is small below this share of what the first rounds of all shapes cost; then these may cost FEW of it."""
TIMED_TURNS = 4
"""Rates that every shape starts with where the budget is real time, whose steps are not known yet."""
SHARE, STEP = 0.2, 0.1
"""The candidates that continue cost at most SHARE of the budget since they started, and STEP of the rest from now."""
LEAST_KEPT = 4
"""Candidates that continue even if they cost more."""
NEW = 0.4
"""The share of the rest of the budget for candidates whose first merge is unlike those of others."""
UNSEEN = 1.05
"""A candidate that waits counts as slower by this factor than the fastest with the same first merge."""
MARGIN = 1.3
"""Candidates are trained up to this multiple of the best time to the target: another seed may change the order."""
EXPLORE = 0.8
"""When this share of the budget is spent, exploring ends if the target was reached, and starts no further rates."""
LAST = 3
"""Evaluations over which a lag is averaged."""

Point = tuple[float, float]  # a simulated time and a value that falls


def steps_to_compare(plans: Iterable[PlannedShape]) -> int:
    """Return the local steps of the first rounds of all these shapes, before which no two of them can be compared."""
    return sum(int(each.steps_by_round[:FIRST_ROUNDS][-1]) for each in plans)


def too_small(state: SearchState, steps: float) -> bool:
    """Return whether a search that trains these local steps can compare few shapes only."""
    return steps < SMALL * steps_to_compare(state.screening.kept.values())


def first_time(state: SearchState, arms: Iterable[GridCell]) -> float:
    """Return when these candidates are first compared: after some rounds, or before if these cost too much."""
    plans = {state.shape(each): state.planned(each) for each in arms}.values()
    seconds = sorted(each.stats.seconds_per_round for each in plans)
    until, earliest = FIRST_ROUNDS * seconds[len(seconds) // 2], min(each.first_round for each in plans)
    while until > earliest and sum(each.steps_until(until) for each in plans) > START * state.race.budget.steps:
        until /= GROWTH
    return max(until, earliest)


def first_arms(state: SearchState) -> list[GridCell]:
    """Return every shape with its usual rates, and candidates with further rates as far as the budget allows."""
    arms = state.next_arms(len({shape.algorithm for shape in state.screening.kept}))  # algorithms start in turn
    timed = math.isinf(state.race.budget.steps)
    if timed:
        _measure_speed(state, arms)
    steps = state.race.steps + state.race.steps_left(1.0)
    if too_small(state, steps):
        return arms + _few_further(state, FEW * steps - steps_to_compare(map(state.planned, arms)))
    shapes = len(state.screening.kept)
    arms += state.next_arms(shapes - len(arms))
    if timed:
        return arms + state.next_arms((TIMED_TURNS - 1) * shapes)
    until = first_time(state, arms)
    left = FURTHER_RATES * state.race.budget.steps - sum(state.cost(each, until) for each in arms)
    while left > 0 and (more := state.next_arms(1)):
        arms += more
        left -= state.cost(more[0], until)
    return arms


def _measure_speed(state: SearchState, arms: Sequence[GridCell]) -> None:
    """Train the first merge of these candidates: a budget of real time has no number of steps until then."""
    state.phase(f"exploring: the first merge of {counted(len(arms), 'candidate')}")
    state.start(arms)
    for until in sorted({state.planned(each).first_round for each in arms}):
        state.race.advance([(each, state.first) for each in arms if state.planned(each).first_round == until], until)


def _few_further(state: SearchState, steps: float) -> list[GridCell]:
    """Return the next candidates, as many as train their first rounds in these local steps."""
    arms: list[GridCell] = []
    while steps > 0 and (more := state.next_arms(1)):
        arms += more
        steps -= steps_to_compare(map(state.planned, more))
    return arms


def explore_all(state: SearchState) -> None:
    """Explore, with further rates as well if no candidate reaches the target."""
    arms = first_arms(state)
    while arms:
        Exploration(state, state.start(arms)).explore()
        if math.isfinite(state.best_time) or state.race.spent_share >= EXPLORE:
            return
        arms = state.next_arms(len(state.screening.kept))


@dataclass(eq=False)
class Exploration:
    """Candidates that advance together; ``lags`` has those that were evaluated after a merge."""

    state: SearchState
    alive: list[GridCell]
    lags: dict[GridCell, float] = field(default_factory=dict)

    def explore(self) -> None:
        """Advance the candidates to growing times until none is left that can win."""
        state, until = self.state, min(first_time(self.state, self.alive), self._limit())
        while self.alive:
            going = self._continuing(until)
            self._drop_except(going)
            state.phase(f"exploring: {counted(len(going), 'candidate')} to {three_digits(until)} s")
            state.race.advance([(each, state.first) for each in self.alive if each in going], until)
            self.lags = lags(self._runs(state.tried), self._runs(self.alive))
            self.alive = state.running(self.alive)
            if self._ends(until):
                break
            until = min(GROWTH * until, self._limit())
        state.postpone(each for each in self.alive if state.run(each) is None)

    def _ends(self, until: float) -> bool:
        reached = math.isfinite(self.state.best_time)
        return until >= self._limit() or (reached and self.state.race.spent_share > EXPLORE)

    def _drop_except(self, going: Collection[GridCell]) -> None:
        """Drop the candidates that have a lag and do not continue."""
        behind = [each for each in self.alive if each in self.lags and each not in going]
        for each in behind:
            self.state.drop(each, self._behind(each))
        self.alive = [each for each in self.alive if each not in behind]

    def _limit(self) -> float:
        return min(self.state.race.horizon, MARGIN * self.state.best_time)

    def _runs(self, candidates: Iterable[GridCell]) -> dict[GridCell, RacedRun]:
        return {each: run for each in candidates if (run := self.state.run(each)) is not None}

    def _behind(self, candidate: GridCell) -> str:
        run = self.state.run(candidate)
        assert run is not None
        found = f"a loss of {three_digits(run.loss())} and a metric of {three_digits(run.value())}"
        when = f"after {three_digits(run.seconds)} s"
        return f"had {found} {when}, {self.lags[candidate]:.2f} times as late as the fastest"

    def _continuing(self, after: float) -> set[GridCell]:
        """Return the candidates that train until a simulated time."""
        seen: dict[Hashable, float] = {}  # the least lag after a first merge
        for each, lag in self.lags.items():
            group = first_merge(self.state, each)
            seen[group] = min(lag, seen.get(group, math.inf))
        scores = {each: self.lags[each] for each in self.alive if each in self.lags}
        going: set[GridCell] = set()
        left = NEW * self.state.race.steps_left(1.0) if self.lags else math.inf
        merges: set[Hashable] = set()
        waiting = [each for each in self.alive if each not in self.lags and self._steps(each, after)]
        for each in sorted(waiting, key=lambda each: self._steps(each, after)):
            group = first_merge(self.state, each)
            if group in seen:
                scores[each] = UNSEEN * seen[group]
            elif group not in merges and self._steps(each, after) <= left:
                merges.add(group)
                left -= self._steps(each, after)
                going.add(each)
        return going | self._ahead(scores, after)

    def _ahead(self, scores: Mapping[GridCell, float], after: float) -> set[GridCell]:
        """Return the candidates with the lowest scores that the budget trains until a simulated time."""
        race, ahead = self.state.race, set[GridCell]()
        rest = race.steps_left(1.0)
        total, step = SHARE * (race.steps + rest), STEP * rest
        for each in sorted(scores, key=lambda each: scores[each]):
            run, cost = self.state.run(each), self._steps(each, after)
            total -= cost
            step -= cost - (0.0 if run is None else self._steps(each, run.seconds))
            if min(total, step) < 0 and len(ahead) >= LEAST_KEPT:
                break
            ahead.add(each)
        return ahead

    def _steps(self, candidate: GridCell, until: float) -> float:
        return self.state.planned(candidate).steps_until(until)


def first_merge(state: SearchState, candidate: GridCell) -> Hashable:
    """Return when a candidate first merges, how many steps, and with which rates."""
    plan, rates = state.planned(candidate), state.grids[candidate.algorithm].rates(candidate)
    return plan.first_round, int(plan.steps_by_round[0]), tuple(rates.items())


def lags(everyone: Mapping[GridCell, RacedRun], some: Mapping[GridCell, RacedRun]) -> dict[GridCell, float]:
    """Return the lags of some candidates behind the fastest of all; infinite for those that diverged."""
    points = {each: curves(run) for each, run in everyone.items()}
    ahead = [fastest(kind) for kind in zip(*points.values(), strict=True)]
    found: dict[GridCell, float] = {}
    for each, run in some.items():
        if run.diverged_at is not None:
            found[each] = math.inf
        elif points[each][0]:
            pairs = zip(points[each], ahead, strict=True)
            found[each] = math.exp(fmean(log_lag(curve[-LAST:], first) for curve, first in pairs))
    return found


def curves(run: RacedRun) -> tuple[list[Point], list[Point]]:
    """Return times and test losses, and times and 1 - metric, of the evaluations after the initialisation."""
    evaluated = [e for e in run.evaluations if e.seconds > 0 and math.isfinite(e.loss)]
    return [(e.seconds, e.loss) for e in evaluated], [(e.seconds, 1.0 - (e.accuracy or 0.0)) for e in evaluated]


def fastest(several: Iterable[Sequence[Point]]) -> list[Point]:
    """Return when any of several curves was first as low: times rise, and values fall."""
    found: list[Point] = []
    for seconds, value in sorted(point for curve in several for point in curve):
        if not found or value < found[-1][1]:
            found.append((seconds, value))
    return found


def log_lag(points: Sequence[Point], ahead: Sequence[Point]) -> float:
    """Return the mean logarithm of the times of some points, relative to when the fastest had the same values."""
    return fmean(math.log(seconds / time_to(value, ahead)) for seconds, value in points)


def time_to(value: float, ahead: Sequence[Point]) -> float:
    """Return when the fastest had a value, interpolated between evaluations on the logarithm of time."""
    i = bisect_left(ahead, -value, key=lambda point: -point[1])
    if i == 0:
        return ahead[0][0]
    (before, higher), (after, lower) = ahead[i - 1], ahead[i]
    share = (higher - value) / (higher - lower)
    return float(before * (after / before) ** share)
