"""Real SuperLinks and SuperNodes for tests: small tasks, everything bounded in time, everything ended."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from defedavg.deploy.deploy_config import read_deploy_config
from defedavg.deploy.engine import event_log as logs
from defedavg.deploy.engine.event_log import LOG, EventLog
from defedavg.deploy.flower.app_template import default_settings, write_app
from defedavg.deploy.flower.local_deployment import LogTail, start_supernodes, wait_until_finished
from defedavg.deploy.flower.processes import FlowerCluster, TlsFiles
from defedavg.deploy.replay import Replay, replay

TASK = '''"""A line parts two classes."""

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


class Narrows:
    """A way to the SuperLink that is cut in the middle of the first large request: part of it arrives, no more does.

    ``stuck`` is set then. ``passed`` and ``held`` are the bytes of that request that went through and that did not.
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
            way = _Way(self, near, far)
            threading.Thread(target=way.there, daemon=True).start()
            threading.Thread(target=way.back, daemon=True).start()

    def close(self) -> None:
        """Nobody is let in any more."""
        self._listener.close()


class _Way:
    """One connection through the narrows."""

    def __init__(self, narrows: Narrows, near: socket.socket, far: socket.socket) -> None:
        self._narrows, self._near, self._far = narrows, near, far
        self._asked = 0  # bytes since the last answer

    def there(self) -> None:
        narrows, cut = self._narrows, False
        with self._near, self._far:
            while data := _some(self._near):
                self._asked += len(data)
                if self._asked > narrows.LARGE and not narrows.stuck.is_set():
                    narrows.passed, cut = self._asked - len(data), True
                if cut:
                    narrows.held += len(data)
                    narrows.stuck.set()
                else:
                    self._far.sendall(data)

    def back(self) -> None:
        while data := _some(self._far):
            self._asked = 0
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
        self, folder: Path, *, tls: TlsFiles | None = None, own_task: bool = True, **changes: Any
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
        self.cluster = FlowerCluster(folder / "flower", tls=tls)
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

    def submit(self, *, resume: bool = False) -> None:
        self.cluster.submit(self.app, **{"deploy.folder": str(self.folder), "deploy.resume": resume})

    def until(self, what: str, condition: Callable[[], bool], seconds: float = 150.0) -> None:
        """Wait for something that the log tells."""
        deadline = time.monotonic() + seconds
        while True:
            self.read()
            if condition():
                return
            assert time.monotonic() < deadline, f"{what} did not happen: {self.lines[-3:]}, {self.server_log()}"
            time.sleep(0.2)

    def read(self) -> None:
        """Take in what the log tells up to now."""
        self.lines.extend(self.tail.lines())

    def version(self) -> int:
        """The newest version that the log tells of."""
        return max((line["version"] for line in self.lines if line.get("note") == "merge"), default=0)

    def seen(self, event: str) -> list[dict[str, Any]]:
        """The events or notes of a name so far."""
        return [line for line in self.lines if event in (line.get("event"), line.get("note"))]

    def works(self, client: int) -> bool:
        """Whether a client's node was given a job."""
        return "Receiving: train message" in (self.cluster.folder / f"node-{client}.log").read_text()

    def server_log(self) -> str:
        path = self.folder / "server.log"
        return path.read_text()[-2000:] if path.exists() else "the server said nothing"

    def finish(self) -> dict[str, Any]:
        """Wait for the end; gives what the summary says of the run."""
        wait_until_finished(self.cluster, self.folder, self.lines.append, self.tail)
        [entry] = json.loads((self.folder / "summary.json").read_text())["runs"]
        return dict(entry)

    def checked(self) -> tuple[EventLog, Replay]:
        """The log, replayed and checked; nothing is merged twice."""
        log = logs.read(self.folder / LOG)
        found = replay(log)
        found.plan.check()
        merged = [(u.client, u.index) for r in found.plan.rounds for u, _ in r.merge.updates]
        assert len(set(merged)) == len(merged)
        return log, found
