"""Updates per second of a deployment over gRPC with TLS: jobs of one local step, real processes on this machine.

Every case runs the complete server: checks, event log, saved updates and versions, merges. Clients are processes that
``deploy local`` would start; ten, 200 and 1,000 clients are tasks in few processes. Evaluations are switched off,
except the first and the last. Printed are updates per second after a warm-up, the processor time of an update in the
server until the last merge and in all clients, the memory of the server before clients connect and its maximum until
then, and what a replay of the log finds.
Run ``python benchmarks/deploy_grpc.py [--cases ten many thousand] [--rounds N]``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from defedavg.deploy.client.handler import ClientHandler
from defedavg.deploy.deploy_config import default_settings, read_deploy_config
from defedavg.deploy.engine import event_log as logs
from defedavg.deploy.engine.events import Trained
from defedavg.deploy.grpc.identities import client_credentials
from defedavg.deploy.grpc.join import run_client, task_of_settings
from defedavg.deploy.grpc.run_server import Listening, run_server
from defedavg.deploy.grpc.stream_client import StreamClient
from defedavg.deploy.ports import HOST, free_port
from defedavg.deploy.replay import replay
from defedavg.deploy.tls_keys import make_keys
from defedavg.runstore.layout import RunFiles


@dataclass(frozen=True)
class Case:
    """One measurement: a model, its clients, how many of them share a process, and updates per merge."""

    model: str
    clients: int
    per_process: int
    updates_per_round: int
    rounds: int


CASES = {
    "cnn": Case("cnn", 8, 1, 3, 150),
    "mlp": Case("mlp", 8, 1, 3, 400),
    "one": Case("mlp", 1, 1, 1, 400),
    "many": Case("softmax", 200, 100, 10, 300),
    "ten": Case("softmax", 10, 10, 10, 300),
    "thousand": Case("softmax", 1000, 250, 10, 300),
    "thousand-cnn": Case("cnn", 1000, 250, 100, 30),
}
DEFAULT_CASES = ("cnn", "mlp", "one", "many")


class Training(threading.Thread):
    """Samples the memory of this process, and notes its processor time, until a folder has a file: the plan."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._folder, self._process = folder, psutil.Process()
        self.first = self.largest = self._process.memory_info().rss
        self._began = self._ended = time.process_time()

    def run(self) -> None:
        """Sample."""
        while not self._folder.is_dir() or not any(self._folder.iterdir()):
            self.largest = max(self.largest, self._process.memory_info().rss)
            time.sleep(0.02)
        self._ended = time.process_time()

    @property
    def processor_seconds(self) -> float:
        """The processor time until then."""
        return self._ended - self._began


def settings(case: Case, rounds: int) -> dict[str, Any]:
    """Return the settings of a case: FedBuff, all clients busy."""
    return {
        **default_settings("fedbuff", case.clients),
        "task.model": case.model,
        "training.local_steps": 1,
        "training.updates_per_round": case.updates_per_round,
        "training.local_lr": 0.01,
        "fedbuff.concurrency": case.clients,
        "stop.max_rounds": rounds,
        "stop.eval_every_rounds": 1_000_000,
    }


async def several(address: str, keys: Path, numbers: range, task: Any) -> None:
    """Run several clients in this process."""

    def make(found: Mapping[str, Any], number: int) -> ClientHandler:
        return ClientHandler(task, dict(found), number)

    clients = (
        StreamClient(address, client_credentials(keys / f"client-{n}"), make, log_line=lambda _: None) for n in numbers
    )
    await asyncio.gather(*(client.run() for client in clients))


def start_clients(case: Case, address: str, keys: Path, task: Any) -> list[int]:
    """Fork the processes of the clients; return their numbers."""
    children = []
    for first in range(0, case.clients, case.per_process):
        child = os.fork()
        if not child:
            try:
                if case.per_process == 1:
                    credentials = client_credentials(keys / f"client-{first}")
                    run_client(address, credentials, task=task, log_line=lambda _: None)
                else:
                    asyncio.run(several(address, keys, range(first, first + case.per_process), task))
            finally:
                os._exit(0)
        children.append(child)
    return children


def measure(case: Case, rounds: int, folder: Path) -> str:
    """Run one case in this process and return a line of figures."""
    torch.set_num_threads(1)
    flat = settings(case, rounds)
    config = read_deploy_config(flat)
    made = task_of_settings(flat, None)
    keys = folder / "keys"
    make_keys(keys, case.clients, (HOST,))
    # The clients are forked before gRPC starts here. They try to connect until the server listens.
    port = free_port()
    children = start_clients(case, f"{HOST}:{port}", keys, lambda _config, _client: made)
    run = folder / "run"
    run.mkdir()
    training = Training(run / "plans")
    training.start()
    run_server(config, flat, lambda: made, run, Listening(f"{HOST}:{port}", keys), log_line=lambda _: None)
    training.join()
    for child in children:
        os.waitpid(child, 0)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    log = logs.read(RunFiles(run).event_log)
    times = [event.t for event in log.events if isinstance(event, Trained)]
    found = replay(log)
    found.plan.check()
    warm = len(times) // 5
    rate = (len(times) - 1 - warm) / (times[-1] - times[warm])
    return (
        f"{rate:.0f} updates/s ({1000 / rate:.1f} ms each), {len(times)} updates, {len(found.plan.rounds)} merges as "
        f"logged; processor time of an update: server {1000 * training.processor_seconds / len(times):.1f} ms, clients "
        f"{1000 * (used.ru_utime + used.ru_stime) / len(times):.1f} ms; "
        f"memory of the server {training.first / 2**20:.0f} MB at first, {training.largest / 2**20:.0f} MB at most"
    )


def main() -> None:
    """Measure every case in a process of its own, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(DEFAULT_CASES))
    parser.add_argument("--rounds", type=int, default=0, help="instead of the case's own")
    parser.add_argument("--turns", type=int, default=1)
    options = parser.parse_args()
    for _ in range(options.turns):
        for name in options.cases:
            child = os.fork()
            if not child:
                with tempfile.TemporaryDirectory() as folder:
                    case = CASES[name]
                    print(f"{name}: {measure(case, options.rounds or case.rounds, Path(folder))}", flush=True)
                os._exit(0)
            os.waitpid(child, 0)


if __name__ == "__main__":
    main()
