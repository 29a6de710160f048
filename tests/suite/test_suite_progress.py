"""The time left of the suite is that of the whole command."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from defedavg.cli import plain_lines
from defedavg.cli.suite_progress import SuiteProgress
from defedavg.experiments.compute import ComputeConfig
from defedavg.experiments.run_events import RunEvaluated, RunFinished, RunSpec
from defedavg.suite.benchmark import FLEETS, TASKS, SuiteCell, tuning_study
from defedavg.suite.cell_files import CellFiles
from defedavg.suite.suite_run import SuiteBatch, SuiteRequest
from defedavg.training import Evaluation

CELLS = tuple(SuiteCell(TASKS["digits-pairs"], FLEETS[name], "fedavg") for name in ("equal", "paper"))
ALONE = tuple((cell,) for cell in CELLS)
POINT = tuning_study(CELLS[:1]).points()[0]


class Commanded:
    """A command of two batches, each of one cell unless others are given, on a clock that the test sets."""

    def __init__(
        self,
        seconds: float | None = None,
        console: Console | None = None,
        batches: Sequence[tuple[SuiteCell, ...]] = ALONE,
    ) -> None:
        self.now = 100.0
        self.progress = SuiteProgress(console or Console(file=io.StringIO()), lambda: self.now)
        cells = tuple(cell for batch in batches for cell in batch)
        request = SuiteRequest(
            cells, CellFiles(Path("out")), Path("work"), ComputeConfig(), print, self.progress.watching
        )
        made = [SuiteBatch(request, batch) for batch in batches]
        self.rates, self.seeds, self.next_rates, self.next_seeds = (each for batch in made for each in batch.studies())
        self.progress.expect(made, None if seconds is None else dict.fromkeys(cells, seconds))

    def evaluated(self, run: int, share: float) -> RunEvaluated:
        """Return an evaluation of a run that has used a share of its rounds."""
        spec = RunSpec(POINT, POINT.settings, run)
        round_ = round(share * POINT.settings.stop.max_rounds)
        simulation = SimpleNamespace(task=SimpleNamespace(metric_name="accuracy"))
        first = Evaluation(0, 0.0, 0.1, 2.3, None, 0.0, 0, 0.0)
        return RunEvaluated(spec, cast(Any, simulation), replace(first, round=round_), None)

    def finish(self, *runs: int) -> None:
        for run in runs:
            self.progress.add(RunFinished(RunSpec(POINT, POINT.settings, run), cast(Any, None), 1.0))


def test_the_time_left_is_that_of_all_studies_at_the_speed_so_far() -> None:
    command = Commanded()  # each cell: six runs of half the length, and three whole ones
    command.progress.begin(command.rates, 6)
    assert command.progress.text() == "time left not known yet"
    command.now += 30
    command.finish(0, 1, 2)  # 1.5 of 12
    assert command.progress.text() == "about 3:30 left"
    command.finish(3, 4, 5)
    command.progress.begin(command.seeds, 3)
    command.now += 30
    command.progress.add(command.evaluated(0, 0.0))
    command.progress.add(command.evaluated(0, 0.5))  # 3.5 of 12 in a minute
    assert command.progress.left == pytest.approx(8.5)
    assert command.progress.text() == "about 2:26 left"


def test_a_run_that_ends_early_is_a_whole_one() -> None:
    command = Commanded()
    command.progress.begin(command.rates, 6)
    command.progress.add(command.evaluated(0, 0.0))
    command.progress.add(command.evaluated(0, 0.2))
    command.now += 10
    command.finish(0)
    assert command.progress.left == pytest.approx(11.5)


def test_before_enough_is_done_the_limit_of_the_estimate_is_shown() -> None:
    command = Commanded(seconds=600.0)
    command.progress.begin(command.rates, 6)
    command.now += 300
    command.progress.add(command.evaluated(0, 0.0))
    assert command.progress.text() == "at most 20:00 left"
    command.finish(0, 1, 2, 3, 4, 5)  # half of a cell, at half of the speed of the estimate
    command.now += 300
    assert command.progress.text() == "about 30:00 left"


def test_what_an_earlier_session_or_another_process_computes_is_neither_left_nor_done() -> None:
    command = Commanded()
    command.progress.begin(command.seeds, 2)  # the rates and a seed are stored
    command.progress.add(command.evaluated(0, 0.5))  # from a checkpoint
    assert command.progress.left == pytest.approx(1.5 + 6)
    command.now += 10
    command.finish(0)
    assert command.progress.text() == "about 2:20 left"
    command.progress.begin(command.next_rates, 6)
    assert command.progress.left == pytest.approx(6)


def test_batches_with_equal_titles_are_counted_apart() -> None:
    pairs = ("fedavg", "fedbuff"), ("mifa", "ace")
    batches = [tuple(replace(CELLS[0], algorithm=name) for name in names) for names in pairs]
    command = Commanded(batches=batches)
    assert command.rates.title == command.next_rates.title
    assert command.progress.left == pytest.approx(2 * (12 * 0.5 + 6))  # both batches: twelve runs of half the length
    command.progress.begin(command.rates, 12)
    assert command.progress.left == pytest.approx(24)
    command.progress.begin(command.next_rates, 12)  # the first batch was left to another process
    assert command.progress.left == pytest.approx(12)
    command.progress.begin(command.next_seeds, 6)
    assert command.progress.left == pytest.approx(6)


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_shown_has_the_time_of_the_command_and_none_of_a_run(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_lines, "QUIET_SECONDS", 0.0)
    console = Console(file=io.StringIO(), force_terminal=terminal, width=160, height=30, color_system=None)
    command = Commanded(600.0, console)
    with command.progress.watching(command.rates, 6) as watch:
        watch(command.evaluated(0, 0.0))
        watch(command.evaluated(0, 0.01))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "whole command: at most" in shown
    assert "digits-pairs, equal: fedavg, rates" in shown
    assert "left, at most" not in shown
    assert "0 of 6 runs" in shown
