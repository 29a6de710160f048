"""Exploring: lags behind the fastest, candidates that wait for a like one, and what the budget allows."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from defedavg.adviser import exploring
from defedavg.adviser.candidates import GridCell, grids_of
from defedavg.adviser.exploring import (
    LEAST_KEPT,
    MARGIN,
    SHARE,
    SMALL,
    STEP,
    Exploration,
    first_arms,
    first_merge,
    lags,
    steps_to_compare,
    time_to,
)
from defedavg.adviser.racing import Budget, BudgetSpentError, Race, RacedRun
from defedavg.adviser.screening import Holders, screen
from defedavg.adviser.search_state import SearchState
from defedavg.config import study as config
from defedavg.experiments.compute import ComputeConfig

HORIZON = 2.0
NAMES = ("fedavg", "fedbuff", "ca2fl", "defedavg-iid")
GRIDS = grids_of(
    config.study(
        {
            "task": {"model": "softmax"},
            "clients": {"num_clients": 10},
            "training": {"updates_per_round": [1, 5], "local_steps": [2, 10], "local_lr": [0.03], "global_lr": [1.0]},
            "stop": {"target_accuracy": 0.6, "eval_every_seconds": 0.02},
            "fedbuff": {"concurrency": [0]},
            "ca2fl": {"concurrency": [0]},
        }
    ),
    NAMES,
    0,
)
SCREENING = screen(GRIDS, HORIZON, 0, Holders(None), lambda *_: None)


class Curve:
    """A run with given times and losses, and by default a metric that rises as the loss falls."""

    def __init__(
        self, *points: tuple[float, float], metrics: Sequence[float] = (), diverged_at: int | None = None
    ) -> None:
        metrics = metrics or [-loss for _, loss in points]
        self.evaluations = [
            type("Point", (), {"seconds": s, "loss": loss, "accuracy": metric})
            for (s, loss), metric in zip(points, metrics, strict=True)
        ]
        self.diverged_at = diverged_at


def lags_of(**curves: Any) -> dict[str, float]:
    runs = {GridCell(name, ()): cast(RacedRun, curve) for name, curve in curves.items()}
    return {each.algorithm: lag for each, lag in lags(runs, runs).items()}


def test_a_lag_is_the_ratio_of_times_to_the_same_loss() -> None:
    fast = Curve((0.0, 9.0), (1.0, 8.0), (2.0, 4.0), (4.0, 2.0), (8.0, 1.0))
    slow = Curve((0.0, 9.0), (3.0, 8.0), (6.0, 4.0), (12.0, 2.0))
    found = lags_of(fast=fast, slow=slow, none=Curve((0.0, 9.0)), away=Curve((1.0, math.nan), diverged_at=3))
    assert found == {"fast": pytest.approx(1.0), "slow": pytest.approx(3.0), "away": math.inf}


def test_a_lag_is_the_geometric_mean_of_those_in_loss_and_metric() -> None:
    fast = Curve((1.0, 8.0), (1.4, 4.0), metrics=(0.2, 0.4))
    slow = Curve((4.0, 8.0), (5.6, 4.0), metrics=(0.4, 0.4))  # 4 times as long in loss; in metric 4 / 1.4 and 4 times
    assert lags_of(fast=fast, slow=slow) == {"fast": pytest.approx(1.0), "slow": pytest.approx(4.0 * 1.4 ** (-1 / 4))}


def test_without_a_metric_a_lag_falls_behind_the_first_evaluation() -> None:
    fast = Curve((1.0, 8.0), (1.4, 4.0), metrics=(0.2, 0.4))
    other = Curve((1.0, 8.0), (1.4, 4.0), metrics=(0.0, 0.0))
    assert lags_of(fast=fast, other=other)["other"] == pytest.approx(1.4 ** (1 / 4))


def test_a_time_to_a_loss_is_interpolated() -> None:
    fastest = [(1.0, 8.0), (4.0, 4.0), (5.0, 1.0)]
    assert time_to(9.0, fastest) == 1.0
    assert time_to(8.0, fastest) == pytest.approx(1.0)
    assert time_to(6.0, fastest) == pytest.approx(2.0)
    assert time_to(4.0, fastest) == pytest.approx(4.0)


@given(st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.1, 10)), min_size=1, max_size=30), st.floats(1.1, 5))
def test_no_lag_is_below_one_at_the_fastest_and_a_slower_copy_lags_by_its_factor(
    points: list[tuple[float, float]], factor: float
) -> None:
    falling = sorted(dict(points).items())
    one, copy = Curve(*falling), Curve(*((factor * s, loss) for s, loss in falling))
    alone, both = lags_of(one=one), lags_of(one=one, copy=copy)
    assert alone["one"] >= 1.0 - 1e-9
    assert both["one"] == pytest.approx(alone["one"])
    assert both["copy"] == pytest.approx(factor * alone["one"])


def explored(steps: float) -> tuple[SearchState, Race, list[int]]:
    """Explore until the budget is spent or the target is reached; return how many advanced each time."""
    plan = SCREENING.kept
    race = Race(
        GRIDS, ComputeConfig(), HORIZON, Budget(steps), lambda c: plan[GRIDS[c.algorithm].shape_of(c)].steps_per_update
    )
    state = SearchState(race, GRIDS, SCREENING, (0,), 0, usual_rate=0.03)
    numbers: list[int] = []
    state.phase = lambda text: numbers.append(int(text.split()[1]))
    with suppress(BudgetSpentError):
        Exploration(state, state.start(first_arms(state))).explore()
    return state, race, numbers


def test_of_candidates_with_the_same_first_merge_one_merges_first() -> None:
    state = SearchState(race_without_runs(), GRIDS, SCREENING, (0,), 0, usual_rate=0.03)
    arms = state.start(first_arms(state))
    exploration = Exploration(state, arms)
    merges = Counter(first_merge(state, each) for each in arms)
    assert max(merges.values()) > 1
    latest = max(state.planned(each).first_round for each in arms)
    going = exploration._continuing(latest)
    assert Counter(first_merge(state, each) for each in going) == dict.fromkeys(merges, 1)
    exploration.lags = dict.fromkeys(going, 1.0)
    assert exploration._continuing(latest) == set(arms)  # the others have a place


def race_without_runs(steps: float = 1e9) -> Race:
    return Race(GRIDS, ComputeConfig(), HORIZON, Budget(steps), lambda _: 1.0)


def test_the_least_lags_continue_as_far_as_the_budget_allows() -> None:
    state = SearchState(race_without_runs(), GRIDS, SCREENING, (0,), 0, usual_rate=0.03)
    arms = state.start(first_arms(state))
    scores = {each: float(i) for i, each in enumerate(arms)}
    costs = [state.planned(each).steps_until(1.0) for each in arms]
    state.race.budget = Budget(1.001 * sum(costs[:7]) / min(SHARE, STEP))
    assert Exploration(state, arms)._ahead(scores, 1.0) == set(arms[:7])
    state.race.budget = Budget(1.0)
    assert Exploration(state, arms)._ahead(scores, 1.0) == set(arms[:LEAST_KEPT])


def test_a_small_budget_starts_with_one_candidate_of_every_algorithm_and_a_larger_one_with_every_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needed = steps_to_compare(SCREENING.kept.values())
    small = SearchState(race_without_runs(0.01 * needed), GRIDS, SCREENING, (0,), 0, usual_rate=0.03)
    assert Counter(each.algorithm for each in first_arms(small)) == dict.fromkeys(NAMES, 1)
    more = SearchState(race_without_runs(0.9 * SMALL * needed), GRIDS, SCREENING, (0,), 0, usual_rate=0.03)
    monkeypatch.setattr(exploring, "FEW", 1.0)
    arms = first_arms(more)
    assert len(NAMES) < len(arms) < len(SCREENING.kept)
    assert {each.algorithm for each in arms[: len(NAMES)]} == set(NAMES)
    large = SearchState(race_without_runs(1.1 * SMALL * needed), GRIDS, SCREENING, (0,), 0, usual_rate=0.03)
    assert {large.shape(each) for each in first_arms(large)} == set(SCREENING.kept)


def test_a_small_budget_trains_several_algorithms_and_not_the_many_settings_of_one() -> None:
    _, race, _ = explored(0.2 * steps_to_compare(SCREENING.kept.values()))
    trained = Counter(cell.algorithm for (cell, _), run in race.runs.items() if run.seconds > 0)
    assert len(trained) >= len(NAMES) - 1
    assert max(trained.values()) <= 2


def test_a_budget_of_time_measures_how_fast_steps_are_on_one_candidate_of_every_algorithm() -> None:
    for seconds, shapes in ((3600.0, len(SCREENING.kept)), (1e-3, len(NAMES))):
        race = race_without_runs()
        state = SearchState(race, GRIDS, SCREENING, (0,), 0, usual_rate=0.03)
        race.budget = Budget(seconds=seconds + time.monotonic() - race.began)
        with suppress(BudgetSpentError):
            arms = first_arms(state)
            assert len({state.shape(each) for each in arms}) == shapes
        assert Counter(each.algorithm for each in state.tried) == dict.fromkeys(NAMES, 1)
        if seconds > 1.0:
            assert all(run.rounds >= 1 for run in race.runs.values())
            assert {cell for cell, _ in race.runs} == set(state.tried)


def test_exploring_trains_no_candidate_much_beyond_the_first_to_reach_the_target() -> None:
    state, race, numbers = explored(30_000.0)
    assert math.isfinite(state.best_time)
    assert all(run.seconds <= MARGIN * state.best_time for run in race.runs.values())
    assert max(numbers) > numbers[0]  # the others start after the first merges
    for each, reason in state.lost.items():
        run = state.run(each)
        assert run is not None
        assert reason.startswith("took ")
        assert reason.endswith(f"{run.loss():.3g} after {run.seconds:.3g} s")
    assert not set(state.postponed) & set(state.tried)
    assert all(state.run(each) is None for each in state.postponed)
