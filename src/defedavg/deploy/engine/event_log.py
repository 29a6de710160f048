"""The event log: lines of JSON, appended and brought to the disk before anything is done about them.

Line 1 is an object that says what the run is: ``{"format": "defedavg-log", "format_version": 1, "settings": …}``.
Every other line is an event, ``{"event": "trained", "t": 12.5, "client": 3, …}`` (the fields are those of the classes
in ``events``), or a note of what was done about it, ``{"note": "merge", "t": …, …}``. Events are enough to rebuild the
run; notes are there to be read, and to be compared with what a replay does.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, get_args

from ...errors import UserError, first_line
from ...fileio import writing
from ...jsonio import finite
from .events import Event, Exchanged, Report, UpdateInfo

FORMAT = "defedavg-log"
LOG = "events.jsonl"
VERSION = 1
EVENTS: dict[str, type[Any]] = {kind.__name__.lower(): kind for kind in get_args(Event)}


@dataclass(frozen=True, slots=True)
class Note:
    """What was done: its name and its fields."""

    name: str
    t: float
    fields: dict[str, Any]


Line = Event | Note


def encode(line: Line) -> dict[str, Any]:
    """A line as JSON has it."""
    if isinstance(line, Note):
        return {"note": line.name, "t": line.t, **line.fields}
    plain = {"event": type(line).__name__.lower(), **asdict(line)}
    if isinstance(line, Exchanged):
        plain["reports"] = [[report.kind, report.version, report.at] for report in line.reports]
    return plain


def decode(found: Any) -> Line:
    """A line from JSON; raises ``ValueError`` or ``TypeError`` for what is none."""
    if not isinstance(found, dict):
        raise TypeError("not an object")
    found = dict(found)
    if "note" in found:
        name, t = found.pop("note"), _number(found.pop("t", None))
        if not isinstance(name, str):
            raise TypeError("the name of a note is not text")
        return Note(name, t, found)
    kind = EVENTS.get(str(found.pop("event", None)))
    if kind is None:
        raise ValueError("no event of that name")
    if set(found) != {item.name for item in fields(kind)}:
        raise ValueError("wrong fields")
    made: Event = kind(**{item.name: _READERS[item.name](found[item.name]) for item in fields(kind)})
    return made


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise TypeError(f"{repr(value)[:40]} is not a number from zero up")
    return float(value)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{repr(value)[:40]} is not a whole number from zero up")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{repr(value)[:40]} is not text")
    return value


def reports_of(found: Any) -> tuple[Report, ...]:
    """What a client's machine saw, from JSON."""
    if not isinstance(found, list):
        raise TypeError("reports are not an array")
    return tuple(Report(_text(kind), _version(version), _number(at)) for kind, version, at in found)


def _version(value: Any) -> int:
    return -1 if value == -1 and type(value) is int else _count(value)


def _handed(found: Any) -> UpdateInfo | None:
    if found is None:
        return None
    if not isinstance(found, dict) or set(found) != {"index", "version", "steps"}:
        raise ValueError("not an update")
    return UpdateInfo(_count(found["index"]), _count(found["version"]), _count(found["steps"]))


_READERS: dict[str, Any] = {
    **dict.fromkeys(("t", "seconds"), _number),
    **dict.fromkeys(("client", "index", "version", "steps", "bytes", "token"), _count),
    **dict.fromkeys(("why", "node"), _text),
    "reports": reports_of,
    "update": _handed,
}


class LogFile:
    """A log being written; every ``add`` is on the disk when it returns."""

    def __init__(self, path: Path, head: dict[str, Any] | None = None) -> None:
        self.path = path
        with writing(path):
            self._file: BinaryIO = path.open("xb" if head is not None else "ab", buffering=0)
        self.lines = 0
        if head is not None:
            self._write([{"format": FORMAT, "format_version": VERSION, **head}])
            self.lines = 0  # the head is no line of events

    def add(self, *lines: Line) -> None:
        """Append lines."""
        if lines:
            self._write([encode(line) for line in lines])

    def _write(self, objects: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(finite(item), separators=(",", ":"), allow_nan=False) + "\n" for item in objects)
        with writing(self.path):
            self._file.write(text.encode())
            os.fsync(self._file.fileno())
        self.lines += len(objects)

    def close(self) -> None:
        """Nothing more will be added."""
        self._file.close()

    def __enter__(self) -> LogFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True)
class Log:
    """A log that was read: what line 1 says, and the others; ``size`` is the length of what could be read."""

    head: dict[str, Any]
    lines: tuple[Line, ...]
    size: int

    @property
    def events(self) -> Iterator[Event]:
        """Without the notes."""
        return (line for line in self.lines if not isinstance(line, Note))

    def notes(self, name: str) -> list[Note]:
        """The notes of one name."""
        return [line for line in self.lines if isinstance(line, Note) and line.name == name]

    @property
    def seconds(self) -> float:
        """The time of the last line."""
        return self.lines[-1].t if self.lines else 0.0


def read(path: Path) -> Log:
    """Read a log; a last line that was cut off by a crash is left out, anything else that is wrong is refused."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"the log {path} cannot be read: {error.strerror or error}") from None
    whole = data[: data.rfind(b"\n") + 1]
    rows = whole.split(b"\n")[:-1]
    if not rows:
        raise UserError(f"{path} is not a log of a deployment: its first line is missing")
    lines: list[Line] = []
    head: dict[str, Any] = {}
    now = 0.0
    for number, row in enumerate(rows, start=1):
        try:
            found = json.loads(row)
            if number == 1:
                head = _head(found)
                continue
            line = decode(found)
            if line.t < now:
                raise ValueError(f"time runs backwards: {line.t} after {now}")  # noqa: TRY301
            now = line.t
            lines.append(line)
        except (ValueError, TypeError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: not a line of a deployment's log ({first_line(error)})") from None
    return Log(head, tuple(lines), len(whole))


def _head(found: Any) -> dict[str, Any]:
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError("not a log")
    if found.get("format_version") != VERSION:
        raise ValueError(f"format version {repr(found.get('format_version'))[:20]}; this program reads {VERSION}")
    return {name: value for name, value in found.items() if name not in ("format", "format_version")}
