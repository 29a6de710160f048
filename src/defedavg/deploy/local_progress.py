"""The progress of a deployment whose server runs on this machine, from its event log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from ..report.tables import score_and_perplexity
from ..runstore.deployment_status import DeploymentStatus, LogTail

OnLine = Callable[[dict[str, Any]], None]
"""Called with every new line of the event log."""

STATUS_SECONDS = 10.0
PROGRESS_SECONDS = 0.3  # between two looks at the log


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
        if note == "no page":
            return f"there is no page: {line['why']}"
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
def followed(tail: LogTail, on_line: OnLine) -> Iterator[None]:
    """Pass every new line of the event log on, from a thread, while the block runs."""
    ended = threading.Event()

    def follow() -> None:
        last = False
        while not last:
            last = ended.wait(PROGRESS_SECONDS)
            for line in tail.lines():
                on_line(line)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def progress_display(
    console: Console, clients: int, resumed: Path | None = None, *, faults: bool = True
) -> Iterator[OnLine]:
    """Yield a function that shows lines of the log: a live status on a terminal, a line from time to time elsewhere.

    ``resumed`` is the folder of a run that continues: what it has done before counts too. ``faults``: also print a line
    for a client that leaves, fails or cannot take part, and for a page that cannot be written, unless the server prints
    it itself.
    """
    progress = LocalProgress(clients, () if resumed is None else LogTail(resumed).lines())
    last = time.monotonic()
    with console.status("starting") if console.is_terminal else nullcontext() as status:

        def show(line: dict[str, Any]) -> None:
            nonlocal last
            message = progress.update(line)
            if message and faults:
                console.print(message, markup=False, soft_wrap=True)
            if status is not None:
                status.update(str(progress))
            elif time.monotonic() - last >= STATUS_SECONDS:
                last = time.monotonic()
                console.print(str(progress), markup=False, soft_wrap=True)

        yield show
