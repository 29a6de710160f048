"""Other readings of the time model, scored by stored times and planned rounds."""

from __future__ import annotations

import math
from typing import Any

import pytest

from defedavg.paper import time_models
from defedavg.paper.implied_rounds import round_seconds
from defedavg.paper.published import Cell
from defedavg.paper.readings import Readings


def row(algorithm: str, times_of_paper: float | None, n: int = 10) -> dict[str, Any]:
    """Return a row of Table 1 with one seed that takes so many times the paper's seconds, or misses the target."""
    setting = "non-iid" if algorithm.endswith("niid") else "iid"
    paper = Cell("fashionmnist", setting, algorithm, n).seconds
    assert paper is not None
    seconds = None if times_of_paper is None else times_of_paper * paper
    times = {"first_hit": seconds, "sustained": seconds, "reached": int(seconds is not None)}
    cell = {"dataset": "fashionmnist", "setting": setting, "algorithm": algorithm, "updates_per_round": n}
    return {**cell, **times, "sustained_reached": times["reached"], "seeds": 1}


def test_times_are_scaled_by_planned_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(cell: Cell, readings: Readings, seeds: range) -> float:
        assert seeds == range(2)
        return 0.5 * cell.updates_per_round * (1.25 if readings.upload == "blocking" else 1.0)

    monkeypatch.setattr(time_models, "round_seconds", planned)
    table = [row("defedavg-iid", 1.0), row("defedavg-iid", 0.8, n=20), row("defedavg-niid", None), row("favano", 9.0)]
    found = {(each["slowness"], each["upload"]): each for each in time_models.scores(table, range(2))}
    assert len(found) == 4
    present, blocking = found["uniform(1, 5)", "background"], found["uniform(1, 5)", "blocking"]
    fifth, missed = (
        math.log(1.25),
        math.log(2.0),
    )  # the least factor, and that of a missed target, whose time is unknown
    assert present["algorithms"] == pytest.approx({"defedavg-iid": fifth / 2, "defedavg-niid": missed})
    assert blocking["algorithms"] == pytest.approx({"defedavg-iid": fifth / 2, "defedavg-niid": missed})
    assert present["first_hit"] == present["sustained"] == pytest.approx((fifth + missed) / 3)
    assert present["number"] == 3  # FAVANO is not scored
    assert "| uniform(1, 5) | blocking | 0.112 | 0.693 | 0.305 | 0.305 |" in time_models.to_markdown([blocking])


def test_uploads_that_occupy_the_client_lengthen_only_rounds_without_draws() -> None:
    """FedAvg waits for uploads under both readings, so its cell is planned once and keeps its error."""
    table = [row("fedavg", 1.1), row("defedavg-iid", 1.0)]
    present, blocking, *_ = time_models.scores(table, range(1))
    assert present["algorithms"] == pytest.approx({"fedavg": math.log(1.1), "defedavg-iid": 0.0})
    cell = Cell("fashionmnist", "iid", "defedavg-iid", 10)
    longer = round_seconds(cell, Readings(upload="blocking"), range(1)) / round_seconds(cell, Readings(), range(1))
    assert longer > 1.1
    assert blocking["algorithms"] == pytest.approx({"fedavg": math.log(1.1), "defedavg-iid": math.log(longer)})
