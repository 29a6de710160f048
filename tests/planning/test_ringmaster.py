"""Ringmaster: no update with a staleness of R or more is merged, and with stop such jobs do not run on."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from defedavg.algorithms import ALGORITHMS, Setup
from defedavg.algorithms.protocol import Discard, Merge, Request, Send, Update
from defedavg.algorithms.ringmaster import RingmasterSettings
from defedavg.planning.records import Job
from helpers.naive_simulator import agrees_with_naive
from helpers.strategies import Case, bounded, case, cases

ROUNDS = 25


@st.composite
def ringmasters(draw: st.DrawFn, *, lossy: bool = False, windows: bool = True) -> Case:
    found: Case = draw(cases(("ringmaster",), lossy=lossy, windows=windows))
    changes = {"threshold": draw(st.integers(0, 9)), "stop": draw(st.booleans())}
    return dataclasses.replace(found, settings=dataclasses.replace(found.settings, **changes))


def bound_of(found: Case) -> int:
    """Return R, as the documentation of the setting defines it."""
    concurrency = found.settings.concurrency or found.setup.num_clients
    return int(found.settings.threshold or 2 * concurrency)


@bounded(150)
@given(data=st.data())
def test_no_merged_update_is_as_stale_as_the_threshold(data: st.DataObject) -> None:
    found = data.draw(ringmasters(lossy=data.draw(st.booleans())))
    plan = found.plan(ROUNDS)
    plan.check()
    assert all(delay < bound_of(found) for record in plan.rounds for delay in record.merge.staleness)


@bounded(100)
@given(data=st.data())
def test_the_naive_simulator_stops_the_same_jobs(data: st.DataObject) -> None:
    lossy = data.draw(st.booleans())
    agrees_with_naive(data.draw(ringmasters(lossy=lossy, windows=False)), ROUNDS)


@bounded(100)
@given(ringmasters())
def test_only_stopped_jobs_are_lost_and_their_clients_restart_at_once(found: Case) -> None:
    """Without failures, a lost job was followed at once by one from a version at least R newer."""
    jobs: dict[int, list[Job]] = {}
    for job in found.plan(ROUNDS).jobs:
        jobs.setdefault(job.client, []).append(job)
    for own in jobs.values():
        for job, following in itertools.pairwise(own):
            if job.outcome == "lost":
                assert found.settings.stop
                assert following.start == job.end
                assert following.version - job.version >= bound_of(found)
        assert own[-1].outcome != "lost"


def test_jobs_are_stopped_and_recorded_as_lost() -> None:
    """Without latency no finished update is stale: its job was stopped before."""
    settings = RingmasterSettings(threshold=4, stop=True)
    links: dict[str, Any] = {"model_megabytes": 0.0, "latency_seconds": 0.0}
    plan = case("ringmaster", 8, 1, settings=settings, step_seconds=0.01, **links).plan(60)
    outcomes = [job.outcome for job in plan.jobs]
    assert outcomes.count("lost") > 20
    assert outcomes.count("ended") == len(plan.rounds) == 60
    without = case("ringmaster", 8, 1, settings=RingmasterSettings(threshold=4), step_seconds=0.01, **links).plan(60)
    discarded = len(without.uploads) - 60
    assert discarded > 5
    assert not any(job.outcome == "lost" for job in without.jobs)


def sends(actions: list[object]) -> set[int]:
    return {action.client for action in actions if isinstance(action, Send)}


@pytest.mark.parametrize("stop", [False, True])
def test_a_client_with_a_discarded_update_restarts_from_the_newest_version(stop: bool) -> None:
    server = ALGORITHMS["ringmaster"](Setup(3, 1, 2), RingmasterSettings(threshold=2, stop=stop))
    server.start()
    for index in range(2):
        [merge, *_] = server.arrived(Update(0, index, index, 2))
        assert isinstance(merge, Merge)
        sent = sends([*server.end_of_instant()])
        assert sent == ({0, 1, 2} if stop and index == 1 else {0})  # version 0 has reached staleness 2 in clients 1, 2
    late = [*server.arrived(Update(1, 0, 0, 2)), *server.end_of_instant()]
    assert Discard(Update(1, 0, 0, 2)) in late
    if stop:  # version 2 is on its way to the client; its request was used up by the late update
        assert Request(1) in late
        assert not sends([*late])
    else:
        assert Send(1, 2) in late


def test_a_timed_out_client_is_not_sent_further_versions() -> None:
    settings = RingmasterSettings(threshold=1, stop=True)
    server = ALGORITHMS["ringmaster"](Setup(2, 1, 2, timeout_seconds=5.0), settings)
    server.start()
    server.timer(next(token for token, client in vars(server)["timed"].items() if client == 1))
    for index in range(4):
        server.arrived(Update(0, index, index, 2))
        assert sends([*server.end_of_instant()]) == {0}
