"""Frames: what one gRPC message contains. Server and client exchange nothing else.

A frame is the length of its head (four bytes, big endian), the head (a JSON object, or nothing), and a payload. A
vector is described in the head of one frame, and its bytes follow as the payloads of frames without a head, in order.
Everything here is checked, because the other side is not trusted: a bad frame raises ``FrameError``.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..transport import Scalar, Vector

PROTOCOL = 1
"""The version of the protocol. Server and client must have the same one."""

METHOD = "/defedavg.Clients/Connect"
SERVICE, METHOD_NAME = "defedavg.Clients", "Connect"
CHUNK_BYTES = 512 << 10
MAX_HEAD_BYTES = 1 << 20
MAX_FRAME_BYTES = 4 + MAX_HEAD_BYTES
MAX_FIELDS = 64
MAX_VALUES = 1 << 48
"""No vector has more values. It keeps what a client states within the range of NumPy's sizes."""

NUMBER_TYPES = ("float32", "float64", "float16")
_LENGTH = struct.Struct(">I")
_NO_HEAD = _LENGTH.pack(0)


class FrameError(ValueError):
    """A frame does not follow the protocol; the message says why."""


def encode(head: dict[str, Any]) -> bytes:
    """Return a frame with a head and no payload."""
    text = json.dumps(head, separators=(",", ":"), allow_nan=False).encode()
    if len(text) > MAX_HEAD_BYTES:
        raise FrameError(f"the head of a message has {len(text)} bytes, more than {MAX_HEAD_BYTES}")
    return _LENGTH.pack(len(text)) + text


def decode(frame: bytes) -> dict[str, Any]:
    """Return the head of a frame that must have one and no payload."""
    if len(frame) < _LENGTH.size:
        raise FrameError("a frame is shorter than its length field")
    [length] = _LENGTH.unpack_from(frame)
    if length == 0 or len(frame) != _LENGTH.size + length:
        raise FrameError("a frame with a head was expected")
    try:
        head = json.loads(frame[_LENGTH.size :], parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise FrameError("the head of a frame is not JSON") from None
    if not isinstance(head, dict):
        raise FrameError("the head of a frame is not an object")
    return head


def _refuse_constant(name: str) -> None:
    raise FrameError(f"{name} is not a number in JSON")


def payload(frame: bytes) -> memoryview:
    """Return the payload of a frame that must have no head."""
    if frame[: _LENGTH.size] != _NO_HEAD:
        raise FrameError("a part of a vector was expected")
    return memoryview(frame)[_LENGTH.size :]


def text_of(head: dict[str, Any], name: str, limit: int = 200) -> str:
    """Return a short text from a head."""
    value = head.get(name)
    if not isinstance(value, str) or len(value) > limit:
        raise FrameError(f"{name} is missing, or is not a short text")
    return value


def count_of(head: dict[str, Any], name: str) -> int:
    """Return a whole number of at least zero from a head."""
    value = head.get(name)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise FrameError(f"{name} is missing, or is not a whole number of at least zero")
    return value


def fields_of(head: dict[str, Any]) -> dict[str, Scalar]:
    """Return the fields of a message or a reply: texts, numbers and truth values under names."""
    fields = head.get("fields")
    if not isinstance(fields, dict) or len(fields) > MAX_FIELDS:
        raise FrameError("the fields are missing, or are too many")
    for value in fields.values():
        if not isinstance(value, str | int | float) or (isinstance(value, int) and not -(1 << 63) <= value < 1 << 63):
            raise FrameError("a field is neither a text nor a number of 64 bits")
    return fields


@dataclass(frozen=True, slots=True)
class Shape:
    """The description of a vector in a head: its type, its number of values, and a checksum of its bytes."""

    number_type: str
    size: int
    checksum: int

    @property
    def bytes(self) -> int:
        """The number of bytes that follow."""
        return self.size * np.dtype(self.number_type).itemsize

    @classmethod
    def of(cls, head: dict[str, Any]) -> Shape | None:
        """Return the description that a head contains, or None if no vector follows it."""
        found = head.get("vector")
        if found is None:
            return None
        if not isinstance(found, dict) or found.get("type") not in NUMBER_TYPES:
            raise FrameError("the description of a vector is not valid")
        shape = cls(found["type"], count_of(found, "size"), count_of(found, "crc32"))
        if shape.size > MAX_VALUES:
            raise FrameError(f"a vector of {shape.size} values is impossible")
        return shape

    def claimed(self) -> Vector:
        """Return a vector of zeros with this shape that takes no memory."""
        return np.broadcast_to(np.zeros(1, dtype=self.number_type), (self.size,))


class EncodedVector:
    """A vector that is sent as frames. Messages that carry the same vector share it."""

    def __init__(self, vector: Vector) -> None:
        self._bytes = np.ascontiguousarray(vector).data.cast("B")
        self.described = {
            "type": str(vector.dtype),
            "size": int(vector.size),
            "crc32": zlib.crc32(self._bytes),
        }
        if self.described["type"] not in NUMBER_TYPES:
            raise FrameError(f"a model of {vector.dtype} cannot be sent; use one of {', '.join(NUMBER_TYPES)}")

    def frames(self) -> Iterator[bytes]:
        """Make the frames one by one: a message that waits for a slow client holds no copy of the vector."""
        data = self._bytes
        for at in range(0, len(data), CHUNK_BYTES):
            yield _NO_HEAD + data[at : at + CHUNK_BYTES]


class Assembler:
    """Collects the parts of one vector."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._buffer = bytearray(shape.bytes)
        self._received = 0

    @property
    def complete(self) -> bool:
        """Whether all bytes have arrived."""
        return self._received == len(self._buffer)

    def add(self, frame: bytes) -> None:
        """Add the next part."""
        part = payload(frame)
        if not len(part) or self._received + len(part) > len(self._buffer):
            raise FrameError("the parts of a vector do not have the size that was stated")
        self._buffer[self._received : self._received + len(part)] = part
        self._received += len(part)

    def vector(self) -> Vector:
        """Return the vector; raise ``FrameError`` if it is not the one that was sent."""
        if zlib.crc32(self._buffer) != self._shape.checksum:
            raise FrameError("the checksum of a vector is wrong")
        return np.frombuffer(self._buffer, dtype=self._shape.number_type)
