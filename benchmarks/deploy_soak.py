"""A deployment over gRPC under random faults: every update must count exactly once, and the log must replay.

A server and its clients are real processes with TLS. Faults are drawn by key, so that a seed repeats their order: the
server is killed and resumed, clients are killed, stopped and continued, leave and return, and connections are cut. The
last client lies: its updates are not finite, have another shape, or belong to another job. At the end the server is
stopped, its log is replayed, the plan is checked, and all merges are computed again: they must lead to the saved
weights. Nothing but what a fault ends may end, and no honest client may be quarantined.
Run ``python benchmarks/deploy_soak.py [--seconds 600] [--seed 0] [--clients 6] [--algorithm defedavg-niid]``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from defedavg.config.build import make_executor
from defedavg.deploy.client.handler import Answer, ClientHandler
from defedavg.deploy.deploy_config import read_deploy_config
from defedavg.deploy.engine import event_log as logs
from defedavg.deploy.engine.events import Exchanged, Joined, Left, Refused, Resumed, Trained
from defedavg.deploy.ports import HOST, free_port
from defedavg.deploy.replay import replay
from defedavg.deploy.tls_keys import make_keys
from defedavg.deploy.transport import Vector
from defedavg.rng import key, uniform
from defedavg.runstore.layout import EVENT_LOG

STUDY = """
name = "soak"
algorithms = ["{algorithm}"]
[task]
module = "soak_task.py:make"
[clients]
num_clients = {clients}
[training]
updates_per_round = {updates}
local_steps = 4
local_lr = 0.05
[stop]
max_rounds = 1000000
eval_every_rounds = 50
[deploy]
min_clients = 2
reconnect_seconds = 3
"""
TASK = '''
import numpy as np
from torch import nn
from defedavg import make_task


def make(config, client):
    """Two classes that a plane separates; the model has 0.5 MB."""
    rng = np.random.Generator(np.random.Philox(key=5))
    x = rng.normal(size=(1300, 60)).astype("float32")
    y = (x.sum(axis=1) > 0).astype("int64")
    return make_task(
        model=lambda: nn.Sequential(nn.Linear(60, 2000), nn.ReLU(), nn.Linear(2000, 2)),
        train=(x[:1200], y[:1200]),
        test=(x[1200:], y[1200:]),
        clients=np.array_split(np.arange(1200), int(config["clients.num_clients"])),
    )
'''
FAULTS = ("kill the server", "kill a client", "stop a client", "cut a connection", "leave")


class Proxy:
    """A TCP proxy between the clients and the server that can cut a connection at any moment, in mid-upload too."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server((HOST, 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            try:
                server = socket.create_connection((HOST, self._target))
            except OSError:
                client.close()
                continue
            pair = (client, server)
            self._open.append(pair)
            for source, target in (pair, pair[::-1]):
                threading.Thread(target=self._copy, args=(source, target, pair), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, pair: tuple[socket.socket, socket.socket]) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        self._close(pair)

    def _close(self, pair: tuple[socket.socket, socket.socket]) -> None:
        if pair in self._open:
            self._open.remove(pair)
        for end in pair:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def cut(self, draw: float) -> None:
        """Cut one of the open connections."""
        if self._open:
            self._close(self._open[int(draw * len(self._open))])


@dataclass
class Soak:
    """The processes of a soak, and what was done to them."""

    folder: Path
    clients: int
    seed: int
    port: int
    proxy: Proxy
    server: subprocess.Popen[bytes] | None = None
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    continue_at: dict[int, float] = field(default_factory=dict)
    start_at: dict[int, float] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    memory: int = 0
    merges_at_kill: int = 0

    def command(self, *words: str, name: str) -> subprocess.Popen[bytes]:
        """Start a command with its output in a file."""
        with (self.folder / f"{name}.txt").open("ab") as out:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            return subprocess.Popen(
                [sys.executable, *words], cwd=self.folder, stdin=-3, stdout=out, stderr=out, env=environment
            )

    def serve(self) -> None:
        """Start the server, or resume its run."""
        resume = ("--resume",) if (self.folder / "runs" / "soak" / EVENT_LOG).exists() else ()
        words = ("-m", "defedavg", "deploy", "serve", "study.toml", "--keys", "keys")
        self.server = self.command(*words, "--listen", f"{HOST}:{self.port}", *resume, name="server")

    def join(self, client: int) -> None:
        """Start a client; the last one lies."""
        address, keys = f"{HOST}:{self.proxy.port}", f"keys/client-{client}"
        if client == self.clients - 1:
            self.processes[client] = self.command(
                str(Path(__file__).absolute()), "--liar", address, keys, name=f"client-{client}"
            )
            return
        words = ("-m", "defedavg", "deploy", "join", address, "--keys", keys, "--task", "soak_task.py:make")
        self.processes[client] = self.command(*words, "--step-seconds", "0.05", name=f"client-{client}")

    def draw(self, number: int, what: str) -> float:
        """Return a random number of this seed."""
        return float(uniform(key(self.seed, f"soak: {what}", number)))

    def fault(self, number: int) -> str:
        """Do something bad; return what it was."""
        kind = FAULTS[int(self.draw(number, "kind") * len(FAULTS))]
        client = int(self.draw(number, "client") * (self.clients - 1))
        away, now = 40 * self.draw(number, "seconds"), time.monotonic()
        process = self.processes.get(client)
        if kind == "kill the server":
            merges = self.merges()
            if merges == self.merges_at_kill and self.draw(number, "early") < 0.75:
                return ""  # of the kills, few hit a server that has not merged since it was resumed
            assert self.server is not None
            self.server.kill()
            self.server.wait()
            self.merges_at_kill = merges
            self.serve()
        elif kind == "cut a connection":
            self.proxy.cut(self.draw(number, "connection"))
        elif process is None or client in self.continue_at:
            return ""  # it is away or stopped
        elif kind == "stop a client":
            process.send_signal(signal.SIGSTOP)
            self.continue_at[client] = now + away
        else:
            process.send_signal(signal.SIGKILL if kind == "kill a client" else signal.SIGTERM)
            process.wait()
            del self.processes[client]
            self.start_at[client] = now + (away if kind == "leave" else 0.0)
        self.faults[kind] += 1
        return kind if kind in ("kill the server", "cut a connection") else f"{kind} ({client}, {away:.0f} s)"

    def look(self) -> None:
        """Continue and start clients whose time has come; nothing may have ended by itself."""
        now = time.monotonic()
        for client in [client for client, at in self.continue_at.items() if at <= now]:
            del self.continue_at[client]
            self.processes[client].send_signal(signal.SIGCONT)
        for client in [client for client, at in self.start_at.items() if at <= now]:
            del self.start_at[client]
            self.join(client)
        honest = [(f"client {n}", process) for n, process in self.processes.items() if n != self.clients - 1]
        for name, process in (("server", self.server), *honest):
            if process is not None and process.poll() is not None:
                raise SystemExit(f"{name} ended with code {process.returncode}; see {self.folder}")
        with suppress(psutil.Error):
            assert self.server is not None
            self.memory = max(self.memory, psutil.Process(self.server.pid).memory_info().rss)

    def run(self, seconds: float) -> None:
        """Start everything, then a fault every few seconds until the time is over, then stop the server."""
        began = time.monotonic()
        self.serve()
        for client in range(self.clients):
            self.start_at[client] = began + (0.25 * seconds if client == 1 else 0.0)  # one client joins late
        number, due = 0, 0.0
        while (now := time.monotonic()) < began + seconds:
            self.look()
            if now >= due and self.merges():
                what = self.fault(number)
                print(f"{now - began:4.0f} s: {what or 'nothing'}", flush=True)
                due, number = now + 1.0 + 8 * self.draw(number, "pause"), number + 1
            time.sleep(0.1)
        assert self.server is not None
        self.server.send_signal(signal.SIGINT)
        print(f"the server was stopped, with exit code {self.server.wait(60)}")

    def merges(self) -> int:
        """Return how many merges are in the log."""
        path = self.folder / "runs" / "soak" / EVENT_LOG
        return path.read_bytes().count(b'"note":"merge"') if path.exists() else 0

    def end(self) -> None:
        """End all processes."""
        for process in (self.server, *self.processes.values()):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()


def check(soak: Soak) -> None:
    """Check the log, the plan and the weights; print counts."""
    folder = soak.folder / "runs" / "soak"
    log = logs.read(folder / EVENT_LOG)
    found = replay(log)
    found.plan.check()
    events = list(log.events)
    received = Counter((e.client, e.index) for e in events if isinstance(e, Trained))
    received.update((e.client, e.update.index) for e in events if isinstance(e, Exchanged) and e.update)
    merged = Counter((u.client, u.index) for r in found.plan.rounds for u, _ in r.merge.updates)
    assert set(received.values()) == set(merged.values()) == {1}, "an update was received or merged twice"
    assert set(merged) <= set(received)
    assert set(found.quarantined) <= {soak.clients - 1}, f"honest clients are quarantined: {found.quarantined}"
    spec = importlib.util.spec_from_file_location("soak_task", soak.folder / "soak_task.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = read_deploy_config(log.head["settings"], stored=True)
    executor = make_executor(config.settings, config.seed, module.make({"clients.num_clients": soak.clients}, None))
    for record in found.plan.rounds:
        executor.apply(record)
    newest = len(found.plan.rounds)
    saved = load_file(folder / "state" / f"version-{newest}.safetensors")["weights"]
    apart = float((saved - executor.versions[newest]).abs().max())
    torch.testing.assert_close(saved, executor.versions[newest], rtol=1e-4, atol=1e-5)
    counts = {
        kind.__name__.lower(): sum(isinstance(e, kind) for e in events) for kind in (Joined, Left, Refused, Resumed)
    }
    print(f"faults: {', '.join(f'{what} {count}' for what, count in sorted(soak.faults.items()))}")
    print(f"{len(received)} updates received once each, {len(merged)} merged once each in {newest} rounds")
    print(f"events: {', '.join(f'{name} {count}' for name, count in counts.items())}; quarantined {found.quarantined}")
    print(f"the plan checks; its merges, computed again, differ from the saved weights by at most {apart:.1e}")
    print(f"largest memory of a server: {soak.memory / 2**20:.0f} MB; the log has {log.size / 1e6:.1f} MB")


def lie(address: str, keys: Path) -> None:
    """Be a client whose updates are wrong in one of three ways, by turns."""
    from defedavg.deploy.grpc.identities import client_credentials
    from defedavg.deploy.grpc.stream_client import StreamClient

    spec = importlib.util.spec_from_file_location("soak_task", Path("soak_task.py").absolute())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    turn = 0

    class Liar(ClientHandler):
        def answer(self, kind: str, fields: Mapping[str, Any], weights: Vector | None, *more: Any) -> Answer:
            nonlocal turn
            found, update = super().answer(kind, fields, weights, *more)
            if update is None:
                return found, update
            turn += 1
            wrong: list[Answer] = [
                (found, update * float("nan")),
                (found, update[:-1]),
                ({**found, "index": 10**6}, update),
            ]
            return wrong[turn % 3]

    import asyncio

    client = StreamClient(
        address, client_credentials(keys), lambda settings, n: Liar(module.make, dict(settings), n, 0.05)
    )
    asyncio.run(client.run())


def main() -> None:
    """Run a soak and check it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--algorithm", default="defedavg-niid")
    parser.add_argument("--liar", nargs=2, metavar=("ADDRESS", "KEYS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.liar:
        lie(options.liar[0], Path(options.liar[1]))
        return
    folder = Path(tempfile.mkdtemp(prefix="defedavg-soak-"))
    print(f"files: {folder}")
    updates = 3 * options.clients if options.algorithm == "defedavg-niid" else 3
    study = STUDY.format(algorithm=options.algorithm, clients=options.clients, updates=updates)
    (folder / "study.toml").write_text(study)
    (folder / "soak_task.py").write_text(TASK)
    make_keys(folder / "keys", options.clients, (HOST,))
    port = free_port()
    soak = Soak(folder, options.clients, options.seed, port, Proxy(port))
    try:
        soak.run(options.seconds)
    finally:
        soak.end()
    check(soak)


if __name__ == "__main__":
    main()
