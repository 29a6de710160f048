"""Numbers in the messages of ``defedavg paper``: singular and plural."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from defedavg.cli import paper_readings_command
from defedavg.paper import comparison, infer_report, run_request
from defedavg.paper.infer import HELD_OUT, TIMES
from defedavg.paper.run_request import PaperRequest


def row(number: int) -> dict[str, Any]:
    times = {"first_hit": 7.0, "sustained": 8.0, "reached": 1, "sustained_reached": 1}
    return {**asdict(HELD_OUT[number]), **times, "seeds": 1}


@pytest.mark.parametrize(("number", "words"), [(1, "the 1 cell that both have"), (2, "the 2 cells that both have")])
def test_a_comparison_counts_the_cells_that_both_tables_have(number: int, words: str) -> None:
    short, long = [row(i) for i in range(number)], [row(i) for i in range(3)]
    assert f"later, {words}:" in comparison.to_markdown({"earlier, some": short, "later, more": long})


@pytest.mark.parametrize(
    ("number", "words"), [(1, "The best 1 of 1 combination:"), (2, "The best 2 of 2 combinations:")]
)
def test_a_report_counts_the_combinations_of_a_stage(number: int, words: str) -> None:
    combination = {"normalise": "symmetric", **dict.fromkeys(TIMES, 0.1)}
    stage = {"title": "one", "cells": ["a"], "alternatives": [], "combinations": [combination] * number}
    assert words in infer_report.to_markdown({"readings": {}, "stages": [stage], "cells": []})


@pytest.mark.parametrize(("number", "words"), [(1, "rates to tune: 1 cell"), (2, "rates to tune: 2 cells")])
def test_tuning_counts_the_cells_without_rates(
    number: int, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    searched = SimpleNamespace(runs=0, run=lambda *_: True)
    monkeypatch.setattr(run_request, "RateSearch", lambda *_: searched)
    lines: list[str] = []
    PaperRequest(tmp_path, tuple(HELD_OUT[:number]), range(1), notify=lines.append).tuned_rates()
    assert lines == [words]


def test_planning_counts_the_cells(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(paper_readings_command, "LineTimer", lambda: SimpleNamespace(due=lambda: True))
    with paper_readings_command._planning() as report:
        report(1, 1)
        report(1, 2)
    assert capsys.readouterr().err.splitlines() == ["planning: 1 of 1 cell", "planning: 1 of 2 cells"]
