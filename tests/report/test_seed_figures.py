"""Figures over seeds: the same definition, name and text wherever they are shown."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from defedavg.cli.main import app
from defedavg.report import tables
from defedavg.report.dashboard.run_index import RunIndex
from defedavg.report.page import asset, build
from defedavg.report.seed_figures import SeedFigure, outcomes, over_seeds, time_to_target
from defedavg.runstore.reader import read_run
from helpers.command_line import call
from helpers.page_data import page_data
from helpers.run_folders import make_folder, rendered


def seed(hit: float | None = None, status: str = "max_rounds", diverged: int | None = None, **more: Any) -> Any:
    return {"target_accuracy": 0.8, "first_hit_seconds": hit, "status": status, "diverged_at": diverged, **more}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], "–"),
        ([None], "–"),
        ([4.99249], "4.992"),
        ([4.0, 5.0, 6.0], "5.0 ± 1.0"),  # sample deviation: (1 + 0 + 1) / 2 = 1
        ([1.0, 2.0], "1.50 ± 0.71"),
        ([3.0, None, 3.0], "3 ± 0"),
        ([100.0, 400.0], "250 ± 212"),
        ([1.0, 1.0 + 1e-9], "1 ± 7.1e-10"),
    ],
)
def test_mean_and_sample_deviation(values: list[float | None], text: str) -> None:
    assert over_seeds([{"x": value} for value in values], "x").text() == text


@pytest.mark.parametrize("huge", [1e308, -1e308, pytest.param(10**400, id="integer")])
def test_a_number_whose_sums_overflow_counts_as_unknown(huge: float) -> None:
    figure = over_seeds([{"x": huge}, {"x": huge}, {"x": 3.0}], "x", 100.0)
    assert (figure.count, figure.mean, figure.sd) == (1, 300.0, None)


@pytest.mark.parametrize("words", [("list",), ("compare", "study", "other"), ("table", "study", "other")])
def test_stored_numbers_whose_sums_overflow_are_shown_as_unknown(tmp_path: Path, words: tuple[str, ...]) -> None:
    make_folder(tmp_path / "runs", "other", rounds=3)
    path = make_folder(tmp_path / "runs", "study", rounds=3) / "summary.json"
    summary = json.loads(path.read_text())
    for entry in summary["runs"]:
        entry |= {name: 1e308 for name, value in entry.items() if isinstance(value, float)}
    path.write_text(json.dumps(summary))
    result = call("runs", *words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "–" in result.stdout
    assert "inf" not in result.stdout
    assert "e+308" not in result.stdout


def test_the_deviation_divides_by_n_minus_one() -> None:
    figure = over_seeds([{"x": 0.80}, {"x": 0.82}, {"x": 0.87}], "x", 100.0)
    assert figure.mean == pytest.approx(83.0)
    assert figure.sd == pytest.approx(13**0.5)  # (9 + 1 + 16) / 2
    assert figure.text(".1f") == "83.0 ± 3.6"
    assert SeedFigure(1, 82.44, None).text(".1f") == "82.4"


@pytest.mark.parametrize(
    ("seeds", "text"),
    [
        ([seed(), seed(), seed(), seed(), seed()], "0 of 5 seeds"),
        ([seed()], "0 of 1 seed"),
        ([seed(4.0), seed(6.0), seed()], "5.0 ± 1.4 s, 2 of 3 seeds"),
        ([seed(4.0), seed()], "4 s, 1 of 2 seeds"),
        ([seed(4.0), seed(6.0)], "5.0 ± 1.4 s"),
        ([seed(2.5)], "2.5 s"),
        ([seed(status="diverged", diverged=7), seed(status="diverged", diverged=9)],
         "0 of 2 seeds, 2 diverged at round 7, 9"),
        ([seed(4.0), seed(status="dropped"), seed(status="interrupted")],
         "4 s, 1 of 3 seeds, 1 dropped, 1 interrupted"),
        ([seed(4.0, "diverged", 9)], "4 s, 1 of them diverged later"),
        ([{**seed(), "target_accuracy": None}], "–"),
    ],
)  # fmt: skip
def test_the_time_to_the_target_states_how_many_seeds_reached_it(seeds: list[Any], text: str) -> None:
    assert time_to_target(seeds) == text


STATUS = st.sampled_from(["target", "max_rounds", "max_seconds", "diverged", "stalled", "interrupted", "dropped", "x"])
SEED = st.builds(seed, st.none() | st.floats(0, 9), STATUS, st.none() | st.integers(1, 9))


@given(st.lists(SEED, max_size=9))
def test_every_seed_has_exactly_one_outcome(seeds: list[Any]) -> None:
    counts = outcomes(seeds)
    assert sum(counts.values()) == len(seeds)
    assert counts.get("reached", 0) == sum(each["first_hit_seconds"] is not None for each in seeds)


def test_the_best_accuracy_is_the_same_everywhere(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "one", seeds=(0, 1, 2))
    make_folder(tmp_path, "two", seeds=(0, 1, 2))
    entries = json.loads((folder / "summary.json").read_text())["runs"]
    texts = {}
    for name in ("fedavg", "defedavg-niid"):
        best = [100 * entry["best_accuracy"] for entry in entries if entry["label"] == name]
        texts[name] = SeedFigure(3, statistics.mean(best), statistics.stdev(best)).text()
    for entry in entries:
        entry["participation"] = [1.0, 1.0]
        entry["updates_started"] = 1
    run = rendered(tables.result_table("one", entries))
    listed = CliRunner().invoke(app, ["runs", "list", "--out", str(tmp_path)], env={"COLUMNS": "200"}).stdout
    compared = CliRunner().invoke(app, ["runs", "compare", "one", "two", "--out", str(tmp_path)]).stdout
    table = CliRunner().invoke(app, ["runs", "table", "one", "--out", str(tmp_path), "--csv"]).stdout
    (group,) = page_data(build([folder]))["groups"]
    (viewed, *_) = RunIndex(tmp_path).list()
    for name, text in texts.items():
        assert f"{text} %" in run
        assert f"{text} %" in listed
        assert f"{text} %" in compared
        (series,) = [each for each in group["series"] if each["name"] == name]
        assert series["accuracy_text"] == f"{text} %"
        best = [100 * entry["best_accuracy"] for entry in entries if entry["label"] == name]
        assert str(statistics.fmean(best)) in table
    assert viewed["best_accuracy"] == f"{texts['fedavg']} %"  # the most accurate setting
    for shown in (run, listed, compared, asset("page.js"), asset("view.js")):
        assert "best accuracy" in shown
    rows = json.loads(CliRunner().invoke(app, ["runs", "list", "--out", str(tmp_path), "--json"]).stdout)
    best = [entry["best_accuracy"] for entry in entries if entry["label"] == "fedavg"]
    assert rows[0]["best_accuracy"] == statistics.fmean(best)
    assert rows[0]["best_accuracy_sd"] == statistics.stdev(best)


def test_a_target_that_no_seed_reached_is_a_count_everywhere(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "one", seeds=(0, 1, 2, 3, 4), target=0.99)
    make_folder(tmp_path, "two", seeds=(0, 1, 2, 3, 4), target=0.99)
    entries = json.loads((folder / "summary.json").read_text())["runs"]
    for entry in entries:
        entry.update(participation=[1.0, 1.0], updates_started=1, seconds=entry["seconds"] + entry["seed"])
    for shown in (
        rendered(tables.result_table("one", entries)),
        *(CliRunner().invoke(app, ["runs", *words, "--out", str(tmp_path)], env={"COLUMNS": "200"}).stdout
          for words in (["list"], ["compare", "one", "two"], ["table", "one", "--markdown"])),
    ):  # fmt: skip
        assert "0 of 5" in shown
        assert "not by" not in shown
    (group,) = page_data(build([folder]))["groups"]
    assert [series["time_text"] for series in group["series"]] == ["0 of 5 seeds", "0 of 5 seeds"]


def test_a_seed_of_a_search_is_not_counted_as_hit_and_as_dropped(tmp_path: Path) -> None:
    """A run that touched the target without holding it has a first hit; its pair was dropped all the same."""
    record = {
        "label": "fedavg η=1", "algorithm": "fedavg", "swept": {}, "global_lr": 1.0, "local_lr": None,
        "target_accuracy": 0.8, "sustained_seconds": None, "best_accuracy": 0.81, "diverged_at": None, "rounds": 9,
        "seconds": 5.0,
    }  # fmt: skip
    touched = {**record, "seed": 0, "status": "dropped", "first_hit_seconds": 4.0, "hit_seconds": None}
    held = {**record, "seed": 1, "status": "target", "first_hit_seconds": 2.0, "hit_seconds": 3.0}
    folder = tmp_path / "search"
    folder.mkdir()
    (folder / "config.toml").write_text('name = "search"\nalgorithms = ["fedavg"]\nseeds = [0, 1]\n')
    (folder / "summary.json").write_text('{"name": "search", "finished": true, "best": []}')
    (folder / "points.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (touched, held)))
    entries = read_run(folder).entries
    shown = rendered(tables.tuning_table("search", entries, []))
    assert "3 s, 1 of 2 seeds, 1 dropped" in shown
    assert "1 dropped, 1 reached" in shown
    (group,) = page_data(build([folder]))["groups"]
    assert group["series"][0]["time_text"] == "3 s, 1 of 2 seeds, 1 dropped"
    assert group["series"][0]["hits"] == 1
