"""``defedavg runs``: what is kept is found, told apart, exported and removed, whatever state it is in."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from defedavg.cli.main import app
from defedavg.config import study as config
from defedavg.errors import UserError
from defedavg.experiments.study_run import StudyRun
from defedavg.runstore.export import COLUMNS
from defedavg.runstore.reader import find_runs, locate_run, read_run
from defedavg.runstore.writer import remove_runs
from helpers.command_line import call as run_command
from helpers.command_line import refuse
from helpers.strategies import bounded

STUDY = """
name = "{name}"
algorithms = ["fedavg", "defedavg-iid"]
seeds = [0, 1]
[task]
model = "softmax"
[clients]
num_clients = 8
[training]
updates_per_round = [2, 4]
local_steps = 2
local_lr = {rate}
[stop]
max_rounds = 2
[fedavg]
local_steps = 3
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two real runs, one of them in a folder of its own."""
    root = tmp_path_factory.mktemp("kept")
    for name, rate in (("one", 0.05), ("deep/two", 0.1)):
        file = root / "study.toml"
        file.write_text(STUDY.format(name=Path(name).name, rate=rate))
        assert StudyRun(config.load(file), root / "runs" / name).run(lambda event: None)
    return root / "runs"


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    """A copy that may be spoilt."""
    shutil.copytree(made, tmp_path / "runs")
    return tmp_path / "runs"


def call(*words: str | Path, fails: str | None = None) -> Any:
    """The answer in JSON; with ``fails``, the one error that is said."""
    if fails is not None:
        with pytest.raises(UserError, match=fails):
            CliRunner().invoke(app, ["runs", *map(str, words)], catch_exceptions=False, standalone_mode=False)
        return None
    done = CliRunner().invoke(app, ["runs", *map(str, words), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_runs_are_listed_a_line_per_setting(made: Path) -> None:
    rows = call("list", "--out", made)
    assert [row["name"] for row in rows] == ["deep/two"] * 4 + ["one"] * 4
    assert [row["label"] for row in rows[:2]] == ["fedavg updates_per_round=2", "fedavg updates_per_round=4"]
    for row in rows:
        summary = json.loads((made / row["name"] / "summary.json").read_text())["runs"]
        own = [entry for entry in summary if entry["label"] == row["label"]]
        best = [entry["best_accuracy"] for entry in own]
        assert row["best_accuracy"] == fmean(best)
        assert row["best_accuracy_sd"] == stdev(best)
        assert (row["task"], row["seeds"], row["status"]) == ("mnist5k/softmax/iid", 2, "finished")
        assert row["ended_by"] == ["max_rounds"]
        assert row["time_to_target"] is None
    shown = CliRunner().invoke(app, ["runs", "list", "--out", str(made)])
    assert shown.exit_code == 0
    assert "deep/two" in shown.stdout
    assert "mnist5k/softmax/iid" in shown.stdout


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (("--algorithm", "fedavg"), 4),
        (("--algorithm", "asysg"), 0),
        (("--where", "local_lr=0.1"), 4),
        (("--where", "training.local_lr=0.05", "--algorithm", "fedavg"), 2),
        (("--where", "updates_per_round=4"), 4),
        (("--where", "local_steps=3"), 4),  # what an algorithm's own table says counts
        (("--where", "local_steps=2", "--where", "training.updates_per_round=2"), 2),
        (("--where", "task.data=mnist5k"), 8),
        (("--where", "split='iid'"), 8),
        (("--where", "model=cnn"), 0),
        (("--status", "finished"), 8),
        (("--status", "max_rounds"), 8),
        (("--status", "damaged"), 0),
        (("--status", "diverged"), 0),
        (("--where", "replacement=true"), 4),  # a default of an algorithm's own settings
        (("--where", "fedavg.replacement=false"), 0),
        (("--where", "fedbuff.concurrency=50"), 0),  # a setting that no run has
    ],
)
def test_runs_are_filtered(made: Path, words: tuple[str, ...], count: int) -> None:
    assert len(call("list", "--out", made, *words)) == count


def test_filters_that_can_match_nothing_are_refused(made: Path, tmp_path: Path) -> None:
    call("list", "--out", made, "--where", "local_rl=1", fails="did you mean 'local_lr'")
    call("list", "--out", made, "--where", "local_lr", fails="key=value")
    call("list", "--out", made, "--where", "foo=5", fails="unknown setting 'foo'; `defedavg settings` lists them")
    call("list", "--out", made, "--algorithm", "fedavgg", fails="did you mean 'fedavg'")
    call("list", "--out", made, "--status", "finnished", fails="unknown status 'finnished'; did you mean 'finished'")
    call("list", "--out", tmp_path / "no", fails="there is no folder")
    assert call("list", "--out", tmp_path) == []


def test_a_folder_without_dated_files_has_no_date(tmp_path: Path) -> None:
    (tmp_path / "runs" / "killed" / ".previous").mkdir(parents=True)
    (tmp_path / "runs" / "killed" / ".previous" / "config.toml").touch()
    (row,) = call("list", "--out", tmp_path / "runs")
    assert row["changed"] is None
    shown = run_command("runs", "list", cwd=tmp_path)
    assert "killed" in shown.stdout
    assert "1970" not in shown.stdout


def test_runs_are_compared(made: Path) -> None:
    found = call("compare", "one", "deep/two", "--out", made)
    assert found["runs"] == ["one", "deep/two"]
    assert found["settings"] == {"training.local_lr": [0.05, 0.1]}
    assert next(iter(found["results"])) == "fedavg updates_per_round=2"
    for pair in found["results"].values():
        assert all(row["best_accuracy"] > 0 for row in pair)
    shown = CliRunner().invoke(app, ["runs", "compare", "one", "deep/two", "--out", str(made)])
    assert shown.exit_code == 0
    assert "training.local_lr" in shown.stdout
    call("compare", "one", "one", "--out", made, fails="at least two")
    call("compare", "one", "three", "--out", made, fails="no run 'three'")


def test_searches_are_compared_by_pairs_of_rates(tmp_path: Path) -> None:
    small = {"task.model": "softmax", "clients.num_clients": 4, "training.updates_per_round": 2, "stop.max_rounds": 2}
    settings = {**small, "training.local_steps": 1, "stop.target_accuracy": 0.9}
    sets = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    (tmp_path / "study.toml").write_text('algorithms = ["fedavg"]\n')
    for name in ("one", "two"):
        done = run_command("tune", "study.toml", *sets, "--set", f"name={name}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    found = call("compare", "one-tune", "two-tune", "--out", tmp_path / "runs")["results"]
    assert len(found) > 1
    assert all(label.startswith("fedavg η=") for label in found)
    assert all(row["best_accuracy"] > 0 for pair in found.values() for row in pair)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("local_steps=abc", "local_steps is 'abc'; it must be a whole number"),
        ("training.local_lr=true", "training.local_lr is True; it must be a number"),
        ("nesterov=1", "nesterov is 1; it must be true or false"),
        ("fedavg.replacement=x", "fedavg.replacement is 'x'; it must be true or false"),
    ],
)
def test_a_value_that_no_run_can_have_is_refused(made: Path, where: str, words: str) -> None:
    call("list", "--where", where, "--out", made, fails=words)


@pytest.mark.parametrize("where", ["local_steps=77", "local_steps=2.0", "local_lr=1", "model=1", "timeout_seconds=inf"])
def test_a_value_that_a_run_could_have_is_not_refused(made: Path, where: str) -> None:
    call("list", "--where", where, "--out", made)


def test_the_parquet_file_has_every_measurement(made: Path, tmp_path: Path) -> None:
    said = call("export", tmp_path / "new" / "all.parquet", "--out", made)
    table = pd.read_parquet(tmp_path / "new" / "all.parquet")
    assert tuple(table.columns) == COLUMNS
    assert (said["runs"], said["rows"], said["unread_lines"]) == (2, len(table), 0)
    for name in ("one", "deep/two"):
        lines = [json.loads(line) for line in (made / name / "metrics.jsonl").read_text().splitlines()]
        own = table[table["run"] == name]
        assert len(own) == len(lines)
        for column in ("algorithm", "seed", "round", "seconds", "accuracy", "loss", "updates", "staleness"):
            assert own[column].tolist() == [line[column] for line in lines]
        assert own["updates_per_round"].tolist() == [line["training.updates_per_round"] for line in lines]
        assert own["train_loss"].isna().all()
        assert set(own["status"]) == {"max_rounds"}
        assert set(own["local_lr"]) == {0.05 if name == "one" else 0.1}
        steps = own["local_steps"].to_numpy()
        assert (steps == np.where(own["algorithm"] == "fedavg", 3, 2)).all()
        assert json.loads(own["swept"].iloc[0]) == {"training.updates_per_round": 2}
    some = call("export", tmp_path / "some.parquet", "--out", made, "--algorithm", "fedavg", "--where", "local_lr=0.1")
    table = pd.read_parquet(tmp_path / "some.parquet")
    assert set(zip(table["run"], table["algorithm"], strict=True)) == {("deep/two", "fedavg")}
    assert some["rows"] == len(table)
    call("export", tmp_path / "x.parquet", "--out", made, "--status", "diverged", fails="no such run")
    (tmp_path / "file").write_text("")
    call("export", tmp_path / "file" / "x.parquet", "--out", made, fails="cannot be written")
    assert not list(tmp_path.glob("*.part"))


def test_csv_and_json_have_the_rows_and_columns_of_parquet(runs: Path, tmp_path: Path) -> None:
    metrics = runs / "one" / "metrics.jsonl"
    first, *lines = metrics.read_text().splitlines(keepends=True)
    odd = json.loads(first) | {"accuracy": None, "loss": float("nan"), "label": 'a "b",\nη=1'}
    metrics.write_text("".join([json.dumps(odd) + "\n", *lines]))  # NaN is not JSON, but Python writes it
    config_file = runs / "one" / "config.toml"
    config_file.write_text(config_file.read_text().replace("local_lr = 0.05", "local_lr = nan"))
    for ending in ("parquet", "csv", "JSON"):
        said = call("export", tmp_path / f"all.{ending}", "--out", runs)
        assert said["file"].endswith(ending)
    whole = pd.read_parquet(tmp_path / "all.parquet")
    table = pd.read_csv(tmp_path / "all.csv")
    records = json.loads((tmp_path / "all.JSON").read_text(), parse_constant=lambda word: pytest.fail(word))
    assert tuple(table.columns) == COLUMNS
    assert all(tuple(record) == COLUMNS for record in records)
    assert len(whole) == len(table) == len(records) == said["rows"]
    for name in COLUMNS:
        expected = [None if value is None or value != value else value for value in whole[name].tolist()]
        assert [record[name] for record in records] == expected
        shown = [None if value != value else value for value in table[name].tolist()]
        assert shown == expected, name
    (changed,) = [record for record in records if record["label"] == 'a "b",\nη=1']
    assert [changed[name] for name in ("accuracy", "loss", "train_loss", "local_lr")] == [None] * 4


def test_the_ending_chooses_the_format(made: Path, tmp_path: Path) -> None:
    for name in ("all.xlsx", "all", "all.parquet.gz", "."):
        refuse(run_command("runs", "export", name, "--out", made, cwd=tmp_path), ".parquet, .csv or .json")
    assert list(tmp_path.iterdir()) == []
    assert run_command("runs", "export", "all.csv", "--out", made, cwd=tmp_path).returncode == 0
    assert (tmp_path / "all.csv").read_text().startswith("run,algorithm,label,")


def test_a_json_file_without_rows_is_an_empty_list(runs: Path, tmp_path: Path) -> None:
    for name in ("one", "deep/two"):
        (runs / name / "metrics.jsonl").write_text("")
    call("export", tmp_path / "none.json", "--out", runs)
    assert json.loads((tmp_path / "none.json").read_text()) == []


def test_only_parquet_needs_pyarrow(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("defedavg.runstore.export.find_spec", lambda name: None)
    assert call("export", tmp_path / "x.csv", "--out", made)["rows"] > 0
    assert call("export", tmp_path / "x.json", "--out", made)["rows"] > 0


def test_without_pyarrow_one_line_says_what_to_do(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("defedavg.runstore.export.find_spec", lambda name: None)
    call("export", tmp_path / "x.parquet", "--out", made, fails=r"pip install 'defedavg\[parquet\]'")
    assert list(tmp_path.iterdir()) == []


# Damage.


@pytest.mark.parametrize("file", ["config.toml", "summary.json"])
@pytest.mark.parametrize("how", ["gone", "empty", "half", "noise", "folder", "link"])
def test_a_damaged_run_is_listed_with_what_is_wrong(runs: Path, file: str, how: str) -> None:
    path = runs / "one" / file
    data = path.read_bytes()
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "link":
        path.symlink_to(runs / "deep" / "two" / file)
    elif how != "gone":
        half = data[: len(data) // 2]
        half = half[: half.rfind(b"=") + 1] or half  # the first half of a TOML file may be one, up to the end of a line
        path.write_bytes({"empty": b"", "half": half, "noise": b"\xff\x00\x80[{"}[how])
    rows = [row for row in call("list", "--out", runs) if row["name"] == "one"]
    assert rows
    if (file, how) == ("config.toml", "empty"):
        assert all(row["task"] is None for row in rows)  # TOML that says nothing
    else:
        assert all(row["status"] == "damaged" and file in row["problem"] for row in rows)
    call("compare", "one", "deep/two", "--out", runs)


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_without_its_evaluations_is_damaged(runs: Path, finished: bool) -> None:
    folder = runs / "one"
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "finished": finished}))
    (folder / "metrics.jsonl").unlink()
    rows = [row for row in call("list", "--out", runs) if row["name"] == "one"]
    assert {(row["status"], row["problem"]) for row in rows} == {("damaged", "metrics.jsonl is missing")}
    assert "metrics.jsonl is missing" in read_run(folder).notes


@pytest.mark.parametrize("entries", [[], [{"label": "fedavg", "algorithm": "fedavg", "seed": 0, "status": "stalled"}]])
def test_a_run_that_has_no_evaluation_yet_is_unfinished(runs: Path, entries: list[dict[str, Any]]) -> None:
    folder = runs / "one"
    (folder / "summary.json").write_text(json.dumps({"name": "one", "finished": False, "runs": entries}))
    (folder / "metrics.jsonl").unlink()
    assert read_run(folder).status == "unfinished"
    (folder / "metrics.jsonl").touch()
    (folder / "summary.json").write_text(json.dumps({"name": "one", "finished": True, "runs": entries}))
    assert read_run(folder).status == "finished"


@bounded(30)
@given(st.binary(max_size=200) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["runs", "label", "swept", "seed", "status", "algorithm", "best"]), inner),
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_any_bytes_are_read_or_named(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("any") / "run"
    folder.mkdir()
    for name in ("config.toml", "summary.json", "metrics.jsonl"):
        (folder / name).write_bytes(data)
    found = read_run(folder, folder.parent)
    assert found.status in ("finished", "unfinished", "damaged")
    found.metrics()
    call("list", "--out", folder.parent)


def test_lines_that_cannot_be_read_are_left_out_and_counted(runs: Path, tmp_path: Path) -> None:
    path = runs / "one" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], "{half", "\n", '{"algorithm": 3}\n', *lines[1:], lines[0][:20]]))
    assert call("export", tmp_path / "x.parquet", "--out", runs)["unread_lines"] == 3
    assert (pd.read_parquet(tmp_path / "x.parquet")["run"] == "one").sum() == len(lines)


@pytest.mark.parametrize("field", ["round", "updates"])
def test_lines_with_negative_counts_are_left_out_and_counted(runs: Path, field: str) -> None:
    path = runs / "one" / "metrics.jsonl"
    first, *others = path.read_text().splitlines(keepends=True)
    path.write_text("".join([json.dumps({**json.loads(first), field: -5}) + "\n", *others]))
    result = run_command("report", runs / "one", "-o", "page.html", cwd=runs)
    assert result.returncode == 0, result.stderr
    assert result.stderr.strip().endswith("metrics.jsonl: 1 damaged line left out")


# Removing.


def test_a_run_is_removed_and_nothing_else(runs: Path) -> None:
    (runs / "deep" / "two" / "mine.txt").write_text("kept")
    call("remove", "one", "--out", runs, fails="--yes")  # standard input is no terminal here
    assert (runs / "one").is_dir()
    assert call("remove", "one", "deep/two", "--out", runs, "--yes") == [
        {"name": "one", "kept": []},
        {"name": "deep/two", "kept": ["mine.txt"]},
    ]
    assert not (runs / "one").exists()
    assert [path.name for path in (runs / "deep" / "two").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(("answer", "stays"), [("n\n", True), ("y\n", False)])
def test_removing_asks_first(runs: Path, monkeypatch: pytest.MonkeyPatch, answer: str, stays: bool) -> None:
    monkeypatch.setattr("defedavg.cli.runs_command.asking", lambda: True)
    done = CliRunner().invoke(app, ["runs", "remove", "one", "--out", str(runs)], input=answer)
    assert done.exit_code == (1 if stays else 0)
    assert (runs / "one").exists() == stays


def test_what_is_no_run_is_not_removed(runs: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(runs / "one", other)
    (runs / "plain").mkdir()
    (runs / "plain" / "plans").mkdir()
    (runs / "link").symlink_to(other)
    (runs / "up").symlink_to(tmp_path)
    for name, says in (
        ("plain", "not a run folder"),
        ("link", "is a link"),
        ("up/other", "is a link"),
        ("../other", "not the name of a run"),
        (str(other), "not the name of a run"),
        ("", "not the name of a run"),
        ("three", "no run 'three'"),
        ("deep", "not a run folder"),
    ):
        call("remove", "one", name, "--yes", "--out", runs, fails=says)
    assert (runs / "one").is_dir()  # all or nothing
    assert sorted(p.name for p in other.iterdir()) == sorted(p.name for p in (runs / "one").iterdir())
    assert "link" not in [run.name for run in find_runs(runs)]


def test_a_run_is_removed_with_what_a_killed_process_left(runs: Path) -> None:
    (runs / "one" / "summary.json.part").write_text("half")
    assert call("remove", "one", "--out", runs, "--yes") == [{"name": "one", "kept": []}]
    assert not (runs / "one").exists()


def test_links_in_a_run_are_removed_and_not_followed(runs: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    (runs / "one" / "plots").symlink_to(outside)
    (runs / "one" / "plans" / "way-out").symlink_to(outside)
    (runs / "one" / "summary.json").unlink()
    (runs / "one" / "summary.json").symlink_to(outside / "precious")
    assert remove_runs([locate_run(runs, "one").path]) == [[]]
    assert (outside / "precious").read_text() == "x"
    assert not os.path.lexists(runs / "one")
