"""Runs that are replaced or removed: the old one survives until the new one has results; one in progress stays."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from defedavg.deploy.deploy_config import default_settings, read_deploy_config
from defedavg.deploy.server.deployment_folder import new_run_folder
from defedavg.runstore.layout import PREVIOUS, PREVIOUS_MOVING, PREVIOUS_REMOVING
from defedavg.runstore.replacement import Replacement
from defedavg.theory import speedup_study
from helpers.command_line import call, refuse
from helpers.interrupted_studies import contents

STUDY = """
name = "study"
algorithms = ["fedavg"]
[task]
model = "softmax"
[clients]
num_clients = 8
[training]
updates_per_round = 2
local_steps = 2
[stop]
target_accuracy = 0.99
max_rounds = 2
"""
SLOW = ("--set", "training.local_steps=1000000", "--checkpoint-every", "inf")
"""The first round takes minutes."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a finished run, and a file that is not part of it."""
    (tmp_path / "study.toml").write_text(STUDY)
    done = call("run", "study.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "runs" / "study" / "notes.txt").write_text("mine")
    return tmp_path


@contextmanager
def running(place: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run that replaces another, wait until it trains, and kill it at the end of the block."""
    folder = place / "runs" / "study"
    command = [sys.executable, "-m", "defedavg", "run", "study.toml", "--force", *SLOW, *words]
    with subprocess.Popen(command, cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        try:
            end = time.monotonic() + 120
            while not ((folder / PREVIOUS).is_dir() and (folder / "metrics.jsonl").exists()):
                assert child.poll() is None
                assert time.monotonic() < end
                time.sleep(0.05)
            yield child
        finally:
            child.kill()


def test_a_run_in_progress_is_not_removed_and_a_killed_one_does_not_lose_the_old_one(place: Path) -> None:
    folder = place / "runs" / "study"
    old = contents(folder)
    with running(place):
        refuse(call("runs", "remove", "study", "--yes", cwd=place), "runs/study is in use by another process; stop it")
        refuse(call("run", "study.toml", "--force", cwd=place), "runs/study is in use by another process")
        assert contents(folder / PREVIOUS) == {name: data for name, data in old.items() if name != "notes.txt"}
        listed = call("runs", "list", cwd=place)
        assert "unfinished" in listed.stdout
        assert listed.stderr == "study: an older run is kept in .previous, until this one has results\n"
    again = call("run", "study.toml", cwd=place)
    assert again.returncode == 2
    assert "already exists" in again.stderr
    assert {name: data for name, data in contents(folder).items() if name != ".lock"} == old
    assert call("runs", "list", cwd=place).stderr == ""


def test_ctrl_c_before_the_first_round_keeps_the_old_run(place: Path) -> None:
    folder = place / "runs" / "study"
    old = contents(folder)
    with running(place) as child:
        child.send_signal(signal.SIGINT)
        assert child.wait(300) == 130  # seconds, also on a busy machine
    assert contents(folder) == old


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--memory", "1K"), "only 1 KiB may be used"),
        (("--set", "training.local_steps=1000000000000"), "training.local_steps is 1000000000000; it must be at most"),
    ],
)
@pytest.mark.parametrize("command", ["run", "tune"])
def test_a_run_that_fails_at_its_start_keeps_the_old_one(
    place: Path, command: str, words: tuple[str, ...], line: str
) -> None:
    folder = place / "runs" / "study"
    if command == "tune":
        folder.rename(place / "runs" / "study-tune")
        folder = place / "runs" / "study-tune"
    (folder / "plots").mkdir()
    (folder / "plots" / "link").symlink_to(place)
    old = contents(folder)
    refuse(call(command, "study.toml", "--force", *words, cwd=place), line)
    assert contents(folder) == old
    assert (folder / "plots" / "link").is_symlink()


@pytest.mark.parametrize("command", ["run", "tune"])
def test_a_run_that_succeeds_removes_the_old_one_and_nothing_else(place: Path, command: str) -> None:
    folder = place / "runs" / "study"
    if command == "tune":
        folder.rename(place / "runs" / "study-tune")
        folder = place / "runs" / "study-tune"
    rates = ("--local-rates", "0.1", "--global-rates", "1") if command == "tune" else ()
    (place / "moved").mkdir()
    (place / "moved" / "mine").write_text("kept")
    (folder / "plots").symlink_to(place / "moved")
    done = call(command, "study.toml", "--force", *rates, cwd=place)
    assert done.returncode == 0, done.stderr
    assert (folder / "notes.txt").read_text() == "mine"
    assert not list(folder.glob(".previous*"))
    assert list((place / "moved").iterdir())
    assert json.loads((folder / "summary.json").read_text())["finished"] is True


# Every state that a killed process can leave.


def small(folder: Path) -> Replacement:
    folder.mkdir()
    for name in ("config.toml", "summary.json"):
        (folder / name).write_text(f"old {name}")
    (folder / "plans").mkdir()
    (folder / "plans" / "a").write_text("old plan")
    return Replacement(folder)


def begin(folder: Path) -> None:
    for name in ("config.toml", "summary.json", "metrics.jsonl"):
        (folder / name).write_text("new")


def test_an_old_run_that_was_being_moved_is_complete_again(tmp_path: Path) -> None:
    old = small(tmp_path / "run")
    before = contents(tmp_path / "run")
    (tmp_path / "run" / PREVIOUS_MOVING).mkdir()
    (tmp_path / "run" / "plans").rename(tmp_path / "run" / PREVIOUS_MOVING / "plans")
    assert old.recover()
    assert contents(tmp_path / "run") == before


def test_an_old_run_is_restored_if_the_new_one_has_no_results(tmp_path: Path) -> None:
    old = small(tmp_path / "run")
    before = contents(tmp_path / "run")
    old.set_aside()
    begin(tmp_path / "run")
    assert old.pending
    assert old.recover()
    assert contents(tmp_path / "run") == before
    assert not old.recover()
    assert contents(tmp_path / "run") == before


def test_an_old_run_that_was_being_removed_is_removed(tmp_path: Path) -> None:
    old = small(tmp_path / "run")
    old.set_aside()
    begin(tmp_path / "run")
    (tmp_path / "run" / PREVIOUS).rename(tmp_path / "run" / PREVIOUS_REMOVING)
    assert not old.recover()
    assert set(contents(tmp_path / "run")) == {"config.toml", "summary.json", "metrics.jsonl"}


# Deployments and speedup studies.


@pytest.mark.parametrize("started", [False, True])
def test_a_deployment_replaces_a_run_when_its_server_has_started(tmp_path: Path, started: bool) -> None:
    folder = tmp_path / "run"
    small(folder)
    before = contents(folder)
    config = read_deploy_config({**default_settings("fedavg", 2), "name": "x"})
    with new_run_folder(config, folder, force=True):
        (folder / "server.log").write_text("printed")
        if started:
            (folder / "events.jsonl").write_text("{}\n")
    if started:
        assert (folder / "events.jsonl").read_text() == "{}\n"
        assert not (folder / PREVIOUS).exists()
    else:
        assert contents(folder) == {**before, "failed-server.log": b"printed"}


def test_a_speedup_study_that_fails_keeps_the_old_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise MemoryError

    (tmp_path / "trials.jsonl").write_text("old\n")
    (tmp_path / "speedup.json").write_text("old")
    monkeypatch.setattr(speedup_study, "_measure", fail)
    scope = speedup_study.SpeedupScope(["least-squares"], ["defedavg-iid"], [1, 2], 1, None, 0.5)
    with pytest.raises(MemoryError):
        speedup_study.run_speedup_study(scope, tmp_path, print, force=True, jobs=1)
    assert contents(tmp_path) == {"trials.jsonl": b"old\n", "speedup.json": b"old"}
