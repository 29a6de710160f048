"""AsySG with a fixed number of clients at work: dispatching, closed forms, and its limits."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from defedavg.algorithms import ALGORITHMS, Setup
from defedavg.algorithms.asysg import AsySG, AsySGSettings, DispatchedAsySG
from defedavg.algorithms.fedbuff import FedBuffSettings
from defedavg.errors import UserError
from defedavg.planning.records import Sent
from helpers.strategies import Case, bounded, case, cases, equal_speeds

ROUNDS = 15


@st.composite
def dispatched(draw: st.DrawFn) -> Case:
    found: Case = draw(cases(("asysg",)))
    settings = AsySGSettings(concurrency=draw(st.integers(1, found.setup.num_clients)))
    return dataclasses.replace(found, settings=settings)


@bounded(150)
@given(dispatched())
def test_exactly_c_clients_are_at_work_at_any_moment(found: Case) -> None:
    """A client is at work from the moment a version is sent to it until its gradient arrives."""
    plan = found.plan(ROUNDS)
    changes = [(record.time, 1) for record in plan.records if isinstance(record, Sent)]
    changes += [(upload.end, -1) for upload in plan.uploads]
    at_work = 0
    for time, group in itertools.groupby(sorted(changes), key=lambda change: change[0]):
        at_work += sum(change for _, change in group)
        if time < plan.seconds:  # the plan ends with the last merge, before the next dispatch
            assert at_work == found.settings.concurrency


@bounded(100)
@given(dispatched())
def test_it_is_fedbuff_with_one_local_step(found: Case) -> None:
    concurrency, setup = found.settings.concurrency, dataclasses.replace(found.setup, local_steps=1)
    fedbuff = Case("fedbuff", FedBuffSettings(concurrency=concurrency), setup, found.fleet).plan(ROUNDS)
    asysg = found.plan(ROUNDS)
    assert asysg.records == fedbuff.records
    assert dataclasses.replace(asysg.header, algorithm="fedbuff") == fedbuff.header


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_one_client_at_work_is_sequential_sgd(n: int, seed: int) -> None:
    """The time of a merge is the sum of the trips of all clients that were drawn so far; nothing is stale."""
    found = case("asysg", 7, n, seed=seed, settings=AsySGSettings(concurrency=1), latency_seconds=0.01)
    trips = found.fleet.down_times + found.fleet.step_times + found.fleet.up_times
    seconds, drawn = 0.0, set()
    for record in found.plan(60).rounds:
        drawn |= {update.client for update, _ in record.merge.updates}
        seconds += sum(float(trips[update.client]) for update, _ in record.merge.updates)
        assert record.time == pytest.approx(seconds)
        assert record.merge.staleness == (0,) * n
        assert [weight for _, weight in record.merge.updates] == [-1.0 / n] * n
    assert drawn == set(range(7))


def test_with_equal_speeds_the_round_time_is_n_over_c_trips() -> None:
    for concurrency, n in itertools.product((1, 2, 4, 8), (1, 2, 4, 8)):
        found = case("asysg", 9, n, settings=AsySGSettings(concurrency=concurrency), **equal_speeds())
        times = [record.time for record in found.plan(32).rounds]
        trip = 0.25 + 2 * 0.5
        waves = [np.ceil((number + 1) * n / concurrency) for number in range(32)]
        assert times == pytest.approx([trip * wave for wave in waves])


@pytest.mark.parametrize("seed", range(3))
def test_without_a_concurrency_it_is_defedavg_iid_with_one_local_step(seed: int) -> None:
    for upload in ("auto", "background", "blocking"):
        one = case("defedavg-iid", 9, 4, steps=1, seed=seed, jitter=0.2, upload=upload).plan(40)
        other = case("asysg", 9, 4, steps=50, seed=seed, jitter=0.2, upload=upload).plan(40)
        assert one.records == other.records


def test_two_machines_serve_one_name() -> None:
    setup = Setup(5, 2, 3)
    machines = [AsySG(setup), AsySG(setup, AsySGSettings()), AsySG(setup, AsySGSettings(concurrency=5))]
    assert [type(machine) for machine in machines] == [AsySG, AsySG, DispatchedAsySG]
    assert [machine.broadcasts for machine in machines] == [True, True, False]
    assert {machine.name for machine in machines} == {"asysg"}
    assert ALGORITHMS["asysg"] is AsySG
    with pytest.raises(UserError, match="is not one of 'asysg'"):
        machines[2].restore(machines[0].state())


def test_a_concurrency_that_is_out_of_range_is_refused() -> None:
    with pytest.raises(UserError, match="asysg: concurrency is 6 but there are 5 clients"):
        AsySG(Setup(5, 2, 3), AsySGSettings(concurrency=6))
    with pytest.raises(UserError, match="asysg: concurrency is -1"):
        AsySGSettings(concurrency=-1)
