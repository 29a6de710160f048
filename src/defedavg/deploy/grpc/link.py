"""One client process as the server knows it, over all its connections, and the memory that uploads may take."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from .frames import EncodedVector, encode
from .identities import Identity


@dataclass(frozen=True, eq=False, slots=True)
class OutgoingMessage:
    """A message to a client: its first frame, and the vector that follows it."""

    name: str
    kind: str
    head: bytes
    vector: EncodedVector | None


@dataclass(eq=False)
class Connection:
    """One stream. Frames are written by one task, in the order of the queue."""

    context: Any
    queue: deque[OutgoingMessage | bytes] = field(default_factory=deque)
    filled: asyncio.Event = field(default_factory=asyncio.Event)
    cut: asyncio.Future[tuple[Any, str]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    closing: bool = False

    def send(self, item: OutgoingMessage | bytes) -> None:
        """Queue a message or a frame."""
        self.queue.append(item)
        self.filled.set()

    def close(self) -> None:
        """Write nothing after the frame that is being written."""
        self.closing = True
        self.filled.set()

    def end(self, code: Any, reason: str) -> None:
        """Ask for the end of the stream, with a status for the client."""
        if not self.cut.done():
            self.cut.set_result((code, reason))


@dataclass(eq=False)
class Link:
    """A client process: messages that it has not answered outlive a connection."""

    identity: Identity
    process: str
    node: int
    pending: dict[str, OutgoingMessage] = field(default_factory=dict)
    connection: Connection | None = None
    expiry: asyncio.TimerHandle | None = None

    @property
    def client(self) -> int:
        """The number of the client."""
        return self.identity.client

    def add(self, message: OutgoingMessage) -> None:
        """Send a message. It replaces an older one of its kind: the server no longer waits for that answer."""
        work = message.kind != "hello"
        self.pending = {name: other for name, other in self.pending.items() if (other.kind != "hello") != work}
        self.pending[message.name] = message
        if self.connection is not None:
            self.connection.send(message)

    def connect(self, connection: Connection, received: Collection[str]) -> None:
        """Continue on a new connection with the messages that the client has not received."""
        if self.expiry is not None:
            self.expiry.cancel()
        self.expiry, self.connection = None, connection
        for name, message in self.pending.items():
            if name not in received:
                connection.send(message)

    async def write_queue(self, connection: Connection) -> None:
        """Write what is queued on a connection until it closes. ``write`` waits while the client does not read."""
        while not connection.closing:
            await connection.filled.wait()
            connection.filled.clear()
            while connection.queue:
                for frame in self._frames(connection.queue.popleft()):
                    if connection.closing:
                        return
                    await connection.context.write(frame)

    def _frames(self, item: OutgoingMessage | bytes) -> Iterator[bytes]:
        if isinstance(item, bytes):
            yield item
        elif item.name in self.pending:  # otherwise another message has replaced it
            yield item.head
            if item.vector is not None:
                yield from item.vector.frames()


def acknowledgement(name: str) -> bytes:
    """Return the frame that tells a client that a reply has arrived."""
    return encode({"type": "ack", "id": name})


class ByteBudget:
    """Bytes that uploads may take in the server's memory together. A client waits, unread, until its upload fits."""

    def __init__(self, total: int) -> None:
        self._free = total
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, count: int) -> None:
        """Wait until that many bytes are free, in the order of the calls, and take them."""
        if not self._waiting and count <= self._free:
            self._free -= count
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(count)
            raise

    def give(self, count: int) -> None:
        """Return bytes."""
        self._free += count
        while self._waiting and (self._waiting[0][1].done() or self._waiting[0][0] <= self._free):
            needed, turn = self._waiting.popleft()
            if not turn.done():
                self._free -= needed
                turn.set_result(None)
