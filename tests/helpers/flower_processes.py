"""Real SuperLinks and SuperNodes for tests: small tasks, time limits, and no process left at the end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from defedavg.deploy.deploy_config import default_settings, read_deploy_config
from defedavg.deploy.engine import event_log as logs
from defedavg.deploy.engine.event_log import EventLog
from defedavg.deploy.flower.app_template import write_app
from defedavg.deploy.flower.local_deployment import start_supernodes, wait_until_finished
from defedavg.deploy.flower.processes import FlowerCluster, TlsFiles
from defedavg.deploy.replay import Replay, replay
from defedavg.runstore.deployment_status import LogTail
from defedavg.runstore.layout import EVENT_LOG as LOG

TASK = '''"""Two classes that a line separates."""

import numpy as np
from torch import nn

from defedavg import make_task


def make(config, client):
    rng = np.random.Generator(np.random.Philox(key=5))
    x = rng.normal(size=(660, 20)).astype("float32")
    y = (x.sum(axis=1) > 0).astype("int64")
    total = config["clients.num_clients"]
    width = 2
    return make_task(
        model=lambda: nn.Linear(20, width),
        train=(x[:600], y[:600]),
        test=(x[600:], y[600:]),
        clients=np.array_split(np.arange(600), total),
    )
'''


class CutProxy:
    """A proxy to the SuperLink that cuts the first large request: a part of it arrives, the rest does not.

    ``stuck`` is set then. ``passed`` and ``held`` count the bytes of that request that arrived and that did not.
    """

    LARGE = 100_000

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.stuck = threading.Event()
        self.passed = self.held = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
                far = socket.create_connection(("127.0.0.1", self._port))
            except OSError:
                return
            connection = _ProxyConnection(self, near, far)
            threading.Thread(target=connection.forward, daemon=True).start()
            threading.Thread(target=connection.backward, daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        self._listener.close()


class _ProxyConnection:
    """One connection through the proxy."""

    def __init__(self, proxy: CutProxy, near: socket.socket, far: socket.socket) -> None:
        self._proxy, self._near, self._far = proxy, near, far
        self._request_bytes = 0  # since the last response

    def forward(self) -> None:
        proxy, cut = self._proxy, False
        with self._near, self._far:
            while data := _some(self._near):
                self._request_bytes += len(data)
                if self._request_bytes > proxy.LARGE and not proxy.stuck.is_set():
                    proxy.passed, cut = self._request_bytes - len(data), True
                if cut:
                    proxy.held += len(data)
                    proxy.stuck.set()
                else:
                    self._far.sendall(data)

    def backward(self) -> None:
        while data := _some(self._far):
            self._request_bytes = 0
            try:
                self._near.sendall(data)
            except OSError:
                return


def _some(end: socket.socket) -> bytes:
    try:
        return end.recv(16_384)
    except OSError:
        return b""


class Deployment:
    """An app, a cluster, and a run in a folder."""

    def __init__(
        self,
        folder: Path,
        *,
        tls: TlsFiles | None = None,
        own_task: bool = True,
        database: bool = False,
        **changes: Any,
    ) -> None:
        flat = default_settings(changes.pop("algorithm", "defedavg-iid"), changes.pop("clients", 4))
        flat |= {
            "name": "test",
            "training.updates_per_round": 2,
            "training.local_steps": 10,
            "clients.step_seconds": 0.02,
            "stop.max_rounds": 6,
            "stop.max_seconds": 240.0,
            "deploy.job_seconds": 25.0,
            "deploy.wait_seconds": 90.0,
        }
        flat |= {name.replace("__", "."): value for name, value in changes.items()}
        self.folder = folder / "run"
        self.folder.mkdir(parents=True)
        self.app = folder / "app"
        write_app(self.app, flat)
        if own_task:
            (self.app / "app" / "task.py").write_text(TASK)
        self.config = read_deploy_config(flat)
        self.cluster = FlowerCluster(folder / "flower", tls=tls, database=database)
        self.tail = LogTail(self.folder)
        self.lines: list[dict[str, Any]] = []

    def __enter__(self) -> Deployment:
        self.cluster.start_superlink()
        return self

    def __exit__(self, *args: object) -> None:
        self.cluster.stop()
        assert self.cluster.processes() == {}

    def start_nodes(self, clients: list[int] | None = None) -> None:
        start_supernodes(self.cluster, self.config, clients)

    def submit(self, *, resume: bool = False, **changes: Any) -> None:
        changed = {name.replace("__", "."): value for name, value in changes.items()}
        self.cluster.submit(self.app, **{"deploy.folder": str(self.folder), "deploy.resume": resume}, **changed)

    def use_folder(self, folder: Path) -> None:
        """Use another folder for the next run."""
        folder.mkdir(parents=True)
        self.folder, self.tail, self.lines = folder, LogTail(folder), []

    def kill(self, word: str) -> None:
        """Kill every process of the cluster with a name, including those that Flower starts meanwhile."""
        deadline = time.monotonic() + 30.0
        while pids := self.cluster.pids(word):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def until(self, what: str, condition: Callable[[], bool], seconds: float = 300.0) -> None:
        """Wait until the log shows something."""
        deadline = time.monotonic() + seconds
        while True:
            self.read()
            if condition():
                return
            assert time.monotonic() < deadline, f"{what} did not happen: {self.lines[-3:]}, {self.server_log()}"
            time.sleep(0.2)

    def read(self) -> None:
        """Read the new lines of the log."""
        self.lines.extend(self.tail.lines())

    def version(self) -> int:
        """Return the newest version in the log."""
        return max((line["version"] for line in self.lines if line.get("note") == "merge"), default=0)

    def seen(self, event: str) -> list[dict[str, Any]]:
        """Return the events or notes with a name so far."""
        return [line for line in self.lines if event in (line.get("event"), line.get("note"))]

    def has_job(self, client: int) -> bool:
        """Return whether a client's node has received a job."""
        return "Receiving: train message" in (self.cluster.folder / f"node-{client}.log").read_text()

    def server_log(self) -> str:
        path = self.folder / "server.log"
        return path.read_text()[-2000:] if path.exists() else "the server printed nothing"

    def finish(self) -> dict[str, Any]:
        """Wait for the end and return the summary of the run."""
        wait_until_finished(self.cluster, self.folder, self.lines.append, self.tail)
        [entry] = json.loads((self.folder / "summary.json").read_text())["runs"]
        return dict(entry)

    def checked(self) -> tuple[EventLog, Replay]:
        """Replay and check the log; no update is merged twice."""
        log = logs.read(self.folder / LOG)
        found = replay(log)
        found.plan.check()
        merged = [(u.client, u.index) for r in found.plan.rounds for u, _ in r.merge.updates]
        assert len(set(merged)) == len(merged)
        return log, found
