"""FAVANO whose clients receive a version when they are drawn: against a plain simulation, and late or lost clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from defedavg.algorithms import ALGORITHMS, Setup
from defedavg.algorithms.favano import FavanoSettings
from defedavg.algorithms.protocol import Discard, Merge, Request, Send, SetTimer, Update
from defedavg.errors import UserError
from helpers.strategies import Case, bounded, case, cases

AT_DRAW = FavanoSettings(wait_seconds=0.05, send="draw")


def plain_rounds(found: Case, drawn: list[list[int]]) -> list[tuple[float, list[tuple[int, int, int]]]]:
    """Return the time of every merge, and the client, version and steps of its updates, for given draws.

    All links are equal. A drawn client starts again when the version that it was sent at the draw has arrived.
    """
    fleet, setup = found.fleet, found.setup
    down, up, wait = float(fleet.down_times[0]), float(fleet.up_times[0]), found.settings.wait_seconds
    assert wait + up > down
    starts = np.full(setup.num_clients, down)
    versions = np.zeros(setup.num_clients, dtype=int)
    rounds, time = [], 0.0
    for version, clients in enumerate(drawn):
        time += wait
        steps = np.minimum(setup.local_steps, np.floor((time - starts) / fleet.step_times))
        rounds.append((time + up, [(each, int(versions[each]), int(steps[each])) for each in sorted(clients)]))
        starts[clients], versions[clients] = time + down, version
        time += up
    return rounds


@pytest.mark.parametrize("n", [1, 4, 9])
@pytest.mark.parametrize("seed", range(3))
def test_merges_are_those_of_a_plain_simulation(n: int, seed: int) -> None:
    found = case("favano", 9, n, steps=20, seed=seed, settings=AT_DRAW, step_seconds=0.01)
    records = found.plan(80).rounds
    seen = [sorted((u.client, u.version, u.steps) for u, _ in record.merge.updates) for record in records]
    expected = plain_rounds(found, [[client for client, _, _ in updates] for updates in seen])
    assert seen == [updates for _, updates in expected]
    assert [record.time for record in records] == pytest.approx([time for time, _ in expected])
    partial = sum(0 < steps < 20 for updates in seen for _, _, steps in updates)
    assert partial > 20


def test_a_client_trains_longer_than_if_it_receives_the_version_after_the_merge() -> None:
    def steps(send: str) -> int:
        settings = dataclasses.replace(AT_DRAW, send=send)
        found = case("favano", 9, 4, steps=20, seed=0, settings=settings, step_seconds=0.01)
        return sum(update.steps for record in found.plan(80).rounds for update, _ in record.merge.updates)

    assert steps("draw") > steps("merge") > 0


@st.composite
def at_draw(draw: st.DrawFn) -> Case:
    found: Case = draw(cases(("favano",)))
    return dataclasses.replace(found, settings=dataclasses.replace(found.settings, send="draw"))


@bounded(150)
@given(at_draw())
def test_every_round_has_different_clients_and_no_update_twice(found: Case) -> None:
    plan = found.plan(15)
    plan.check()
    merged = [update for record in plan.rounds for update, _ in record.merge.updates]
    assert len(set(merged)) == len(merged) > 0
    for record in plan.rounds:
        assert len({update.client for update, _ in record.merge.updates}) == found.setup.updates_per_round


def requests(actions: Sequence[object]) -> list[int]:
    return [action.client for action in actions if isinstance(action, Request)]


def sends(actions: Sequence[object]) -> list[tuple[int, int]]:
    return [(action.client, action.version) for action in actions if isinstance(action, Send)]


def test_a_late_client_is_not_sent_a_second_version() -> None:
    """It has that of its draw; a second one would wait in its receive buffer, and be old when it starts from it."""
    server = ALGORITHMS["favano"](Setup(6, 2, 5, timeout_seconds=10.0), AT_DRAW)
    (pause,) = (action.token for action in server.start() if isinstance(action, SetTimer))
    opened = list(server.timer(pause))
    first = requests(opened)
    assert sends(opened) == [(client, 0) for client in first]
    (timeout,) = (action.token for action in opened if isinstance(action, SetTimer))
    again = list(server.timer(timeout))
    substitutes = requests(again)
    assert sends(again) == [(client, 0) for client in substitutes]
    closed = [action for client in substitutes for action in server.arrived(Update(client, 0, 0, 3))]
    assert any(isinstance(action, Merge) for action in closed)
    assert not sends(closed)
    late = min({*first} - {*substitutes})
    discarded = list(server.arrived(Update(late, 0, 0, 2)))
    assert [type(action) for action in discarded] == [Discard]
    assert sends(list(server.returned(late))) == [(late, 1)]  # it lost what it had


def test_an_unknown_value_is_refused() -> None:
    with pytest.raises(UserError, match="send of favano"):
        FavanoSettings(send="later")
