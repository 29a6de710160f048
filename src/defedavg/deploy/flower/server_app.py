"""The server's side of Flower: a ``Transport`` over its Grid, and the ServerApp. Nothing else here knows Flower."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid, ServerApp

from ...errors import UserError
from ...fileio import FolderLock, InUse
from ...tasks import Task
from ..client.handler import MakeTask, find_task
from ..deploy_config import DeployConfig, read_orders
from ..server.coordinator import Coordinator
from ..server.deployment_folder import ERROR, finish, folder_of, goes_on, is_finished, open_run
from ..server.session import Session
from ..transport import Message, Reply, Transport, Vector, size_of

FAILED = {1, 2, 6, 7, 8}
"""Errors of the client's own app; all others mean that the node or its reply cannot be had."""


CLAIM_SECONDS = 30.0
"""Flower may start a second server of a run when it has not heard of the first for a while; that one waits so long."""

PULL_SECONDS = 1.0
QUESTIONS = 8
"""Replies are asked for one by one, or, where more messages are out, in so many groups: each question costs time."""

MOST_LATE = 64


class _Pull(threading.Thread):
    """One question for replies.

    It lasts until every reply of it that has begun to come is whole: as long as its upload, or minutes, if its sender
    died in the middle of it. So it must not keep the server from hearing the others.
    """

    def __init__(self, grid: Grid, ids: Collection[str], doubtful: Collection[str]) -> None:
        super().__init__(daemon=True)
        self._grid, self._doubtful = grid, frozenset(doubtful)
        self.ids = tuple(ids)
        self._found: list[FlowerMessage] = []
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._found = list(self._grid.pull_messages(self.ids))
        except Exception as error:  # for the server's own thread
            self._error = error

    def replies(self) -> list[Reply]:
        """What was answered; that a reply cannot be had is not believed if an earlier question may be fetching it."""
        if self._error is not None:
            raise self._error
        return [_reply(message) for message in self._found if not self._elsewhere(message)]

    def _elsewhere(self, message: FlowerMessage) -> bool:
        gone = message.has_error() and message.error.code not in FAILED
        return gone and message.metadata.reply_to_message_id in self._doubtful


class FlowerTransport:
    """Messages over Flower's Grid; a version is one record object, which Flower then uploads once for all nodes."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._late: list[_Pull] = []
        self._records: dict[int, tuple[Vector, ArrayRecord]] = {}

    def nodes(self) -> set[int]:
        """The nodes that are connected."""
        return set(self._grid.get_node_ids())

    def _record(self, vector: Vector) -> ArrayRecord:
        found = self._records.get(id(vector))
        if found is None:
            if len(self._records) >= 4:
                self._records.pop(next(iter(self._records)))
            found = self._records[id(vector)] = (vector, ArrayRecord({"weights": Array(vector)}))
        return found[1]

    def push(self, messages: Sequence[Message]) -> list[str]:
        """Send."""
        out = []
        for message in messages:
            content = RecordDict({"fields": ConfigRecord({"kind": message.kind, **message.fields})})
            if message.weights is not None:
                content["weights"] = self._record(message.weights)
            kind = "query" if message.kind == "hello" else "train"
            out.append(FlowerMessage(content, dst_node_id=message.node, message_type=kind, ttl=message.seconds))
        ids = list(self._grid.push_messages(out))
        if len(ids) != len(messages):
            raise UserError("the SuperLink takes no message as large as this model; see its limit of the message size")
        return [name or "" for name in ids]

    def pull(self, ids: Collection[str]) -> list[Reply]:
        """The replies that are here, whole; those that are still being uploaded come later."""
        fetched = {pull.ids[0] for pull in self._late if len(pull.ids) == 1}
        doubtful = {name for pull in self._late for name in pull.ids}
        asked = [name for name in ids if name not in fetched]
        questions = min(QUESTIONS, len(asked), MOST_LATE - len(self._late))
        fresh = [_Pull(self._grid, asked[first::questions], doubtful) for first in range(questions)]
        deadline = time.monotonic() + PULL_SECONDS
        for pull in fresh:
            pull.start()
        for pull in fresh:
            pull.join(max(0.0, deadline - time.monotonic()))
        pulls = [*self._late, *fresh]
        self._late = [pull for pull in pulls if pull.is_alive()]
        return [reply for pull in pulls if pull not in self._late for reply in pull.replies()]


def _reply(message: FlowerMessage) -> Reply:
    to = message.metadata.reply_to_message_id
    if message.has_error():
        error = message.error
        reason = (error.reason or "no reason given").strip().splitlines()
        return Reply(to, error=(reason[-1] if reason else "")[:300], failed=error.code in FAILED)
    content = message.content
    fields: dict[str, Any] = dict(content["fields"]) if isinstance(content.get("fields"), ConfigRecord) else {}
    record, update = content.get("update"), None
    if isinstance(record, ArrayRecord) and "update" in record:
        try:
            update = record["update"].numpy()
        except (ValueError, TypeError, EOFError, OSError):
            update = np.zeros(0, dtype=object)  # of no shape that a model has: it is refused
    return Reply(to, fields, update, size_of(update))


def server_app(task: str | MakeTask) -> ServerApp:
    """A ServerApp for the run that the app's configuration describes; ``task`` is ``module:function``."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(FlowerTransport(grid), dict(context.run_config), task, str(context.run_id))

    return app


def serve(port: Transport, flat: dict[str, Any], task: str | MakeTask, run: str) -> None:
    """Carry out a run; what the user can mend is one line, also in the file ``error.txt`` of the run's folder."""
    folder = Path(str(flat.get("deploy.folder") or "."))
    try:
        orders = read_orders(flat)
        folder = folder_of(orders)
        with FolderLock(folder, CLAIM_SECONDS):
            again = goes_on(folder, run)
            if again and is_finished(folder):
                return
            resume = again or orders.deploy.resume
            open_run(orders, folder, resume=resume)
            _carry_out(port, orders, flat, find_task(task)(flat, None), folder, run, resume)
    except InUse as error:  # not the run's own fault, so its folder is left alone
        _say(folder, f"defedavg: {error}")
        raise SystemExit(2) from None
    except UserError as error:
        if folder.is_dir():
            (folder / ERROR).write_text(f"{error}\n", encoding="utf-8")
        _say(folder, f"defedavg: {error}")
        raise SystemExit(2) from None
    except Exception:
        _say(folder, traceback.format_exc())
        raise


def _carry_out(
    port: Transport, orders: DeployConfig, flat: dict[str, Any], task: Task, folder: Path, run: str, resume: bool
) -> None:
    began = time.perf_counter()
    session = Session.resume(orders, flat, task, folder) if resume else Session(orders, flat, task, folder, run=run)
    with session.log:
        if resume:
            session.resumed()
        Coordinator(session, port, say=partial(_say, folder)).run()
        session.note("done", status=str(session.progress.status))
    finish(session, time.perf_counter() - began)


def _say(folder: Path, line: str) -> None:
    """To Flower's own log, and to a file beside the run."""
    print(line, flush=True)
    if folder.is_dir():
        with (folder / "server.log").open("a", encoding="utf-8") as out:
            out.write(f"{time.strftime('%H:%M:%S')} {line}\n")
