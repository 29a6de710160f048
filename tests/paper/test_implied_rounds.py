"""Rounds that Table 1 implies: planned round times against closed forms, and the stored table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from defedavg.cli.main import app
from defedavg.config.build import make_fleet
from defedavg.paper.implied_rounds import round_seconds, rows, to_markdown
from defedavg.paper.published import LOCAL_STEPS, Cell
from defedavg.paper.readings import Readings
from defedavg.paper.run_grid import Choices, PaperRun
from helpers.command_line import call, refuse

ROOT = Path(__file__).parents[2]


def job_seconds(cell: Cell, readings: Readings) -> np.ndarray:
    settings = Choices(readings=readings).settings(PaperRun(cell, cell.rates))
    return LOCAL_STEPS * make_fleet(settings, 0).step_times


@pytest.mark.parametrize("slowness", ["uniform(1, 5)", "inverse-uniform(1, 5)"])
@pytest.mark.parametrize("dataset", ["fashionmnist", "cifar10"])
def test_with_background_uploads_no_client_of_defedavg_iid_waits(dataset: str, slowness: str) -> None:
    cell, readings = Cell(dataset, "iid", "defedavg-iid", 10), Readings(slowness=slowness)
    arrivals_per_second = (1 / job_seconds(cell, readings)).sum()
    assert round_seconds(cell, readings, [0]) == pytest.approx(10 / arrivals_per_second, rel=0.01)


@pytest.mark.parametrize("n", [10, 40])
def test_a_round_of_fedavg_lasts_as_long_as_the_slowest_of_n_draws(n: int) -> None:
    cell, readings = Cell("fashionmnist", "iid", "fedavg", n), Readings()
    slowest_first = np.sort(job_seconds(cell, readings))
    at_most = (np.arange(101) / 100) ** n  # probability that all n draws are among the k fastest clients
    expected = (slowest_first * np.diff(at_most)).sum() + 2 * 2.2 * 8 / 400
    assert round_seconds(cell, readings, [0]) == pytest.approx(expected, rel=0.02)


def test_the_stored_table_is_what_the_command_prints(tmp_path: Path) -> None:
    stored = (ROOT / "results" / "paper" / "rounds.md").read_text(encoding="utf-8")
    some = [Cell("cifar10", "iid", "defedavg-iid", n) for n in (10, 80)]
    for line in to_markdown(rows(some, Readings(), range(3))).splitlines():
        assert line in stored.splitlines()
    assert stored in (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    options = ["--dataset", "cifar10", "--setting", "iid", "--n", "80", "--algorithm", "defedavg-iid"]
    (row,) = json.loads(call("paper", "rounds", *options, "--seeds", "1", "--json", cwd=tmp_path).stdout)
    assert row["implied_rounds"] == pytest.approx(154.26 / row["round_seconds"])
    refuse(call("paper", "rounds", "--seeds", "0", cwd=tmp_path), "--seeds is 0")


def test_the_progress_counts_the_cells_that_have_a_time() -> None:
    some = [Cell("fashionmnist", "iid", "favano", 80), *(Cell("fashionmnist", "iid", "fedavg", n) for n in (10, 20))]
    calls: list[tuple[int, int]] = []
    table = rows(some, Readings(), [0, 1], lambda done, number: calls.append((done, number)))
    assert calls == [(0, 2), (1, 2), (1, 2), (2, 2)]  # after every plan: a cell with many seeds is not silent
    assert table == rows(some, Readings(), [0, 1])


@pytest.mark.parametrize(("quiet", "lines"), [(0.0, 2), (3600.0, 0)])
def test_the_command_shows_its_progress_beside_the_table(
    quiet: float, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("defedavg.cli.plain_lines.QUIET_SECONDS", quiet)
    options = ["--dataset", "fashionmnist", "--setting", "iid", "--algorithm", "fedavg", "--n", "10", "--n", "20"]
    noted: list[str] = []
    monkeypatch.setattr("defedavg.cli.paper_readings_command.print_note", noted.append)
    done = CliRunner().invoke(app, ["paper", "rounds", *options, "--seeds", "1"])
    assert noted == ["planning: 1 of 2 cells", "planning: 2 of 2 cells"][:lines]
    some = [Cell("fashionmnist", "iid", "fedavg", n) for n in (10, 20)]
    assert done.stdout == to_markdown(rows(some, Readings(), [0]))


def test_only_the_sizes_of_table_1_have_rounds(tmp_path: Path) -> None:
    refuse(call("paper", "rounds", "--n", "5", cwd=tmp_path), "--n is 5", "10, 20, 40, 80")


def test_a_cell_without_a_time_in_the_paper_has_no_row() -> None:
    assert rows([Cell("fashionmnist", "iid", "favano", 80)], Readings(), [0]) == []
