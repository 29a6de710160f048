"""The phases of the search, on runs whose times to the target are given."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from types import SimpleNamespace
from typing import Any, cast

import pytest

from defedavg.adviser.candidates import GridCell, grids_of
from defedavg.adviser.racing import Budget, BudgetSpentError, Race
from defedavg.adviser.reasons import why
from defedavg.adviser.screening import Holders, screen
from defedavg.adviser.search import INTERRUPTED, AdviceSearch
from defedavg.config import study as config
from defedavg.rng import generator, key

HORIZON, SEEDS = 8.0, 4
TRAINING = {"updates_per_round": [1, 5], "local_steps": [5], "local_lr": [0.03, 0.1, 0.3], "global_lr": [0.3, 1.0]}
GRIDS = grids_of(
    config.study({"clients": {"num_clients": 10}, "training": TRAINING}), ("fedavg", "fedbuff", "defedavg-iid"), 0
)
SCREENING = screen(GRIDS, HORIZON, 0, Holders(None), lambda *_: None)
CELLS = [GridCell(s.algorithm, (*s.position, *r)) for s in SCREENING.kept for r in GRIDS[s.algorithm].rate_positions()]


@dataclass
class GivenRun:
    """A run whose loss falls from 1 to 0 at a given time, where it reaches the target."""

    ends: float
    steps_per_second: float
    seconds: float = 0.0
    dropped: bool = False
    diverged_at: int | None = None
    resolution = 0.0
    simulation = SimpleNamespace(progress=SimpleNamespace(first_hit_seconds=None))

    @property
    def hit(self) -> float | None:
        return self.ends if self.seconds >= self.ends else None

    @property
    def complete(self) -> bool:
        return self.hit is not None or self.seconds >= HORIZON

    @property
    def running(self) -> bool:
        return not self.complete and not self.dropped

    @property
    def rounds(self) -> int:
        return int(self.seconds * 100)

    @property
    def evaluations(self) -> list[SimpleNamespace]:
        times = [*(0.01 * i for i in range(int(100 * self.seconds) + 1)), self.seconds]
        return [SimpleNamespace(seconds=s, loss=self.loss(s), accuracy=1.0 - self.loss(s)) for s in times]

    def loss(self, seconds: float = math.inf) -> float:
        return max(0.0, 1.0 - min(seconds, self.seconds) / self.ends)

    def seconds_to_loss(self, loss: float) -> float:
        return self.ends * (1.0 - loss) if loss >= self.loss() else math.inf

    def value(self, seconds: float = math.inf) -> float:
        return 1.0 - self.loss(seconds)


@dataclass
class GivenRace:
    """A race of given runs; the steps that they train count as in a real one."""

    times: Mapping[tuple[GridCell, int], float]
    budget: Budget
    horizon: float = HORIZON
    runs: dict[tuple[GridCell, int], GivenRun] = field(default_factory=dict)
    steps: float = 0.0
    last: float = 0.0  # steps of the last run that advanced
    interrupt_at: float = math.inf

    @property
    def spent_share(self) -> float:
        return self.steps / self.budget.steps

    def steps_left(self, share: float) -> float:
        return share * self.budget.steps - self.steps

    def advance(self, entries: Sequence[tuple[GridCell, int]], until: float) -> None:
        for entry in entries:
            plan = SCREENING.kept[GRIDS[entry[0].algorithm].shape_of(entry[0])]
            run = self.runs.setdefault(entry, GivenRun(self.times[entry], plan.steps_per_second))
            if run.running and run.seconds < until:
                after = min(until, run.ends)
                self.last = (after - run.seconds) * run.steps_per_second
                self.steps += self.last
                run.seconds = after
            if self.steps > self.interrupt_at:
                raise KeyboardInterrupt
            if self.spent_share >= 1.0:
                raise BudgetSpentError

    def drop(self, candidate: GridCell, seed: int) -> None:
        self.runs[candidate, seed].dropped = True


def searched(times: Mapping[tuple[GridCell, int], float], steps: float, seed: int = 0, **race: Any) -> AdviceSearch:
    given = cast(Race, GivenRace(times, Budget(steps), **race))
    search = AdviceSearch(given, GRIDS, SCREENING, tuple(range(SEEDS)), seed, usual_rate=0.3)
    search.search()
    return search


def drawn(number: int, noise: float) -> tuple[dict[tuple[GridCell, int], float], dict[GridCell, float]]:
    """Return times on every seed, and their means, which the search does not see."""
    draws = generator(key(number, "tests.adviser.times"))
    means = {each: float(math.exp(draws.normal(0.5, 0.6))) for each in CELLS}
    times = {
        (each, seed): mean * math.exp(noise * draws.normal()) for each, mean in means.items() for seed in range(SEEDS)
    }
    return times, means


WHOLE = sum(SCREENING.kept[GRIDS[c.algorithm].shape_of(c)].steps_per_second * HORIZON for c in CELLS)


def test_without_noise_and_with_a_large_budget_the_best_candidate_is_found() -> None:
    for number in range(5):
        times, means = drawn(number, 0.0)
        search = searched(times, WHOLE)
        best = search.ranking()[0]
        started = min(means[each] for each in search.tried)
        assert means[best] == started
        assert search.ended


def test_more_budget_gives_better_advice_in_expectation_until_only_the_noise_of_seeds_is_left() -> None:
    ratios: dict[float, list[float]] = {share: [] for share in (0.01, 0.03, 0.1, 0.4)}
    for number in range(40):
        times, means = drawn(number, 0.2)
        least = min(means.values())
        for share, found in ratios.items():
            found.append(math.log(means[searched(times, share * WHOLE, number).ranking()[0]] / least))
    least_budget, small, large, largest = (fmean(values) for values in ratios.values())
    assert least_budget > 1.5 * small > 15 * large
    assert largest < large + 0.01  # both are at the noise of a few seeds, a regret of about 1 %


def test_a_candidate_that_was_lucky_on_the_first_seed_is_not_advised() -> None:
    times = {(each, seed): 4.0 for each in CELLS for seed in range(SEEDS)}
    lucky, steady = CELLS[0], CELLS[-1]
    first = AdviceSearch(cast(Race, GivenRace({}, Budget(1.0))), GRIDS, SCREENING, (0,), 0, usual_rate=0.3)
    lucky, steady = first.next_arms(2)  # both start
    times[lucky, 0], times[steady, 0] = 1.0, 1.05
    for seed in range(1, SEEDS):
        times[steady, seed] = 1.05
    search = searched(times, 0.5 * WHOLE)
    assert search.ranking()[0] == steady
    assert "missed the target on seed 1" in search.lost[lucky]
    assert search.reached(lucky)  # on the first seed; the second one was not waited for
    (missed,) = search.missed_runs(lucky)
    assert missed.seconds < times[lucky, 1]
    assert search.missed_runs(steady) == ()


def test_a_run_that_the_budget_stopped_on_a_further_seed_is_not_called_missed() -> None:
    search = confirmed({0: 1.0, 1: 1.0, 2: 1.0})
    leader = search.ranking()[0]
    search.race.advance([(leader, 2)], 0.5)
    assert search.missed_runs(leader) == ()
    search.race.advance([(leader, 3)], HORIZON)  # ends by itself, without the target
    assert [each.seed for each in search.missed_runs(leader)] == [3]


def test_a_candidate_that_ends_without_the_target_on_a_further_seed_says_on_which_one() -> None:
    search = confirmed({0: 1.0})
    leader = search.ranking()[0]
    assert not search.reached(leader)
    assert search.ended == "no candidate reached the target on all its seeds"
    other = next(each for each in search.tried if each != leader)
    reason = why(search, leader, other, Holders(None), "accuracy")
    assert reason.startswith("on seed 1 the target was not reached by 8 s (accuracy 50.0 %)")


def test_the_search_ends_when_all_finalists_miss_the_target_on_a_further_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    # A candidate that was dropped has the higher metric, so it leads the ranking then.
    monkeypatch.setattr(GivenRun, "value", lambda run: 0.0 if run.complete else 0.5)
    first = AdviceSearch(cast(Race, GivenRace({}, Budget(1.0))), GRIDS, SCREENING, (0,), 0, usual_rate=0.3)
    times = {(each, seed): 2 * HORIZON for each in CELLS for seed in range(SEEDS)}
    for finalist, found in zip(first.next_arms(2), ((1.0, 1.2), (1.1, 1.0)), strict=True):  # not separated
        times |= {(finalist, seed): seconds for seed, seconds in enumerate(found)}
    search = searched(times, 100 * WHOLE)
    assert search.ended == "no candidate reached the target on all its seeds"
    assert not any(seed == 3 for _, seed in search.race.runs)


def confirmed(times: Mapping[int, float], phase: Callable[[str], None] = lambda _: None) -> AdviceSearch:
    """Return a search with one candidate that reaches the target, at these times by seed, and for two seeds at most."""
    first = AdviceSearch(cast(Race, GivenRace({}, Budget(1.0))), GRIDS, SCREENING, (0,), 0, usual_rate=0.3)
    (good,) = first.next_arms(1)
    every = {(each, seed): 2 * HORIZON for each in CELLS for seed in range(SEEDS)}
    every |= {(good, seed): seconds for seed, seconds in times.items()}
    race = cast(Race, GivenRace(every, Budget(100 * WHOLE)))
    search = AdviceSearch(race, GRIDS, SCREENING, (0, 1), 0, usual_rate=0.3)
    search.phase = phase
    search.search()
    search.seeds = tuple(range(SEEDS))
    return search


def test_the_reason_why_the_search_ends_has_its_numbers_in_the_singular_or_the_plural() -> None:
    phases: list[str] = []
    alone = "no other candidate was a finalist; the leader was run on 2 seeds"
    assert confirmed({0: 1.0, 1: 1.0}, phases.append).ended == alone
    assert "confirming: 1 finalist on seed 1" in phases
    assert [text for text in phases if re.match(r"exploring: \d+ candidates to", text)]
    times, _ = drawn(1, 0.0)
    once = AdviceSearch(cast(Race, GivenRace(times, Budget(WHOLE))), GRIDS, SCREENING, (0,), 0, usual_rate=0.3)
    once.search()
    assert once.ended.startswith("the only seed is used, and ")
    assert [once._refined(number, None) for number in (1, 2)] == ["1 further candidate", "2 further candidates"]
    leader = once.ranking()[0]
    assert once._refined(1, leader) == f"1 neighbour of {once.label(leader)}"


def two_finalists(
    monkeypatch: pytest.MonkeyPatch, leader: Sequence[float], other: Sequence[float], seen: float = HORIZON
) -> tuple[AdviceSearch, GridCell, GridCell]:
    """Search among two candidates with these times by seed; the other one is trained until ``seen`` on the first."""
    one, two = CELLS[0], CELLS[-1]
    times = {(one, seed): seconds for seed, seconds in enumerate(leader)}
    times |= {(two, seed): seconds for seed, seconds in enumerate(other)}

    def explore(search: AdviceSearch) -> None:
        search.start((one, two))
        search.race.advance([(one, 0)], HORIZON)
        search.race.advance([(two, 0)], seen)

    monkeypatch.setattr("defedavg.adviser.search.explore_all", explore)
    monkeypatch.setattr(AdviceSearch, "_refine", lambda _: None)
    race = cast(Race, GivenRace(times, Budget(100 * WHOLE)))
    search = AdviceSearch(race, GRIDS, SCREENING, tuple(range(SEEDS)), 0, usual_rate=0.3)
    search.search()
    return search, one, two


def test_a_leader_is_separated_after_three_seeds_at_the_earliest(monkeypatch: pytest.MonkeyPatch) -> None:
    search, leader, other = two_finalists(monkeypatch, (1.0, 1.01, 0.99, 1.0), (1.2, 1.21, 1.19, 1.2))
    assert search.ended == "the leader is separated from 1 finalist after 3 seeds"
    assert search.ranking() == [leader, other]
    assert search.close(leader) == []
    assert list(search.times(leader)) == list(search.times(other)) == [0, 1, 2]


def test_finalists_that_the_seeds_do_not_separate_are_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    search, leader, other = two_finalists(monkeypatch, (1.0, 1.2, 0.9, 1.1), (1.05, 1.0, 1.2, 1.05))
    assert search.ended == "all 4 seeds are used, and 2 candidates are not separated after 4 seeds"
    assert search.close(leader) == [other]


def seen_on(*times: Sequence[float]) -> AdviceSearch:
    """Return a search of which candidates were run to the target on the seeds that have a time."""
    cells = CELLS[: len(times)]
    given = {
        (each, seed): seconds for each, found in zip(cells, times, strict=True) for seed, seconds in enumerate(found)
    }
    race = cast(Race, GivenRace(given, Budget(100 * WHOLE)))
    search = AdviceSearch(race, GRIDS, SCREENING, tuple(range(SEEDS)), 0, usual_rate=0.3)
    search.start(cells)
    race.advance(list(given), HORIZON)
    return search


def test_finalists_with_one_seed_are_neither_separated_nor_not_separated() -> None:
    search = seen_on((1.0, 1.2), (1.05, 1.0), (1.1,))
    assert search.close(CELLS[0]) == [CELLS[1]]
    text = "2 candidates are not separated after 2 seeds; 1 more finalist was run on one seed only"
    assert search._verdict() == text
    search = seen_on((1.0, 1.01, 0.99), (1.2, 1.21, 1.19), (1.1,), (1.15,))
    assert search.close(CELLS[0]) == []
    text = "the leader is separated from 1 finalist after 3 seeds; 2 more finalists were run on one seed only"
    assert search._verdict() == text
    text = "the leader was run on 2 seeds; 1 more finalist was run on one seed only"
    assert seen_on((1.0, 1.2), (1.05,))._verdict() == text


def test_a_leader_with_one_seed_has_no_interval_whoever_is_near() -> None:
    search = seen_on((1.0,), (1.05,))
    assert search.close(CELLS[0]) == []
    assert search._verdict() == "the leader has a time on one seed, so no interval"


def test_a_candidate_that_comes_near_while_others_are_compared_is_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    search, leader, other = two_finalists(monkeypatch, (1.0, 1.0, 1.0, 1.0), (1.001, 1.0, 0.999, 1.0), seen=0.5)
    assert len(search.times(other)) == 3
    assert search.ended == "2 candidates are not separated after 3 seeds"  # and further seeds would not separate them
    assert search.close(leader) == [other]


def test_times_that_fall_on_the_same_evaluation_are_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GivenRun, "resolution", 0.3)
    search, leader, other = two_finalists(monkeypatch, (1.0,) * SEEDS, (1.1,) * SEEDS)
    found, ratio = search.interval(leader), search.ratio(other, leader)
    assert found is not None
    assert ratio is not None
    # A time that is uniform on [0.7, 1] has a logarithm with this variance; the quantile is that of three degrees.
    deviation = math.sqrt(1 - 0.7 * (math.log(0.7) / 0.3) ** 2)
    assert found.high == pytest.approx(math.exp(2.353 * deviation / 2))
    assert ratio.low == pytest.approx(1.1 / math.exp(2.353 * math.sqrt(2) * deviation / 2))
    assert search.close(leader) == [other]


def test_a_dropped_candidate_is_not_trained_to_the_end_and_the_reason_says_why() -> None:
    times, _ = drawn(1, 0.0)
    search = searched(times, 0.1 * WHOLE)
    assert search.lost
    for each, reason in search.lost.items():
        run = search.run(each)
        assert run is not None
        assert run.hit is None or each in search.missed
        assert reason.startswith(("had a loss of", "had a test loss of", "missed the target"))
    assert search.race.steps < 0.11 * WHOLE


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1])
def test_the_same_seed_gives_the_same_search_and_the_budget_limits_it(share: float) -> None:
    times, _ = drawn(2, 0.2)
    one, other = (searched(times, share * WHOLE, 7) for _ in range(2))
    assert one.ranking() == other.ranking()
    assert one.lost == other.lost
    assert one.race.steps == other.race.steps
    assert one.race.steps - cast(GivenRace, one.race).last < share * WHOLE
    assert one.ended


def test_no_candidate_reaches_the_target_and_ctrl_c_ends_with_the_best_so_far() -> None:
    never = {(each, seed): 2 * HORIZON for each in CELLS for seed in range(SEEDS)}
    never[CELLS[3], 0] = 1.5 * HORIZON
    search = searched(never, WHOLE)
    assert search.ended == "no candidate reached the target"
    assert not search.reached(search.ranking()[0])
    times, _ = drawn(3, 0.0)
    stopped = searched(times, WHOLE, interrupt_at=0.01 * WHOLE)
    assert stopped.ended == INTERRUPTED
    assert stopped.ranking()
