"""Read numbers and text from a pickle without executing it.

A pickle is a program. This reader interprets only the opcodes that make numbers, text, lists, tuples and dicts, and
recognises how NumPy writes an array. It imports and calls nothing that a file names, and refuses any other opcode.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray


class UnreadablePickleError(Exception):
    """The pickle is damaged, or holds more than numbers and text; the message says which."""


@dataclass(slots=True)
class _Name:
    """A name that unpickling would import."""

    text: str


@dataclass(slots=True)
class _Made:
    """An array or a data type that unpickling would make: from which arguments, and with which state."""

    maker: str
    arguments: tuple[Any, ...]
    state: Any = None


_ARRAY: Final = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
_DTYPE: Final = "numpy.dtype"
_VALUES: Final = {
    "INT", "BININT", "BININT1", "BININT2", "LONG1", "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE",
    "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES",
}  # fmt: skip
_CONSTANTS: Final[dict[str, Callable[[], object]]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple,
}  # fmt: skip
_FROM_MARK: Final = ("TUPLE", "LIST", "APPENDS", "SETITEMS", "DICT")
_FROM_TOP: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "SETITEM": 2}  # opcode -> number of values


def read(data: bytes) -> object:
    """Return the value that a pickle holds."""
    reader = _Reader()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                (value,) = reader.stack
                return value
            reader.execute(opcode.name, argument)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, Warning):
        pass  # truncated, or opcodes in an impossible order
    raise UnreadablePickleError("it is truncated or not a pickle")


class _Reader:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks below the marks
        self.memo: dict[int, Any] = {}

    def execute(self, name: str, argument: Any) -> None:
        """Interpret one opcode."""
        if name in _VALUES:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name]())
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            self.stack.append(self.memo[argument])
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self.memo[len(self.memo) if name == "MEMOIZE" else argument] = self.stack[-1]
        elif name == "MARK":
            self.below.append(self.stack)
            self.stack = []
        elif name in _FROM_MARK:
            values, self.stack = self.stack, self.below.pop()
            self._collect(name, values)
        elif name in _FROM_TOP:
            values = [self.stack.pop() for _ in range(_FROM_TOP[name])]
            self._collect(name, values[::-1])
        elif name in ("GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD"):
            self._object(name, argument)
        elif name not in ("PROTO", "FRAME"):
            raise _more(name)

    def _collect(self, name: str, values: list[Any]) -> None:
        """Make a container of values, or add them to the container on top of the stack."""
        if name == "LIST" or name.startswith("TUPLE"):
            self.stack.append(values if name == "LIST" else tuple(values))
            return
        if name == "DICT":
            self.stack.append({})
        container: Any = self.stack[-1]
        if name.startswith("APPEND") and type(container) is list:
            container.extend(values)
            return
        if name.startswith("APPEND") or type(container) is not dict:
            raise TypeError(name)
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str | bytes):
                raise UnreadablePickleError("it has keys that are not text")
            container[key] = value

    def _object(self, name: str, argument: Any) -> None:
        """Recognise the parts of a NumPy array; refuse every other object."""
        top: Any = self.stack.pop() if name != "GLOBAL" else None
        if name == "BUILD":
            if not isinstance(self.stack[-1], _Made):
                raise _more(name)
            self.stack[-1].state = top
        elif name == "REDUCE":
            called = self.stack.pop()
            if not isinstance(called, _Name) or called.text not in (*_ARRAY, _DTYPE) or not isinstance(top, tuple):
                raise _more(name)
            self.stack.append(_Made(called.text, top))
        else:
            text = ".".join([self.stack.pop(), top]) if name == "STACK_GLOBAL" else argument.replace(" ", ".", 1)
            if text not in (*_ARRAY, _DTYPE, "numpy.ndarray"):
                raise UnreadablePickleError(f"it asks to run {text[:60]!r}, which was refused")
            self.stack.append(_Name(text))


def _more(opcode: str) -> UnreadablePickleError:
    return UnreadablePickleError(f"it holds more than numbers and text ({opcode})")


def rows_of_bytes(value: object, width: int) -> NDArray[np.uint8]:
    """Return the rows of a pickled array of bytes."""
    if not isinstance(value, _Made) or type(value.state) is not tuple or len(value.state) != 5:
        raise UnreadablePickleError("its pixels are not an array")
    _, shape, kind, by_column, content = value.state
    if getattr(kind, "arguments", ())[:1] not in (("u1",), ("|u1",), (b"u1",), (b"|u1",)):
        raise UnreadablePickleError("its pixels are not bytes")
    if type(shape) is not tuple or shape[1:] != (width,) or type(shape[0]) is not int or shape[0] < 1:
        raise UnreadablePickleError(f"its pixels are not rows of {width} bytes")
    if isinstance(content, str):  # Python 2 wrote bytes as text
        with suppress(UnicodeEncodeError):
            content = content.encode("latin-1")
    if not isinstance(content, bytes) or len(content) != shape[0] * width:
        raise UnreadablePickleError(f"its pixels are not {shape[0]} rows of {width} bytes")
    flat = np.frombuffer(content, dtype=np.uint8)
    return flat.reshape(width, shape[0]).T if by_column is True else flat.reshape(shape[0], width)
