"""A text task with a metric of its own on the command line and in studies; bad tasks are one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from defedavg.config import study as config
from defedavg.experiments.compute import ComputeConfig
from defedavg.experiments.study_run import StudyRun
from defedavg.experiments.tune import Tuning, pairs_of
from defedavg.experiments.tuning_folder import TuningFolder
from defedavg.report import tables
from defedavg.report.payload import live, payload
from defedavg.runstore.reader import read_run
from helpers.command_line import call, refuse
from helpers.interrupted_studies import InterruptionError, assert_same, ignore, interrupt_after

EXAMPLE = Path(__file__).parents[2] / "examples" / "text_task.py"
STUDY = """
name = "texts"
algorithms = ["fedavg", "defedavg-niid"]
[task]
module = "text_task.py:make"
[training]
updates_per_round = 3
local_steps = 10
local_lr = 0.3
[stop]
max_rounds = 12
eval_every_rounds = 2
"""


@pytest.fixture
def study_file(tmp_path: Path) -> Path:
    shutil.copy(EXAMPLE, tmp_path)
    (tmp_path / "study.toml").write_text(STUDY)
    return tmp_path / "study.toml"


def test_the_commands_show_the_metric_by_its_name(study_file: Path) -> None:
    folder = study_file.parent
    done = call("run", study_file, "--plots", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "best f1" in done.stdout
    assert "%" not in done.stdout.partition("Times to the target")[0]
    for ending in ("png", "pdf"):
        assert (folder / f"runs/texts/plots/f1-over-seconds.{ending}").exists()
    lines = [json.loads(line) for line in (folder / "runs/texts/metrics.jsonl").read_text().splitlines()]
    assert {line["metric"] for line in lines} == {"f1"}
    listed = json.loads(call("runs", "list", "--json", cwd=folder).stdout)
    assert {row["metric"] for row in listed} == {"f1"}
    best = max(line["accuracy"] for line in lines)
    assert f"{best:.4g}" in call("runs", "list", cwd=folder).stdout
    shutil.copytree(folder / "runs/texts", folder / "runs/again")
    assert "best f1" in call("runs", "compare", "texts", "again", cwd=folder).stdout
    for output in ("accuracy", "accurate"):
        assert output not in call("runs", "compare", "texts", "again", cwd=folder).stdout


def test_the_report_and_the_live_view_name_the_metric(study_file: Path, tmp_path: Path) -> None:
    run = StudyRun(config.load(study_file), tmp_path / "folder")
    with pytest.raises(InterruptionError):
        run.run(interrupt_after(5))
    unfinished = read_run(tmp_path / "folder")
    assert {series["metric"] for series in live(unfinished)} == {"f1"}
    assert StudyRun(config.load(study_file), tmp_path / "whole").run(ignore)
    stored = read_run(tmp_path / "whole")
    (group,) = payload([stored], "title")["groups"]
    assert group["metric"] == "f1"
    assert "had the highest best f1: " in group["conclusion"]
    assert "No target f1 was set" in group["conclusion"]
    assert "accura" not in group["conclusion"]


def test_a_target_is_a_value_of_the_metric(study_file: Path, tmp_path: Path) -> None:
    run = StudyRun(config.load(study_file, ("stop.target_accuracy=0.5",)), tmp_path / "folder")
    assert run.run(ignore)
    (group,) = payload([read_run(tmp_path / "folder")], "title")["groups"]
    assert "reached a f1 of 0.5 first" in group["conclusion"] or "No run reached a f1 of 0.5" in group["conclusion"]
    table = tables.result_table("title", run.entries)
    assert "time to 0.5" in [column.header for column in table.columns]


@pytest.mark.parametrize("executor", ["batched", "reference"])
def test_a_text_study_is_resumed(study_file: Path, tmp_path: Path, executor: str) -> None:
    study, compute = config.load(study_file), ComputeConfig(executor)
    assert StudyRun(study, tmp_path / "whole", compute=compute).run(ignore)
    with pytest.raises(InterruptionError):
        StudyRun(study, tmp_path / "part", compute=compute, checkpoint_interval=0.0).run(interrupt_after(5))
    assert StudyRun(study, tmp_path / "part", compute=compute, resume=True).run(ignore)
    assert_same(tmp_path / "whole", tmp_path / "part")


def test_rates_are_tuned_for_a_metric(study_file: Path, tmp_path: Path) -> None:
    study = config.load(study_file, ("stop.target_accuracy=0.6", "algorithms=fedavg"))
    tuning = Tuning(pairs_of(study.points(), (1.0,), (0.01, 0.3)), study.seeds, ComputeConfig())
    assert TuningFolder(tuning, study, tmp_path / "texts-tune", force=False).run(ignore)
    assert {record["metric"] for record in tuning.records()} == {"f1"}
    found = read_run(tmp_path / "texts-tune").runs
    assert "best f1" in [column.header for column in tables.tuning_table("title", found, []).columns]
    assert {entry.metric for entry in found} == {"f1"}


# Bad tasks on the command line

HEAD = """
import numpy as np, torch
from torch import nn
from defedavg import make_task

x, y = np.zeros((20, 4), "float32"), np.arange(20) % 2
parts = np.split(np.arange(20), 4)


class Dict(nn.Linear):
    def forward(self, x):
        return {"scores": super().forward(x)}


def make(config, client):
    given = dict(model=lambda: nn.Linear(4, 2), train=(x, y), test=(x, y), clients=parts)
    return make_task(**{**given, **CHANGES})


"""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ("dict(model=lambda: Dict(4, 2))", ("dict with 'scores'", "make_task(logits=…)")),
        ("dict(model=lambda: nn.Linear(5, 2))", ("cannot be trained on these data", "(10, 4) float32")),
        ("dict(test=(x[:, :3], y))", ("cannot be evaluated on the test data",)),
        ("dict(train=({'x': x}, y), test=({'x': x}, y))", ("unexpected keyword argument 'x'",)),
        ("dict(clients=np.arange(7))", ("line 17", "clients has 7 ids for 20 training samples")),
        ("dict(train=(x * np.nan, y))", ("line 17", "the train inputs have NaN")),
        ("dict(metric=lambda o, t: o)", ("the metric lambda has shape (20, 2)",)),
        ("dict(loss=nn.CrossEntropyLoss())", ("one value per sample",)),
    ],
)
def test_a_bad_task_is_one_line_and_exit_code_2(changes: str, words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(f"{HEAD}CHANGES = {changes}\n")
    (tmp_path / "study.toml").write_text('[task]\nmodule = "bad.py:make"\n[training]\nupdates_per_round = 2\n')
    refuse(call("run", "study.toml", cwd=tmp_path), *words)
    assert "metric" in changes or not (tmp_path / "runs").exists()


def test_the_split_of_a_task_without_classes_shows_the_sizes(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(f"{HEAD}CHANGES = dict(classes=None)\n")
    (tmp_path / "study.toml").write_text('[task]\nmodule = "plain.py:make"\n[training]\nupdates_per_round = 2\n')
    done = call("split", "study.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["custom", "client", "samples", "0", "5", "1", "5", "2", "5", "3", "5"]
    refuse(call("split", "study.toml", "--plot", "split.png", cwd=tmp_path), "no classes", "--plot")


def test_a_model_that_cannot_be_stacked_is_said(tmp_path: Path) -> None:
    changes = "dict(model=lambda: nn.Sequential(Dict(4, 2), Noisy()))"
    noisy = "class Noisy(nn.Module):\n    def forward(self, x):\n        return (x['scores'] + torch.rand(1), x)\n"
    (tmp_path / "noisy.py").write_text(f"{HEAD}{noisy}CHANGES = {{**{changes}, 'logits': 0}}\n")
    (tmp_path / "study.toml").write_text(
        '[task]\nmodule = "noisy.py:make"\n[training]\nupdates_per_round = 2\n[stop]\nmax_rounds = 2\n'
    )
    done = call("run", "study.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the model is trained one client at a time: it draws from the global generator" in done.stderr + done.stdout


def test_a_cast_is_one_line_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "cast.py").write_text(f"{HEAD}CHANGES = dict(train=(x.astype(float), y))\n")
    (tmp_path / "study.toml").write_text(
        'seeds = [0, 1]\n[task]\nmodule = "cast.py:make"\n[training]\nupdates_per_round = 2\n[stop]\nmax_rounds = 2\n'
    )
    done = call("run", "study.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("float64 data become float32; pass float32, or keep_dtype=True") == 1
    assert "CastWarning" not in done.stderr
