"""``defedavg deploy local``: a whole deployment on this machine, with clients of uneven slowness."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from ...config.build import make_fleet
from ...errors import UserError
from ..deploy_config import DeployConfig
from ..engine.event_log import LOG
from ..server.deployment_folder import ERROR, is_finished
from .processes import Cluster, free_port
from .signals import as_interrupts

Watch = Callable[[dict[str, Any]], None]
QUIET_SECONDS = 10.0


def start_nodes(cluster: Cluster, orders: DeployConfig, clients: list[int] | None = None, warm: bool = True) -> None:
    """A SuperNode for every client, as slow as the settings say."""
    pace = make_fleet(orders.settings, orders.seed).step_times
    for client in range(len(pace)) if clients is None else clients:
        cluster.start_node(str(client), client=client, step_seconds=float(pace[client]), warm=warm)


class Follower:
    """Reads the log of a run while it is being written."""

    def __init__(self, folder: Path, *, from_end: bool = False) -> None:
        self._path = folder / LOG
        self._read = self._path.stat().st_size if from_end and self._path.exists() else 0

    def lines(self) -> Iterator[dict[str, Any]]:
        """What was added since the last time."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        for row in whole.splitlines():
            yield json.loads(row)


def follow(cluster: Cluster, folder: Path, watch: Watch, follower: Follower, poll_seconds: float = 0.3) -> None:
    """Wait for the end of a run; raises if it ends badly, with the line that says why."""
    seen = done = False
    begun = time.monotonic()
    while True:
        for line in follower.lines():
            watch(line)
            done = done or line.get("note") == "done"
        if (folder / ERROR).exists():
            raise UserError((folder / ERROR).read_text(encoding="utf-8").strip())
        running = bool(cluster.pids("flwr-serverapp"))
        seen = seen or running
        if done and is_finished(folder):
            return
        if cluster.link is not None and cluster.link.poll() is not None:
            raise UserError(f"the SuperLink ended: {cluster.last_line('superlink')}; go on with --resume")
        if not running and (seen or time.monotonic() - begun > 60.0) and not _more(follower, watch):
            if is_finished(folder):
                return
            raise UserError(f"the server ended before the run did; see {folder / 'server.log'}; go on with --resume")
        time.sleep(poll_seconds)


def _more(follower: Follower, watch: Watch) -> bool:
    """Whether the log still grew while it was noticed that its writer is gone."""
    time.sleep(1.0)
    found = list(follower.lines())
    for line in found:
        watch(line)
    return bool(found)


class LocalProgress:
    """What a log tells, in one line."""

    def __init__(self, clients: int) -> None:
        self._clients, self._here, self._updates = clients, set[int](), 0
        self._measured: dict[str, Any] = {}

    def take(self, line: dict[str, Any]) -> str | None:
        """Take in a line of the log; gives what is worth a line of its own."""
        event, client = line.get("event"), line.get("client")
        if event == "joined" and isinstance(client, int):
            self._here.add(client)
        elif event in ("left", "refused", "failed") and isinstance(client, int):
            if event == "left":
                self._here.discard(client)
            return f"client {client} {event}: {line['why']}"
        elif line.get("note") == "quarantined" and isinstance(client, int):
            self._here.discard(client)
            return f"client {client} is quarantined"
        elif event == "resumed":
            self._here.clear()
        elif event == "trained" or (event == "exchanged" and line.get("update")):
            self._updates += 1
        elif line.get("note") == "measured":
            self._measured = line
        return None

    def __str__(self) -> str:
        found = self._measured
        here = f"{len(self._here)} of {self._clients} clients here"
        if not found:
            return f"waiting: {here}"
        accuracy = found.get("accuracy")
        share = "" if accuracy is None else f", accuracy {100 * accuracy:.1f} %"
        return f"round {found['round']}, {found['seconds']:.0f} s{share}, {self._updates} updates, {here}"


@contextmanager
def showing(console: Console, clients: int) -> Iterator[Watch]:
    """A function to be told of the lines of a log: a live line on a terminal, one now and then elsewhere."""
    progress = LocalProgress(clients)
    last = time.monotonic()
    with console.status("starting") if console.is_terminal else _nothing() as status:

        def watch(line: dict[str, Any]) -> None:
            nonlocal last
            said = progress.take(line)
            if said:
                console.print(said, markup=False, soft_wrap=True)
            if status is not None:
                status.update(str(progress))
            elif time.monotonic() - last >= QUIET_SECONDS:
                last = time.monotonic()
                console.print(str(progress), markup=False, soft_wrap=True)

        yield watch


@contextmanager
def _nothing() -> Iterator[None]:
    yield None


def run_local(
    app: Path,
    orders: DeployConfig,
    folder: Path,
    watch: Watch,
    changes: dict[str, Any],
    *,
    port: int | None = None,
    warm: bool = True,
) -> None:
    """Start a cluster, run an app on it to the end of its run, and stop the cluster, whatever happens.

    ``changes`` are the settings that are not as the app has them.
    """
    follower = Follower(folder, from_end=orders.deploy.resume)
    cluster = Cluster(folder / "flower", port or free_port())
    (folder / ERROR).unlink(missing_ok=True)
    with as_interrupts(), cluster:
        cluster.start_link()
        start_nodes(cluster, orders, warm=warm)
        settings = {"deploy.folder": str(folder.absolute()), "deploy.resume": orders.deploy.resume}
        cluster.submit(app, **{**changes, **settings})
        follow(cluster, folder, watch, follower)
