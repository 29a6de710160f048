"""FedBuff whose clients have one update in a round: against a plain simulation, its limit, and lost clients."""

from __future__ import annotations

import dataclasses
import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from defedavg.algorithms import ALGORITHMS, Setup
from defedavg.algorithms.fedbuff import FedBuffSettings
from defedavg.algorithms.protocol import Merge, Send, Update
from defedavg.errors import UserError
from helpers.plans import timers_of
from helpers.strategies import Case, bounded, case, cases

DISTINCT = FedBuffSettings(distinct_clients=True)


@st.composite
def distinct(draw: st.DrawFn) -> Case:
    found: Case = draw(cases(("fedbuff",)))
    return dataclasses.replace(found, settings=dataclasses.replace(found.settings, distinct_clients=True))


@bounded(150)
@given(distinct())
def test_the_updates_of_a_round_come_from_different_clients(found: Case) -> None:
    rounds = found.plan(15).rounds
    assert rounds
    for record in rounds:
        assert len({update.client for update, _ in record.merge.updates}) == found.setup.updates_per_round


def plain_merge_times(found: Case, rounds: int) -> list[float]:
    """Return the times of merges if every client waits for the merge after each of its updates; no ties."""
    fleet, n = found.fleet, found.setup.updates_per_round
    trips = fleet.down_times + found.setup.local_steps * fleet.step_times + fleet.up_times
    events = [(float(trip), client) for client, trip in enumerate(trips)]
    heapq.heapify(events)
    waiting: list[int] = []
    times: list[float] = []
    while len(times) < rounds:
        time, client = heapq.heappop(events)
        waiting.append(client)
        if len(waiting) == n:
            times.append(time)
            for each in waiting:
                heapq.heappush(events, (time + float(trips[each]), each))
            waiting = []
    return times


@pytest.mark.parametrize("n", [1, 3, 7, 10])
@pytest.mark.parametrize("seed", range(3))
def test_merges_are_those_of_a_plain_simulation(n: int, seed: int) -> None:
    found = case("fedbuff", 10, n, steps=20, seed=seed, settings=DISTINCT)
    assert [record.time for record in found.plan(60).rounds] == pytest.approx(plain_merge_times(found, 60))


@pytest.mark.parametrize("seed", range(3))
def test_a_round_of_all_clients_lasts_as_long_as_the_slowest(seed: int) -> None:
    found = case("fedbuff", 6, 6, steps=20, seed=seed, settings=DISTINCT)
    fleet = found.fleet
    slowest = float((fleet.down_times + 20 * fleet.step_times + fleet.up_times).max())
    plan = found.plan(8)
    assert [record.time for record in plan.rounds] == pytest.approx([slowest * (t + 1) for t in range(8)])
    assert all(delay == 0 for record in plan.rounds for delay in record.merge.staleness)


def test_more_updates_than_clients_are_refused() -> None:
    ALGORITHMS["fedbuff"](Setup(3, 4, 5), FedBuffSettings())
    with pytest.raises(UserError, match="updates_per_round is 4 but there are 3 clients"):
        ALGORITHMS["fedbuff"](Setup(3, 4, 5), DISTINCT)


def test_a_client_waits_for_the_merge_until_no_other_is_left() -> None:
    server = ALGORITHMS["fedbuff"](Setup(3, 3, 5, timeout_seconds=10.0), DISTINCT)
    tokens = timers_of(server.start())
    actions = server.arrived(Update(0, 0, 0, 5)) + server.end_of_instant()
    actions += server.returned(0) + server.end_of_instant()
    assert not [action for action in actions if isinstance(action, Send)]
    assert not [action for action in server.timer(tokens[1]) if isinstance(action, Send)]
    merge, start = (
        action for action in server.timer(tokens[2]) if isinstance(action, Merge | Send)
    )  # client 0 would wait for ever
    assert isinstance(merge, Merge)
    assert [update.client for update, _ in merge.updates] == [0]
    assert isinstance(start, Send)
    assert start.client == 0
