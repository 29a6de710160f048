"""The order in which candidates start, and the race that pauses runs between rounds."""

from __future__ import annotations

import itertools
import math

import pytest

from defedavg.adviser.candidates import AlgorithmGrid, GridCell, grids_of
from defedavg.adviser.racing import Budget, BudgetSpentError, Race
from defedavg.adviser.screening import Holders, Screening, screen
from defedavg.adviser.start_order import delayed_stability, distance, start_order
from defedavg.config import study as config
from defedavg.experiments.compute import ComputeConfig

NAMES = ("fedavg", "fedbuff", "asysg", "fadas")


def grids(**tables: dict[str, object]) -> dict[str, AlgorithmGrid]:
    training = {"updates_per_round": [1, 5], "local_steps": [5]}
    return grids_of(config.study({"clients": {"num_clients": 10}, "training": training, **tables}), NAMES, 0)


def screened(found: dict[str, AlgorithmGrid]) -> Screening:
    return screen(found, 5.0, 0, Holders(None), lambda *_: None)


def test_every_candidate_has_one_turn_and_the_first_turn_has_every_shape() -> None:
    found = grids()
    plans = screened(found).kept
    excluded = {GridCell("fedavg", (0, 0, 0, 0))}
    turns = list(start_order(found, plans, excluded, 0.1, 3))
    everything = [each for turn in turns for each in turn]
    assert len(everything) == len(set(everything))
    whole = {GridCell(s.algorithm, (*s.position, *r)) for s in plans for r in found[s.algorithm].rate_positions()}
    assert set(everything) == whole - excluded
    assert {found[each.algorithm].shape_of(each) for each in turns[0]} == set(plans)
    assert {each.algorithm for each in turns[0][: len(NAMES)]} == set(NAMES)  # algorithms in turn
    assert turns != list(start_order(found, plans, excluded, 0.1, 4))
    assert turns == list(start_order(found, plans, excluded, 0.1, 3))


def test_the_first_rates_are_the_largest_stable_one_and_one_that_allows_for_staleness() -> None:
    found = grids()
    plans = screened(found).kept
    (first, *_) = start_order(found, plans, (), 0.1, 0)
    for each in first:
        values = found[each.algorithm].chosen(each.position)
        staleness = plans[found[each.algorithm].shape_of(each)].stats.staleness_mean
        damping = 1 / math.sqrt(1 + staleness)
        if each.algorithm in ("fedavg", "fedbuff"):
            assert values["training.local_lr"] == 0.1
            nearest = min((0.1, 0.3, 1.0, 3.0), key=lambda rate: abs(math.log(rate / damping)))
            assert values["training.global_lr"] == nearest
        elif each.algorithm == "asysg":
            usual = 0.1 * delayed_stability(staleness)
            nearest = min((0.003, 0.01, 0.03, 0.1, 0.3, 1.0), key=lambda rate: abs(math.log(rate / usual)))
            assert values["training.global_lr"] == nearest
        else:
            assert values["training.global_lr"] == 0.01  # the larger one of the two in the middle of the axis
    dampings = {plans[found[each.algorithm].shape_of(each)].stats.staleness_mean for each in first}
    assert min(dampings) == 0.0
    assert max(dampings) > 2.0


@pytest.mark.parametrize("delay", [0, 1, 2, 5, 10])
def test_delayed_gradient_descent_is_stable_below_the_rate_and_unstable_above_it(delay: int) -> None:
    def last_to_first(share: float) -> float:
        points = [1.0] * (delay + 1)
        for _ in range(5_000):
            points.append(points[-1] - 2 * share * delayed_stability(delay) * points[-1 - delay])
        return max(map(abs, points[-50:])) / max(map(abs, points[:50]))

    assert delayed_stability(0) == pytest.approx(1.0)
    assert last_to_first(0.96) < 1e-3
    assert last_to_first(1.04) > 1e3


def test_rates_outside_an_axis_and_unknown_curvatures_have_an_order_too() -> None:
    grid = grids(fedbuff={"local_lr": [0.3, 0.01]})["fedbuff"]
    cells = [GridCell("fedbuff", (0,) * len(grid.shape_axes) + rates) for rates in grid.rate_positions()]
    for rate, expected in ((50.0, 0.3), (1e-9, 0.01)):
        best = min(cells, key=lambda each: distance(grid, each, rate, 0.0))
        assert grid.chosen(best.position)["training.local_lr"] == expected
    assert all(math.isfinite(distance(grid, each, None, 3.0)) for each in cells)


def race_of(found: dict[str, AlgorithmGrid], budget: Budget, plans: Screening) -> Race:
    return Race(
        found, ComputeConfig(), 2.0, budget, lambda c: plans.kept[found[c.algorithm].shape_of(c)].steps_per_update
    )


SMALL: dict[str, dict[str, object]] = {
    "task": {"model": "softmax"},
    "stop": {"target_accuracy": 0.99, "eval_every_seconds": 0.01},
}


@pytest.mark.parametrize("name", ["fedavg", "fedbuff"])
def test_a_paused_run_trains_no_round_after_the_time_and_continues_as_if_it_had_not_paused(name: str) -> None:
    found = grids(**SMALL)
    plans = screened(found)
    cell = GridCell(name, (1, *([0] * (len(found[name].axes) - 1))))
    entry, plan = (cell, 0), plans.kept[found[name].shape_of(cell)]
    once, often = (race_of(found, Budget(), plans) for _ in range(2))
    once.advance([entry], 1.0)
    often.advance([entry], 0.9 * plan.first_round)
    assert often.steps == 0.0
    assert often.runs[entry].rounds == 0
    for until in (*(factor * plan.first_round for factor in (1.0, 1.5, 1.51, 2.0)), 1.0):
        often.advance([entry], until)
        assert often.runs[entry].seconds <= until
    assert often.steps == once.steps > 0

    def seen(race: Race) -> list[tuple[int, float, float]]:
        return [(each.round, each.seconds, each.loss) for each in race.runs[entry].evaluations]

    assert seen(often) == seen(once)
    assert once.runs[entry].rounds == sum(1 for _ in itertools.takewhile(lambda t: t <= 1.0, times_of(once, entry)))


def times_of(race: Race, entry: tuple[GridCell, int]) -> list[float]:
    from defedavg.config.build import make_simulator
    from defedavg.planning.plan import records
    from defedavg.planning.records import Round

    simulator = make_simulator(race.settings(entry[0]), entry[1])
    return [record.time for record in records(simulator, 200, 2.0) if isinstance(record, Round)]


def test_planned_steps_are_those_that_a_race_trains() -> None:
    found = grids(**SMALL)
    plans = screened(found)
    cell = GridCell("fedbuff", (1, *([0] * (len(found["fedbuff"].axes) - 1))))
    race, plan = race_of(found, Budget(), plans), plans.kept[found["fedbuff"].shape_of(cell)]
    race.advance([(cell, 0)], 1.0)
    assert plan.steps_until(0.99 * plan.first_round) == 0.0
    assert race.steps == pytest.approx(plan.steps_until(1.0), rel=0.1)
    race = race_of(found, Budget(steps=20.0), plans)
    with pytest.raises(BudgetSpentError):
        race.advance([(cell, 0)], 1.0)
    assert race.steps_left(1.0) <= 0.0
    assert race_of(found, Budget(), plans).steps_left(0.5) == math.inf
