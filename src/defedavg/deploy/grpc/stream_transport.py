"""A ``Transport`` over gRPC: the coordinator's thread on one side, the thread of the stream server on the other."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, TypeVar

from ..transport import Message, Reply, Vector
from .frames import EncodedVector, encode
from .link import OutgoingMessage
from .stream_server import StreamServer, StreamSettings

KEPT_VECTORS = 8
STOP_SECONDS = 10.0


Result = TypeVar("Result")


@functools.cache
def grpc_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of gRPC, in a thread that lasts as long as the process: gRPC supports one loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="gRPC", daemon=True).start()
    return loop


class StreamTransport:
    """Listens from the start of its ``with`` block to the end; ``port`` is where."""

    def __init__(self, settings: StreamSettings, log_line: Callable[[str], None] = print) -> None:
        self._settings, self._log_line = settings, log_line
        self._arrived: list[Reply] = []
        self._event = threading.Condition()
        self._nodes: frozenset[int] = frozenset()
        self._changes = self._changes_seen = 0
        self._prefix, self._names = os.urandom(4).hex(), itertools.count()
        self._encoded: OrderedDict[int, tuple[Vector, EncodedVector]] = OrderedDict()
        self.finished = False
        """Whether clients are told at the end of the block that the run is over."""

    def __enter__(self) -> StreamTransport:
        self._loop = grpc_loop()
        self._server = StreamServer(self._settings, self._deliver, self._set_nodes, self._log_line)
        self.port: int = self._in_loop(self._server.start())
        return self

    def __exit__(self, *raised: object) -> None:
        self._in_loop(self._server.stop(finished=self.finished))

    def _in_loop(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(STOP_SECONDS)

    def _deliver(self, reply: Reply) -> None:
        with self._event:
            self._arrived.append(reply)
            self._event.notify()

    def _set_nodes(self, nodes: frozenset[int]) -> None:
        with self._event:
            self._nodes = nodes
            self._changes += 1
            self._event.notify()

    @property
    def nodes_changed(self) -> bool:
        """Whether a node has connected or disconnected since the last call of ``nodes``."""
        return self._changes != self._changes_seen

    def wait(self, seconds: float) -> None:
        """Return when a reply has arrived or the nodes have changed, or after that time."""
        with self._event:
            self._event.wait_for(lambda: bool(self._arrived) or self.nodes_changed, seconds)

    def nodes(self) -> set[int]:
        """Return the nodes that are connected, and those that have been disconnected for a short time only."""
        with self._event:
            self._changes_seen = self._changes
            return set(self._nodes)

    def push(self, messages: Sequence[Message]) -> list[str]:
        """Send messages; return an id for each, or an empty string if its node is not connected."""
        batch, names = [], []
        for message in messages:
            name = f"{self._prefix}-{next(self._names)}" if message.node in self._nodes else ""
            names.append(name)
            if name:
                batch.append((message.node, self._outgoing(name, message)))
        if batch:
            self._loop.call_soon_threadsafe(self._server.push, batch)
        return names

    def reject(self, node: int, reason: str) -> None:
        """End the connection of a node that cannot take part, and tell it why."""
        self._loop.call_soon_threadsafe(self._server.reject, node, reason)

    def _outgoing(self, name: str, message: Message) -> OutgoingMessage:
        vector = None if message.weights is None else self._encode(message.weights)
        described = None if vector is None else vector.described
        head = {"type": "message", "id": name, "kind": message.kind, "fields": message.fields, "vector": described}
        return OutgoingMessage(name, message.kind, encode(head), vector)

    def _encode(self, vector: Vector) -> EncodedVector:
        """Encode a version once for all clients. The vector is kept as well, so that its id stays its own."""
        known = self._encoded.get(id(vector))
        if known is None:
            if len(self._encoded) >= KEPT_VECTORS:
                self._encoded.popitem(last=False)
            known = self._encoded[id(vector)] = (vector, EncodedVector(vector))
        self._encoded.move_to_end(id(vector))
        return known[1]

    def pull(self, ids: Collection[str]) -> list[Reply]:  # noqa: ARG002 (a reply that is not expected is noted as stale)
        """Return all replies that have arrived, each of them once."""
        with self._event:
            arrived, self._arrived = self._arrived, []
        taken = sum(reply.bytes for reply in arrived)
        if taken:
            self._loop.call_soon_threadsafe(self._server.budget.give, taken)
        return arrived
