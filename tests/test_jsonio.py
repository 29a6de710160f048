"""Short figures for readers, and checks of numbers that were read."""

from __future__ import annotations

import pytest

from defedavg.jsonio import is_count, is_whole, three_digits


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1674.2, "1,670"),
        (999.6, "1,000"),
        (999.4, "999"),
        (-1234567.0, "-1,230,000"),
        (2.5e6, "2,500,000"),
        (0.12345, "0.123"),
        (12.0, "12"),
        (0.0, "0"),
        (float("inf"), "inf"),
        (1e16, "1e+16"),
    ],
)
def test_a_number_has_three_digits_and_no_exponent_unless_it_is_huge(value: float, text: str) -> None:
    assert three_digits(value) == text


@pytest.mark.parametrize(
    ("value", "whole", "count"),
    [
        (0, True, True), (2**63 - 1, True, True), (-1, True, False), (2**63, False, False),
        (-(2**63) - 1, False, False), (True, False, False), (1.0, False, False),
        ("1", False, False), (None, False, False),
    ],
)  # fmt: skip
def test_whole_numbers_and_counts(value: object, whole: bool, count: bool) -> None:
    assert (is_whole(value), is_count(value)) == (whole, count)
