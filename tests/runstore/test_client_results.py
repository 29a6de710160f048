"""Figures over clients in closed form, and the files of clients in a run folder."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from defedavg.cli import main as cli
from defedavg.config.build import build_task
from defedavg.experiments.study_run import StudyRun
from defedavg.report.page import build
from defedavg.report.tables import result_tables
from defedavg.runstore.client_results import COLUMNS, client_figures, rank_correlation, read_client_rows
from defedavg.runstore.export import available, write_parquets
from defedavg.runstore.reader import read_run
from helpers.interrupted_studies import contents, entries, ignore, interrupted, study, uninterrupted
from helpers.page_data import page_data

SHARE = {"model": "softmax", "split": "classes", "client_test_share": 0.25}
FLEET = {"num_clients": 20, "joules_per_step": 0.5, "joules_per_byte": 1e-7}


def row(**more: Any) -> dict[str, Any]:
    return {**dict.fromkeys(COLUMNS), "client": 0, "user": "0", "test_samples": 4, **more}


def test_figures_of_clients_in_closed_form() -> None:
    rows = [
        row(client=i, accuracy=i / 20, loss=float(i), answer_seconds=20.0 - i, train_samples=7, updates=i // 2)
        for i in range(20)
    ]
    found = client_figures([*rows, row(client=20, test_samples=0)])
    assert (found["clients_evaluated"], found["clients_left_out"]) == (20, 1)
    assert found["client_accuracy_mean"] == pytest.approx(19 / 40)
    assert found["client_accuracy_worst_decile"] == pytest.approx(0.025)
    assert found["client_accuracy_best_decile"] == pytest.approx(0.925)
    assert found["client_accuracy_worst"] == 0.0
    assert found["client_accuracy_spread"] == pytest.approx(np.std(np.arange(20) / 20))
    assert (found["client_loss_mean"], found["client_loss_worst_decile"]) == (9.5, 18.5)
    assert found["client_correlation_slowness"] == pytest.approx(-1.0)
    assert found["client_correlation_samples"] is None
    assert found["client_correlation_updates"] == pytest.approx(
        rank_correlation([i // 2 for i in range(20)], range(20))
    )


def test_rank_correlation_with_ties() -> None:
    # The ranks are 1.5, 1.5, 3 and 1, 2, 3: deviations −½, −½, 1 and −1, 0, 1.
    assert rank_correlation([5, 5, 9], [0.1, 0.2, 7.0]) == pytest.approx(1.5 / (1.5 * 2.0) ** 0.5)


def test_figures_of_runs_without_accuracies_or_evaluated_clients() -> None:
    assert client_figures([row(test_samples=0)]) == {}
    found = client_figures([row(loss=2.0)])
    assert (found["client_loss_mean"], found["client_accuracy_mean"]) == (2.0, None)
    users = client_figures([row(test_samples=0), row(client=None, accuracy=0.5, loss=1.0)])
    assert (users["clients_evaluated"], users["clients_left_out"]) == (1, 0)


def test_a_damaged_file_of_clients_is_read_as_far_as_possible(tmp_path: Path) -> None:
    path = tmp_path / "clients.jsonl"
    assert read_client_rows(path) == ([], [])
    good = row(accuracy=0.5, loss=1e400, train_samples=True)
    path.write_text("\n".join([json.dumps(good), "{", json.dumps({"user": 3, "test_samples": 1})]) + "\n")
    rows, notes = read_client_rows(path)
    assert rows == [row(accuracy=0.5)]
    assert len(notes) == 2
    assert notes[1] == "clients.jsonl: left out 1 line without a client"


def test_a_run_stores_what_each_client_gets_and_a_resumed_one_the_same(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    chosen = study(task=SHARE, clients=FLEET)
    uninterrupted(whole, chosen)
    interrupted(resumed, chosen)
    assert StudyRun(chosen, resumed, resume=True).run(ignore)
    assert entries(whole) == entries(resumed)
    assert len(contents(whole, "clients")) == 4
    assert contents(whole, "clients") == contents(resumed, "clients")

    folder = read_run(whole)
    task = build_task(chosen.points()[0].settings, 0)
    for entry in folder.runs:
        rows, notes = folder.client_rows(entry)
        assert (len(rows), notes) == (20, [])
        assert [one["train_samples"] for one in rows] == [len(part) for part in task.clients]
        assert entry.numbers["client_accuracy_mean"] == pytest.approx(np.mean([one["accuracy"] for one in rows]))
        joules = [one["joules"] for one in rows]
        assert entry.numbers["energy_joules"] == pytest.approx(sum(joules))
        assert entry.numbers["client_energy_most"] == max(joules)
        assert sum(one["updates"] for one in rows) == entry.numbers["updates_trained"]
    shown = page_data(build([whole]))["groups"][0]["series"][0]["clients"]
    assert len(shown["points"]["slowness"]["x"]) == 40
    assert shown["points"]["samples"] is None  # all clients have the same number
    assert shown["figures"]["clients_evaluated"] == 20


def test_tables_and_export_have_clients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = StudyRun(study(task=SHARE, clients=FLEET, algorithms=["fedbuff"]), tmp_path / "study")
    assert run.run(ignore)
    results, clients = result_tables("study", run.entries)
    assert (results.title, clients.title) == ("study", "clients")
    headings = [str(column.header) for column in clients.columns]
    assert {"worst decile (%)", "worst client (%)", "ρ slowness", "energy (J)"} <= set(headings)
    cli.app(["runs", "table", "study", "--csv", "--out", str(tmp_path)], standalone_mode=False)
    (table,) = csv.DictReader(capsys.readouterr().out.splitlines())
    means = [entry["client_accuracy_mean"] for entry in run.entries]
    assert float(table["client_accuracy_mean_percent_mean"]) == pytest.approx(100 * np.mean(means))
    write_parquets(run.folder)
    cli.app(["runs", "export", str(tmp_path / "all.csv"), "--clients", "--out", str(tmp_path)], standalone_mode=False)
    with (tmp_path / "all.csv").open() as file:
        found = list(csv.DictReader(file))
    assert [int(one["client"]) for one in found] == [*range(20), *range(20)]
    assert {one["seed"] for one in found} == {"0", "1"}
    if available():
        import pyarrow.parquet as pq

        assert pq.read_table(run.folder / "clients.parquet").num_rows == 40
