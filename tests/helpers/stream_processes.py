"""Servers and clients over gRPC in processes of their own, which tests kill, stop and start again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from defedavg.deploy.engine import event_log as logs
from defedavg.deploy.engine.event_log import EventLog
from defedavg.deploy.engine.events import Event
from defedavg.deploy.ports import free_port
from defedavg.deploy.replay import Replay
from defedavg.deploy.tls_keys import make_keys
from defedavg.runstore.layout import EVENT_LOG
from helpers.checked_logs import received_and_merged
from helpers.user_code import TASK

SECONDS = 240.0
"""How long a test waits for something that must happen, on a machine of any speed."""

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
wait_seconds = 240
"""

# Loads what the commands import, then runs each of them in a fork: the real command in a real process, without the
# seconds that importing PyTorch takes.
FORKS = """
import json, os, signal, sys, traceback
import torch, defedavg.cli.main as command, defedavg.deploy.client.handler, defedavg.deploy.grpc.run_server
torch.set_num_threads(1)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    words, out = json.loads(line)
    child = os.fork()
    if child:
        print(child, flush=True)
        continue
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(log, standard)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["defedavg", *words]
    code = 1
    try:
        command.main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    with open(out + ".code", "w") as file:
        file.write(str(code))
    os._exit(0)
"""


@dataclass(frozen=True)
class Forked:
    """A process, and the file with what it prints."""

    process: psutil.Process
    output: Path

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the process, and wait until it is gone."""
        with suppress(psutil.NoSuchProcess):
            self.process.kill()
        self.process.wait(SECONDS)

    def exit_code(self) -> int:
        """Wait for the end of the command and return its exit code."""
        self.process.wait(SECONDS)
        return int(Path(f"{self.output}.code").read_text())


class Site:
    """A folder with a study, a task and keys, and the processes that were started there."""

    def __init__(self, folder: Path, algorithm: str, rounds: int, study: str = STUDY, task: str = TASK) -> None:
        self.folder, self.port = folder, free_port()
        (folder / "study.toml").write_text(study.format(algorithm=algorithm, rounds=rounds))
        (folder / "my_task.py").write_text(task)
        make_keys(folder / "keys", 6, ("127.0.0.1",))
        self._started: list[Forked] = []
        self._forks = subprocess.Popen(
            [sys.executable, "-c", FORKS], cwd=folder, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *raised: object) -> None:
        for forked in self._started:
            forked.kill()
        self._forks.kill()
        self._forks.communicate()

    def start(self, *words: str) -> Forked:
        """Start a command, with its output in a file."""
        output = self.folder / f"{len(self._started)}.txt"
        assert self._forks.stdin is not None
        assert self._forks.stdout is not None
        self._forks.stdin.write(json.dumps([["deploy", *words], str(output)]) + "\n")
        self._forks.stdin.flush()
        forked = Forked(psutil.Process(int(self._forks.stdout.readline())), output)
        self._started.append(forked)
        return forked

    def serve(self, *words: str) -> Forked:
        return self.start("serve", "study.toml", "--keys", "keys", "--listen", f"127.0.0.1:{self.port}", *words)

    def join(self, client: int, *, step_seconds: float = 0.005, address: str = "") -> Forked:
        task = ("--task", "my_task.py:make", "--step-seconds", str(step_seconds))
        return self.start("join", address or f"127.0.0.1:{self.port}", "--keys", f"keys/client-{client}", *task)

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "served"

    def log(self) -> EventLog:
        return logs.read(self.run / EVENT_LOG)

    def events(self, kind: type[Any], client: int | None = None) -> list[Any]:
        """Return the events of a kind in the log so far, of one client or of all."""
        with suppress(Exception):  # the file does not exist yet
            found: list[Event] = [event for event in self.log().events if isinstance(event, kind)]
            return [event for event in found if client is None or getattr(event, "client", None) == client]
        return []

    def output(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.txt")))

    def until(self, condition: Callable[[], bool], seconds: float = SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)

    def merges(self) -> int:
        try:
            return (self.run / EVENT_LOG).read_bytes().count(b'"note":"merge"')
        except OSError:
            return 0

    def until_merged(self, more: int) -> None:
        """Wait until that many more merges are in the log."""
        seen = self.merges()
        self.until(lambda: self.merges() >= seen + more)

    def checked(self) -> tuple[EventLog, Replay]:
        """Replay and check the log: every update is received once and merged at most once."""
        log = self.log()
        found, received, merged = received_and_merged(log)
        assert set(merged) <= set(received)
        return log, found
