"""What clients did in a plan: Gini coefficients, coverage, bytes and energy with closed forms, and time horizons."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from defedavg.planning.client_totals import Energy, Spread, gini
from defedavg.planning.devices import Fleet, Trace, Windows
from defedavg.planning.plan import Plan
from defedavg.planning.plan_stats import PlanStats, PlanStatsCollector
from defedavg.planning.records import Job, Round, Sent, Timeout, Uploaded, moment
from defedavg.planning.slowness import Slowness
from defedavg.planning.sparse_simulator import make_simulator_for
from helpers.strategies import Case, bounded, case, cases

JOULES = Energy(joules_per_step=2.0, joules_per_byte=1e-6)


def collected(plan: Plan, fleet: Fleet, horizon: float | None = None, energy: Energy = JOULES) -> PlanStats:
    collector = PlanStatsCollector(plan.header, fleet, horizon_seconds=horizon, energy=energy)
    for record in plan.records:
        collector.add(record)
    return collector.stats()


# Gini.


@pytest.mark.parametrize(
    ("counts", "value"),
    [([3, 3, 3], 0.0), ([0, 0, 0], 0.0), ([5], 0.0), ([0, 0, 0, 8], 0.75), ([1, 2, 3, 4], 0.25), ([0, 1], 0.5)],
)
def test_the_gini_coefficient_of_known_counts(counts: list[int], value: float) -> None:
    assert gini(np.array(counts)) == pytest.approx(value, abs=1e-12)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30))
def test_the_gini_coefficient_is_half_the_relative_mean_difference(counts: list[int]) -> None:
    found, total, size = gini(np.array(counts)), sum(counts), len(counts)
    differences = sum(abs(a - b) for a in counts for b in counts)
    assert found == pytest.approx(differences / (2 * size * total) if total else 0.0, abs=1e-12)


# Equal clients, closed forms.


def test_equal_clients_that_all_answer_are_heard_together() -> None:
    """FedBuff with all clients at work and n = N: a round takes down + 5 steps + up, and merges every client once."""
    words: dict[str, Any] = {"slowness": Slowness.parse("equal"), "step_seconds": 0.25, "model_megabytes": 25.0}
    found = case("fedbuff", 8, 8, steps=5, **words)
    stats = collected(found.plan(10), found.fleet)
    trip = 0.5 + 1.25 + 0.5
    assert stats.horizon_seconds == stats.seconds == pytest.approx(10 * trip)
    assert (stats.gini, stats.never_heard, stats.timed_out, stats.substitutes) == (0.0, 0, 0, 0)
    assert stats.coverage == (1.0, 1.0, 1.0), "the first round ends at 10 % of the time"
    assert stats.uplink_per_client == Spread(25e7, 25e7, 25e7)
    assert stats.energy_per_client is not None
    # Ten jobs, and the models of eleven rounds: the next one was sent in the instant of the last merge, or not yet.
    low = 10 * 5 * 2.0 + 1e-6 * (10 + 10) * 25e6
    assert low <= stats.energy_per_client.median <= low + 25.0 + 1e-9


def test_a_round_robin_covers_one_more_client_at_a_time() -> None:
    """Ten clients with jobs of 1, 2, …, 10 seconds and merges of one: client i is first heard at second i."""
    instant = np.full(10, np.inf)
    found = case("fedbuff", 10, 1, steps=1, trace=Trace(np.arange(1, 11).astype(np.float64), instant, instant))
    plan = Plan.collect(found.simulator(), 10**6, 10.0)
    stats = collected(plan, found.fleet, 10.0)
    assert stats.coverage == (0.1, 0.5, 1.0)
    assert stats.jobs_merged == sum(10 // i for i in range(1, 11))
    assert stats.energy_joules is not None
    steps = sum(10 // i for i in range(1, 11))
    messages = sum(isinstance(r, Uploaded | Sent) for r in plan.records)
    assert stats.energy_joules == pytest.approx(2.0 * steps + 1e-6 * 2.2e6 * messages)


def test_without_figures_and_in_sparse_plans_there_is_no_energy() -> None:
    found = case("fedavg", 8, 2)
    assert collected(found.plan(3), found.fleet, energy=Energy()).energy_per_client is None
    sparse = Plan.collect(make_simulator_for(found.server(), found.fleet, "used"), 3)
    assert collected(sparse, found.fleet).energy_per_client is None
    assert collected(found.plan(3), found.fleet, energy=Energy(joules_per_byte=1.0)).energy_joules is not None


def test_partial_jobs_take_energy() -> None:
    """Every job fails; what was trained before counts in whole steps."""
    found = case(
        "fedbuff", 3, 1, steps=10, timeout=50.0, step_seconds=1.0, failure_rate=0.9, return_seconds=1.0,
        slowness=Slowness.parse("equal"), uplink_mbps=math.inf, downlink_mbps=math.inf,
    )  # fmt: skip
    plan = Plan.collect(found.simulator(), 10**6, 200.0)
    stats = collected(plan, found.fleet, 200.0, Energy(joules_per_step=1.0))
    lost = [job for job in plan.jobs if job.outcome == "lost"]
    assert len(lost) > 10
    expected = sum(math.floor(min(job.end, 200.0) - job.start + 1e-9) for job in plan.jobs)
    assert stats.energy_joules == expected > 10 * sum(job.outcome == "ended" for job in plan.jobs)


# Any plan.


@bounded(100)
@given(st.booleans().flatmap(lambda lossy: cases(lossy=lossy)), st.integers(1, 10))
def test_statistics_over_clients_are_those_of_a_plain_count(found: Case, rounds: int) -> None:
    plan = found.plan(rounds)
    stats, clients = collected(plan, found.fleet), found.setup.num_clients
    size = found.fleet.model_megabytes * 1e6
    ups = Counter(r.client for r in plan.uploads)
    downs = Counter(
        c for r in plan.records if isinstance(r, Sent) for c in (range(clients) if r.client is None else [r.client])
    )
    for spread, counts in ((stats.uplink_per_client, ups), (stats.downlink_per_client, downs)):
        values = np.array([counts[i] for i in range(clients)]) * size
        assert spread == Spread(float(np.percentile(values, 50)), float(np.percentile(values, 95)), float(values.max()))
    assert stats.uplink_bytes == pytest.approx(sum(ups.values()) * size)
    assert stats.downlink_bytes == pytest.approx(sum(downs.values()) * size)
    heard = {u.client: r.time for r in reversed(plan.rounds) for u, _ in r.merge.updates}
    assert stats.never_heard == clients - len(heard)
    shares = [sum(t <= part * plan.seconds for t in heard.values()) / clients for part in (0.1, 0.5, 1.0)]
    assert stats.coverage == pytest.approx(shares)
    timeouts = [r for r in plan.records if isinstance(r, Timeout)]
    assert stats.timed_out == sum(len(r.missing) for r in timeouts)
    assert stats.substitutes == sum(len(r.drawn) for r in timeouts)


@pytest.mark.parametrize("name", ["fedavg", "fedbuff", "defedavg-iid", "defedavg-niid", "favano"])
def test_sparse_plans_have_the_same_statistics_over_clients(name: str) -> None:
    found = case(name, 300, 20, steps=3)
    every, used = (
        collected(Plan.collect(make_simulator_for(found.server(), found.fleet, detail), 12), found.fleet)
        for detail in ("all", "used")
    )
    for field in ("coverage", "never_heard", "gini", "uplink_per_client", "downlink_per_client", "timed_out"):
        assert getattr(every, field) == getattr(used, field), field


# Horizons.


@bounded(100)
@given(st.booleans().flatmap(lambda lossy: cases(lossy=lossy)), st.integers(2, 10), st.floats(0.05, 1.0))
def test_a_horizon_ends_a_plan_where_a_longer_one_passes_it(found: Case, rounds: int, part: float) -> None:
    """The records up to the horizon are those of the longer plan, and no client loses its running job."""
    whole = found.plan(rounds)
    horizon = part * whole.seconds
    cut = Plan.collect(found.simulator(), rounds, horizon)
    cut.check()
    ended = [r for r in cut.records if not (isinstance(r, Job) and r.outcome == "running")]
    assert all(moment(record) <= horizon for record in ended)
    assert tuple(ended) == whole.records[: len(ended)]
    assert [r for r in whole.rounds if r.time <= horizon] == [r for r in ended if isinstance(r, Round)]
    started = {(job.client, job.index) for job in whole.jobs if job.start < horizon}
    assert started <= {(job.client, job.index) for job in cut.jobs}


# The automatic timeout.


def test_the_automatic_timeout_follows_most_clients_and_not_the_slowest() -> None:
    fleet = Fleet(1000, slowness=Slowness.parse("two-speed(0.03, 100)"), failure_rate=0.1)
    quick = 50 * 0.0017 + 0.088
    assert fleet.automatic_timeout(50) == pytest.approx(1.5 * quick)
    uniform = dataclasses.replace(fleet, slowness=Slowness.parse("uniform(1, 5)"))
    seconds = uniform.automatic_timeout(50)
    assert seconds is not None
    assert seconds > uniform.round_trip(50), "no client of a fleet without a tail is replaced"


def test_only_fleets_that_may_not_answer_have_a_timeout() -> None:
    assert Fleet(5).automatic_timeout(3) is None
    assert Fleet(5, availability=Windows(2.0, 0.0)).automatic_timeout(3) is None
    closing = Fleet(5, availability=Windows(8.0, 16.0))
    assert closing.automatic_timeout(3) == Fleet(5, failure_rate=0.1).automatic_timeout(3), "not the closed time"
