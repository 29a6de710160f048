"""Devices: every distribution against its closed form, the paper's numbers, and invalid values."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from defedavg import rng as keyed
from defedavg.errors import UserError
from defedavg.planning.devices import PAPER, Fleet, Windows
from defedavg.planning.phones import LATENCY, Quantiles
from defedavg.planning.slowness import SLOWNESS, Slowness
from helpers.strategies import SLOWNESS_TEXTS, bounded

MANY = keyed.extend_all(keyed.key(3, "test"), np.arange(200_000))


def mean_of(found: Quantiles) -> float:
    """Return the mean of a distribution whose quantiles are linear in log space: the integral of each piece."""
    pieces = itertools.pairwise(zip(found.shares, found.values, strict=True))
    return sum((q - p) * (b - a) / math.log(b / a) for (p, a), (q, b) in pieces)


PHONES_MEAN = mean_of(LATENCY) / 172

# Slowness: text, mean, tolerance, minimum, maximum.
CLOSED_FORMS = [
    ("equal", 1.0, 0.0, 1.0, 1.0),
    ("uniform(1, 5)", 3.0, 0.02, 1.0, 5.0),
    ("uniform(0.5, 0.5)", 0.5, 0.0, 0.5, 0.5),
    ("lognormal(0.5)", math.exp(0.125), 0.01, 0.0, math.inf),
    ("lognormal(0)", 1.0, 0.0, 1.0, 1.0),
    ("exponential(2)", 3.0, 0.03, 1.0, math.inf),
    ("inverse-uniform(1, 5)", 5.0 * math.log(5.0) / 4.0, 0.02, 1.0, 5.0),
    ("inverse-uniform(2, 3)", 3.0 * math.log(1.5), 0.005, 1.0, 1.5),
    ("inverse-uniform(7, 7)", 1.0, 0.0, 1.0, 1.0),
    ("exponential(0)", 1.0, 0.0, 1.0, 1.0),
    ("two-speed(0.25, 9)", 3.0, 0.04, 1.0, 9.0),
    ("two-speed(0, 9)", 1.0, 0.0, 1.0, 1.0),
    ("two-speed(1, 9)", 9.0, 0.0, 9.0, 9.0),
    ("pareto(4)", 4.0 / 3.0, 0.01, 1.0, math.inf),
    ("phones", PHONES_MEAN, 0.02, 34 / 172, 6000 / 172),
]


@pytest.mark.parametrize(("text", "mean", "tolerance", "low", "high"), CLOSED_FORMS)
def test_slowness_has_the_right_range_and_mean(
    text: str, mean: float, tolerance: float, low: float, high: float
) -> None:
    drawn = Slowness.parse(text).draw(MANY)
    assert drawn.shape == MANY.shape
    assert float(drawn.mean()) == pytest.approx(mean, abs=tolerance or 1e-12)
    assert drawn.min() >= low
    assert drawn.max() <= high
    assert drawn.min() > 0.0


QUANTILES: list[tuple[str, Callable[[float], float]]] = [
    ("uniform(1, 5)", lambda q: 1.0 + 4.0 * q),
    ("inverse-uniform(1, 5)", lambda q: 5.0 / (5.0 - 4.0 * q)),
    ("inverse-uniform(2, 3)", lambda q: 3.0 / (3.0 - q)),
    ("exponential(2)", lambda q: 1.0 - 2.0 * math.log(1.0 - q)),
    ("pareto(4)", lambda q: (1.0 - q) ** -0.25),
    ("lognormal(1)", lambda q: {0.1: 0.2776, 0.5: 1.0, 0.9: 3.6022}[q]),
]


@pytest.mark.parametrize(("text", "quantile"), QUANTILES)
@pytest.mark.parametrize("q", [0.1, 0.5, 0.9])
def test_slowness_has_the_right_quantiles(text: str, quantile: Callable[[float], float], q: float) -> None:
    assert float(np.quantile(Slowness.parse(text).draw(MANY), q)) == pytest.approx(quantile(q), rel=0.015)


def test_two_speed_has_two_values() -> None:
    drawn = Slowness.parse("two-speed(0.2, 5)").draw(MANY)
    assert set(drawn.tolist()) == {1.0, 5.0}
    assert float((drawn == 5.0).mean()) == pytest.approx(0.2, abs=0.005)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("uniform(1)", "has 1 argument, but uniform takes 2; write it as uniform(low, high)"),
        ("inverse-uniform(1)", "has 1 argument, but inverse-uniform takes 2; write it as inverse-uniform(low, high)"),
        ("uniform(1, 2, 3)", "has 3 arguments, but uniform takes 2; write it as uniform(low, high)"),
        ("two-speed(0.2)", "has 1 argument, but two-speed takes 2; write it as two-speed(share, factor)"),
        ("lognormal(0.5, 1)", "has 2 arguments, but lognormal takes 1; write it as lognormal(sigma)"),
        ("exponential(1, 2)", "has 2 arguments, but exponential takes 1; write it as exponential(mean)"),
        ("pareto(1, 2)", "has 2 arguments, but pareto takes 1; write it as pareto(shape)"),
        ("equal(1)", "has 1 argument, but equal takes none; write it as equal"),
        ("phones(1, 2)", "has 2 arguments, but phones takes none; write it as phones"),
        ("phones(x)", "cannot be read; write it as phones"),
    ],
)
def test_a_wrong_number_of_arguments_is_named(text: str, problem: str) -> None:
    with pytest.raises(UserError) as refusal:
        Slowness.parse(text)
    assert str(refusal.value) == f"slowness {text!r} {problem}"


def test_every_distribution_is_tested() -> None:
    assert {Slowness.parse(text).kind for text, *_ in CLOSED_FORMS} == set(SLOWNESS)
    assert {Slowness.parse(text).kind for text in SLOWNESS_TEXTS} == set(SLOWNESS)


@pytest.mark.parametrize("name", SLOWNESS)
def test_every_distribution_has_defaults(name: str) -> None:
    assert Slowness.parse(name).arguments == SLOWNESS[name].defaults
    assert Slowness.parse(f" {name}() ") == Slowness.parse(name)


@pytest.mark.parametrize("text", SLOWNESS_TEXTS)
def test_slowness_does_not_depend_on_the_number_of_clients(text: str) -> None:
    few, many = (Fleet(size, 5, slowness=Slowness.parse(text), availability=Windows(1, 1)) for size in (7, 300))
    assert few.step_times.tolist() == many.step_times[:7].tolist()
    assert [few.opens(i, 0.7) for i in range(7)] == [many.opens(i, 0.7) for i in range(7)]
    assert few.pace(6, 3) == many.pace(6, 3)
    if text != "equal":
        assert Fleet(300, 6, slowness=Slowness.parse(text)).step_times.tolist() != many.step_times.tolist()


def test_spaces_and_signs_are_read() -> None:
    assert Slowness.parse("  uniform ( 1e0 ,+5 ) ") == Slowness("uniform", (1.0, 5.0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read"),
        ("uniform(1, 5", "cannot be read"),
        ("uniform 1 5", "cannot be read"),
        ("uniform(1)(2)", "cannot be read"),
        ("unifrom(1, 5)", "did you mean 'uniform'"),
        ("zipf", "known: "),
        ("uniform(1)", r"uniform\(low, high\)"),
        ("uniform(1, 2, 3)", r"uniform\(low, high\)"),
        ("uniform(a, b)", "with numbers"),
        ("uniform(1,)", "with numbers"),
        ("uniform(5, 1)", "out of range"),
        ("uniform(0, 1)", "out of range"),
        ("uniform(-1, 1)", "out of range"),
        ("uniform(1, inf)", "out of range"),
        ("uniform(nan, 5)", "out of range"),
        ("lognormal(-1)", "out of range"),
        ("exponential(-1)", "out of range"),
        ("two-speed(1.5, 2)", "out of range"),
        ("two-speed(-0.1, 2)", "out of range"),
        ("two-speed(0.5, 0)", "out of range"),
        ("pareto(0)", "out of range"),
        ("equal(1)", "has 1 argument, but equal takes none"),
    ],
)
def test_invalid_slowness_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        Slowness.parse(text)
    assert "\n" not in str(caught.value)


# The paper's time model.


def test_the_papers_numbers() -> None:
    words: list[Any] = [PAPER[name] for name in ("paper-fashionmnist", "paper-cifar10")]
    fashion, cifar = (Fleet(20_000, **paper) for paper in words)
    for fleet, step, one_way in ((fashion, 0.00170, 0.0440), (cifar, 0.00314, 0.0706)):
        assert fleet.slowness == Slowness("uniform", (1.0, 5.0))
        assert step <= fleet.step_times.min() < 1.01 * step
        assert 4.99 * step < fleet.step_times.max() <= 5.0 * step
        assert float(fleet.step_times.mean()) == pytest.approx(3.0 * step, rel=0.01)
        assert fleet.up_times.tolist() == fleet.down_times.tolist()
        assert fleet.up_times == pytest.approx(np.full(20_000, one_way), rel=1e-12)
    assert fashion.round_trip(50) == pytest.approx(50 * fashion.step_times.max() + 0.088)


def test_latency_and_links_add_up() -> None:
    fleet = Fleet(3, uplink_mbps=8.0, downlink_mbps=math.inf, latency_seconds=0.5, model_megabytes=2.0)
    assert fleet.up_times.tolist() == [2.5] * 3
    assert fleet.down_times.tolist() == [0.5] * 3


# Jitter and failures.


@pytest.mark.parametrize("jitter", [0.1, 0.5])
def test_jitter_has_mean_one(jitter: float) -> None:
    paces = np.array([Fleet(1, jitter=jitter).pace(client, job) for client in range(100) for job in range(200)])
    deviation = math.sqrt(math.exp(jitter**2) - 1.0)
    assert float(paces.mean()) == pytest.approx(1.0, abs=5.0 * deviation / math.sqrt(len(paces)))
    assert float(paces.std()) == pytest.approx(deviation, rel=0.1)
    assert len(set(paces.tolist())) == len(paces)
    assert Fleet(1, seed=1, jitter=jitter).pace(0, 0) != paces[0]


def test_without_jitter_the_pace_is_one() -> None:
    assert {Fleet(5).pace(client, 3) for client in range(5)} == {1.0}


def test_failures_have_their_rate_and_a_uniform_time() -> None:
    fleet = Fleet(1, failure_rate=0.3)
    failures = [fleet.dies_after(client, job) for client in range(100) for job in range(200)]
    shares = np.array([share for share in failures if share is not None])
    assert len(shares) / len(failures) == pytest.approx(0.3, abs=0.02)
    assert shares.min() >= 0.0
    assert shares.max() < 1.0
    assert float(shares.mean()) == pytest.approx(0.5, abs=0.02)
    assert fleet.lossy
    assert Fleet(1).dies_after(0, 0) is None
    assert not Fleet(1).lossy


# Availability.


@pytest.mark.parametrize("text", ["always", " always "])
def test_always_means_no_windows(text: str) -> None:
    assert Windows.parse(text) is None
    assert Fleet(2).opens(1, 3.25) == 3.25


def test_windows_are_read() -> None:
    assert Windows.parse("windows(10, 2.5)") == Windows(10.0, 2.5)
    assert Windows.parse(" windows( 1e3 ,0) ") == Windows(1000.0, 0.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "never",
        "windows",
        "windows()",
        "windows(1)",
        "windows(1,2,3)",
        "windows(0,1)",
        "windows(-1,1)",
        "windows(1,-1)",
        "windows(inf,1)",
        "windows(1,inf)",
        "windows(nan,1)",
        "windows(1,nan)",
        "windows(a,b)",
    ],
)
def test_invalid_windows_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="windows"):
        Windows.parse(text)


def test_windows_open_and_close() -> None:
    windows = Windows(2.0, 6.0)
    assert [windows.opens(0.0, t) for t in (0.0, 1.9, 2.0, 5.0, 8.0, 9.5, 10.0)] == [0.0, 1.9, 8.0, 8.0, 8.0, 9.5, 16.0]
    assert [windows.opens(0.25, t) for t in (0.0, 5.0, 6.0, 7.9)] == [6.0, 6.0, 6.0, 7.9]
    assert Windows(1.0, 0.0).opens(0.7, 123.4) == 123.4


PHASES = st.integers(0, 2**53 - 1).map(lambda word: word * 2.0**-53)


@bounded(300)
@given(PHASES, st.floats(0.0, 1e4), st.floats(0.01, 100.0), st.floats(0.01, 100.0))
def test_an_opening_is_open_and_at_most_one_closed_window_later(
    phase: float, time: float, on: float, off: float
) -> None:
    windows = Windows(on, off)
    opens = windows.opens(phase, time)
    assert time <= opens <= time + off * (1.0 + 1e-9) + 1e-9
    assert windows.opens(phase, opens) == opens


@bounded(300)
@given(PHASES, st.integers(0, 1000), st.floats(0.05, 0.95), st.floats(0.05, 0.95))
def test_an_opening_is_the_same_for_all_times_of_one_closed_window(
    phase: float, cycle: int, early: float, late: float
) -> None:
    """Otherwise a plan would depend, in the last digit, on how often a client was woken."""
    windows = Windows(0.2, 0.3)
    asked = [cycle * 0.5 + 0.2 + 0.3 * part - phase * 0.5 for part in (early, late)]
    opens = [windows.opens(phase, time) for time in asked if time >= 0.0]
    assert len(set(opens)) <= 1
    assert opens == pytest.approx([(cycle + 1) * 0.5 - phase * 0.5] * len(opens))


def test_clients_open_at_different_times() -> None:
    fleet = Fleet(50, availability=Windows(0.01, 10.0))
    moments = [fleet.opens(client, 0.0) for client in range(50)]
    assert len(set(moments)) > 45
    assert 0.0 <= min(moments) < max(moments) <= 10.0


# Invalid fleets.


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_clients": 0},
        {"num_clients": -3},
        {"step_seconds": 0.0},
        {"step_seconds": -1.0},
        {"step_seconds": math.inf},
        {"step_seconds": math.nan},
        {"jitter": -0.1},
        {"jitter": math.inf},
        {"jitter": math.nan},
        {"uplink_mbps": 0.0},
        {"uplink_mbps": math.nan},
        {"downlink_mbps": -1.0},
        {"downlink_mbps": math.nan},
        {"latency_seconds": -0.1},
        {"latency_seconds": math.inf},
        {"model_megabytes": -1.0},
        {"model_megabytes": math.inf},
        {"failure_rate": -0.1},
        {"failure_rate": 1.0},
        {"failure_rate": math.nan},
        {"return_seconds": -1.0},
        {"return_seconds": math.nan},
    ],
    ids=str,
)
def test_an_invalid_fleet_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(arguments))):
        Fleet(**{"num_clients": 4, **arguments})


def test_a_fleet_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Fleet(1).seed = 3  # type: ignore[misc]


# Any text.


@bounded(100)
@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    def outcome(read: Callable[[str], object]) -> object:
        try:
            return read(text)
        except UserError as error:
            return error

    assert isinstance(outcome(Slowness.parse), Slowness | UserError)
    assert isinstance(outcome(Windows.parse), Windows | UserError | None)
