"""Phones: their distributions have the published quantiles, and their hours follow a daily cycle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from defedavg.config.build import make_fleet, make_plan
from defedavg.config.study import override, study
from defedavg.config.unused_settings import unused_settings
from defedavg.planning.devices import PHONES, Fleet
from defedavg.planning.phones import DAY, DOWN_MBPS, LATENCY, LONGEST_CLOSED, TRACE_DAYS, UP_MBPS, PhoneHours, Quantiles
from defedavg.planning.plan import Plan
from defedavg.planning.slowness import Slowness
from defedavg.planning.sparse_simulator import make_simulator_for
from helpers.strategies import bounded, case

MANY = 10_000
SEEDS = range(10)  # one draw of 10,000 phones has a sampling error of up to 6 % where a quantile function is steep
SPANS = TRACE_DAYS * DAY


def fleet_of(seed: int) -> Fleet:
    return Fleet(MANY, seed, step_seconds=172.0, slowness=Slowness.parse("phones"), links=PHONES, availability=PHONES)


def intervals_of(hours: PhoneHours) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the phone, the start and the end of all intervals of five days."""
    parts = []
    phones = np.arange(MANY)
    for day in range(TRACE_DAYS + 1):
        offsets, starts, ends = hours.day(phones, np.full(MANY, day))
        parts.append((np.repeat(phones, np.diff(offsets)), np.clip(starts, 0, SPANS), np.clip(ends, 0, SPANS)))
    rows, starts, ends = (np.concatenate(part) for part in zip(*parts, strict=True))
    inside = ends > starts
    return rows[inside], starts[inside], ends[inside]


# The published figures, at 5, 50 and 95 %.


@pytest.mark.parametrize(
    ("found", "figures"),
    [(LATENCY, (59, 172, 572)), (UP_MBPS, (0.08, 10.8, 220)), (DOWN_MBPS, (2, 57, 500))],
)
def test_quantile_functions_have_the_published_quantiles(found: Quantiles, figures: tuple[float, ...]) -> None:
    assert found(np.array([0.05, 0.5, 0.95])) == pytest.approx(figures, rel=1e-9)
    assert (np.diff(found(np.linspace(0, 1, 1001))) > 0).all()


def test_drawn_phones_have_the_published_quantiles() -> None:
    quantiles, correlations = [], []
    for fleet in map(fleet_of, SEEDS):
        up, down = (8.0 * fleet.model_megabytes / times for times in (fleet.up_times, fleet.down_times))
        quantiles.append([np.percentile(values, [5, 50, 95]) for values in (fleet.step_times, up, down)])
        ranks = np.array([np.argsort(np.argsort(values)) for values in (up, down)])
        correlations.append(np.corrcoef(ranks)[0, 1])
    figures = np.array([(59, 172, 572), (0.08, 10.8, 220), (2, 57, 500)])
    assert np.mean(quantiles, axis=0) == pytest.approx(figures, rel=0.05)
    assert np.mean(correlations) == pytest.approx(0.6, abs=0.03)


@pytest.mark.parametrize("seed", range(3))
def test_drawn_hours_have_the_published_figures(seed: int) -> None:
    phones, starts, ends = intervals_of(PhoneHours(seed))
    ready = np.bincount(phones, ends - starts, MANY)
    counts = np.bincount(phones, minlength=MANY)
    assert np.median(ready) / SPANS == pytest.approx(0.055, rel=0.05)
    assert np.median(counts) == pytest.approx(12, rel=0.05)
    assert counts.max() == pytest.approx(197, rel=0.05)
    hours = np.zeros(24)
    for hour in range(24 * TRACE_DAYS):
        hours[hour % 24] += np.clip(
            np.minimum(ends, 3600 * (hour + 1)) - np.maximum(starts, 3600 * hour), 0, None
        ).sum()
    assert hours.max() / hours.min() == pytest.approx(2.0, rel=0.05)
    assert hours.argmax() in range(2, 7)
    assert hours.argmin() in range(12, 18)


def test_intervals_of_a_phone_are_disjoint_and_in_order() -> None:
    hours = PhoneHours(3)
    for client in range(300):
        days = np.arange(8)
        _, starts, ends = hours.day(np.full(8, client), days)
        assert (ends - starts > 0.99).all()
        assert (starts[1:] >= ends[:-1] - 1e-6).all()


# Look-up.


@bounded(60)
@given(
    st.integers(0, 2**32),
    st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 1e7)), min_size=1, max_size=12),
)
def test_openings_of_many_phones_equal_those_of_each(seed: int, pairs: list[tuple[int, float]]) -> None:
    hours = PhoneHours(seed)
    clients, times = np.array([client for client, _ in pairs]), np.array([time for _, time in pairs])
    opens = [hours.opens(client, time) for client, time in pairs]
    assert hours.opens_all(clients, times).tolist() == opens
    for (client, time), found in zip(pairs, opens, strict=True):
        assert time <= found <= time + LONGEST_CLOSED
        assert hours.opens(client, found) == found
        assert hours.opens(client, 0.5 * (time + found)) == (time if found == time else found)
    assert hours.opens_all(clients, np.full(len(pairs), np.inf)).tolist() == [np.inf] * len(pairs)


def test_phones_do_not_depend_on_the_number_of_clients() -> None:
    few, many = (Fleet(n, 5, slowness=Slowness("phones", ()), links=PHONES, availability=PHONES) for n in (7, 3000))
    assert few.step_times.tolist() == many.step_times[:7].tolist()
    assert few.up_times.tolist() == many.up_times[:7].tolist()
    assert [few.opens(i, 5e4) for i in range(7)] == many.opens_all(np.arange(7), np.full(7, 5e4)).tolist()
    assert Fleet(7, 6, links=PHONES).up_times.tolist() != few.up_times.tolist()


# Plans.


@pytest.mark.parametrize(
    ("name", "rounds"), [("defedavg-niid", 6), ("defedavg-iid", 30), ("fedbuff", 30), ("fedavg", 5)]
)
def test_the_simulators_agree_on_phones(name: str, rounds: int) -> None:
    for seed in range(3):
        phones: dict[str, Any] = {"slowness": Slowness("phones", ()), "links": PHONES, "availability": PHONES}
        found = case(name, 40, 10, seed=seed, step_seconds=20.0, **phones)
        whole = Plan.collect(found.simulator(), rounds)
        part = Plan.collect(make_simulator_for(found.server(), found.fleet, "used"), rounds)
        assert [(r.time, r.merge) for r in part.rounds] == [(r.time, r.merge) for r in whole.rounds]
        for plan in (whole, part):
            plan.check(found.fleet)


def test_the_profile_sets_what_is_not_given() -> None:
    settings = study({"clients": {"profile": "phones", "num_clients": 50}}).points()[0].settings
    made = make_fleet(settings, 4)
    assert (made.slowness.kind, made.links, made.availability) == ("phones", "phones", "phones")
    assert made.step_seconds == 0.172
    assert len(make_plan(settings, 4, 3).rounds) == 3
    given = {"clients": {"profile": "phones", "availability": "always", "slowness": "equal", "num_clients": 50}}
    clients = study(given).points()[0].settings.clients
    assert (clients.slowness, clients.links, clients.availability) == ("equal", "phones", "always")
    changed = override({"clients": {"slowness": "equal", "jitter": 0.1}}, ("clients.profile=phones",))
    clients = study(changed).points()[0].settings.clients
    assert (clients.slowness, clients.jitter) == ("phones", 0.1)


def test_bandwidths_beside_drawn_links_are_named() -> None:
    found = unused_settings(study({"clients": {"profile": "phones", "uplink_mbps": 5.0}}))
    assert found == ["clients.uplink_mbps has no effect: clients.links is phones"]
