"""Schedules of learning rates: their values, and one line for a text that is none."""

from __future__ import annotations

import pytest

from defedavg.errors import UserError
from defedavg.planning.rate_schedules import Schedule


@pytest.mark.parametrize(
    ("text", "x", "factor"),
    [
        ("constant", 1e9, 1.0),
        ("step(10, 0.5)", 0, 1.0),
        ("step(10, 0.5)", 9.99, 1.0),
        ("step(10, 0.5)", 10, 0.5),
        ("step(10, 0.5)", 39, 0.125),
        ("step(1e-9, 0.5)", 1e9, 0.0),
        ("cosine(100)", 0, 1.0),
        ("cosine(100)", 50, 0.5),
        ("cosine(100)", 100, 0.0),
        ("cosine(100)", 1e9, 0.0),
        (" inverse-sqrt( 4 ) ", 12, 0.5),
        ("inverse-sqrt(4)", 0, 1.0),
    ],
)
def test_factors(text: str, x: float, factor: float) -> None:
    assert Schedule.parse(text).factor(x) == pytest.approx(factor, rel=1e-15, abs=1e-300)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("cosine", r"write cosine\(end\) with numbers above zero, like cosine\(400\)$"),
        ("cosine()", r"write cosine\(end\)"),
        ("cosine(0)", r"write cosine\(end\)"),
        ("cosine(-5)", r"write cosine\(end\)"),
        ("cosine(nan)", r"write cosine\(end\)"),
        ("cosine(inf)", r"write cosine\(end\)"),
        ("cosine(1e-320)", r"write cosine\(end\)"),
        ("cosine(1, 2)", r"write cosine\(end\)"),
        ("cosine(ten)", r"write cosine\(end\)"),
        ("step(10)", r"write step\(every, factor\) .* like step\(100, 0.5\); a factor is above 0 and at most 1$"),
        ("step(10, 0)", "at most 1$"),
        ("step(10, 2)", "at most 1$"),
        ("step(0, 0.5)", "at most 1$"),
        ("inverse-sqrt(0)", r"like inverse-sqrt\(100\)$"),
        ("constant(1)", "write constant$"),
        ("linear(3)", r"write constant, step\(every, factor\), cosine\(end\) or inverse-sqrt\(scale\)$"),
        ("", "write constant, step"),
        ("cosine(10))", "write constant, step"),
    ],
)
def test_a_text_that_is_no_schedule_is_refused(text: str, rule: str) -> None:
    with pytest.raises(UserError, match=rf"^training.local_schedule is '.*'; .*{rule}"):
        Schedule.parse(text, "training.local_schedule")
