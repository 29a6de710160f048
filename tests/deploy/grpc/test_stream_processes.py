"""Deployments over gRPC with real processes: kills of clients and of the server, and the commands themselves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from defedavg.cli.deploy_stream_command import study_settings
from defedavg.cli.main import app
from defedavg.deploy.engine import event_log as logs
from defedavg.deploy.engine.event_log import EventLog
from defedavg.deploy.engine.events import Joined, Left, Resumed
from defedavg.deploy.flower.processes import free_port
from defedavg.deploy.replay import replay
from defedavg.deploy.tls_keys import make_keys
from defedavg.errors import UserError
from defedavg.runstore.layout import EVENT_LOG
from defedavg.runstore.reader import read_run
from helpers.user_code import TASK

STUDY = """
name = "served"
algorithms = ["{algorithm}"]
seeds = [3]
[task]
module = "my_task.py:make"
[clients]
num_clients = 6
[training]
updates_per_round = 2
local_steps = 4
[stop]
max_rounds = {rounds}
[deploy]
min_clients = 2
reconnect_seconds = 0.5
wait_seconds = 60
"""


class Site:
    """A folder with a study, a task and keys, and the processes that were started there."""

    def __init__(self, folder: Path, algorithm: str, rounds: int) -> None:
        self.folder, self.port = folder, free_port()
        (folder / "study.toml").write_text(STUDY.format(algorithm=algorithm, rounds=rounds))
        (folder / "my_task.py").write_text(TASK)
        make_keys(folder / "keys", 6, ("127.0.0.1",))
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a command, with its output in a file."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{len(self.processes)}.txt").open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "defedavg", "deploy", *words],
                cwd=self.folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def serve(self, *words: str) -> subprocess.Popen[bytes]:
        return self.start("serve", "study.toml", "--keys", "keys", "--listen", f"127.0.0.1:{self.port}", *words)

    def join(self, client: int) -> subprocess.Popen[bytes]:
        keys = f"keys/client-{client}"
        task = ("--task", "my_task.py:make", "--step-seconds", "0.005")
        return self.start("join", f"127.0.0.1:{self.port}", "--keys", keys, *task)

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "served"

    def log(self) -> EventLog:
        return logs.read(self.run / EVENT_LOG)

    def output(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.txt")))

    def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)

    def merges(self) -> int:
        try:
            return (self.run / EVENT_LOG).read_bytes().count(b'"note":"merge"')
        except OSError:
            return 0

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def make_site(tmp_path: Path) -> Iterator[Callable[[str, int], Site]]:
    sites: list[Site] = []

    def make(algorithm: str, rounds: int) -> Site:
        sites.append(Site(tmp_path, algorithm, rounds))
        return sites[-1]

    yield make
    for site in sites:
        site.close()


@pytest.mark.deploy
def test_kills_of_a_client_and_of_the_server_lose_and_repeat_nothing(make_site: Callable[[str, int], Site]) -> None:
    site = make_site("defedavg-niid", 60)
    server = site.serve()
    clients = [site.join(client) for client in range(2)]
    site.until(lambda: site.merges() >= 5)
    clients[1].send_signal(signal.SIGSTOP)  # the run must not end before the new process connects
    clients[0].send_signal(signal.SIGKILL)
    clients[0] = site.join(0)
    site.until(lambda: len([e for e in site.log().events if isinstance(e, Joined) and e.client == 0]) == 2)
    clients[1].send_signal(signal.SIGCONT)
    seen = site.merges()
    site.until(lambda: site.merges() >= seen + 5)
    server.send_signal(signal.SIGKILL)
    server.wait()
    server = site.serve("--resume")
    assert server.wait(60) == 0, site.output()
    assert [client.wait(20) for client in clients] == [0] * 2, site.output()
    log = site.log()
    found = replay(log)
    found.plan.check()
    assert len(found.plan.rounds) == 60
    assert read_run(site.run).finished
    events = list(log.events)
    assert len([event for event in events if isinstance(event, Resumed)]) == 1
    assert 0 in {event.client for event in events if isinstance(event, Left)}
    assert len([event for event in events if isinstance(event, Joined) and event.client == 0]) == 3


@pytest.mark.deploy
def test_a_local_run_stopped_by_ctrl_c_is_resumed_and_leaves_no_process(tmp_path: Path) -> None:
    words = ["local", "--out", str(tmp_path), "--clients", "3", "--algorithm", "defedavg-niid"]
    chosen = {"task.model": "softmax", "training.local_steps": 5, "stop.max_rounds": 60, "clients.step_seconds": 0.004}
    sets = [word for name, value in chosen.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "defedavg", "deploy"]
    first = subprocess.Popen([*command, *words, *sets], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    log, deadline = tmp_path / "deployment" / EVENT_LOG, time.monotonic() + 60
    while not log.exists() or log.read_bytes().count(b'"note":"merge"') < 5:
        assert time.monotonic() < deadline
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.02)
    started = psutil.Process(first.pid).children(recursive=True)
    assert len(started) == 4
    first.send_signal(signal.SIGINT)
    printed = first.communicate(timeout=30)[0].decode()
    assert first.returncode == 130, printed
    assert "--resume" in printed
    assert not psutil.wait_procs(started, timeout=10)[1]
    second = subprocess.run(
        [*command, "local", "--out", str(tmp_path), "--resume", "--json"], capture_output=True, timeout=90, check=False
    )
    assert second.returncode == 0, second.stderr.decode()
    assert json.loads(second.stdout)[0]["rounds"] == 60
    found = replay(logs.read(log))
    found.plan.check()
    assert len(found.plan.rounds) == 60


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


def test_the_settings_of_a_study_become_those_of_a_deployment(tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text(TASK)
    (tmp_path / "study.toml").write_text(STUDY.format(algorithm="fedavg", rounds=7))
    flat = study_settings(tmp_path / "study.toml", ["training.local_steps=9"], None, None)
    assert flat["algorithm"] == "fedavg"
    assert flat["seed"] == 3
    assert flat["task.module"] == f"{tmp_path / 'my_task.py'}:make"
    assert (flat["training.local_steps"], flat["stop.max_rounds"], flat["deploy.min_clients"]) == (9, 7, 2)
