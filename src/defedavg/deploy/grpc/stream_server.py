"""The gRPC server: it accepts one stream per client, and passes messages and replies on.

It runs in one thread with an event loop. A slow or half-dead client costs a task and a bounded buffer, never a thread.
All methods except the constructor run in that thread.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc

from ...errors import UserError
from ..transport import Reply, Vector
from . import frames
from .frames import Assembler, FrameError, Shape
from .identities import Identity, RevocationList, identity_of
from .link import ByteBudget, Connection, Link, OutgoingMessage, acknowledgement

HELLO_SECONDS = 10.0  # for the first frame of a connection
CHUNK_SECONDS = 30.0  # for every further part of an upload
REVOCATION_SECONDS = 1.0  # between two looks at the list
UPLOAD_BYTES = 512 << 20  # of all uploads in memory together, if the model is not larger
MAX_RECEIVED = 64  # messages that a client may name when it connects
WINDOW_BYTES = 1 << 20
STOP_SECONDS = 1.0  # for streams to end when the server stops

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", frames.MAX_FRAME_BYTES),
    ("grpc.max_concurrent_streams", 4),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # newer versions of gRPC wait this long for the answer, by default a minute
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # no limit: by default, gRPC pings a quiet connection once a minute
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    ("grpc.http2.bdp_probe", 0),  # the window, and with it the memory of a connection, does not grow
    ("grpc.so_reuseport", 0),
)


@dataclass(frozen=True)
class StreamSettings:
    """What a stream server needs to know about its run."""

    address: str
    credentials: Any  # None: plain text
    num_clients: int
    update_bytes: int  # of the largest update
    settings: Mapping[str, Any]  # that clients receive
    reconnect_seconds: float
    min_upload_rate: float  # bytes per second
    revocations: RevocationList = field(default_factory=lambda: RevocationList(None))


class StreamEndError(Exception):
    """A connection cannot be accepted, or must end: a gRPC status code and a reason."""

    def __init__(self, code: Any, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class SlowUploadError(StreamEndError):
    """An update took longer than its size allows. The job has failed: a second upload would be as slow."""


class StreamServer:
    """The streams of all clients. ``deliver`` receives every reply, ``changed`` the nodes after every change."""

    def __init__(
        self,
        settings: StreamSettings,
        deliver: Callable[[Reply], None],
        changed: Callable[[frozenset[int]], None],
        log_line: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._deliver, self._changed, self._log_line = deliver, changed, log_line
        self._session = os.urandom(8).hex()
        self._links: dict[int, Link] = {}
        self._nodes: dict[int, Link] = {}
        self._next_node = itertools.count(1)
        self._refused: dict[int, str] = {}  # client -> the newest second process that was refused
        self._ended = False
        self.budget = ByteBudget(max(UPLOAD_BYTES, 2 * settings.update_bytes))

    async def start(self) -> int:
        """Listen, and return the port."""
        self._server = grpc.aio.server(
            options=SERVER_OPTIONS, maximum_concurrent_rpcs=2 * self._settings.num_clients + 64
        )
        handler = grpc.stream_stream_rpc_method_handler(self._connect)
        service = grpc.method_handlers_generic_handler(frames.SERVICE, {frames.METHOD_NAME: handler})
        self._server.add_generic_rpc_handlers((service,))
        address, credentials = self._settings.address, self._settings.credentials
        try:
            if credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, credentials)
        except RuntimeError:
            port = 0
        if not port:
            raise UserError(f"the server cannot listen at {address}: choose another address or port")
        await self._server.start()
        self._watch = asyncio.create_task(self._watch_revocations())
        return int(port)

    async def stop(self, *, finished: bool) -> None:
        """Close all streams; tell the clients if the run is over."""
        self._ended = True
        self._watch.cancel()
        for link in list(self._links.values()):
            if link.expiry is not None:
                link.expiry.cancel()
            if link.connection is not None and finished:  # the client ends the stream when it has read this
                link.connection.send(frames.encode({"type": "finished"}))
            elif link.connection is not None:
                link.connection.end(grpc.StatusCode.UNAVAILABLE, "the server has stopped")
        await self._server.stop(STOP_SECONDS)

    def push(self, batch: Sequence[tuple[int, OutgoingMessage]]) -> None:
        """Send messages to nodes; those of a node that has gone are dropped."""
        for node, message in batch:
            link = self._nodes.get(node)
            if link is not None:
                link.add(message)

    async def _connect(self, _requests: Any, context: Any) -> None:
        """Serve one stream from its first frame to its end."""
        link: Link | None = None
        code, reason = grpc.StatusCode.OK, ""
        connection = Connection(context)
        try:
            link = await self._accept(connection)
            await self._serve(link, connection)
        except StreamEndError as error:
            code, reason = error.code, str(error)
        except FrameError as error:
            code, reason = grpc.StatusCode.INVALID_ARGUMENT, str(error)
            if link is not None:
                self._log_line(f"client {link.client} broke the protocol: {error}")
                self._drop(link)
        finally:
            if link is not None and link.connection is connection:
                self._lost(link)
        if code is not grpc.StatusCode.OK:
            await context.abort(code, reason)

    async def _accept(self, connection: Connection) -> Link:
        """Identify a client, check its first frame, and answer it."""
        context = connection.context
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                frame = await context.read()
        except TimeoutError:
            raise FrameError("the first frame did not arrive in time") from None
        if frame is grpc.aio.EOF:
            raise FrameError("the stream ended before its first frame")
        head = frames.decode(frame)
        if head.get("type") != "hello":
            raise FrameError("the first frame is not a hello")
        if head.get("protocol") != frames.PROTOCOL:
            found = repr(head.get("protocol"))[:20]
            reason = f"the client speaks version {found} of the protocol, the server version {frames.PROTOCOL}"
            code = grpc.StatusCode.FAILED_PRECONDITION
            raise StreamEndError(code, f"{reason}; install the same version of defedavg on both sides")
        process, received = frames.text_of(head, "process", 64), head.get("received")
        if (
            not isinstance(received, list)
            or len(received) > MAX_RECEIVED
            or not all(isinstance(n, str) for n in received)
        ):
            raise FrameError("received is not a short list of messages")
        link = self._claim(self._identify(context, head), process)
        if link.connection is not None:
            link.connection.end(grpc.StatusCode.ABORTED, "the client has opened another stream")
        link.connect(connection, received)
        settings = dict(self._settings.settings)
        welcome = {"type": "welcome", "session": self._session, "client": link.client, "settings": settings}
        welcome["waiting"] = list(link.pending)
        connection.queue.appendleft(frames.encode(welcome))
        connection.filled.set()
        return link

    def _identify(self, context: Any, head: dict[str, Any]) -> Identity:
        refused = grpc.StatusCode.PERMISSION_DENIED
        if self._settings.credentials is None:
            identity = Identity(frames.count_of(head, "client"), "")
        else:
            try:
                identity = identity_of(context.auth_context())
            except ValueError as error:
                raise StreamEndError(grpc.StatusCode.UNAUTHENTICATED, str(error)) from None
        if identity in self._settings.revocations:
            self._log_line(f"refused client {identity.client}: its certificate is revoked")
            raise StreamEndError(refused, "the certificate is revoked")
        if identity.client >= self._settings.num_clients:
            last = self._settings.num_clients - 1
            raise StreamEndError(refused, f"this is client {identity.client}, but the run has clients 0 to {last}")
        return identity

    def _claim(self, identity: Identity, process: str) -> Link:
        """Return the link of a client process; refuse a second process while the first one is connected.

        A first process without a connection has most likely crashed, and the second is its restart: it takes its place.
        """
        if self._ended:
            raise StreamEndError(grpc.StatusCode.UNAVAILABLE, "the server is ending")
        link = self._links.get(identity.client)
        if link is not None and link.process != process:
            if link.connection is not None:
                self._refuse_second(identity.client, process)
            self._drop(link)
            link = None
        if link is None:
            link = Link(identity, process, next(self._next_node))
            self._links[identity.client] = self._nodes[link.node] = link
            self._changed(frozenset(self._nodes))
        return link

    def _refuse_second(self, client: int, process: str) -> NoReturn:
        if self._refused.get(client) != process:  # one line for a process, however often it tries
            self._refused[client] = process
            self._log_line(f"refused a second process that connects as client {client}")
        raise StreamEndError(grpc.StatusCode.ALREADY_EXISTS, f"client {client} is connected from another process")

    def reject(self, node: int, reason: str) -> None:
        """End a client process that cannot take part, and tell it why."""
        link = self._nodes.get(node)
        if link is not None:
            self._drop(link)
            if link.connection is not None:
                link.connection.end(grpc.StatusCode.FAILED_PRECONDITION, reason)

    async def _serve(self, link: Link, connection: Connection) -> None:
        """Read and write until the client ends the stream, the connection is lost, or the server cuts it."""
        reader: asyncio.Future[None] = asyncio.create_task(self._read_replies(link, connection))
        writer: asyncio.Future[None] = asyncio.create_task(link.write_queue(connection))
        ends: list[asyncio.Future[Any]] = [reader, writer, connection.cut]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reader.cancel()
            connection.close()  # gRPC cannot end a stream while a frame is being written, nor cancel the writing
            results = await asyncio.gather(reader, writer, return_exceptions=True)
        if connection.cut.done():
            raise StreamEndError(*connection.cut.result())
        for result in results:
            if isinstance(result, FrameError | StreamEndError):
                raise result
            if isinstance(result, Exception) and not self._ended:
                self._log_line(f"the stream of client {link.client} ended: {type(result).__name__}: {result}")

    async def _read_replies(self, link: Link, connection: Connection) -> None:
        while (frame := await connection.context.read()) is not grpc.aio.EOF:
            head = frames.decode(frame)
            if head.get("type") == "bye":
                self._drop(link)
                return
            if head.get("type") != "reply":
                raise FrameError("a reply was expected")
            await self._read_reply(link, connection, head)

    async def _read_reply(self, link: Link, connection: Connection, head: dict[str, Any]) -> None:
        name, fields, shape = frames.text_of(head, "id"), frames.fields_of(head), Shape.of(head)
        error = None if head.get("error") is None else frames.text_of(head, "error", 2000)
        update, size = None, 0
        if shape is not None and shape.bytes > self._settings.update_bytes:
            self._refuse_upload(link, name, fields, shape)
        if shape is not None and shape.bytes:
            size = shape.bytes
            await self.budget.take(size)
            try:
                update = await _receive(connection.context, shape, self._settings.min_upload_rate)
            except BaseException as raised:
                self.budget.give(size)
                if isinstance(raised, SlowUploadError) and link.pending.pop(name, None) is not None:
                    self._deliver(_reply(link, name, {}, None, 0, str(raised)))
                raise
        connection.send(acknowledgement(name))
        if link.pending.pop(name, None) is None:
            self.budget.give(size)  # the server has stopped waiting for this reply
            return
        self._deliver(_reply(link, name, fields, update, size, error))

    def _refuse_upload(self, link: Link, name: str, fields: dict[str, Any], shape: Shape) -> None:
        """Refuse an update before it arrives: the coordinator sees its size, and logs the reason."""
        limit = self._settings.update_bytes
        reason = f"an update of {shape.bytes} bytes was announced, but the model has {limit}"
        self._log_line(f"client {link.client}: {reason}; it was not received")
        if link.pending.pop(name, None) is not None:
            self._deliver(_reply(link, name, fields, shape.claimed(), 0, None))
        raise StreamEndError(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)

    def _lost(self, link: Link) -> None:
        """Keep the link of a lost connection for a while, in which the same process may return."""
        link.connection = None
        if self._links.get(link.client) is link and not self._ended:
            loop = asyncio.get_running_loop()
            link.expiry = loop.call_later(self._settings.reconnect_seconds, self._drop, link)

    def _drop(self, link: Link) -> None:
        """Remove a client process; it does not keep anything if it returns."""
        if self._links.get(link.client) is link:
            del self._links[link.client], self._nodes[link.node]
            link.pending.clear()
            self._changed(frozenset(self._nodes))

    async def _watch_revocations(self) -> None:
        while True:
            await asyncio.sleep(REVOCATION_SECONDS)
            if not self._settings.revocations.read_again():
                continue
            for link in list(self._links.values()):
                if link.identity in self._settings.revocations:
                    self._log_line(f"client {link.client} is cut: its certificate is revoked")
                    self._drop(link)
                    if link.connection is not None:
                        link.connection.end(grpc.StatusCode.PERMISSION_DENIED, "the certificate is revoked")


async def _receive(context: Any, shape: Shape, min_rate: float) -> Vector:
    """Receive the parts of an update. Each has a time limit, and so has the whole: its memory is not held for ever."""
    assembler, loop = Assembler(shape), asyncio.get_running_loop()
    allowed = CHUNK_SECONDS + shape.bytes / min_rate
    deadline = loop.time() + allowed
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    while not assembler.complete:
        try:
            async with asyncio.timeout_at(min(deadline, loop.time() + CHUNK_SECONDS)):
                frame = await context.read()
        except TimeoutError:
            if loop.time() >= deadline:
                slow = f"its update did not arrive within {allowed:.0f} s, which deploy.min_upload_rate allows"
                raise SlowUploadError(code, slow) from None
            raise StreamEndError(code, f"no part of the update arrived for {CHUNK_SECONDS:g} s") from None
        if frame is grpc.aio.EOF:
            raise StreamEndError(grpc.StatusCode.ABORTED, "the stream ended during an upload")
        assembler.add(frame)
    return assembler.vector()


def _reply(link: Link, name: str, fields: dict[str, Any], update: Vector | None, size: int, error: str | None) -> Reply:
    """Return the reply for the coordinator. The certificate says which client it is, whatever the fields state."""
    stated = fields.get("client", link.client)
    if error is None and stated != link.client:
        error = f"it claims to be client {str(stated)[:40]}"
    if error is not None:
        return Reply(name, {"client": link.client}, bytes=size, error=error, failed=True)
    return Reply(name, {**fields, "client": link.client}, update, size)
