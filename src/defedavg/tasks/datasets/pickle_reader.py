"""Reading numbers and text out of a pickle without running it.

A pickle is a program. Here its opcodes are only looked at: those that make numbers, text, lists, tuples and dicts are
followed, and NumPy's way of writing an array is recognised as data. Nothing that a file names is imported or called,
and anything else ends the reading.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray


class Unreadable(Exception):
    """The pickle is broken, or holds more than numbers and text; the message says which."""


@dataclass(slots=True)
class _Name:
    """Something that the file would have imported."""

    text: str


@dataclass(slots=True)
class _Type:
    """A NumPy type, by its code."""

    code: object


@dataclass(slots=True)
class Array:
    """A NumPy array as it is written: (version, shape, type, column order, bytes)."""

    state: object = None


_MAKERS: Final = {"numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"}
_NAMES: Final = {*_MAKERS, "numpy.ndarray", "numpy.dtype"}
_VALUES: Final = {
    "INT", "BININT", "BININT1", "BININT2", "LONG1", "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE",
    "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES",
}  # fmt: skip
_FRESH: Final[dict[str, Callable[[], object]]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple,
}  # fmt: skip
_PUTS: Final = {"PUT", "BINPUT", "LONG_BINPUT"}
_GETS: Final = {"GET", "BINGET", "LONG_BINGET"}
_SHORT_TUPLES: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read(data: bytes) -> object:
    """The value that a pickle holds."""
    reader = _Reader()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                (value,) = reader.stack
                return value
            reader.follow(opcode.name, argument)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, Warning):
        pass  # cut off, or opcodes in an order that makes no sense
    raise Unreadable("it is cut off or not a pickle")


class _Reader:
    """The stack on which a pickle builds its value."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks under the marks
        self.memo: dict[int, Any] = {}

    def follow(self, name: str, argument: Any) -> None:
        """One opcode."""
        stack = self.stack
        if name in _VALUES:
            stack.append(argument)
        elif name in _FRESH:
            stack.append(_FRESH[name]())
        elif name in _PUTS:
            self.memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in _GETS:
            stack.append(self.memo[argument])
        elif name == "MARK":
            self.below.append(stack)
            self.stack = []
        elif name in _SHORT_TUPLES:
            values = [stack.pop() for _ in range(_SHORT_TUPLES[name])]
            stack.append(tuple(reversed(values)))
        elif name in ("TUPLE", "LIST", "APPENDS", "SETITEMS", "DICT"):
            self._gather(name, self._unmark())
        elif name == "APPEND":
            self._gather("APPENDS", [stack.pop()])
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            self._gather("SETITEMS", [key, value])
        elif name == "GLOBAL":
            stack.append(_known(argument.replace(" ", ".", 1)))
        elif name == "STACK_GLOBAL":
            last, first = stack.pop(), stack.pop()
            stack.append(_known(f"{first}.{last}" if isinstance(first, str) and isinstance(last, str) else "?"))
        elif name == "REDUCE":
            arguments, called = stack.pop(), stack.pop()
            stack.append(_recognise(called, arguments))
        elif name == "BUILD":
            self._build(stack.pop())
        elif name not in ("PROTO", "FRAME"):
            raise Unreadable(f"it holds more than numbers and text ({name})")

    def _unmark(self) -> list[Any]:
        values, self.stack = self.stack, self.below.pop()
        return values

    def _gather(self, name: str, values: list[Any]) -> None:
        """Make a container of values, or add them to the one on top."""
        if name in ("TUPLE", "LIST"):
            self.stack.append(tuple(values) if name == "TUPLE" else values)
            return
        if name == "DICT":
            self.stack.append({})
        container = self.stack[-1]
        if name == "APPENDS" and type(container) is list:
            container.extend(values)
        elif name != "APPENDS" and type(container) is dict:
            for key, value in zip(values[::2], values[1::2], strict=True):
                if not isinstance(key, str | bytes):
                    raise Unreadable("it has keys that are not text")
                container[key] = value
        else:
            raise TypeError(name)

    def _build(self, state: object) -> None:
        made = self.stack[-1]
        if isinstance(made, Array):
            made.state = state
        elif not isinstance(made, _Type):  # byte order and such, which one byte does not have
            raise Unreadable("it holds more than numbers and text (BUILD)")


def _known(text: str) -> _Name:
    if text not in _NAMES:
        raise Unreadable(f"it asks to run {text[:60]!r}, which was not done")
    return _Name(text)


def _recognise(called: object, arguments: object) -> Array | _Type:
    if isinstance(called, _Name) and isinstance(arguments, tuple):
        if called.text in _MAKERS:
            return Array()
        if called.text == "numpy.dtype" and arguments:
            return _Type(arguments[0])
    raise Unreadable("it holds more than numbers and text (REDUCE)")


def pixels(value: object, width: int) -> NDArray[np.uint8]:
    """The rows of a recognised array of bytes."""
    if not isinstance(value, Array) or not isinstance(value.state, tuple) or len(value.state) != 5:
        raise Unreadable("its pixels are not an array")
    _, shape, kind, by_column, content = value.state
    if not isinstance(kind, _Type) or kind.code not in ("u1", "|u1", b"u1", b"|u1"):
        raise Unreadable("its pixels are not bytes")
    if not (type(shape) is tuple and len(shape) == 2 and type(shape[0]) is int and shape[0] > 0 and shape[1] == width):
        raise Unreadable(f"its pixels are not rows of {width} bytes")
    try:
        found = content.encode("latin-1") if isinstance(content, str) else content  # Python 2 wrote text
    except UnicodeEncodeError:
        found = None
    if not isinstance(found, bytes) or len(found) != shape[0] * width:
        raise Unreadable(f"its pixels are not {shape[0]} rows of {width} bytes")
    flat = np.frombuffer(found, dtype=np.uint8)
    return flat.reshape(width, shape[0]).T if by_column is True else flat.reshape(shape[0], width)
