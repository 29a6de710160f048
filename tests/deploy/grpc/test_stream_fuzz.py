"""Fuzzed frames: whatever a client with a valid certificate sends, the server refuses it or answers, and runs on."""

from __future__ import annotations

import asyncio
import json
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from defedavg.deploy.engine.event_log import read_number
from defedavg.deploy.grpc import frames
from defedavg.deploy.grpc.frames import Assembler, EncodedVector, FrameError, Shape
from defedavg.deploy.grpc.link import ByteBudget, OutgoingMessage
from defedavg.deploy.grpc.stream_server import StreamServer, StreamSettings
from defedavg.deploy.server import reply_checks
from defedavg.deploy.server.reply_checks import BadReplyError
from defedavg.deploy.transport import Reply

EXAMPLES = int(os.environ.get("DEFEDAVG_FUZZ", "60"))
fuzzed = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
MODEL = np.ones(5, dtype="float32")

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(["m1", "m2", "hello", ""]) | st.text(max_size=8)
described = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from([*frames.NUMBER_TYPES, "object", "int8"]) | values,
        "size": st.sampled_from([0, 1, 5, 6, 1 << 40, 1 << 62]) | values,
        "crc32": st.just(EncodedVector(MODEL).described["crc32"]) | values,
    },
)
fields = st.dictionaries(
    st.sampled_from(["client", "index", "version", "steps", "seconds", "clock", "reports", "update", "x"]),
    st.integers() | st.floats() | st.text(max_size=5) | st.booleans() | values,
    max_size=9,
)
replies = st.fixed_dictionaries(
    {"type": st.just("reply") | values},
    optional={
        "id": names | values,
        "fields": fields | values,
        "error": values,
        "vector": described | st.just(EncodedVector(MODEL).described) | values,
    },
)


def raw(head: Any) -> bytes:
    """Return a frame of any JSON, valid or not for the protocol."""
    text = json.dumps(head).encode()
    return struct.pack(">I", len(text)) + text


frame = (
    st.binary(max_size=40)
    | replies.map(raw)
    | values.map(raw)
    | st.just(next(EncodedVector(MODEL).frames()))
    | st.binary(max_size=40).map(lambda data: b"\0\0\0\0" + data)
)
hello = {"type": "hello", "protocol": frames.PROTOCOL, "process": "p", "received": [], "client": 0}
first = (
    st.just(raw(hello)) | frame | st.dictionaries(st.sampled_from(list(hello)), values).map(lambda d: raw(hello | d))
)


class AbortError(Exception):
    """The stream was ended with a status."""


class FakeContext:
    """A stream that delivers given frames, and then ends."""

    def __init__(self, sent: list[bytes]) -> None:
        self._sent = sent
        self.status: Any = None

    async def read(self) -> Any:
        await asyncio.sleep(0)
        return self._sent.pop(0) if self._sent else grpc.aio.EOF

    async def write(self, frame: bytes) -> None:
        assert isinstance(frames.decode(frame), dict)

    async def abort(self, code: Any, details: str) -> None:
        self.status = code
        raise AbortError(details)


async def serve(sent: list[bytes]) -> tuple[Any, list[Reply]]:
    """Serve one stream with two unanswered messages; return its status and the replies that were delivered."""
    delivered: list[Reply] = []
    unexpected: list[str] = []
    server = StreamServer(
        StreamSettings("", None, 3, MODEL.nbytes, {}, 0.0, 1e4), delivered.append, lambda _: None, unexpected.append
    )
    claim: Callable[..., Any] = server._claim

    def with_messages(*given: Any) -> Any:
        link = claim(*given)
        for name, kind in (("m1", "train"), ("m2", "hello")):
            link.add(OutgoingMessage(name, kind, frames.encode({"type": "message"}), None))
        return link

    server._claim = with_messages  # type: ignore[method-assign, assignment]
    context = FakeContext(sent)
    with suppress(AbortError):
        await asyncio.wait_for(server._connect(None, context), 10.0)
    await asyncio.sleep(0)
    assert not [line for line in unexpected if "the stream of client" in line]
    free = server.budget._free + sum(reply.bytes for reply in delivered)
    assert free == max(512 << 20, 2 * MODEL.nbytes)  # no upload has kept its memory
    return context.status, delivered


@fuzzed
@given(first, st.lists(frame, max_size=4))
def test_any_frames_are_refused_or_answered(opening: bytes, sent: list[bytes]) -> None:
    status, delivered = asyncio.run(serve([opening, *sent]))
    assert status in (
        None,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
    )
    for reply in delivered:
        assert reply.to in ("m1", "m2")
        assert reply.error is not None or reply.fields["client"] in range(3)  # that of the certificate


@fuzzed
@given(fields, described)
def test_any_fields_are_read_or_refused(found: dict[str, Any], vector: dict[str, Any]) -> None:
    """The checks of the coordinator, on everything that passes those of the stream."""
    with suppress(FrameError):
        read = frames.fields_of(frames.decode(raw({"fields": found})))
        shape = Shape.of({"vector": vector})
        reply = Reply("m1", dict(read), None if shape is None else shape.claimed())
        with suppress(BadReplyError):
            assert reply_checks.checked(reply.fields, "seconds", read_number) >= 0
        with suppress(BadReplyError):
            assert reply_checks.update_info(reply.fields).steps >= 0
        with suppress(BadReplyError):
            assert reply_checks.reports(reply.fields)[1] >= 0
        with suppress(BadReplyError):
            assert reply_checks.update_values(reply, MODEL, 10.0, {}).shape == MODEL.shape


@fuzzed
@given(st.binary(max_size=60))
def test_any_bytes_are_a_head_or_an_error(data: bytes) -> None:
    for frame_data in (data, struct.pack(">I", max(0, len(data) - 4)) + data, struct.pack(">I", len(data)) + data):
        with suppress(FrameError):
            assert isinstance(frames.decode(frame_data), dict)


@given(st.integers(1, 300_000), st.sampled_from(frames.NUMBER_TYPES), st.booleans())
@settings(max_examples=10, deadline=None)
def test_a_vector_arrives_as_it_was_sent_or_not_at_all(size: int, kind: str, damaged: bool) -> None:
    vector = (np.arange(size) % 1000).astype(kind)
    encoded = EncodedVector(vector)
    shape = Shape.of({"vector": encoded.described})
    assert shape is not None
    assembler, parts = Assembler(shape), list(encoded.frames())
    if damaged:
        last = bytearray(parts[-1])
        last[-1] ^= 1
        parts[-1] = bytes(last)
    for part in parts:
        assembler.add(part)
    assert assembler.complete
    with pytest.raises(FrameError):
        assembler.add(parts[-1])
    if damaged:
        with pytest.raises(FrameError, match="checksum"):
            assembler.vector()
    else:
        np.testing.assert_array_equal(assembler.vector(), vector)


def test_uploads_wait_for_memory_in_their_order() -> None:
    async def scenario() -> list[str]:
        budget, order = ByteBudget(10), list[str]()

        async def upload(name: str, size: int) -> None:
            await budget.take(size)
            order.append(name)

        await budget.take(8)
        waiting = [asyncio.create_task(upload(name, size)) for name, size in (("large", 9), ("small", 1), ("lost", 5))]
        await asyncio.sleep(0)
        waiting[2].cancel()
        assert order == []  # the small one does not pass the large one
        budget.give(8)
        await asyncio.sleep(0.01)
        assert budget._free == 0
        return order

    assert asyncio.run(scenario()) == ["large", "small"]
