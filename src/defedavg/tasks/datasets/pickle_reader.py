"""Read numbers and text from a pickle without executing it.

A pickle is a program. This reader interprets only the opcodes that make numbers, text, lists, tuples and dicts, and
recognises how NumPy writes an array. It imports and calls nothing that a file names, and refuses any other opcode.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
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
class _DType:
    """A NumPy data type, by its code."""

    code: object


@dataclass(slots=True)
class PickledArray:
    """A NumPy array as a pickle holds it: (version, shape, type, column order, bytes)."""

    state: object = None


_MAKERS: Final = {"numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"}
_NAMES: Final = {*_MAKERS, "numpy.ndarray", "numpy.dtype"}
_VALUES: Final = {
    "INT", "BININT", "BININT1", "BININT2", "LONG1", "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE",
    "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES",
}  # fmt: skip
_CONSTANTS: Final[dict[str, Callable[[], object]]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple,
}  # fmt: skip
_PUTS: Final = {"PUT", "BINPUT", "LONG_BINPUT"}
_GETS: Final = {"GET", "BINGET", "LONG_BINGET"}
_MEMO_OPCODES: Final = {*_PUTS, *_GETS, "MEMOIZE"}
_SINGLE_ITEMS: Final = {"APPEND": 1, "SETITEM": 2}
_SHORT_TUPLES: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


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
    """The stack on which a pickle builds its value."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks below the marks
        self.memo: dict[int, Any] = {}

    def execute(self, name: str, argument: Any) -> None:
        """Interpret one opcode."""
        stack = self.stack
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name in _MEMO_OPCODES:
            self._memo(name, argument)
        elif name == "MARK":
            self.below.append(stack)
            self.stack = []
        elif name in _SHORT_TUPLES:
            values = [stack.pop() for _ in range(_SHORT_TUPLES[name])]
            stack.append(tuple(reversed(values)))
        elif name in ("TUPLE", "LIST", "APPENDS", "SETITEMS", "DICT"):
            self._collect(name, self._unmark())
        elif name in _SINGLE_ITEMS:
            items = [stack.pop() for _ in range(_SINGLE_ITEMS[name])]
            self._collect(f"{name}S", items[::-1])
        elif name in ("GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD"):
            self._object(name, argument)
        elif name not in ("PROTO", "FRAME"):
            raise UnreadablePickleError(f"it holds more than numbers and text ({name})")

    def _memo(self, name: str, argument: Any) -> None:
        if name in _GETS:
            self.stack.append(self.memo[argument])
        else:
            self.memo[len(self.memo) if name == "MEMOIZE" else argument] = self.stack[-1]

    def _object(self, name: str, argument: Any) -> None:
        """Recognise the parts of a NumPy array; refuse every other object."""
        stack = self.stack
        if name == "GLOBAL":
            stack.append(_known(argument.replace(" ", ".", 1)))
        elif name == "STACK_GLOBAL":
            last, first = stack.pop(), stack.pop()
            stack.append(_known(f"{first}.{last}" if isinstance(first, str) and isinstance(last, str) else "?"))
        elif name == "REDUCE":
            arguments, called = stack.pop(), stack.pop()
            stack.append(_recognise(called, arguments))
        else:
            self._build(stack.pop())

    def _unmark(self) -> list[Any]:
        values, self.stack = self.stack, self.below.pop()
        return values

    def _collect(self, name: str, values: list[Any]) -> None:
        """Make a container of values, or add them to the container on top of the stack."""
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
                    raise UnreadablePickleError("it has keys that are not text")
                container[key] = value
        else:
            raise TypeError(name)

    def _build(self, state: object) -> None:
        made = self.stack[-1]
        if isinstance(made, PickledArray):
            made.state = state
        elif not isinstance(made, _DType):  # its state is the byte order, which does not matter for bytes
            raise UnreadablePickleError("it holds more than numbers and text (BUILD)")


def _known(text: str) -> _Name:
    if text not in _NAMES:
        raise UnreadablePickleError(f"it asks to run {text[:60]!r}, which was refused")
    return _Name(text)


def _recognise(called: object, arguments: object) -> PickledArray | _DType:
    if isinstance(called, _Name) and isinstance(arguments, tuple):
        if called.text in _MAKERS:
            return PickledArray()
        if called.text == "numpy.dtype" and arguments:
            return _DType(arguments[0])
    raise UnreadablePickleError("it holds more than numbers and text (REDUCE)")


def rows_of_bytes(value: object, width: int) -> NDArray[np.uint8]:
    """Return the rows of a pickled array of bytes."""
    if not isinstance(value, PickledArray) or not isinstance(value.state, tuple) or len(value.state) != 5:
        raise UnreadablePickleError("its pixels are not an array")
    _, shape, kind, by_column, content = value.state
    if not isinstance(kind, _DType) or kind.code not in ("u1", "|u1", b"u1", b"|u1"):
        raise UnreadablePickleError("its pixels are not bytes")
    rows, data = _row_count(shape, width), _to_bytes(content)
    if data is None or len(data) != rows * width:
        raise UnreadablePickleError(f"its pixels are not {rows} rows of {width} bytes")
    flat = np.frombuffer(data, dtype=np.uint8)
    return flat.reshape(width, rows).T if by_column is True else flat.reshape(rows, width)


def _row_count(shape: object, width: int) -> int:
    if type(shape) is tuple and len(shape) == 2 and type(shape[0]) is int and shape[0] > 0 and shape[1] == width:
        return shape[0]
    raise UnreadablePickleError(f"its pixels are not rows of {width} bytes")


def _to_bytes(content: object) -> bytes | None:
    if isinstance(content, str):  # Python 2 wrote bytes as text
        try:
            return content.encode("latin-1")
        except UnicodeEncodeError:
            return None
    return content if isinstance(content, bytes) else None
