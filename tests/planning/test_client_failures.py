"""Client failures: planning never hangs, plans satisfy the invariants, and returned clients participate again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from defedavg.algorithms import ALGORITHMS, Setup
from defedavg.algorithms.protocol import Send
from defedavg.planning.devices import Fleet, Trace
from defedavg.planning.plan import Plan
from defedavg.planning.records import Absence, Job, Stall, Timeout
from defedavg.planning.simulator import Simulator
from helpers.naive_simulator import agrees_with_naive
from helpers.plans import timers_of
from helpers.strategies import Case, GuardedSimulator, bounded, case, cases, variants

NAMES = list(ALGORITHMS)
DRAWING = [name for name, kind in ALGORITHMS.items() if not (kind.broadcasts and not kind.policy.hold_until_requested)]
VARIANTS = [
    pytest.param(name, settings, id=f"{name}-{i}")
    for name, kind in ALGORITHMS.items()
    for i, settings in enumerate(variants(kind))
]
ALL = pytest.mark.parametrize(("name", "settings"), VARIANTS)
ROUNDS = 6


def leaving(clients: int, absences: Mapping[int, tuple[float, float]]) -> dict[str, Any]:
    """Return fleet arguments: equal clients of which some leave; a job of five steps and its messages take 1.1 s."""
    return {"trace": Trace(np.full(clients, 0.2), np.full(clients, 400.0), np.full(clients, 400.0), absences)}


def lost_for_good(plan: Plan) -> set[int]:
    return {record.client for record in plan.records if isinstance(record, Absence) and math.isinf(record.back)}


def plan_or_stall(found: Case, rounds: int) -> Plan:
    """Plan all rounds, or fewer if no client is left; the guarded simulator fails on a hang."""
    plan = found.plan(rounds)
    stalled = any(isinstance(record, Stall) for record in plan.records)
    assert stalled == (len(plan.rounds) < rounds)
    losses = [r.time for r in plan.records if isinstance(r, Absence) and math.isinf(r.back)]
    if stalled:
        assert isinstance(plan.records[-1], Stall)
        assert len(lost_for_good(plan)) == found.fleet.num_clients
    elif len(lost_for_good(plan)) == found.fleet.num_clients:  # updates in flight completed the last round
        assert any(losses[-1] <= upload.end <= plan.seconds for upload in plan.uploads)
    return plan


@bounded(250)
@given(cases(lossy=True))
def test_planning_never_hangs(found: Case) -> None:
    plan_or_stall(found, ROUNDS)


@bounded(150)
@given(cases(lossy=True))
def test_every_plan_with_failures_satisfies_the_invariants(found: Case) -> None:
    plan_or_stall(found, ROUNDS).check()


@bounded(150)
@given(cases(lossy=True, windows=False))
def test_the_naive_simulator_loses_the_same_clients(found: Case) -> None:
    agrees_with_naive(found, ROUNDS)


@ALL
@pytest.mark.parametrize("seed", range(4))
def test_random_failures_never_hang_a_single_client(name: str, settings: Any, seed: int) -> None:
    """No other client can replace it, so it must repeat what it lost."""
    found = case(name, 1, 1, settings=settings, seed=seed, timeout=5.0, failure_rate=0.4, return_seconds=0.5)
    plan = plan_or_stall(found, 8)
    assert len(plan.rounds) == 8
    assert any(isinstance(record, Absence) for record in plan.records)
    plan.check()


@ALL
@pytest.mark.parametrize("return_seconds", [0.0, 0.5, 30.0])
def test_half_of_all_jobs_may_fail(name: str, settings: Any, return_seconds: float) -> None:
    for seed in range(3):
        found = case(
            name, 5, 3, settings=settings, seed=seed, timeout=5.0, failure_rate=0.5, return_seconds=return_seconds
        )
        plan = plan_or_stall(found, 10)
        assert len(plan.rounds) == 10
        assert {job.outcome for job in plan.jobs} >= {"ended", "lost"} or ALGORITHMS[name].policy.interruptible
        plan.check()


@ALL
def test_the_plan_ends_when_no_client_is_left(name: str, settings: Any) -> None:
    found = case(
        name, 4, 2, settings=settings, timeout=5.0, failure_rate=0.5, return_seconds=math.inf, step_seconds=0.05
    )
    plan = plan_or_stall(found, 10_000)
    assert lost_for_good(plan) == {0, 1, 2, 3}
    assert sum(isinstance(record, Stall) for record in plan.records) == 1
    plan.check()


@ALL
def test_the_last_of_four_clients_continues_alone(name: str, settings: Any) -> None:
    """Three of four clients never return, n = 4."""
    absences = {1: (0.0, math.inf), 2: (0.5, math.inf), 3: (2.5, math.inf)}
    found = case(name, 4, 4, settings=settings, timeout=11.0, **leaving(4, absences))
    plan = plan_or_stall(found, 12)
    assert len(plan.rounds) == 12
    assert lost_for_good(plan) == {1, 2, 3}
    assert {update.client for record in plan.rounds[-5:] for update, _ in record.merge.updates} == {0}
    plan.check()


@ALL
def test_all_clients_leave_and_return(name: str, settings: Any) -> None:
    found = case(
        name, 4, 2, settings=settings, timeout=11.0, **leaving(4, {i: (0.4 + 0.1 * i, 40.0 + i) for i in range(4)})
    )
    plan = plan_or_stall(found, 6)
    assert len(plan.rounds) == 6
    assert plan.rounds[-1].time > 40.0
    plan.check()


@ALL
def test_one_of_four_clients_returns_after_many_timeouts(name: str, settings: Any) -> None:
    """The server keeps waiting while there is nothing to merge, and merges fewer updates when there are some."""
    absences = {0: (0.4, 60.0), 1: (0.4, math.inf), 2: (0.4, math.inf), 3: (0.4, math.inf)}
    plan = plan_or_stall(case(name, 4, 4, settings=settings, timeout=11.0, **leaving(4, absences)), 5)
    assert len(plan.rounds) == 5
    plan.check()


@ALL
@pytest.mark.parametrize("away", [0.0, 0.3, 5.0, 60.0])
def test_a_returned_client_participates_again(name: str, settings: Any, away: float) -> None:
    """Whether it leaves for less or more than the timeout of 11 s, in the middle of a job."""
    found = case(name, 4, 2, settings=settings, timeout=11.0, **leaving(4, {1: (0.5, 0.5 + away)}))
    plan = plan_or_stall(found, 100 + 10 * int(away))  # a round lasts 0.1 s or more
    assert [record for record in plan.records if isinstance(record, Absence)] == [Absence(1, 0.5, 0.5 + away)]
    later = [u for record in plan.rounds for u, _ in record.merge.updates if u.client == 1 and record.time > 0.5 + away]
    assert len(later) > 10
    plan.check()


@ALL
def test_an_absent_client_trains_nothing(name: str, settings: Any) -> None:
    found = case(name, 4, 2, settings=settings, timeout=11.0, **leaving(4, {1: (0.7, 20.0), 2: (3.0, 25.0)}))
    plan = plan_or_stall(found, 40)
    for record in plan.records:
        if isinstance(record, Job):
            for client, left, back in ((1, 0.7, 20.0), (2, 3.0, 25.0)):
                assert record.client != client or record.end <= left or record.start >= back


@pytest.mark.parametrize("name", DRAWING)
def test_a_drawn_client_that_failed_is_replaced(name: str) -> None:
    """The record names the missing clients and their substitutes."""
    for settings in variants(ALGORITHMS[name]):
        if hasattr(settings, "concurrency"):
            settings = dataclasses.replace(settings, concurrency=3)  # otherwise no client is idle
        found = case(
            name, 6, 3, settings=settings, timeout=11.0, **leaving(6, {1: (0.3, math.inf), 4: (0.3, math.inf)})
        )
        rounds = 90 // found.setup.updates_per_round
        plan = plan_or_stall(found, rounds)
        timeouts = [record for record in plan.records if isinstance(record, Timeout)]
        assert timeouts
        assert {client for timeout in timeouts for client in timeout.missing} == {1, 4}
        assert any(timeout.drawn for timeout in timeouts)
        for timeout in timeouts:
            assert not set(timeout.missing) & set(timeout.drawn)
        # Suspected clients are not drawn again, so no timeout follows in the second half.
        assert timeouts[-1].time < plan.rounds[rounds // 2].time


def test_a_buffered_round_that_times_out_merges_fewer_updates() -> None:
    found = case("defedavg-iid", 3, 3, timeout=11.0, **leaving(3, {2: (0.5, math.inf)}))
    plan = plan_or_stall(found, 5)
    assert next(record for record in plan.records if isinstance(record, Timeout)).drawn == ()
    for record in plan.rounds:
        assert [(u.client, b) for u, b in record.merge.updates] == [(0, -0.5), (1, -0.5)]


def test_fedavg_counts_a_substitute_as_often_as_the_missing_client() -> None:
    """The weights of a round sum to one, whichever clients sent the updates."""
    for seed in range(10):
        found = case("fedavg", 4, 6, seed=seed, timeout=11.0, **leaving(4, {0: (0.2, math.inf), 3: (0.2, math.inf)}))
        for record in plan_or_stall(found, 4).rounds:
            assert sum(weight for _, weight in record.merge.updates) == pytest.approx(-1.0)


def test_fedbuff_keeps_its_concurrency() -> None:
    """A client that returns before its timeout is idle, and stays available after it."""
    server = ALGORITHMS["fedbuff"](Setup(3, 2, 5, timeout_seconds=10.0))
    tokens = timers_of(server.start())
    assert set(tokens) == {0, 1, 2}
    answers = server.returned(1) + server.end_of_instant() + server.timer(tokens[1]) + server.end_of_instant()
    assert [action.client for action in answers if isinstance(action, Send)] == [1]


def test_a_lost_upload_never_arrives() -> None:
    """A client that fails during an upload loses its update if the upload occupies it, and only then."""
    slow = Trace(np.full(2, 0.2), np.array([4.0, 4.0]), np.full(2, 400.0), {1: (2.0, math.inf)})
    for upload, merged in (("blocking", {0}), ("background", {0, 1})):
        plan = plan_or_stall(case("defedavg-iid", 2, 1, timeout=60.0, trace=slow, upload=upload), 3)
        # Both start at about 1 s and take 4.4 s.
        assert [(u.client, u.index) for u in plan.uploads][:2] == [(0, 0), (1, 0)]
        assert {update.client for record in plan.rounds for update, _ in record.merge.updates} == merged


@ALL
def test_an_infinite_timeout_never_expires(name: str, settings: Any) -> None:
    """The plan equals that without a timeout."""
    found = case(name, 4, 2, settings=settings, timeout=math.inf, step_seconds=0.05)
    assert found.plan(5).records == case(name, 4, 2, settings=settings, step_seconds=0.05).plan(5).records


def test_the_guard_detects_a_hang() -> None:
    """A timeout much shorter than a job repeats without a merge."""
    trace = leaving(2, {0: (0.1, math.inf)})
    found = case("fedavg", 2, 2, timeout=1e-3, settings=ALGORITHMS["fedavg"].settings_type(replacement=False), **trace)
    with pytest.raises(AssertionError, match="hangs"):
        Plan.collect(GuardedSimulator(found.server(), found.fleet, max_events=50), 1)


def test_a_client_that_leaves_for_good_while_absent_does_not_return() -> None:
    """It fails at random just before it leaves by its trace; the trace still applies."""
    trace = Trace(np.full(2, 0.1), np.full(2, np.inf), np.full(2, np.inf), {1: (0.6, np.inf)})
    left = 0
    for seed in range(30):
        fleet = Fleet(2, seed, failure_rate=0.5, return_seconds=0.3, trace=trace)
        server = ALGORITHMS["defedavg-iid"](Setup(2, 1, 2, seed, timeout_seconds=5.0))
        plan = Plan.collect(Simulator(server, fleet), 40)
        plan.check()
        left += any(r.client == 1 and r.time < 0.6 <= r.back for r in plan.records if isinstance(r, Absence))
        assert all(job.start <= 0.6 for job in plan.jobs if job.client == 1)
    assert left > 0  # the case occurred


def test_without_replacement_no_client_counts_twice_after_a_resample() -> None:
    fleet = Fleet(10, 1, failure_rate=0.15, return_seconds=2.0)
    settings = ALGORITHMS["fedavg"].settings_type(replacement=False)
    plan = Plan.collect(Simulator(ALGORITHMS["fedavg"](Setup(10, 4, 20, 1, timeout_seconds=1.0), settings), fleet), 60)
    plan.check()
    assert any(isinstance(record, Timeout) and record.drawn for record in plan.records)
    full = [record for record in plan.rounds if len(record.merge.updates) == 4]
    assert len(full) > 40
    for record in plan.rounds:
        assert all(weight == -1.0 / len(record.merge.updates) for _, weight in record.merge.updates)


@pytest.mark.parametrize("name", ["fedavg", "mifa"])
def test_without_replacement_a_round_has_every_client_that_is_left(name: str) -> None:
    """All clients take part; one leaves for good. Each round then has the others once, with equal weights."""
    kind = ALGORITHMS[name]
    given = {"replacement": False} if name == "fedavg" else {}
    trace = leaving(7, {6: (1.0, math.inf)})
    plan = case(name, 7, 7, settings=kind.settings_type(**given), timeout=2.0, **trace).plan(60)
    plan.check()
    after = [record for record in plan.rounds if record.time > 1.0 + 2.0 + 2.0]  # the first timeout has passed
    assert len(after) >= 10
    for record in after:
        assert sorted(update.client for update, _ in record.merge.updates) == list(range(6))
        assert len({weight for _, weight in record.merge.updates}) == 1


@pytest.mark.parametrize("name", ["favano", "quafl"])
def test_a_server_that_interrupts_does_not_interrupt_all_clients_that_are_left_in_every_round(name: str) -> None:
    """One of three leaves for good; the others are drawn with replacement, so that one of them may train on."""
    plan = case(name, 3, 3, timeout=2.0, **leaving(3, {2: (1.0, math.inf)})).plan(80)
    plan.check()
    after = [record for record in plan.rounds if record.time > 1.0 + 2.0 + 2.0]
    drawn = {tuple(sorted(update.client for update, _ in record.merge.updates)) for record in after}
    assert drawn == {(0,), (1,), (0, 1)}
