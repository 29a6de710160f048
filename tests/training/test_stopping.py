"""The times at which a run first hits its target, and first holds it."""

from __future__ import annotations

import pytest

from defedavg.training import Evaluation, hit_times


def evaluations(accuracies: list[float | None]) -> list[Evaluation]:
    return [Evaluation(at, at / 2, accuracy, 1.0, None, 0.0, 0, 0.0) for at, accuracy in enumerate(accuracies)]


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ([], (None, None)),
        ([0.1, None, 0.4], (None, None)),
        ([0.1, 0.5, 0.4, 0.6], (0.5, None)),
        ([0.5, 0.6, 0.6, 0.6], (0.0, None)),
        ([0.5, 0.1, 0.6, 0.6, 0.6, 0.6, 0.6, 0.1], (0.0, 1.0)),
        ([0.1, *[0.5] * 9], (0.5, 0.5)),
    ],
)
def test_hit_times(accuracies: list[float | None], expected: tuple[float | None, float | None]) -> None:
    assert hit_times(evaluations(accuracies), 0.5) == expected
    assert hit_times(evaluations(accuracies), None) == (None, None)
