"""Run folders of version 0.1 open, resume and report: their settings have old names."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from defedavg.config import study as config
from defedavg.config.build import make_plan
from defedavg.errors import UserError
from defedavg.experiments.compute import ComputeConfig
from defedavg.experiments.study_run import StudyRun
from defedavg.planning.plan import Plan
from defedavg.report.page import build
from defedavg.runstore.layout import RunFiles
from defedavg.runstore.reader import read_run
from helpers.page_data import page_data

OLD = Path(__file__).parent / "version_0_1"

STUDY: dict[str, Any] = {
    "name": "old",
    "algorithms": ["fedavg", "defedavg-iid"],
    "seeds": [0],
    "task": {"model": "softmax"},
    "clients": {"num_clients": 4, "plan_detail": "all", "upload": "blocking"},
    "training": {"updates_per_round": 2, "local_steps": 2},
    "stop": {
        "max_rounds": 8,
        "eval_every_rounds": 2,
        "consecutive_hits": 2,
        "stop_at_target": False,
        "target_accuracy": 0.3,
    },
}


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    shutil.copytree(OLD, tmp_path / "runs")
    return tmp_path / "runs"


def test_a_finished_folder_is_read_without_a_warning(folders: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = read_run(folders / "finished")
        assert run.study is not None
    assert (run.status, run.notes) == ("finished", ())
    settings = run.settings("fedavg")
    assert settings is not None
    assert (settings.stop.consecutive_hits, settings.stop.stop_at_target, settings.stop.eval_every_rounds) == (
        2,
        False,
        2,
    )
    assert settings.clients.plan_detail == "all"
    for entry in run.runs:
        path = run.plan_path(entry)
        assert path is not None
        assert Plan.load(path).hash() == entry.plan
        assert len(entry.trail.rounds) == 5


def test_a_finished_folder_is_reported(folders: Path) -> None:
    page = page_data(build([folders / "finished"]))
    (group,) = page["groups"]
    assert {series["algorithm"] for series in group["series"]} == {"fedavg", "defedavg-iid"}


def test_uploads_of_an_old_folder_are_blocking(folders: Path) -> None:
    """It has no setting for uploads; resumed with another meaning, its checkpoints would not fit its plan."""
    run = read_run(folders / "finished")
    settings = run.settings("defedavg-iid")
    assert settings is not None
    assert settings.clients.upload == "blocking"
    entry = next(entry for entry in run.runs if entry.algorithm == "defedavg-iid")
    assert make_plan(settings, 0, int(entry.trail.rounds[-1])).hash() == entry.plan
    study = {**STUDY, "clients": {**STUDY["clients"], "upload": "auto"}}
    with pytest.raises(UserError, match=r"clients.upload: blocking → auto"):
        StudyRun(config.study(study), folders / "interrupted", compute=ComputeConfig("reference"), resume=True)


def test_an_interrupted_folder_is_resumed(folders: Path) -> None:
    folder = folders / "interrupted"
    before = json.loads(RunFiles(folder).summary.read_text())["runs"]
    run = StudyRun(config.study(STUDY), folder, compute=ComputeConfig("reference"), resume=True)
    assert not any("no checkpoint" in note for note in run.notes)
    assert run.run(lambda event: None)
    summary = json.loads(RunFiles(folder).summary.read_text())
    assert summary["finished"] is True
    assert summary["runs"][0] == before[0]
    whole = json.loads(RunFiles(folders / "finished").summary.read_text())["runs"]
    assert [entry["plan_sha256"] for entry in summary["runs"]] == [entry["plan_sha256"] for entry in whole]
    for ours, theirs in zip(summary["runs"], whole, strict=True):
        assert ours["best_accuracy"] == pytest.approx(theirs["best_accuracy"], abs=0.02)  # other hardware, other bits
        assert (ours["rounds"], ours["updates_trained"]) == (theirs["rounds"], theirs["updates_trained"])
