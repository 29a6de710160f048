"""The paper's experiments: its figures as they are printed, and Table 1 made in parts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from defedavg.paper.table1 import Choices, Rates, Table1, rows, to_csv, to_markdown

from defedavg import config
from defedavg.algorithms import ALGORITHMS
from defedavg.errors import UserError
from defedavg.paper.command import chosen
from defedavg.paper.facts import Cell, cells
from defedavg.sweep import Finished, Means, Measured
from test_cli import call, refuse

MANY = cells()


def test_all_cells_are_there_once() -> None:
    assert len(MANY) == len(set(MANY)) == 64
    assert sum(cell.seconds is None for cell in MANY) == 3  # printed as ">880" and ">1400"
    assert Cell("fashionmnist", "iid", "defedavg-iid", 10).seconds == 26.39
    assert Cell("cifar10", "non-iid", "favano", 80).seconds == 4751.8
    assert Cell("cifar10", "iid", "defedavg-iid", 10).rates == (1.0, 0.05)
    assert Cell("fashionmnist", "non-iid", "fedbuff", 10).rates == (0.1, 0.005)


@pytest.mark.parametrize("cell", MANY, ids=lambda cell: cell.label)
def test_every_cell_is_a_valid_run_with_the_rates_its_algorithm_has(cell: Cell) -> None:
    kind = ALGORITHMS[cell.algorithm]
    assert (cell.rates[0] is not None) == kind.uses_global_lr
    assert (cell.rates[1] is not None) == kind.uses_local_lr
    settings = Choices().settings(cell, cell.rates)
    assert settings.training.updates_per_round == cell.updates_per_round
    assert settings.training.local_steps == 50
    assert settings.clients.step_seconds == {"fashionmnist": 0.0017, "cifar10": 0.00314}[cell.dataset]
    assert settings.stop.target_accuracy == cell.target
    assert settings.stop.hits == 5
    assert settings.task.split == ("iid" if cell.setting == "iid" else "classes")
    if cell.rates[0] is not None:
        assert settings.training.global_lr == cell.rates[0]


def test_cells_are_chosen() -> None:
    assert chosen(None, None, None) == MANY
    assert {c.updates_per_round for c in chosen(["cifar10"], ["iid"], [10, 80])} == {10, 80}
    for wrong in ((["mnist"], None, None), (None, ["iidd"], None), (None, None, [11])):
        with pytest.raises(UserError):
            chosen(*wrong)


def small_settings(choices: Choices, cell: Cell, rates: Rates) -> config.Settings:
    """A small run in the place of one of the paper's."""
    tables: dict[str, Any] = {
        "algorithms": [cell.algorithm],
        "task": {"model": "softmax"},
        "clients": {"num_clients": 20},
        "training": {"updates_per_round": 4, "local_steps": 5},
        "stop": {"target_accuracy": 0.5, "hits": 5, "max_rounds": 12},
    }
    return config.study(tables).points()[0].settings


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Choices, "settings", small_settings)


def test_the_table_is_made_in_parts(small: None, tmp_path: Path) -> None:
    wanted, seeds = chosen(["fashionmnist"], ["iid"], [10]), [0, 1]
    rates = {cell: cell.rates for cell in wanted}
    table = Table1(tmp_path, Choices(), Means())
    assert len(table.missing(wanted, seeds)) == 8
    assert table.carry_out(table.missing(wanted, seeds)[:3], rates, lambda event: None) is True
    assert len(table.missing(wanted, seeds)) == 5

    def stop(event: Measured | Finished) -> None:
        if isinstance(event, Finished):
            raise KeyboardInterrupt

    assert table.carry_out(table.missing(wanted, seeds), rates, stop) is False
    left = len(table.missing(wanted, seeds))
    assert 0 < left < 5
    assert table.carry_out(table.missing(wanted, seeds), rates, lambda event: None) is True
    found = rows(table.results(wanted, seeds, rates))
    assert [row["algorithm"] for row in found] == ["fedavg", "favano", "asysg", "defedavg-iid"]
    assert all(row["seeds"] == 2 for row in found)
    whole = Table1(tmp_path / "whole", Choices(), Means())
    whole.carry_out(whole.missing(wanted, seeds), rates, lambda event: None)
    assert rows(whole.results(wanted, seeds, rates)) == found


def test_results_of_other_choices_are_not_mixed(small: None, tmp_path: Path) -> None:
    cell = MANY[0]
    table = Table1(tmp_path, Choices(), Means())
    table.carry_out([(cell, 0)], {cell: cell.rates}, lambda event: None)
    for other, rates in ((Choices(measure_seconds=1.0), cell.rates), (Choices(), (0.5, 0.5))):
        with pytest.raises(UserError, match="another --out"):
            Table1(tmp_path, other, Means()).results([cell], [0], {cell: rates})
    table.path(cell, 0).write_text("{half", encoding="utf-8")
    with pytest.raises(UserError, match="delete it"):
        table.results([cell], [0], {cell: cell.rates})


def entry(cell: Cell, **more: Any) -> dict[str, Any]:
    base = {
        "dataset": cell.dataset, "setting": cell.setting, "algorithm": cell.algorithm,
        "updates_per_round": cell.updates_per_round, "rates": list(cell.rates), "first_hit_seconds": None,
        "sustained_seconds": None, "diverged_at": None, "seconds": 900.0, "best_accuracy": 0.5,
    }  # fmt: skip
    return {**base, **more}


def test_rows_say_what_happened() -> None:
    cell = Cell("fashionmnist", "iid", "defedavg-iid", 10)
    other = replace(cell, algorithm="favano", updates_per_round=80)
    results = [
        entry(cell, first_hit_seconds=20.0, sustained_seconds=25.0),
        entry(cell, first_hit_seconds=30.0),
        entry(other, diverged_at=7),
        entry(other),
    ]
    ours, theirs = rows(results)
    assert ours["first_hit"] == 25.0
    assert ours["first_hit_sd"] == pytest.approx(50**0.5)
    assert (ours["sustained"], ours["sustained_reached"]) == (25.0, 1)
    assert ours["ratio"] == pytest.approx(25 / 26.39)
    assert theirs["ratio"] is None
    assert theirs["note"] == "diverged at round 7; not reached by 900 s (best 50.0 %)"
    text = to_markdown([ours, theirs])
    assert "25 ± 7.1 (2/2)" in text
    assert ">880" in text
    assert len(to_csv([ours, theirs]).splitlines()) == 3
    partly = rows([entry(cell, first_hit_seconds=20.0), entry(cell)])[0]
    assert partly["ratio"] is None  # a mean over the lucky seeds alone is no time to the target
    assert "not reached" in partly["note"]


def test_the_commands(tmp_path: Path) -> None:
    listed = call("paper", "list", "--json", cwd=tmp_path)
    assert len(json.loads(listed.stdout)) == 64
    refuse(call("paper", "table1", "--dataset", "mnist", cwd=tmp_path), "mnist", "fashionmnist")
    refuse(call("paper", "table1", "--n", "11", cwd=tmp_path), "11")
    refuse(call("paper", "table1", "--seeds", "0", cwd=tmp_path), "--seeds")
    missing = call("paper", "table1", "--n", "10", "--data-dir", tmp_path / "nowhere", cwd=tmp_path)
    assert missing.returncode == 2
    assert "defedavg data fetch fashionmnist" in missing.stderr
    assert not list((tmp_path / "results/paper/table1").rglob("*.json"))
