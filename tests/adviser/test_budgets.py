"""How much a race may train: updates and real seconds, and how far it goes beyond them."""

from __future__ import annotations

import math
import re
import time
from typing import Any

import numpy as np
import pytest

from defedavg.adviser.advice import advise
from defedavg.adviser.arguments import MOST_SEEDS, checked_budget, checked_seeds
from defedavg.adviser.budgets import AskedBudget
from defedavg.adviser.candidates import AlgorithmGrid, GridCell, grids_of
from defedavg.adviser.constants import TaskConstants
from defedavg.adviser.racing import Budget, BudgetSpentError, Race
from defedavg.adviser.recommendation import Advice
from defedavg.adviser.screening import Holders, Screening, screen
from defedavg.config import study as config
from defedavg.errors import UserError
from defedavg.experiments.compute import ComputeConfig
from defedavg.training import StackingError

HORIZON = 4.0
NAMES = ("fedavg", "fedbuff", "asysg", "quafl")
STUDY: dict[str, Any] = {
    "task": {"model": "softmax"},
    "clients": {"num_clients": 10},
    "training": {"updates_per_round": [1, 3, 5], "local_steps": [2, 10], "local_lr": [0.01], "global_lr": [0.3]},
    "stop": {"target_accuracy": 0.99, "max_seconds": HORIZON, "eval_every_seconds": 1.0},
}


def raced(budget: Budget, **options: Any) -> tuple[Race, list[tuple[GridCell, int]]]:
    grids: dict[str, AlgorithmGrid] = grids_of(config.study(STUDY), NAMES, 0)
    plans: Screening = screen(grids, HORIZON, 0, Holders(None), lambda *_: None)
    cells = [GridCell(s.algorithm, (*s.position, *r)) for s in plans.kept for r in grids[s.algorithm].rate_positions()]

    def steps(cell: GridCell) -> float:
        return plans.kept[grids[cell.algorithm].shape_of(cell)].steps_per_update

    return Race(grids, ComputeConfig(), HORIZON, budget, steps, **options), [(cell, 0) for cell in cells]


@pytest.mark.parametrize("steps", [1.0, 500.0, 3000.0])
def test_a_race_trains_less_than_one_update_beyond_its_budget(steps: float) -> None:
    race, entries = raced(Budget(steps))
    with pytest.raises(BudgetSpentError):
        race.advance(entries, HORIZON)
    longest = max(run.steps_per_update for run in race.runs.values())
    assert steps <= race.steps < steps + longest
    if steps > 100:  # what was trained is merged and evaluated
        assert any(run.rounds for run in race.runs.values())


def test_a_model_that_is_not_stacked_trains_less_than_a_round_beyond_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: Any) -> None:
        raise StackingError("not this one")

    monkeypatch.setattr(ComputeConfig, "trainer", refused)
    race, entries = raced(Budget(100.0))
    entries = [each for each in entries if each[0].algorithm == "fedbuff"]
    with pytest.raises(BudgetSpentError):
        race.advance(entries, HORIZON)
    most = max(run.steps_per_update * run.simulation.settings.training.updates_per_round for run in race.runs.values())
    assert 100.0 <= race.steps < 100.0 + most


def test_a_budget_of_time_counts_from_its_beginning() -> None:
    race, entries = raced(Budget(seconds=50.0), began=time.monotonic() - 60.0)
    with pytest.raises(BudgetSpentError):
        race.advance(entries, HORIZON)
    assert race.updates == 0
    assert race.seconds_left == 0.0


def test_the_speed_of_a_race_leaves_out_the_time_before_it() -> None:
    race, entries = raced(Budget(seconds=1e5), began=time.monotonic() - 1e4)
    assert race.steps_left(1.0) == math.inf
    race.advance(entries[:1], 0.5)
    race._started -= 1.0
    assert race.steps_left(1.0) > 0.5 * race.steps * 9e4 / (time.monotonic() - race._started)
    assert race.seconds_left == pytest.approx(9e4, abs=100.0)


def test_a_budget_of_time_that_planning_spends_is_refused() -> None:
    line = (
        r"the budget of 0.0001 s was spent while planning \d+ settings, before any candidate was raced; give more "
        "time, fewer algorithms, or lists of fewer values"
    )
    with pytest.raises(UserError, match=line):
        advise(STUDY, algorithms=NAMES, budget_seconds=1e-4)


def small() -> Advice:
    study = {**STUDY, "training": {"local_steps": 10, "local_lr": [0.01], "global_lr": [0.3]}}
    return advise(study, budget_updates=150, seeds=1)


def test_a_budget_that_compares_too_little_says_what_a_search_needs() -> None:
    advice = small()
    assert advice.shortage is not None
    assert advice.shortage in advice.notes
    assert "the budget was too small to choose among all" in advice.shortage
    assert "it trained 150 updates of 10 steps" in advice.shortage
    line = advice.failure() or ""
    assert line.endswith(advice.shortage)
    assert "lower stop.target_accuracy" not in line
    assert len({each.algorithm for each in advice.ranking[:8]}) >= 4
    assert advice.trained.endswith("updates, as many steps as 150 updates of 10 steps")
    enough = advise(STUDY, algorithms=NAMES, budget_updates=5000, seeds=1)
    assert enough.shortage is None


def test_the_number_of_updates_that_a_shortage_names_is_the_least_without_one() -> None:
    study = {**STUDY, "training": {"local_steps": 10, "local_lr": [0.01], "global_lr": [0.3]}}
    less = advise(study, algorithms=["fedbuff"], budget_updates=60, seeds=1)
    found = re.search(r"chooses among them all from (\d+) updates on; give a larger budget", less.shortage or "")
    assert found is not None
    least = int(found[1])
    advice = advise(study, algorithms=["fedbuff"], budget_updates=least, seeds=1)
    assert advice.shortage is None
    trained = {each.label for each in advice.ranking}
    assert len(trained | {label for label, _ in advice.dropped}) == advice.planned  # the search came to every setting
    below = advise(study, algorithms=["fedbuff"], budget_updates=least - 5, seeds=1)
    assert f"from {least} updates on" in (below.shortage or "")


def test_the_remedy_for_slow_constants_is_not_fewer_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: Any) -> TaskConstants:
        monkeypatch.setattr(AskedBudget, "require_time", require_time)
        return TaskConstants(None, "none")

    require_time = AskedBudget.require_time
    monkeypatch.setattr(AskedBudget, "require_time", lambda *_: None)  # planning takes no time
    monkeypatch.setattr("defedavg.adviser.advice.measure", slow)
    line = r"spent while measuring constants of the task, .*; give more time, or a budget of updates, which does not"
    with pytest.raises(UserError, match=line) as refused:
        advise(STUDY, algorithms=["fedavg"], budget_seconds=1e-4)
    assert "algorithms" not in str(refused.value)


@pytest.mark.parametrize("name", ["budget_updates", "budget_seconds"])
@pytest.mark.parametrize("value", [0, -3, math.nan, math.inf, -math.inf, True, "20k", [1], 1e300])
def test_a_budget_from_python_is_checked(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"^{name} is ") as refused:
        advise(STUDY, **{name: value})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("value", [0, -1, MOST_SEEDS + 1, True, 2.5, math.nan, "3", None])
def test_seeds_from_python_are_checked(value: Any) -> None:
    with pytest.raises(UserError, match=r"^seeds is "):
        advise(STUDY, seeds=value)


def test_one_budget_is_enough_and_numbers_of_numpy_are_read() -> None:
    with pytest.raises(UserError, match="budget_updates and budget_seconds are both given; give one of them"):
        advise(STUDY, budget_updates=100, budget_seconds=1)
    assert checked_budget(np.int64(300), None) == (300.0, None)
    assert checked_budget(None, np.float32(2.5)) == (None, 2.5)
    assert checked_budget(None, None) == (None, None)
    assert checked_seeds(np.int64(MOST_SEEDS)) == MOST_SEEDS
