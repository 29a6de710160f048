"""The commands ``deploy local``, ``deploy serve`` and ``deploy join``: runs that learn, are stopped and are resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from defedavg.cli.deploy_stream_command import study_settings
from defedavg.cli.main import app
from defedavg.config.build import build_task, make_executor
from defedavg.deploy.deploy_config import read_deploy_config
from defedavg.deploy.engine import event_log as logs
from defedavg.deploy.engine.events import Resumed
from defedavg.deploy.replay import Replay, replay
from defedavg.errors import UserError
from defedavg.runstore.layout import EVENT_LOG
from helpers.stream_processes import SECONDS, STUDY
from helpers.user_code import TASK

UNEVEN: dict[str, Any] = {"stop.max_rounds": 200, "clients.step_seconds": 0.002}
IID = {
    **UNEVEN, "task.model": "mlp", "training.updates_per_round": 3, "training.local_steps": 100,
    "stop.target_accuracy": 0.9,
}  # fmt: skip
NIID = {
    **UNEVEN, "task.model": "softmax", "task.split": "classes", "training.updates_per_round": 24,
    "training.local_steps": 20, "training.local_lr": 0.1, "stop.target_accuracy": 0.8,
}  # fmt: skip


def command(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Start a command in a folder, as a user does."""
    words = (sys.executable, "-m", "defedavg", *words)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(words, cwd=folder, stdout=-1, stderr=-1, text=True, start_new_session=True, env=environment)


def local(folder: Path, algorithm: str, settings: dict[str, Any]) -> subprocess.Popen[str]:
    """Start a deployment of six clients, each of another speed."""
    sets = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    return command(folder, "deploy", "local", "--clients", "6", "--algorithm", algorithm, "--json", *sets)


def until_a_merge(started: subprocess.Popen[str], log: Path) -> None:
    """Wait until a command has merged once more than the log says now."""

    def merges() -> int:
        return log.read_bytes().count(b'"note":"merge"') if log.exists() else 0

    seen, deadline = merges(), time.monotonic() + SECONDS
    while merges() <= seen:
        assert started.poll() is None, started.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def replayed(folder: Path) -> Replay:
    """Return the plan of a run; the executor computes the saved weights from it, and no update is merged twice."""
    log = logs.read(folder / EVENT_LOG)
    found = replay(log)
    found.plan.check()
    merged = [(update.client, update.index) for record in found.plan.rounds for update, _ in record.merge.updates]
    assert len(set(merged)) == len(merged)
    config = read_deploy_config(log.head["settings"], stored=True)
    executor = make_executor(config.settings, config.seed, build_task(config.settings, config.seed))
    weights = executor.versions[0]
    for record in found.plan.rounds:
        weights = executor.apply(record)
    saved = load_file(folder / "state" / f"version-{len(found.plan.rounds)}.safetensors")["weights"]
    torch.testing.assert_close(weights, saved, rtol=1e-4, atol=1e-5)
    return found


@pytest.mark.deploy
def test_six_uneven_clients_learn_digits_with_defedavg_iid(tmp_path: Path) -> None:
    started = local(tmp_path, "defedavg-iid", IID)
    stdout, stderr = started.communicate(timeout=SECONDS)
    assert started.returncode == 0, stderr
    [entry] = json.loads(stdout)
    assert entry["status"] == "target", entry
    assert entry["final_accuracy"] >= 0.9
    found = replayed(tmp_path / "runs" / "deployment")
    assert found.measured_clients == (0, 1, 2, 3, 4, 5)
    assert {path.name for path in (tmp_path / "runs" / "deployment").iterdir()} >= {
        "config.toml", "metrics.jsonl", "summary.json", "plans"
    }  # fmt: skip


@pytest.mark.deploy
def test_a_local_run_learns_although_it_is_stopped_by_ctrl_c_and_its_command_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six uneven clients with two classes each. Every command ends all its processes, however it ends itself."""
    folder = tmp_path / "runs" / "deployment"
    first = local(tmp_path, "defedavg-niid", NIID)
    until_a_merge(first, folder / EVENT_LOG)
    processes = psutil.Process(first.pid).children(recursive=True)
    assert len(processes) == 7
    locked = [file.path for process in processes for file in process.open_files() if file.path.endswith(".lock")]
    assert not locked  # only the command holds the locks of the folder, and they end with it
    first.send_signal(signal.SIGINT)
    _, stderr = first.communicate(timeout=SECONDS)
    assert first.returncode == 130, stderr
    assert "defedavg deploy local --name deployment --resume" in stderr
    assert not psutil.wait_procs(processes, timeout=SECONDS)[1]

    second = command(tmp_path, "deploy", "local", "--resume")
    until_a_merge(second, folder / EVENT_LOG)
    processes = psutil.Process(second.pid).children(recursive=True)
    second.kill()
    second.communicate(timeout=SECONDS)
    assert not psutil.wait_procs(processes, timeout=SECONDS)[1]

    third = command(tmp_path, "deploy", "local", "--resume", "--json")
    until_a_merge(third, folder / EVENT_LOG)
    processes = psutil.Process(third.pid).children(recursive=True)
    stdout, stderr = third.communicate(timeout=SECONDS)
    assert third.returncode == 0, stderr
    [entry] = json.loads(stdout)
    assert entry["status"] == "target", entry
    assert entry["final_accuracy"] >= 0.8
    found = replayed(folder)
    assert entry["rounds"] == len(found.plan.rounds)
    assert sum(job.outcome == "ended" for job in found.plan.jobs) > 0
    assert sum(isinstance(event, Resumed) for event in logs.read(folder / EVENT_LOG).events) == 2
    assert not psutil.wait_procs(processes, timeout=SECONDS)[1]
    assert (folder / "report.html").stat().st_size > 1000
    monkeypatch.chdir(tmp_path)
    for words in (("report", "runs/deployment"), ("runs", "remove", "deployment", "--yes")):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
    assert not folder.exists()


def refused(*words: str) -> str:
    result = CliRunner().invoke(app, ["deploy", *words])
    assert isinstance(result.exception, UserError), result.output
    assert "\n" not in str(result.exception)
    return str(result.exception)


def test_bad_input_of_serve_and_join_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.toml").write_text('algorithms = ["fedavg", "fedbuff"]\n[deploy]\njob_second = 3\n')
    assert "give --keys FOLDER" in refused("serve", "study.toml")
    assert "0.0.0.0 is not a loopback address" in refused("serve", "study.toml", "--insecure")
    assert "cannot be read" in refused("serve", "study.toml", "--keys", "nowhere")
    assert "not an address" in refused("serve", "study.toml", "--insecure", "--listen", "9092")
    local = ("--insecure", "--listen", "127.0.0.1:0")
    assert "no configuration file" in refused("serve", "none.toml", *local)
    assert "one algorithm" in refused("serve", "study.toml", *local)
    assert "job_seconds" in refused("serve", "study.toml", *local, "--algorithm", "fedavg")
    once = ("--algorithm", "fedavg", "--set", "deploy.job_second=1")
    assert "job_second" in refused("serve", "study.toml", *local, *once)
    (tmp_path / "study.toml").write_text("[clients]\nnum_clients = 3\n")
    assert "no run to resume" in refused("serve", "study.toml", *local, "--resume")
    assert "give --keys FOLDER" in refused("join", "127.0.0.1:9092")
    assert "give --keys FOLDER" in refused("join", "127.0.0.1:9092", "--insecure")
    assert "example.org is not a loopback" in refused("join", "example.org:9092", "--insecure", "--client", "3")
    assert "client.key" in refused("join", "127.0.0.1:9092", "--keys", "nowhere")
    assert "unknown transport" in refused("local", "--transport", "carrier-pigeon")
    assert not (tmp_path / "runs").exists()


@pytest.mark.deploy
def test_a_study_runs_on_this_machine(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(
        'name = "advised"\nalgorithms = ["fedavg"]\n[task]\nmodel = "softmax"\n[clients]\nnum_clients = 3\n'
        "[training]\nupdates_per_round = 2\nlocal_steps = 2\n[stop]\nmax_rounds = 4\n"
    )
    words = ("--clients", "2", "--set", "training.local_steps=3", "--json")
    started = command(tmp_path, "deploy", "local", "study.toml", *words)
    stdout, stderr = started.communicate(timeout=SECONDS)
    assert started.returncode == 0, stderr
    [entry] = json.loads(stdout)
    assert (entry["algorithm"], entry["rounds"]) == ("fedavg", 4)
    settings = logs.read(tmp_path / "runs" / "deployment" / EVENT_LOG).settings
    assert (settings["clients.num_clients"], settings["training.local_steps"]) == (2, 3)


def test_the_settings_of_a_study_become_those_of_a_deployment(tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text(TASK)
    (tmp_path / "study.toml").write_text(STUDY.format(algorithm="fedavg", rounds=7))
    flat = study_settings(tmp_path / "study.toml", ["training.local_steps=9"], None, None)
    assert flat["algorithm"] == "fedavg"
    assert flat["seed"] == 3
    assert flat["task.module"] == f"{tmp_path / 'my_task.py'}:make"
    assert (flat["training.local_steps"], flat["stop.max_rounds"], flat["deploy.min_clients"]) == (9, 7, 2)
