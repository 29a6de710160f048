"""The reasons of candidates of which nothing was trained."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from defedavg.adviser.candidates import GridCell, grids_of
from defedavg.adviser.exploring import first_arms, first_merge
from defedavg.adviser.racing import Budget, Race
from defedavg.adviser.screening import Holders, screen
from defedavg.adviser.search_state import SearchState
from defedavg.adviser.untrained import not_trained
from defedavg.config import study as config
from defedavg.experiments.compute import ComputeConfig

STUDY = {
    "task": {"model": "softmax"},
    "clients": {"num_clients": 10},
    "training": {"updates_per_round": [1, 5], "local_steps": [2, 10], "local_lr": [0.03], "global_lr": [1.0]},
    "stop": {"target_accuracy": 0.6},
    "fedbuff": {"concurrency": [0]},
    "ca2fl": {"concurrency": [0]},
}
GRIDS = grids_of(config.study(STUDY), ("fedavg", "fedbuff", "ca2fl"), 0)
SCREENING = screen(GRIDS, 2.0, 0, Holders(None), lambda *_: None)


def searched(ended: str, steps_left: float = 1e9) -> tuple[SearchState, list[GridCell]]:
    """Return a search that started candidates and trained none, and these candidates."""
    race = Race(GRIDS, ComputeConfig(), 2.0, Budget(1e9), lambda _: 1.0)
    race.steps = 1e9 - steps_left
    state = SearchState(race, GRIDS, SCREENING, (0,), 0, usual_rate=0.03)
    state.ended = ended
    return state, state.start(first_arms(state))


def train(state: SearchState, candidate: GridCell, hit: float | None = None) -> None:
    """Give a candidate a run that was trained for half a second."""
    cast(Any, state.race.runs)[candidate, 0] = SimpleNamespace(seconds=0.5, hit=hit)


def test_the_order_of_the_search_is_the_reason_while_the_budget_has_steps_for_a_first_round() -> None:
    state, arms = searched("the leader is separated after 2 seeds")
    first = arms[0]
    same = [each for each in arms[1:] if first_merge(state, each) == first_merge(state, first)]
    assert same
    train(state, first)
    found = dict(not_trained(state))
    assert set(found) == set(arms) - {first}
    ended = "the search ended before its turn (the leader is separated after 2 seeds)"
    before = f"not started: {state.label(first)}, which has the same first merge, was trained before it, and {ended}"
    for each, reason in found.items():
        assert reason == (before if each in same else f"not started: {ended}")


def test_the_budget_is_the_reason_where_it_has_no_steps_for_a_first_round() -> None:
    state, arms = searched("the budget is spent", steps_left=3.0)
    found = dict(not_trained(state))
    costs = {each: state.planned(each).steps_until(state.planned(each).first_round) for each in arms}
    assert min(costs.values()) <= 3.0 < max(costs.values())
    for each, reason in found.items():
        spent = f"not started: its first round trains {costs[each]:,.0f} local steps, and the budget had 3 left"
        assert (reason == spent) == (costs[each] > 3.0)


def test_a_first_round_after_the_best_time_is_the_reason_whatever_is_left() -> None:
    state, arms = searched("the budget is spent", steps_left=0.0)
    latest = max(arms, key=lambda each: state.planned(each).first_round)
    earliest = min(arms, key=lambda each: state.planned(each).first_round)
    between = (state.planned(latest).first_round + state.planned(earliest).first_round) / 2
    train(state, earliest, hit=between)
    planned = f"its first round is planned at {state.planned(latest).first_round:.3g} s"
    assert dict(not_trained(state))[latest] == f"{planned}, and the target was reached at {between:.3g} s"


def test_a_candidate_that_waited_is_named_with_its_reason() -> None:
    state, arms = searched("it was interrupted")
    state.postpone(arms[1:])
    train(state, arms[0])
    found = dict(not_trained(state))
    assert set(found) == set(arms[1:])
    assert all(reason.endswith("the search ended before its turn (it was interrupted)") for reason in found.values())
