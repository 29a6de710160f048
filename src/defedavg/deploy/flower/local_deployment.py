"""``defedavg deploy local``: a complete deployment on this machine, with clients of different speeds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from ...config.build import make_fleet
from ...errors import UserError
from ...report.tables import score_and_perplexity
from ...runstore.layout import RunFiles, is_being_replaced
from ...runstore.metrics import metric_of
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


class LogTail:
    """Reads the log of a run while the server writes it."""

    def __init__(self, folder: Path, *, from_end: bool = False) -> None:
        self._path = RunFiles(folder).event_log
        self._position = self._path.stat().st_size if from_end and self._path.exists() else 0

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines added since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read()
        except OSError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._position += len(complete)
        return [json.loads(row) for row in complete.splitlines()]


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

    def __init__(self, clients: int) -> None:
        self._clients, self._connected, self._updates = clients, set[int](), 0
        self._evaluation: dict[str, Any] = {}

    def update(self, line: dict[str, Any]) -> str | None:
        """Take account of a line of the log; return a message if the user should see one."""
        event, note, client = line.get("event"), line.get("note"), line.get("client")
        if event == "joined":
            self._connected.add(line["client"])
        elif event == "left" or note == "quarantined":
            self._connected.discard(line["client"])
        elif event == "resumed":
            self._connected.clear()
        elif event == "trained" or (event == "exchanged" and line.get("update")):
            self._updates += 1
        elif note == "measured":
            self._evaluation = line
        if event in ("left", "refused", "failed"):
            return f"client {client} {event}: {line['why']}"
        return f"client {client} is quarantined" if note == "quarantined" else None

    def __str__(self) -> str:
        evaluation = self._evaluation
        connected = f"{len(self._connected)} of {self._clients} clients connected"
        if not evaluation:
            return f"waiting: {connected}"
        metric = metric_of(evaluation)
        accuracy, loss = evaluation.get("accuracy"), evaluation.get("loss")
        value = "" if accuracy is None else f", {metric} {score_and_perplexity(accuracy, loss, metric)}"
        done = f"round {evaluation['round']}, {evaluation['seconds']:.0f} s{value}"
        return f"{done}, {self._updates} updates, {connected}"


@contextmanager
def progress_display(console: Console, clients: int) -> Iterator[OnLine]:
    """Yield a function that shows lines of the log: a live status on a terminal, a line from time to time elsewhere."""
    progress = LocalProgress(clients)
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
