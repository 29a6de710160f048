"""A command on the folder of a run that is alive, or whose command was killed, starts and removes nothing too early."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from defedavg.cli.main import app
from defedavg.deploy.flower.app_template import write_app
from defedavg.deploy.run_processes import end_orphans, run_environment
from defedavg.errors import UserError
from helpers.deployments import World

SERVER = """
import sys, time
from pathlib import Path
from defedavg.fileio import FolderLock
with FolderLock(Path(sys.argv[1]), launched=True):
    print("locked", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of an interrupted run, in a working directory of its own; no command starts a cluster."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("defedavg.deploy.flower.local_deployment.run_local", _started)
    monkeypatch.setattr("defedavg.deploy.grpc.local_streams.run_local_streams", _started)
    monkeypatch.setattr("defedavg.deploy.grpc.local_clients.local_clients", lambda: nullcontext(object()))
    folder = tmp_path / "runs" / "deployment"
    world = World(folder)
    world.until(lambda: world.session.engine.server.version >= 2)
    World.close_all()
    write_app(folder / "app", world.flat)
    (folder / "config.toml").write_text(world.config.toml)
    (folder / "summary.json").write_text('{"name": "tiny", "finished": false, "runs": []}')
    return folder


def _started(*_: Any, **more: Any) -> None:
    raise UserError("the processes would start now")


def _server(folder: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", SERVER, str(folder)]
    process = subprocess.Popen(words, stdout=-1, text=True, env={**os.environ, **environment})
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    return process


def _files(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.parametrize("option", ["--force", "--resume"])
def test_a_server_that_another_command_started_is_named_and_keeps_its_files(option: str, run: Path) -> None:
    before = _files(run)
    with _server(run, {}) as server:
        try:
            result = CliRunner().invoke(app, ["deploy", "local", option])
            assert isinstance(result.exception, UserError)
            assert f"is in use by another process ({server.pid}, " in str(result.exception)
            assert server.poll() is None
            assert _files(run) == before
        finally:
            server.kill()


@pytest.mark.parametrize("transport", ["grpc", "flower"])
@pytest.mark.parametrize("option", ["--force", "--resume"])
def test_the_processes_of_a_killed_command_end_before_the_next_one_starts(
    option: str, transport: str, run: Path
) -> None:
    with _server(run, run_environment(run)) as server:
        result = CliRunner().invoke(app, ["deploy", "local", option, "--transport", transport])
        assert str(result.exception) == "the processes would start now"
        assert "ended 1 processes of a killed command" in result.stderr
        assert not psutil.pid_exists(server.pid)
    assert (run / "events.jsonl").exists()  # --force restores a run that the new one has not replaced


def test_without_force_a_refused_command_ends_no_process(run: Path) -> None:
    with _server(run, run_environment(run)) as server:
        try:
            assert "holds an unfinished run" in str(CliRunner().invoke(app, ["deploy", "local"]).exception)
            assert server.poll() is None
        finally:
            server.kill()


def test_a_process_that_ignores_sigterm_is_killed_and_others_are_not(tmp_path: Path) -> None:
    words = ["sh", "-c", "trap '' TERM; echo ready; while true; do sleep 0.1; done"]
    stubborn = subprocess.Popen(words, stdout=-1, text=True, env={**os.environ, **run_environment(tmp_path / "a")})
    words = [sys.executable, "-c", "import time; time.sleep(60)"]
    other = subprocess.Popen(words, env={**os.environ, **run_environment(tmp_path / "b")})
    try:
        assert stubborn.stdout is not None
        assert stubborn.stdout.readline() == "ready\n"
        assert end_orphans(tmp_path / "a") >= 1
        assert not psutil.pid_exists(stubborn.pid)
        assert psutil.pid_exists(other.pid)
        assert end_orphans(tmp_path / "b") == 1
        assert not psutil.pid_exists(other.pid)
    finally:
        for process in (stubborn, other):
            process.kill()
            process.wait()
        if stubborn.stdout is not None:
            stubborn.stdout.close()
