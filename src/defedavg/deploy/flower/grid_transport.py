"""A ``Transport`` over Flower's Grid."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid

from ...errors import UserError
from ..transport import Message, Reply, Vector, size_of
from .vector_record import read_vector, vector_record

CLIENT_FAILED = {1, 2, 6, 7, 8}
"""Error codes of the client's own app; all others mean that the node or its reply is unavailable."""

PULL_SECONDS = 1.0
MAX_PULLS = 8
"""Replies are pulled one by one or, if more messages are in flight, in this many groups: every pull takes time."""

MAX_PENDING_PULLS = 64


class _Pull(threading.Thread):
    """One request for replies.

    It lasts until every reply that has begun to arrive is complete. That is the time of its upload, or minutes if its
    sender crashed during the upload. In the meantime the server must be able to receive other replies.
    """

    def __init__(self, grid: Grid, ids: Collection[str], pulled_before: Collection[str]) -> None:
        super().__init__(daemon=True)
        self._grid, self._pulled_before = grid, frozenset(pulled_before)
        self.ids = tuple(ids)
        self._found: list[FlowerMessage] = []
        self._error: Exception | None = None

    def run(self) -> None:
        """Pull; keep an error for the thread of the server."""
        try:
            self._found = list(self._grid.pull_messages(self.ids))
        except Exception as error:
            self._error = error

    def replies(self) -> list[Reply]:
        """Return the replies; ignore that one is unavailable if an earlier pull may be receiving it."""
        if self._error is not None:
            raise self._error
        return [_reply(message) for message in self._found if not self._may_be_pulled(message)]

    def _may_be_pulled(self, message: FlowerMessage) -> bool:
        unavailable = message.has_error() and message.error.code not in CLIENT_FAILED
        return unavailable and message.metadata.reply_to_message_id in self._pulled_before


class GridTransport:
    """Messages over Flower's Grid; a version is one record object, which Flower uploads once for all nodes."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._pending: list[_Pull] = []
        self._records: dict[int, tuple[Vector, ConfigRecord]] = {}

    def nodes(self) -> set[int]:
        """Return the nodes that are connected."""
        return set(self._grid.get_node_ids())

    def _record(self, vector: Vector) -> ConfigRecord:
        cached = self._records.get(id(vector))
        if cached is None:
            if len(self._records) >= 4:
                self._records.pop(next(iter(self._records)))
            cached = self._records[id(vector)] = (vector, vector_record(vector))
        return cached[1]

    def push(self, messages: Sequence[Message]) -> list[str]:
        """Send messages; return an id for each, or an empty string if its node is not connected."""
        out = []
        for message in messages:
            content = RecordDict({"fields": ConfigRecord({"kind": message.kind, **message.fields})})
            if message.weights is not None:
                content["weights"] = self._record(message.weights)
            kind = "query" if message.kind == "hello" else "train"
            out.append(FlowerMessage(content, dst_node_id=message.node, message_type=kind, ttl=message.seconds))
        ids = list(self._grid.push_messages(out))
        if len(ids) != len(messages):
            raise UserError("the SuperLink refuses messages as large as this model; raise its limit on message size")
        return [name or "" for name in ids]

    def pull(self, ids: Collection[str]) -> list[Reply]:
        """Return the replies that are complete; those that are still being uploaded follow in a later call."""
        started = self._start_pulls(ids)
        deadline = time.monotonic() + PULL_SECONDS
        for pull in started:
            pull.join(max(0.0, deadline - time.monotonic()))
        pulls = [*self._pending, *started]
        self._pending = [pull for pull in pulls if pull.is_alive()]
        return [reply for pull in pulls if pull not in self._pending for reply in pull.replies()]

    def _start_pulls(self, ids: Collection[str]) -> list[_Pull]:
        """Start pulls for all messages except those that a pending pull of their own is receiving."""
        receiving = {pull.ids[0] for pull in self._pending if len(pull.ids) == 1}
        pulled_before = {name for pull in self._pending for name in pull.ids}
        names = [name for name in ids if name not in receiving]
        count = min(MAX_PULLS, len(names), MAX_PENDING_PULLS - len(self._pending))
        pulls = [_Pull(self._grid, names[first::count], pulled_before) for first in range(count)]
        for pull in pulls:
            pull.start()
        return pulls


def _reply(message: FlowerMessage) -> Reply:
    to = message.metadata.reply_to_message_id
    if message.has_error():
        error = message.error
        reason = (error.reason or "no reason given").strip().splitlines()
        return Reply(to, error=(reason[-1] if reason else "")[:300], failed=error.code in CLIENT_FAILED)
    content = message.content
    fields: dict[str, Any] = dict(content["fields"]) if isinstance(content.get("fields"), ConfigRecord) else {}
    update = None
    if "update" in content:
        try:
            update = read_vector(content["update"])
        except ValueError:
            update = np.zeros(0, dtype=object)  # no model has this shape, so the server refuses the reply
    return Reply(to, fields, update, size_of(update))
