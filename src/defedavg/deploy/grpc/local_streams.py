"""``defedavg deploy local`` over gRPC: the server in this process, every client in a process of its own."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ...config.build import make_fleet
from ...config.task_module import task_from_module
from ...runstore.deployment_status import LogTail
from ...runstore.layout import RunFiles
from ...tasks import Task
from ..deploy_config import DeployConfig
from ..local_progress import OnLine, followed
from ..tls_keys import make_keys
from .join import task_of_settings
from .local_clients import LocalClients
from .run_server import Listening, ServerLog, run_server

HOST = "127.0.0.1"


def run_local_streams(
    clients: LocalClients,
    config: DeployConfig,
    flat: Mapping[str, Any],
    folder: Path,
    on_line: OnLine,
    *,
    app: Path | None,
    port: int,
) -> None:
    """Run a deployment on this machine with TLS and keys of its own; ``app`` has a task, port 0 is any free port."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))  # the clients need the other cores
    files, tail = RunFiles(folder), LogTail(folder, from_end=config.deploy.resume)
    step_times = make_fleet(config.settings, config.seed).step_times
    module = str(flat.get("task.module") or "") or None
    spec = module if app is None else f"{_package_of(app)}.task:make"
    with tempfile.TemporaryDirectory(prefix="defedavg-keys-") as scratch:
        keys = Path(scratch) / "keys"
        launch = {
            "settings": {**flat, "task.module": module or ""},
            "task": spec,
            "sys_path": [] if app is None else [str(app.absolute())],
            "keys": str(keys),
            "clients": [[client, float(seconds)] for client, seconds in enumerate(step_times)],
            "log": str(files.client_log.absolute()),
            "fork": sys.platform != "darwin",
        }
        clients.prepare(launch)
        with followed(tail, on_line):
            make_keys(keys, len(step_times), (HOST, "localhost"))
            run_server(
                config,
                flat,
                _task_maker(spec, app, flat),
                folder,
                Listening(f"{HOST}:{port}", keys),
                log_line=ServerLog(folder),
                on_listening=lambda found: clients.start(f"{HOST}:{found}"),
            )


def _task_maker(spec: str | None, app: Path | None, flat: Mapping[str, Any]) -> Callable[[], Task]:
    def make() -> Task:
        if app is not None:
            sys.path.insert(0, str(app.absolute()))
        return task_of_settings(flat, None) if spec is None else task_from_module(spec, flat, None)

    return make


def _package_of(app: Path) -> str:
    """Return the name of the package in an app of ``deploy init``: the folder in it that has a task."""
    named = app.absolute().name
    if (app / named / "task.py").is_file():
        return named
    found = sorted(path.parent.name for path in app.glob("*/task.py"))
    return found[0] if found else named
