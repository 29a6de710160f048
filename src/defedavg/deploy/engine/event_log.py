"""The event log: lines of JSON, flushed to disk before the server acts on them.

Line 1 describes the run: ``{"format": "defedavg-log", "format_version": 1, "settings": …}``. Every other line is an
event, ``{"event": "trained", "t": 12.5, "client": 3, …}`` with the fields of its class in ``events``, or a note about a
decision, ``{"note": "merge", "t": …, …}``. The events are enough to rebuild the run. The notes are for readers, and a
replay compares its own decisions with them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ...algorithms.protocol import Discard
from ...errors import UserError, first_line
from ...fileio import read_regular, writing
from ...jsonio import finite
from ...planning.plan_io import plain_extension, plain_updates
from ...planning.records import Round, Timeout
from . import events
from .events import Command, Event, Exchanged, Report, UpdateInfo

FORMAT = "defedavg-log"
VERSION = 1
EVENTS: dict[str, type[Any]] = {
    "joined": events.Joined,
    "began": events.Began,
    "left": events.Left,
    "trained": events.Trained,
    "exchanged": events.Exchanged,
    "refused": events.Refused,
    "failed": events.Failed,
    "fired": events.TimerExpired,
    "settled": events.InstantEnded,
    "resumed": events.Resumed,
}
"""Names of events in the log. They belong to the file format: a class may be renamed, its name here may not."""
_NAMES = {kind: name for name, kind in EVENTS.items()}


@dataclass(frozen=True, slots=True)
class LogNote:
    """A note about a decision: its name and its fields."""

    name: str
    t: float
    fields: dict[str, Any]


Line = Event | LogNote


def encode(line: Line) -> dict[str, Any]:
    """Return a line as a JSON object."""
    if isinstance(line, LogNote):
        return {"note": line.name, "t": line.t, **line.fields}
    encoded = {"event": _NAMES[type(line)], **asdict(line)}
    if isinstance(line, Exchanged):
        encoded["reports"] = [[report.kind, report.version, report.at] for report in line.reports]
    return encoded


def decode(value: Any) -> Line:
    """Return a line from JSON; a value that is not a line raises ``ValueError`` or ``TypeError``."""
    if not isinstance(value, dict):
        raise TypeError("not an object")
    value = dict(value)
    if "note" in value:
        return LogNote(_text(value.pop("note")), read_number(value.pop("t", None)), value)
    kind = EVENTS.get(str(value.pop("event", None)))
    if kind is None:
        raise ValueError("unknown event")
    if set(value) != {item.name for item in fields(kind)}:
        raise ValueError("wrong fields")
    event: Event = kind(**{name: _READERS[name](item) for name, item in value.items()})
    return event


def read_number(value: Any) -> float:
    """Return a finite number of at least zero; any other value raises ``TypeError``."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= sys.float_info.max:  # an integer may be too large for a float
        raise TypeError(f"{repr(value)[:40]}, not a finite number of at least zero")
    return float(value)


def read_count(value: Any) -> int:
    """Return a whole number of at least zero; any other value raises ``TypeError``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{repr(value)[:40]}, not a whole number of at least zero")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{repr(value)[:40]} is not text")
    return value


def read_reports(value: Any) -> tuple[Report, ...]:
    """Return the reports of a client's machine from JSON."""
    if not isinstance(value, list):
        raise TypeError("reports are not an array")
    return tuple(Report(_text(kind), _version(version), read_number(at)) for kind, version, at in value)


def _version(value: Any) -> int:
    return -1 if value == -1 and type(value) is int else read_count(value)


def _update_info(value: Any) -> UpdateInfo | None:
    if value is None:
        return None
    if not isinstance(value, dict) or set(value) != {"index", "version", "steps"}:
        raise ValueError("not an update")
    return UpdateInfo(read_count(value["index"]), read_count(value["version"]), read_count(value["steps"]))


_READERS: dict[str, Any] = {
    **dict.fromkeys(("t", "seconds"), read_number),
    **dict.fromkeys(("client", "index", "version", "steps", "bytes", "token"), read_count),
    **dict.fromkeys(("why", "node"), _text),
    "reports": read_reports,
    "update": _update_info,
}


def notes_for(t: float, commands: list[Command]) -> list[LogNote]:
    """Return the notes that the log keeps of these commands."""
    notes = []
    for command in commands:
        if isinstance(command, Round):
            merge = command.merge
            past, extension = [list(pair) for pair in merge.past], plain_extension(merge)
            fields = {"version": merge.version, "past": past, "updates": plain_updates(merge.updates)}
            fields |= {"freed": list(command.freed)} | ({"extension": extension} if extension else {})
            notes.append(LogNote("merge", t, fields))
        elif isinstance(command, Discard):
            notes.append(LogNote("dropped", t, {"client": command.update.client, "index": command.update.index}))
        elif isinstance(command, Timeout):
            notes.append(LogNote("redrawn", t, {"missing": list(command.missing), "drawn": list(command.drawn)}))
        elif isinstance(command, events.Quarantined):
            notes.append(LogNote("quarantined", t, {"client": command.client}))
    return notes


class EventLogWriter:
    """Appends to a log that has that many lines. With ``head``, create a new one.

    Events that were added are on disk when ``write`` returns: it flushes all of them together. Notes alone are on disk
    with the next event: no decision depends on them.
    """

    def __init__(self, path: Path, head: dict[str, Any] | None = None, *, lines: int = 0) -> None:
        self.path = path
        self.lines = self.flushed_lines = lines  # written, and known to be on disk; the head does not count
        self._added: list[Line] = []
        with writing(path):
            self._file = path.open("xb" if head is not None else "ab", buffering=0)
        try:
            if head is not None:
                self._write([{"format": FORMAT, "format_version": VERSION, **head}])
            self._flush()
        except BaseException:
            self.abandon()
            raise

    def add(self, *lines: Line) -> None:
        """Add lines, which ``write`` appends to the file in this order."""
        self._added.extend(lines)

    def write(self) -> None:
        """Append the lines that were added, and flush them to disk if there is an event among them."""
        lines, self._added = self._added, []
        if lines:
            self._write([encode(line) for line in lines])
            self.lines += len(lines)
            if not all(isinstance(line, LogNote) for line in lines):
                self._flush()

    def _write(self, objects: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(finite(item), separators=(",", ":"), allow_nan=False) + "\n" for item in objects)
        with writing(self.path):
            rest = memoryview(text.encode())
            while rest:  # a disk that is almost full takes a part, and refuses the next
                rest = rest[self._file.write(rest) :]

    def _flush(self) -> None:
        with writing(self.path):
            os.fsync(self._file.fileno())
        self.flushed_lines = self.lines

    def close(self) -> None:
        """Flush the file to disk and close it. Lines that were added and not written are lost, as in a crash."""
        if not self._file.closed:
            self._flush()
            self._file.close()

    def abandon(self) -> None:
        """Close the file without another flush, after an error."""
        self._file.close()


@dataclass(frozen=True)
class EventLog:
    """A log read from disk: its head, its other lines, and the size in bytes of all complete lines."""

    head: dict[str, Any]
    lines: tuple[Line, ...]
    size: int

    @property
    def events(self) -> Iterator[Event]:
        """The lines without the notes."""
        return (line for line in self.lines if not isinstance(line, LogNote))

    @property
    def settings(self) -> dict[str, Any]:
        """The settings with which the run was started."""
        settings = self.head.get("settings")
        if not isinstance(settings, dict):
            raise UserError("the log does not contain the settings of its run; it cannot be used")
        return settings

    def notes(self, name: str) -> list[LogNote]:
        """Return the notes with this name."""
        return [line for line in self.lines if isinstance(line, LogNote) and line.name == name]

    @property
    def seconds(self) -> float:
        """The time of the last line."""
        return self.lines[-1].t if self.lines else 0.0


def read(path: Path) -> EventLog:
    """Read a log; ignore an incomplete last line, which a crash may leave, and refuse anything else that is invalid."""
    try:
        data = read_regular(path)
    except OSError as error:
        raise UserError(f"the log {path} cannot be read: {error.strerror or error}") from None
    complete = data[: data.rfind(b"\n") + 1]
    rows = complete.split(b"\n")[:-1]
    if not rows:
        raise UserError(f"{path} is not the log of a deployment: its first line is missing")
    lines: list[Line] = []
    head: dict[str, Any] = {}
    for number, row in enumerate(rows, start=1):
        try:
            if number == 1:
                head = _head(json.loads(row))
                continue
            lines.append(decode(json.loads(row)))
            if len(lines) > 1 and lines[-1].t < lines[-2].t:
                raise ValueError(f"time decreases from {lines[-2].t} to {lines[-1].t}")  # noqa: TRY301 (named below)
        except (ValueError, TypeError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: not a line of a deployment's log ({first_line(error)})") from None
    return EventLog(head, tuple(lines), len(complete))


def _head(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ValueError("not a log")
    if value.get("format_version") != VERSION:
        raise ValueError(f"format version {repr(value.get('format_version'))[:20]}; this program reads {VERSION}")
    return {name: item for name, item in value.items() if name not in ("format", "format_version")}
