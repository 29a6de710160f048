"""A client's side of the stream: it connects, answers messages, and connects again when the connection is lost.

The handler with its data, its buffers and its background training outlives every connection. A reply stays here until
the server has acknowledged it, and is sent again on the next connection. After a restart of the server, whose session
is another one, replies to messages of the old session are discarded.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from ...errors import UserError, first_line
from ..transport import Vector
from . import frames
from .frames import Assembler, EncodedVector, FrameError, Shape
from .refusals import final_fault, plain_reason

if TYPE_CHECKING:
    from ..client.handler import ClientHandler

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 15.0
"""Seconds between two attempts to connect: they double from the first to the longest, and vary at random."""

REMIND_SECONDS = 60.0  # between two lines that say why there is no connection

CLAIM_SECONDS = 90.0
"""How long a client tries to connect while the server says that another process is connected for it."""

BYE_SECONDS = 1.0
GRPC_ERRORS = (grpc.aio.BaseError, grpc.aio.UsageError)

CLIENT_OPTIONS = (
    ("grpc.max_receive_message_length", frames.MAX_FRAME_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),  # every attempt opens a connection of its own
    ("grpc.http2.lookahead_bytes", 1 << 20),
)

MakeHandler = Callable[[Mapping[str, Any], int], "ClientHandler"]
"""(settings of the run, number of the client) -> the handler of its messages."""


@dataclass(frozen=True, eq=False, slots=True)
class PendingReply:
    """A reply that the server has not acknowledged yet."""

    head: bytes
    vector: EncodedVector | None


@dataclass(eq=False)
class Conversation:
    """The state of a client that outlives connections: messages in work, and replies not yet acknowledged."""

    session: str = ""
    working: dict[str, threading.Event] = field(default_factory=dict)  # message -> set when it is obsolete
    replies: dict[str, PendingReply] = field(default_factory=dict)

    @property
    def received(self) -> list[str]:
        """The messages that need not be sent again."""
        return [*self.working, *self.replies]

    def enter(self, session: str, waiting: Collection[str]) -> None:
        """Discard replies for which the server does not wait, and all work of another session of the server."""
        self.replies = {name: reply for name, reply in self.replies.items() if name in waiting}
        if session != self.session:
            self.session = session
            for obsolete in self.working.values():
                obsolete.set()
            self.working.clear()


class StreamClient:
    """One client. ``address`` is HOST:PORT; without ``credentials``, it is plain text, and ``client`` its number."""

    def __init__(
        self,
        address: str,
        credentials: Any,
        make_handler: MakeHandler,
        *,
        client: int | None = None,
        retry_seconds: float = 600.0,
        log_line: Callable[[str], None] = print,
    ) -> None:
        self._address, self._credentials, self._client = address, credentials, client
        self._make_handler, self._retry_seconds, self._log_line = make_handler, retry_seconds, log_line
        self._process = os.urandom(16).hex()
        self._handler: ClientHandler | None = None
        self._failure: UserError | None = None
        self._state = Conversation()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="client")
        self._stream: Stream | None = None
        self._welcomed = self._finished = False

    async def run(self) -> None:
        """Answer messages until the run is over; raise ``UserError`` if the server refuses this client."""
        pause, lost_at, told_at = FIRST_PAUSE, time.monotonic(), -REMIND_SECONDS
        while True:
            self._welcomed = False
            try:
                await self._connect()
                reason, claimed = "the server closed the stream", False
            except grpc.aio.AioRpcError as error:
                reason, claimed = self._check_refusal(error), error.code() is grpc.StatusCode.ALREADY_EXISTS
            except FrameError as error:
                raise UserError(f"{self._address} does not follow the protocol: {error}") from None
            if self._failure is not None:
                raise self._failure
            if self._finished:
                return
            if self._welcomed:
                pause, lost_at = FIRST_PAUSE, time.monotonic()
            self._check_patience(time.monotonic() - lost_at, reason, claimed=claimed)
            if pause == FIRST_PAUSE or time.monotonic() - told_at >= REMIND_SECONDS:
                told_at = time.monotonic()
                limit = f" for at most {self._retry_seconds:g} s" if self._retry_seconds else ""
                self._log_line(f"not connected to {self._address}: {reason}; trying again{limit}")
            await asyncio.sleep(pause * (0.5 + int.from_bytes(os.urandom(2)) / 131072))
            pause = min(2 * pause, LONGEST_PAUSE)

    def _check_patience(self, seconds: float, reason: str, *, claimed: bool) -> None:
        if claimed and seconds > CLAIM_SECONDS:
            raise UserError(f"{reason}; end that process, or use the keys of this client")
        if self._retry_seconds and seconds > self._retry_seconds:
            raise UserError(f"no connection to {self._address} for {seconds:.0f} s: {reason}")

    def _check_refusal(self, error: Any) -> str:
        """Return the reason of a lost or refused connection; raise ``UserError`` if another attempt would not help."""
        reason = (error.details() or "no reason given").splitlines()[0]
        final = (
            grpc.StatusCode.PERMISSION_DENIED,
            grpc.StatusCode.UNAUTHENTICATED,
            grpc.StatusCode.FAILED_PRECONDITION,
            grpc.StatusCode.UNIMPLEMENTED,
        )
        if error.code() in final:
            raise UserError(f"the server at {self._address} refuses this client: {reason}") from None
        fault = final_fault(reason)
        if fault is not None:
            raise UserError(f"no secure connection to {self._address}: {fault}") from None
        return plain_reason(reason, secure=self._credentials is not None)

    async def _connect(self) -> None:
        """Use one connection until it ends."""
        if self._credentials is None:
            channel = grpc.aio.insecure_channel(self._address, options=CLIENT_OPTIONS)
        else:
            channel = grpc.aio.secure_channel(self._address, self._credentials, options=CLIENT_OPTIONS)
        async with channel:
            call = channel.stream_stream(frames.METHOD)()
            hello = {"type": "hello", "protocol": frames.PROTOCOL, "process": self._process}
            hello |= {"received": self._state.received} | ({} if self._client is None else {"client": self._client})
            with suppress(asyncio.InvalidStateError):  # the stream has ended; reading returns its status
                await call.write(frames.encode(hello))
            frame = await call.read()
            if frame is not grpc.aio.EOF:
                await self._welcome(frames.decode(frame))
                self._stream = Stream(self, call)
                try:
                    await self._stream.run(self._state.replies)
                finally:
                    self._stream = None

    async def _welcome(self, head: dict[str, Any]) -> None:
        """Handle the first frame of the server: who this client is, and the settings of the run."""
        settings, waiting = head.get("settings"), head.get("waiting")
        if head.get("type") != "welcome" or not isinstance(settings, dict) or not isinstance(waiting, list):
            raise FrameError("the first frame is not a welcome")
        number = frames.count_of(head, "client")
        self._welcomed = True
        self._state.enter(frames.text_of(head, "session"), waiting)
        self._log_line(f"connected to {self._address} as client {number}")
        if self._handler is None:
            loop = asyncio.get_running_loop()
            try:
                self._handler = await loop.run_in_executor(self._pool, self._make_handler, settings, number)
            except UserError as error:
                self._failure = error  # the answer to the first message reports it
            except Exception as error:  # a user's task may raise anything
                self._failure = UserError(f"the task cannot be made: {type(error).__name__}: {first_line(error)}")

    def start_work(self, name: str, kind: str, fields: Mapping[str, Any], weights: Vector | None) -> None:
        """Answer a message in the worker thread; work on an older message is obsolete."""
        if kind != "hello":
            for obsolete in self._state.working.values():
                obsolete.set()
        obsolete = self._state.working[name] = threading.Event()
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._pool, self._answer, name, kind, fields, weights, obsolete)
        work.add_done_callback(lambda done: self._finish_work(name, done))

    def _answer(
        self, name: str, kind: str, fields: Mapping[str, Any], weights: Vector | None, obsolete: threading.Event
    ) -> PendingReply:
        update, error = None, None
        found: Mapping[str, Any] = {}
        try:
            if self._failure is not None:
                raise self._failure  # noqa: TRY301 (one place reports every reason)
            assert self._handler is not None
            found, update = self._handler.answer(kind, fields, weights, lambda: not obsolete.is_set())
        except Exception as raised:  # the server receives any error of a user's task
            error = str(first_line(raised) if isinstance(raised, UserError) else f"{type(raised).__name__}: {raised}")
        vector = None if update is None else EncodedVector(update)
        head = {"type": "reply", "id": name, "fields": dict(found), "error": error and error[:1000]}
        head["vector"] = None if vector is None else vector.described
        return PendingReply(frames.encode(head), vector)

    def _finish_work(self, name: str, done: asyncio.Future[PendingReply]) -> None:
        """Keep a reply until it is acknowledged, and send it if the server still waits for it."""
        obsolete = self._state.working.pop(name, None)
        if not done.cancelled() and obsolete is not None and not obsolete.is_set():
            self._state.replies[name] = done.result()
            if self._stream is not None:
                self._stream.send(name)

    def reply(self, name: str) -> PendingReply | None:
        """Return a reply that the server has not acknowledged."""
        return self._state.replies.get(name)

    def acknowledged(self, name: str) -> bool:
        """Discard a reply that the server has; return whether this client has nothing more to do."""
        self._state.replies.pop(name, None)
        return self._failure is not None

    def close(self) -> None:
        """End all work."""
        for obsolete in self._state.working.values():
            obsolete.set()
        if self._handler is not None:
            self._handler.close()

    def finish(self) -> None:
        """End after this connection: the run is over."""
        self._finished = True


class Stream:
    """One connection of a client, after its first frames."""

    def __init__(self, client: StreamClient, call: Any) -> None:
        self._client, self._call = client, call
        self._queue: asyncio.Queue[str] = asyncio.Queue()

    def send(self, name: str) -> None:
        """Send the reply to a message."""
        self._queue.put_nowait(name)

    async def run(self, replies: Collection[str]) -> None:
        """Send these replies, then read and write until the connection ends."""
        for name in replies:
            self.send(name)
        writer, reader = asyncio.create_task(self._write()), asyncio.create_task(self._read())
        try:
            await asyncio.shield(reader)  # gRPC ends the whole stream when a pending read is cancelled
        except asyncio.CancelledError:
            await self._say_bye(writer)
            raise
        finally:
            for task in (writer, reader):
                task.cancel()
                with suppress(asyncio.CancelledError, asyncio.InvalidStateError, FrameError, *GRPC_ERRORS):
                    await task

    async def _say_bye(self, writer: asyncio.Task[None]) -> None:
        """Tell the server that this client leaves, so that it does not wait for another connection."""
        writer.cancel()
        with suppress(Exception):  # whatever the state of the connection is
            async with asyncio.timeout(BYE_SECONDS):
                await self._call.write(frames.encode({"type": "bye"}))
                await self._call.done_writing()
                await self._call.code()

    async def _read(self) -> None:
        while (frame := await self._call.read()) is not grpc.aio.EOF:
            head = frames.decode(frame)
            kind = head.get("type")
            if kind == "finished":
                self._client.finish()
                return
            if kind == "ack":
                if self._client.acknowledged(frames.text_of(head, "id")):
                    return
            elif kind == "message":
                await self._message(head)
            else:
                raise FrameError("a frame is of an unknown type")

    async def _message(self, head: dict[str, Any]) -> None:
        name, kind, fields = frames.text_of(head, "id"), frames.text_of(head, "kind"), frames.fields_of(head)
        shape, weights = Shape.of(head), None
        if shape is not None:
            assembler = Assembler(shape)
            while not assembler.complete:
                frame = await self._call.read()
                if frame is grpc.aio.EOF:
                    return
                assembler.add(frame)
            weights = assembler.vector()
        self._client.start_work(name, kind, fields, weights)

    async def _write(self) -> None:
        while True:
            reply = self._client.reply(await self._queue.get())
            if reply is None:
                continue
            await self._call.write(reply.head)
            for frame in reply.vector.frames() if reply.vector is not None else ():
                await self._call.write(frame)
