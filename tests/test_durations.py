"""Durations: what is read, what is refused, and what is shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from defedavg.durations import MAX_SECONDS, UNITS, duration, parse_duration
from defedavg.errors import UserError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("90s", 90.0), ("15m", 900.0), ("6h", 21_600.0), ("2d", 172_800.0), (" 1.5 d ", 129_600.0),
     ("1e3", 1000.0), (".5", 0.5)],
)  # fmt: skip
def test_durations_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text, "--seconds") == seconds


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "1w", "d", "1d2h", "nan", "inf", "1e400", "1.2.3", "99999d", "1_0", "٣d"]
)
def test_anything_else_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(
        UserError, match=r"--seconds is .*; give a time above zero, such as 90 \(seconds\), 15m"
    ) as error:
        parse_duration(text, "--seconds")
    assert "\n" not in str(error.value)


@given(st.text(max_size=50))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        seconds = parse_duration(text, "x")
    except UserError:
        return
    assert 0 < seconds <= MAX_SECONDS


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4942, "0.4942 s"), (90.0, "90 s"), (119.9, "119.9 s"), (120.0, "2 min"), (826.0, "13.8 min"), (3600.0, "1 h"),
     (86_399.0, "24 h"), (86_400.0, "1 d"), (200_000.0 * 86_400, "200,000 d"), (float("nan"), "–")],
)  # fmt: skip
def test_long_times_are_shown_in_larger_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.floats(1e-3, 1e9))
def test_what_is_shown_is_the_time_that_was_given(seconds: float) -> None:
    number, unit = duration(seconds).replace(",", "").split()
    assert float(number) * UNITS[unit[0]] == pytest.approx(seconds, rel=6e-3)
