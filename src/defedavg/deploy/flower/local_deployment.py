"""``defedavg deploy local``: a complete deployment on this machine, with clients of different speeds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from ...config.build import make_fleet
from ...errors import UserError
from ...report.tables import score_and_perplexity
from ...runstore.deployment_status import DeploymentStatus, LogTail
from ...runstore.layout import RunFiles, is_being_replaced
from ...runstore.reader import read_run
from ..deploy_config import DeployConfig
from .processes import FlowerCluster, free_port
from .signals import signals_as_interrupts

OnLine = Callable[[dict[str, Any]], None]
"""Called with every new line of the event log."""

STATUS_SECONDS = 10.0
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


class LocalProgress:
    """The progress of a run as one line of text, from its event log."""

    def __init__(self, clients: int, before: Iterable[dict[str, Any]] = ()) -> None:
        self._clients, self._status = clients, DeploymentStatus()
        for line in before:
            self._status.add(line)

    def update(self, line: dict[str, Any]) -> str | None:
        """Take account of a line of the log; return a message if the user should see one."""
        self._status.add(line)
        event, note, client = line.get("event"), line.get("note"), line.get("client")
        if note == "turned away":
            return f"{line.get('who', 'a node')} cannot take part: {line['why']}"
        if event in ("left", "refused", "failed"):
            return f"client {client} {event}: {line['why']}"
        return f"client {client} is quarantined" if note == "quarantined" else None

    def __str__(self) -> str:
        status = self._status
        connected = f"{status.connected} of {self._clients} clients connected"
        if not status.evaluations:
            return f"waiting: {connected}"
        done, seconds, accuracy, loss = status.evaluations[-1]
        value = "" if accuracy is None else f", {status.metric} {score_and_perplexity(accuracy, loss, status.metric)}"
        goal = status.goal_text()
        return f"round {done}, {seconds:.0f} s{value}, {status.updates} updates, {connected}{goal and f'; {goal}'}"


@contextmanager
def progress_display(console: Console, clients: int, resumed: Path | None = None) -> Iterator[OnLine]:
    """Yield a function that shows lines of the log: a live status on a terminal, a line from time to time elsewhere.

    ``resumed`` is the folder of a run that continues: what it has done before counts too.
    """
    progress = LocalProgress(clients, () if resumed is None else LogTail(resumed).lines())
    last = time.monotonic()
    with console.status("starting") if console.is_terminal else nullcontext() as status:

        def show(line: dict[str, Any]) -> None:
            nonlocal last
            message = progress.update(line)
            if message:
                console.print(message, markup=False, soft_wrap=True)
            if status is not None:
                status.update(str(progress))
            elif time.monotonic() - last >= STATUS_SECONDS:
                last = time.monotonic()
                console.print(str(progress), markup=False, soft_wrap=True)

        yield show


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
