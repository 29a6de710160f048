"""Algorithms that merge arrivals, against independent oracles: plain NumPy, written from their definitions.

An oracle takes from the plan only whose update arrived when and from which version it started.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from defedavg.algorithms.protocol import Update
from defedavg.config.build import make_executor, make_plan
from defedavg.planning.plan import Plan
from defedavg.planning.records import Absence
from defedavg.tasks import least_squares
from helpers.oracle_runs import CLIENTS, GLOBAL_LR, START, Vector, assert_versions, delta, product_run
from helpers.settings_tables import settings, small

FACTORS: dict[str, Callable[[int], float]] = {
    "constant": lambda tau: 1.0,
    "polynomial": lambda tau: 1.0 / np.sqrt(1.0 + tau),
    "hinge": lambda tau: 1.0 if tau <= 4 else 1.0 / (10.0 * (tau - 4) + 1.0),
}


def arrivals(plan: Plan) -> list[Update]:
    """Return the updates of a plan that merges one at a time."""
    assert all(len(record.merge.updates) == 1 for record in plan.rounds)
    return [record.merge.updates[0][0] for record in plan.rounds]


def stepped(plan: Plan, factor: Callable[[int], float]) -> list[Vector]:
    """Return the versions of w ← w − η·factor(τ)·Δ."""
    w: list[Vector] = [START]
    for update in arrivals(plan):
        tau = len(w) - 1 - update.version
        w.append(w[-1] - GLOBAL_LR * factor(tau) * delta(w[update.version], update.client))
    return w


@pytest.mark.parametrize("staleness", FACTORS)
def test_fedasync_mixes_every_arriving_model_into_the_servers(staleness: str) -> None:
    plan, found = product_run("fedasync", own={"staleness": staleness}, rounds=80)
    w: list[Vector] = [START]
    seen = set()
    for update in arrivals(plan):
        tau = len(w) - 1 - update.version
        seen.add(tau > 4)
        a = 0.6 * FACTORS[staleness](tau)
        w.append((1 - a) * w[-1] + a * (w[update.version] - delta(w[update.version], update.client)))
    assert seen == {False, True}  # both branches of the hinge
    assert_versions(found, w)


def test_fedasync_uses_the_exponent_the_bound_and_the_slope() -> None:
    cases: tuple[tuple[dict[str, Any], Callable[[int], float]], ...] = (
        ({"staleness": "polynomial", "exponent": 2.0, "alpha": 0.9}, lambda tau: (1.0 + tau) ** -2),
        (
            {"staleness": "hinge", "hinge_bound": 6, "hinge_slope": 0.5, "alpha": 0.9},
            lambda tau: 1.0 if tau <= 6 else 1.0 / (0.5 * (tau - 6) + 1.0),
        ),
    )
    for own, factor in cases:
        plan, found = product_run("fedasync", own=own)
        w: list[Vector] = [START]
        for update in arrivals(plan):
            a = 0.9 * factor(len(w) - 1 - update.version)
            w.append((1 - a) * w[-1] + a * (w[update.version] - delta(w[update.version], update.client)))
        assert_versions(found, w)


@pytest.mark.parametrize("staleness", FACTORS)
def test_fedasync_with_alpha_one_and_one_client_is_sgd(staleness: str) -> None:
    problem = least_squares(1, noise=0.0, samples_per_client=4)
    how = settings("fedasync", **small(1, 1), fedasync={"alpha": 1.0, "staleness": staleness})
    executor = make_executor(how, 0, problem.task)
    w = [executor.versions[0].numpy().copy()]
    found = [w[0], *(executor.apply(record).numpy().copy() for record in make_plan(how, 0, 60).rounds)]
    for _ in range(60):
        w.append(w[-1])
        for _ in range(3):
            w[-1] = w[-1] - 0.1 * problem.curvature * (w[-1] - problem.client_means[0])
    assert_versions(found, w)


def test_fedasync_does_not_compound_its_mixing() -> None:
    """The factor of each arrival follows from its own staleness, not from those before it."""
    plan, _ = product_run("fedasync", rounds=60)
    for record in plan.rounds:
        [(update, b)] = record.merge.updates
        a = 0.6 / np.sqrt(record.merge.version - update.version)
        assert b == pytest.approx(-a, rel=1e-15)
        assert sum(share for _, share in record.merge.past) == pytest.approx(1.0, abs=1e-15)
        newest = dict(record.merge.past).get(record.merge.version - 1, 0.0)
        fresh = update.version == record.merge.version - 1
        assert newest == pytest.approx(1.0 if fresh else 1.0 - a)


def test_staleness_counts_merges_since_the_start_version() -> None:
    """Not since the arrival of the client's last update, the upload, or the start of the job by time."""
    plan, _ = product_run("delay-adaptive-sgd", own={"threshold": 1}, rounds=60)
    for record in plan.rounds:
        [(update, _)] = record.merge.updates
        started = next(job.start for job in plan.jobs if (job.client, job.index) == (update.client, update.index))
        version = max((r.merge.version for r in plan.rounds if r.time <= started), default=0)
        assert update.version <= version  # merges while the model is in transit count, too
        tau = record.merge.version - 1 - update.version
        assert record.merge.rate_scale == min(1.0, 1.0 / max(tau, 1))


@pytest.mark.parametrize("threshold", [1, 5, 1000])
def test_delay_adaptive_sgd_lowers_the_rate_of_stale_updates(threshold: int) -> None:
    plan, found = product_run("delay-adaptive-sgd", own={"threshold": threshold})
    assert_versions(found, stepped(plan, lambda tau: 1.0 if tau <= threshold else threshold / tau))


@pytest.mark.parametrize("threshold", [4, 6])
def test_delay_adaptive_sgd_discards_stale_updates(threshold: int) -> None:
    plan, found = product_run("delay-adaptive-sgd", own={"threshold": threshold, "rule": "discard"})
    staleness = {delay for record in plan.rounds for delay in record.merge.staleness}
    assert max(staleness) == threshold
    assert len(plan.uploads) > len(plan.rounds)
    assert_versions(found, stepped(plan, lambda tau: 1.0))


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("threshold", [1, 4, 6, 1000])
def test_ringmaster_is_sgd_on_the_updates_that_are_fresh_enough(threshold: int, stop: bool) -> None:
    plan, found = product_run("ringmaster", own={"threshold": threshold, "stop": stop})
    assert max(delay for record in plan.rounds for delay in record.merge.staleness) < threshold
    assert_versions(found, stepped(plan, lambda tau: 1.0))


def ca2fl_versions(plan: Plan, clients: int = CLIENTS) -> list[Vector]:
    """Return the versions of CA²FL: h is replaced after every merge by the latest update of the client."""
    h = np.zeros((clients, len(START)))
    w: list[Vector] = [START]
    for record in plan.rounds:
        updates = [update for update, _ in record.merge.updates]
        deltas = [delta(w[update.version], update.client) for update in updates]
        v = h.mean(axis=0) + sum(d - h[u.client] for u, d in zip(updates, deltas, strict=True)) / len(updates)
        w.append(w[-1] - GLOBAL_LR * v)
        for update, d in sorted(zip(updates, deltas, strict=True), key=lambda pair: pair[0].index):
            h[update.client] = d
    return w


@pytest.mark.parametrize("n", [1, 3, 7])
def test_ca2fl_calibrates_the_buffer_with_the_last_updates_of_all_clients(n: int) -> None:
    plan, found = product_run("ca2fl", n=n)
    assert_versions(found, ca2fl_versions(plan))


def test_ca2fl_with_two_updates_of_one_client_in_a_buffer_keeps_the_later_one() -> None:
    plan, found = product_run(
        "ca2fl", n=5, own={"concurrency": 2}, rounds=60, clients={"slowness": "two-speed(0.5, 20)"}
    )
    twice = [len({u.client for u, _ in record.merge.updates}) < 5 for record in plan.rounds]
    assert sum(twice) > 10
    assert_versions(found, ca2fl_versions(plan))


def test_ca2fl_with_empty_caches_is_fedbuff() -> None:
    """The first merge has no caches; later ones differ from FedBuff's, because the caches are filled."""
    first, found = product_run("ca2fl")
    second, expected = product_run("fedbuff")
    assert [u for u, _ in first.rounds[0].merge.updates] == [u for u, _ in second.rounds[0].merge.updates]
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-13)
    assert not np.allclose(found[2], expected[2], rtol=1e-3)
    merged = [[[update for update, _ in record.merge.updates] for record in plan.rounds] for plan in (first, second)]
    assert merged[0] == merged[1]


def test_fedbuff_divides_by_n_once() -> None:
    plan, found = product_run("fedbuff")
    w: list[Vector] = [START]
    for record in plan.rounds:
        deltas = [delta(w[update.version], update.client) for update, _ in record.merge.updates]
        assert len(deltas) == 3
        w.append(w[-1] - GLOBAL_LR * np.mean(deltas, axis=0))
    assert_versions(found, w)


def ace_versions(plan: Plan, bound: int) -> tuple[list[Vector], list[int]]:
    """Return the versions of ACE (bound 0) or ACED, and how many clients each mean is over."""
    latest: dict[int, tuple[int, Vector]] = {}
    w: list[Vector] = [START]
    sizes = []
    for update in arrivals(plan):
        t = len(w) - 1
        latest[update.client] = (update.version, delta(w[update.version], update.client))
        counted = [d for version, d in latest.values() if not bound or t - version <= bound]
        sizes.append(len(counted))
        w.append(w[-1] - GLOBAL_LR * np.mean(counted, axis=0))
    return w, sizes


@pytest.mark.parametrize("bound", [0, 5, 8, 12])
def test_ace_steps_along_the_mean_of_the_latest_updates(bound: int) -> None:
    plan, found = product_run("ace", own={"max_staleness": bound}, rounds=90)
    expected, sizes = ace_versions(plan, bound)
    assert (min(sizes[10:]) < CLIENTS) == bool(bound)
    assert sizes[0] == 1
    assert_versions(found, expected)


FAILING = {"failure_rate": 0.2, "return_seconds": 0.5}


@pytest.mark.parametrize(("name", "own"), [("ace", {}), ("ace", {"max_staleness": 6}), ("ca2fl", {}), ("mifa", {})])
def test_stored_updates_of_clients_that_fail_and_return(name: str, own: dict[str, Any]) -> None:
    """The last update of an absent client stays until it answers again."""
    plan, found = product_run(name, own=own, rounds=70, clients=FAILING)
    assert sum(isinstance(record, Absence) for record in plan.records) > 10
    if name == "ace":
        assert_versions(found, ace_versions(plan, own.get("max_staleness", 0))[0])
    elif name == "ca2fl":
        assert_versions(found, ca2fl_versions(plan))
    else:
        last = np.zeros((CLIENTS, len(START)))
        w: list[Vector] = [START]
        for record in plan.rounds:
            for update, _ in record.merge.updates:
                last[update.client] = delta(w[update.version], update.client)
            w.append(w[-1] - GLOBAL_LR * last.mean(axis=0))
        assert_versions(found, w)


def test_ace_with_all_clients_in_turn_averages_the_last_update_of_each() -> None:
    plan, found = product_run("ace", clients={"slowness": "equal"})
    order = [update.client for update in arrivals(plan)]
    assert all(sorted(order[k : k + CLIENTS]) == list(range(CLIENTS)) for k in range(0, 56, CLIENTS))
    w: list[Vector] = [START]
    deltas: list[Vector] = []
    for update in arrivals(plan):
        deltas.append(delta(w[update.version], update.client))
        w.append(w[-1] - GLOBAL_LR * np.mean(deltas[-CLIENTS:], axis=0))
    assert_versions(found, w)
