"""The theorems' formulas compared with their proofs, and λ compared with its union bound."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from defedavg.config.build import make_plan
from defedavg.errors import UserError
from defedavg.rng import generator, key
from defedavg.theory import (
    THEOREMS,
    Constants,
    draw_probability,
    probable_staleness,
    rounds_needed,
    rounds_needed_drawn,
    rounds_to_apply,
    rounds_to_reach,
    stated_staleness,
    theorem,
)
from defedavg.theory.speedup import measure
from defedavg.theory.speedup_cases import make_case
from helpers.settings_tables import settings
from helpers.strategies import positive

IID, NIID = theorem("defedavg-iid"), theorem("defedavg-niid")
TIGHT = 1e-12


@st.composite
def constants(draw: st.DrawFn) -> Constants:
    """Draw constants over the whole range that the theorems allow."""
    clients = draw(st.integers(1, 2000))
    return Constants(
        smoothness=draw(positive()),
        noise=draw(positive()),
        gap=draw(positive()),
        gradient=draw(st.one_of(st.just(0.0), positive())),
        heterogeneity=draw(st.one_of(st.just(0.0), positive())),
        updates_per_round=draw(st.integers(1, clients)),
        local_steps=draw(st.integers(1, 200)),
        rounds=draw(st.integers(1, 10**9)),
        max_staleness=draw(st.integers(1, 500)),
        num_clients=clients,
    )


def last_line_iid(c: Constants, eta: float, rate: float) -> float:
    """Return the last display of the proof of Theorem 2 before the rates are inserted."""
    n, k = c.updates_per_round, c.local_steps
    return (
        4 * c.gap / (k * c.rounds * eta * rate)
        + 8 * c.smoothness * eta * rate * c.noise / n
        + 8 * c.smoothness**2 * k * rate**2 * c.noise
    )


def last_line_niid(c: Constants, eta: float, rate: float) -> float:
    """Return the last display of the proof of Theorem 1 before the rates are inserted."""
    n, k = c.updates_per_round, c.local_steps
    return (
        4 * c.gap / (k * c.rounds * eta * rate)
        + (16 * c.noise * c.smoothness + 8 * c.smoothness * c.gradient * k) / n * eta * rate
        + (c.noise + 8 * k * c.heterogeneity) * 8 * c.smoothness**2 * k * rate**2
    )


# Formulas.


@given(constants())
def test_the_bounds_are_the_last_displays_of_the_proofs_with_the_rates_inserted(c: Constants) -> None:
    for kind, last in ((IID, last_line_iid), (NIID, last_line_niid)):
        rates = kind.rates(c)
        assert kind.bound(c).total == pytest.approx(last(c, rates.global_lr, rates.local_lr), rel=TIGHT)


@given(constants())
def test_the_rates_are_as_stated(c: Constants) -> None:
    n, k, t = c.updates_per_round, c.local_steps, c.rounds
    iid, niid = IID.rates(c), NIID.rates(c)
    assert iid.global_lr == pytest.approx((n * k * c.gap / 2) ** 0.5, rel=TIGHT)
    assert iid.local_lr * k * (c.noise * c.smoothness * t) ** 0.5 == pytest.approx(1, rel=TIGHT)
    weight = 4 * c.noise * c.smoothness + 2 * c.smoothness * k * c.gradient
    assert niid.global_lr == pytest.approx(2 * (n * k * c.gap) ** 0.5, rel=TIGHT)
    assert niid.local_lr * k * (weight * t) ** 0.5 == pytest.approx(1, rel=TIGHT)


@given(constants())
def test_the_printed_bounds(c: Constants) -> None:
    """The printed first term of Theorem 1 is 3.2 times the proved one; Theorem 2 lacks Lσ² under the root."""
    n, k, t = c.updates_per_round, c.local_steps, c.rounds
    weight = 16 * c.noise * c.smoothness + 8 * c.smoothness * c.gradient * k
    assert NIID.printed(c).first == pytest.approx(math.sqrt(256 * c.gap * weight / (n * k * t)), rel=TIGHT)
    assert NIID.printed(c).first == pytest.approx(3.2 * NIID.bound(c).first, rel=TIGHT)
    assert NIID.printed(c).second == NIID.bound(c).second
    assert IID.printed(c).first == pytest.approx(math.sqrt(128 * c.gap / (n * k * t)), rel=TIGHT)
    share = math.sqrt(c.smoothness * c.noise)
    assert IID.bound(c).first == pytest.approx(share * IID.printed(c).first, rel=TIGHT)


@given(constants())
def test_where_the_conditions_hold_every_step_of_the_proofs_does(c: Constants) -> None:
    slack = 1 + 1e-9
    for kind in (IID, NIID):
        applies = replace(c, rounds=rounds_to_apply(kind, c))
        rates = kind.rates(applies)
        rate, product = rates.local_lr, rates.product
        smooth, k, stale = c.smoothness, c.local_steps, c.max_staleness
        drift = 12 if kind is IID else 16
        assert drift * smooth**2 * k**3 * rate**2 <= k / 4 * slack
        assert smooth**2 * k + drift * smooth**4 * k**3 * rate**2 <= 2 * smooth**2 * k * slack
        assert smooth * product <= 1 / (4 * k) * slack
        assert 4 * smooth**2 * k * stale**2 * product**2 <= 1 / (4 * k) * slack
        if kind is IID:
            assert 4 * smooth**2 * k**2 * stale * product * c.noise <= smooth * k * c.noise * slack
        else:
            late = 8 * c.noise * smooth**2 * k**2 * stale + 4 * smooth**2 * c.gradient * k**3 * stale**2
            assert late * product <= (2 * c.noise * smooth * k + smooth * c.gradient * k**2) * slack


@given(constants())
def test_the_rounds_for_the_conditions_are_the_fewest(c: Constants) -> None:
    n, k, stale = c.updates_per_round, c.local_steps, c.max_staleness
    weight = 4 * c.noise + 2 * k * c.gradient  # A / L
    drift = (8 * c.noise * k * stale + 4 * c.gradient * k**2 * stale**2) / (2 * c.noise + c.gradient * k)
    exact = {
        "defedavg-iid": max(48 / c.noise, 8 * n * k * stale**2 * c.gap / c.noise) * c.smoothness,
        "defedavg-niid": max(64, 64 * n * k * stale**2 * c.gap, 4 * n * c.gap / k * drift**2) * c.smoothness / weight,
    }
    for name, kind in THEOREMS.items():
        found = rounds_to_apply(kind, c)
        assert all(each.holds for each in kind.conditions(replace(c, rounds=found)))
        if found > 1:
            assert not all(each.holds for each in kind.conditions(replace(c, rounds=found - 1)))
        wanted = max(1, math.ceil(exact[name]))
        assert abs(found - wanted) <= 1 + 1e-9 * wanted


@given(constants(), positive())
def test_the_rounds_for_a_bound_are_the_fewest(c: Constants, epsilon: float) -> None:
    for kind in THEOREMS.values():
        found = rounds_to_reach(kind, c, epsilon)
        assert kind.bound(replace(c, rounds=found)).total <= epsilon
        if found > 1:
            assert kind.bound(replace(c, rounds=found - 1)).total > epsilon
        assert rounds_needed(kind, c, epsilon) == max(found, rounds_to_apply(kind, c))


# Staleness.


@given(st.integers(1, 5000), st.integers(1, 200), st.integers(1, 10**7), st.floats(1e-6, 0.5))
def test_lambda_is_the_smallest_that_the_union_bound_allows(clients: int, n: int, rounds: int, delta: float) -> None:
    found = probable_staleness(clients, n, rounds, delta)
    missed = (1 - 1 / clients) ** n
    assert clients * rounds * missed**found <= delta * (1 + 1e-6)
    if found > 1:
        assert clients * rounds * missed ** (found - 1) > delta * (1 - 1e-6)
    assert draw_probability(clients, n) == pytest.approx(1 - missed, rel=1e-9)
    assert found <= stated_staleness(clients, n, rounds, delta)


def test_clients_are_drawn_as_often_as_lambda_says() -> None:
    clients, n, rounds, delta = 6, 2, 60, 0.2
    stale = probable_staleness(clients, n, rounds, delta)
    late = 0
    for turn in range(400):
        draws = generator(key(turn, "test.draws")).integers(0, clients, (rounds, n))
        drawn = (draws[:, :, None] == np.arange(clients)).any(axis=1)
        undrawn = np.lib.stride_tricks.sliding_window_view(~drawn, stale, axis=0).all(axis=2)
        late += bool(undrawn.any())
    assert late / 400 <= delta


def test_without_links_no_update_is_staler_than_the_draws_allow() -> None:
    plan_settings = settings(
        "defedavg-niid",
        clients={"num_clients": 12, "model_megabytes": 0.0},
        training={"updates_per_round": 3, "local_steps": 2},
        **{"defedavg-niid": {"mode": "thrifty"}},
    )
    seen = dict.fromkeys(range(12), 0)
    for record in make_plan(plan_settings, 0, 300).rounds:
        current = record.merge.version - 1
        for (update, _), stale in zip(record.merge.updates, record.merge.staleness, strict=True):
            assert stale <= current - seen[update.client]
        seen.update((update.client, current) for update, _ in record.merge.updates)


@given(constants(), st.floats(0.001, 0.3))
def test_rounds_with_growing_lambda_are_a_fixed_point(c: Constants, delta: float) -> None:
    c = replace(c, num_clients=min(c.num_clients, 50), updates_per_round=min(c.updates_per_round, 50))
    assume(c.updates_per_round <= c.num_clients)
    found = rounds_needed_drawn(NIID, c, 0.1, delta)
    stale = probable_staleness(c.num_clients, c.updates_per_round, found, delta)
    assert found == rounds_needed(NIID, replace(c, max_staleness=stale), 0.1)


# Invalid input.


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"smoothness": -1.0}, "smoothness is -1"),
        ({"smoothness": 0.0}, "smoothness is 0"),
        ({"noise": -0.5}, "noise is -0.5"),
        ({"gradient": math.nan}, "gradient is nan"),
        ({"heterogeneity": math.inf}, "heterogeneity is inf"),
        ({"gap": 0.0}, "gap is 0"),
        ({"updates_per_round": 11}, "only 10 clients"),
        ({"rounds": 0}, "rounds is 0"),
        ({"max_staleness": 0}, "max_staleness is 0"),
    ],
)
def test_invalid_constants_are_refused(wrong: dict[str, Any], words: str) -> None:
    good = Constants(smoothness=1.0, noise=1.0, gap=1.0, updates_per_round=2, num_clients=10)
    with pytest.raises(UserError, match=words):
        Constants(**{**asdict(good), **wrong})


def test_unanswerable_queries_are_refused() -> None:
    good = Constants(smoothness=1.0, noise=1.0, gap=1.0)
    with pytest.raises(UserError, match="epsilon is 0"):
        rounds_to_reach(IID, good, 0.0)
    with pytest.raises(UserError, match="delta is 1"):
        probable_staleness(10, 2, 5, 1.0)
    with pytest.raises(UserError, match="noise is zero"):
        IID.rates(replace(good, noise=0.0))
    with pytest.raises(UserError, match="both zero"):
        NIID.rates(replace(good, noise=0.0))
    with pytest.raises(UserError, match="did you mean 'defedavg-iid'"):
        theorem("defedavg-idd")
    with pytest.raises(UserError, match="rounds would be needed"):
        rounds_to_reach(IID, good, 1e-200)
    case = make_case("least-squares", "defedavg-iid")
    for ns, seeds, words in (([], [0], "empty"), ([2, 4], [], "empty"), ([4], [0], "two"), ([2, 2], [0], "twice")):
        with pytest.raises(UserError, match=words):
            measure(case, ns, seeds)
    with pytest.raises(UserError, match="unknown task"):
        make_case("cubes", "defedavg-iid")
