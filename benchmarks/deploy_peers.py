"""Updates per second of APPFL's gRPC server and of this one, in alternating turns on one machine.

Both run FedBuff with a merge after three updates, eight clients as processes, TLS, the same models, and jobs of one
local step on a batch of ten. APPFL is installed from PyPI into an environment of its own. Its forced garbage
collections are switched off. Its server, its FedBuff aggregator and its communicators are used as they come; a plain
loop in place of its client agent makes the local step. Its TLS authenticates the server alone, ours both sides, and
ours also checks, logs and saves every update. Only figures of one run can be compared with each other. Run
``python benchmarks/deploy_peers.py FOLDER [--turns 3] [--updates 300] [--models cnn mlp]``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import types
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).absolute().parents[1]
REQUIREMENTS = ("torch==2.13.0", "appfl==1.12.0")
HOST, CLIENTS, BATCH, PER_MERGE = "127.0.0.1", 8, 10, 3
MODEL = """
from defedavg.tasks.models import build


def make(name):
    return build(name, (1, 28, 28), 10)
"""


def environment(folder: Path) -> Path:
    """Return the Python of APPFL's environment; make the environment first if it does not exist."""
    python = folder / "appfl" / "bin" / "python"
    if not (folder / "appfl" / "complete").exists():
        print(f"installing {' and '.join(REQUIREMENTS)} into {folder / 'appfl'}: minutes", flush=True)
        venv.create(folder / "appfl", with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *REQUIREMENTS], check=True)
        (folder / "appfl" / "complete").touch()
    return python


def prepare_appfl() -> None:
    """Switch forced garbage collections off, and do without image metrics, which need a matching torchvision."""
    import gc

    gc.collect = lambda *_: 0
    sys.modules["piq"] = types.ModuleType("piq")  # of the reports on data, which are not made here


def serve(options: argparse.Namespace) -> None:
    """Be APPFL's server; print a line of JSON after the last update."""
    prepare_appfl()
    from appfl.agent import ServerAgent
    from appfl.comm.grpc import GRPCServerCommunicator
    from appfl.comm.grpc import serve as serve_grpc
    from appfl.config import ServerAgentConfig
    from omegaconf import OmegaConf

    model = {
        "model_path": str(options.files / "peer_model.py"),
        "model_name": "make",
        "model_kwargs": {"name": options.model},
    }
    server = {
        "num_clients": CLIENTS,
        "num_global_epochs": options.updates + 10 * CLIENTS,
        "scheduler": "AsyncScheduler",
        "scheduler_kwargs": {},
        "aggregator": "FedBuffAggregator",
        "aggregator_kwargs": {"K": PER_MERGE, "num_clients": CLIENTS},
        "device": "cpu",
        "logging_output_dirname": str(options.files / "logs"),
        "logging_output_filename": "server",
    }
    train = {"train_configs": {"send_gradient": False}, "model_configs": model}
    agent = ServerAgent(
        ServerAgentConfig(client_configs=OmegaConf.create(train), server_configs=OmegaConf.create(server))
    )
    times: list[tuple[float, float]] = []
    aggregate = agent.aggregator.aggregate

    def counted(*given: Any, **more: Any) -> Any:
        found = aggregate(*given, **more)
        times.append((time.monotonic(), time.process_time()))
        if len(times) == options.updates:
            (began, used), (ended, used_then) = times[len(times) // 5], times[-1]
            count = len(times) - 1 - len(times) // 5
            rate, cost = count / (ended - began), 1000 * (used_then - used) / count
            print(json.dumps({"updates_per_second": rate, "server_ms": cost}), file=sys.__stdout__, flush=True)
        return found

    agent.aggregator.aggregate = counted
    communicator = GRPCServerCommunicator(agent, logger=agent.logger)
    keys = {"server_certificate_key": "server.key", "server_certificate": "server.crt", "ca_certificate": "ca.crt"}
    files = {name: str(options.files / "keys" / file) for name, file in keys.items()}
    serve_grpc(communicator, server_uri=f"{HOST}:{options.port}", use_ssl=True, **files)


def train(options: argparse.Namespace) -> None:
    """Be one of APPFL's clients: a local step for every model received."""
    prepare_appfl()
    import torch
    from appfl.comm.grpc import GRPCClientCommunicator

    sys.path.insert(0, str(options.files))
    from peer_model import make

    torch.set_num_threads(1)
    model = make(options.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, labels = torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))
    server = GRPCClientCommunicator(
        f"client-{options.client}",
        server_uri=f"localhost:{options.port}",
        use_ssl=True,
        root_certificate=str(options.files / "keys" / "ca.crt"),
    )
    server.get_configuration()
    received = server.get_global_model(init_model=True)
    while True:
        weights = received[0] if isinstance(received, tuple) else received
        model.load_state_dict(weights)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        received = server.update_global_model(model.state_dict())


def measure_appfl(python: Path, model: str, updates: int) -> dict[str, float]:
    """Run APPFL's server and clients until that many updates have arrived."""
    from defedavg.deploy.ports import free_port
    from defedavg.deploy.tls_keys import make_keys

    with tempfile.TemporaryDirectory() as scratch:
        files, port = Path(scratch), free_port()
        (files / "peer_model.py").write_text(MODEL)
        make_keys(files / "keys", 1, (HOST, "localhost"))
        words = [str(python), str(Path(__file__).absolute()), str(files), "--files", str(files), "--port", str(port)]
        words += ["--models", model, "--updates", str(updates), "--model", model]
        more = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
        with (files / "clients.txt").open("wb") as out, (files / "server.txt").open("wb") as err:
            server = subprocess.Popen([*words, "--role", "server"], stdout=subprocess.PIPE, stderr=err, env=more)
            clients = [
                subprocess.Popen([*words, "--role", "client", "--client", str(n)], stdout=out, stderr=out, env=more)
                for n in range(CLIENTS)
            ]
        try:
            assert server.stdout is not None
            for line in server.stdout:
                if line.startswith(b"{"):
                    return dict(json.loads(line))
            raise SystemExit(f"APPFL's server ended: {(files / 'server.txt').read_text()[-2000:]}")
        finally:
            for process in (*clients, server):
                process.kill()
                process.wait()


def measure_own(model: str, updates: int) -> dict[str, float]:
    """Run this server with the benchmark of its own."""
    words = [sys.executable, str(ROOT / "benchmarks" / "deploy_grpc.py"), "--cases", model]
    words += ["--rounds", str(updates // PER_MERGE)]
    more = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    printed = subprocess.run(words, capture_output=True, text=True, check=True, env=more).stdout
    rate, cost = re.search(r": (\d+) updates/s", printed), re.search(r"server ([\d.]+) ms", printed)
    assert rate is not None
    assert cost is not None
    return {"updates_per_second": float(rate[1]), "server_ms": float(cost[1])}


def main() -> None:
    """Alternate, and print every turn and the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where APPFL's environment is, or is made")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--models", nargs="+", choices=("cnn", "mlp"), default=["cnn", "mlp"])
    for name, kind in {"role": str, "model": str, "client": int, "port": int, "files": Path}.items():
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        (serve if options.role == "server" else train)(options)
        return
    python = environment(options.folder.absolute())
    for model in options.models:
        found: dict[str, list[float]] = {"APPFL": [], "defedavg": []}
        for turn in range(options.turns):
            for name, result in (
                ("APPFL", measure_appfl(python, model, options.updates)),
                ("defedavg", measure_own(model, options.updates)),
            ):
                found[name].append(result["updates_per_second"])
                rate, cost = result["updates_per_second"], result["server_ms"]
                print(
                    f"{model}, turn {turn + 1}, {name}: {rate:.1f} updates/s, server {cost:.1f} ms an update",
                    flush=True,
                )
        medians = {name: statistics.median(values) for name, values in found.items()}
        ratio = medians["defedavg"] / medians["APPFL"]
        print(f"{model}: medians APPFL {medians['APPFL']:.1f}, defedavg {medians['defedavg']:.1f}, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
