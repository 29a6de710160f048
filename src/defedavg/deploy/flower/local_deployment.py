"""``defedavg deploy local``: a complete deployment on this machine, with clients of different speeds."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ...config.build import make_fleet
from ...errors import UserError
from ...runstore.deployment_status import LogTail
from ...runstore.layout import RunFiles, is_being_replaced
from ...runstore.reader import read_run
from ..deploy_config import DeployConfig
from ..local_progress import OnLine
from ..ports import free_port
from .processes import FlowerCluster
from .signals import signals_as_interrupts

SERVER_START_SECONDS = 60.0


def start_supernodes(
    cluster: FlowerCluster, config: DeployConfig, clients: list[int] | None = None, warm: bool = True
) -> None:
    """Start a SuperNode for every client, with the speed that the settings give it."""
    step_times = make_fleet(config.settings, config.seed).step_times
    for client in range(len(step_times)) if clients is None else clients:
        cluster.start_supernode(str(client), client=client, step_seconds=float(step_times[client]), warm=warm)


def wait_until_finished(
    cluster: FlowerCluster, folder: Path, on_line: OnLine, tail: LogTail, poll_seconds: float = 0.3
) -> None:
    """Wait for the end of a run; raise ``UserError`` with the reason if it fails."""
    seen = done = False
    began = time.monotonic()
    while True:
        lines = _pass_on(tail, on_line)
        done = done or any(line.get("note") == "done" for line in lines)
        if done and read_run(folder).finished:
            return
        _raise_failure(cluster, folder)
        running = bool(cluster.pids("flwr-serverapp"))
        seen = seen or running
        if not running and (seen or time.monotonic() - began > SERVER_START_SECONDS):
            time.sleep(1.0)  # the server may have written more lines just before it ended
            if not _pass_on(tail, on_line):
                break
        time.sleep(poll_seconds)
    if not read_run(folder).finished:
        _raise_failure(cluster, folder)
        raise UserError(f"the server ended before the run did; see {_log_of(folder)}; continue with --resume")


def _log_of(folder: Path) -> Path:
    """Return where the log of the server will be, also if the run that this one was to replace is restored."""
    files = RunFiles(folder)
    return files.server_log if files.event_log.exists() or not is_being_replaced(folder) else files.failed_log


def _raise_failure(cluster: FlowerCluster, folder: Path) -> None:
    error = RunFiles(folder).error
    if error.exists():
        # A full disk takes the name of a file, but not its content.
        full = f"the server could not write to {folder}, its disk is full; free some space, then continue with --resume"
        raise UserError(error.read_text(encoding="utf-8", errors="replace").strip() or full)
    if cluster.superlink is not None and cluster.superlink.poll() is not None:
        raise UserError(f"the SuperLink ended: {cluster.cause_of_end('superlink')}; continue with --resume")


def _pass_on(tail: LogTail, on_line: OnLine) -> list[dict[str, Any]]:
    lines = tail.lines()
    for line in lines:
        on_line(line)
    return lines


def run_local(
    app: Path, config: DeployConfig, folder: Path, on_line: OnLine, changes: dict[str, Any], *, port: int, warm: bool
) -> None:
    """Start a cluster, run an app on it until the run ends, and stop the cluster in any case.

    ``changes`` are the settings that differ from those in the app; port 0 is any free port.
    """
    files, tail = RunFiles(folder), LogTail(folder, from_end=config.deploy.resume)
    cluster = FlowerCluster(files.flower, port or free_port(), run_folder=folder)
    files.error.unlink(missing_ok=True)
    with signals_as_interrupts(), cluster:
        cluster.start_superlink()
        start_supernodes(cluster, config, warm=warm)
        settings = {"deploy.folder": str(folder.absolute()), "deploy.resume": config.deploy.resume}
        cluster.submit(app, **{**changes, **settings})
        wait_until_finished(cluster, folder, on_line, tail)
