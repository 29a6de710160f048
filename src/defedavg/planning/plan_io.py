"""The file format of plans: lines of JSON, plain or gzip, written atomically and checked when read.

Line 1 is an object: ``{"format": "defedavg-plan", "format_version": 1, "algorithm": …, "num_clients": …, …}``.
Every other line is an array whose first item names the kind of record:

    ["job", client, index, version, steps, start, end, outcome]     outcome: ended, interrupted, lost, running
    ["upload", client, index, start, end]
    ["sent", version, client or null, time]
    ["round", time, version, [[version, a], …], [[client, index, version, steps, b], …], [freed versions], extension]
    ["absence", client, time, back or null]
    ["replacement", time, [missing], [drawn]]
    ["stall", time]

Times are in seconds. Numbers are written so that they read back exactly. In the header, "repeats" is the policy's
``allow_same_version``, and "lean" (absent: false) marks a sparse plan. Format version 2 is that of a plan with state
vectors: "state" declares them, [[name, count, initial, per client], …], "job_start" says from what jobs start,
[[name, c], …], and "correction" (absent: nothing), likewise, what is added to their gradients. The extension of a
round (absent: none) is an object with "states" [[name, index, c], …], "before" and "after", each
[[name, index, past, updates, states, transform], …], and "rate_scale"; keys without content are absent.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, get_args

from ..algorithms.protocol import FROM_VERSION, Assignment, Merge, StateSpec, StateVector, Update
from ..errors import UserError
from ..fileio import open_regular, replacing, writing
from .records import Absence, Header, Job, JobOutcome, Record, Round, Sent, Stall, Timeout, Uploaded

FORMAT = "defedavg-plan"
VERSION, STATE_VERSION = 1, 2
"""Of plans without and with state vectors."""

Updates = tuple[tuple[Update, float], ...]

_SAME_KEYS = ("algorithm", "num_clients", "updates_per_round", "local_steps", "seed")
HEADER_KEYS = {name: name for name in _SAME_KEYS} | {
    "repeats": "allow_same_version", "interruptible": "interruptible", "lean": "sparse"
}  # fmt: skip
"""Keys of the file -> fields of ``Header``."""


_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def encode(item: Header | Record) -> str:
    """Return the line of a header or a record."""
    # Nearly all lines are those of jobs and uploads. Formatting them takes a third of the time of the encoder, which
    # treats other numbers: infinity and NaN, which it refuses, and the types of NumPy.
    if type(item) is Job:
        client, index, version, steps, start, end, outcome = item
        if type(start) is float and type(end) is float and -math.inf < start <= end < math.inf:
            return f'["job",{client},{index},{version},{steps},{start!r},{end!r},"{outcome}"]'
    elif type(item) is Uploaded:
        client, index, start, end = item
        if type(start) is float and type(end) is float and -math.inf < start <= end < math.inf:
            return f'["upload",{client},{index},{start!r},{end!r}]'
    return _json(_plain(item))


def _plain(item: Header | Record) -> Any:
    if isinstance(item, Header):
        return _plain_header(item)
    if isinstance(item, Job):
        return ["job", item.client, item.index, item.version, item.steps, item.start, item.end, item.outcome]
    if isinstance(item, Uploaded):
        return ["upload", item.client, item.index, item.start, item.end]
    if isinstance(item, Sent):
        return ["sent", item.version, item.client, item.time]
    if isinstance(item, Round):
        merge = item.merge
        extension = plain_extension(merge)
        row = ["round", item.time, merge.version, merge.past, plain_updates(merge.updates), item.freed]
        return [*row, extension] if extension else row
    if isinstance(item, Absence):
        return ["absence", item.client, item.time, None if math.isinf(item.back) else item.back]
    if isinstance(item, Timeout):
        return ["replacement", item.time, item.missing, item.drawn]
    return ["stall", item.time]


def _plain_header(header: Header) -> dict[str, Any]:
    values = {key: getattr(header, field) for key, field in HEADER_KEYS.items()}
    if not header.sparse:  # keeps the lines and the hash of complete plans independent of the later field
        del values["lean"]
    version = VERSION
    if header.state or header.correction or header.job_start != FROM_VERSION:
        values["state"] = [[spec.name, spec.count, spec.initial, spec.per_client] for spec in header.state]
        values["job_start"], version = header.job_start, STATE_VERSION
        if header.correction:
            values["correction"] = header.correction
    return {"format": FORMAT, "format_version": version, **values}


def plain_updates(updates: Updates) -> list[list[Any]]:
    """Return updates with coefficients as JSON values."""
    return [[u.client, u.index, u.version, u.steps, b] for u, b in updates]


def plain_extension(merge: Merge) -> dict[str, Any]:
    """Return the parts of a merge that few algorithms use as JSON values; empty for the others."""
    found: dict[str, Any] = {"states": _plain_states(merge.states)}
    for name in ("before", "after"):
        found[name] = [
            [
                a.target.name,
                a.target.index,
                [list(pair) for pair in a.past],
                plain_updates(a.updates),
                _plain_states(a.states),
                a.transform,
            ]
            for a in getattr(merge, name)
        ]
    found["rate_scale"] = None if merge.rate_scale == 1.0 else merge.rate_scale
    return {name: value for name, value in found.items() if value}


def _plain_states(states: tuple[tuple[StateVector, float], ...]) -> list[list[Any]]:
    return [[vector.name, vector.index, c] for vector, c in states]


class Hashed:
    """``encode`` that also hashes its lines, for a plan that is not stored."""

    def __init__(self) -> None:
        self._digest = sha256()

    def __call__(self, item: Header | Record) -> str:
        """Return the line of an item and add it to the hash."""
        line = encode(item)
        self._digest.update(line.encode() + b"\n")
        return line

    def hash(self) -> str:
        """Return the SHA-256 of the lines so far."""
        return self._digest.hexdigest()


def saved(
    path: str | Path, header: Header, records: Iterable[Record], line: Callable[[Header | Record], str] = encode
) -> Iterator[Record]:
    """Write a plan, compressed if the name ends in .gz; yield each record after writing it.

    The file appears under its name after the last record.
    """
    path = Path(path)
    with writing(path), replacing(path) as scratch, scratch.open("wb") as file:
        # Without a name and a time stamp, equal plans give equal files.
        packed = gzip.GzipFile("", "wb", fileobj=file, mtime=0) if path.suffix == ".gz" else None
        target = packed or file
        target.write(line(header).encode() + b"\n")
        for record in records:
            target.write(line(record).encode() + b"\n")
            yield record
        if packed:
            packed.close()


def stream(path: str | Path) -> tuple[Header, Iterator[Record]]:
    """Return the header of a plan file and an iterator over its records, which reads as it goes."""
    path = Path(path)
    lines = _lines(path)
    first = next(lines, None)
    if first is None:
        raise UserError(f"the plan {path} is empty; plan again")
    try:
        header = read_header(json.loads(first))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise UserError(f"{path}, line 1: not the header of a plan ({error})") from None
    return header, _records(path, lines)


def _lines(path: Path) -> Iterator[str]:
    try:
        with open_regular(path) as file:
            for line in gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file:
                yield line.decode()
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise UserError(f"the plan {path} cannot be read: {error}") from None


def _records(path: Path, lines: Iterator[str]) -> Iterator[Record]:
    for number, line in enumerate(lines, start=2):
        try:
            yield _record(json.loads(line))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: not a record of a plan ({error})") from None


def read_header(found: Any) -> Header:
    """Check the first line of a file and return its header."""
    if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
        raise ValueError("not a plan")
    version = found.pop("format_version", None)
    if type(version) is not int or version not in (VERSION, STATE_VERSION):
        raise ValueError(f"format version {_short(version)}, but this program reads {VERSION} and {STATE_VERSION}")
    found.setdefault("lean", False)
    extra = _read_state(found) if version == STATE_VERSION else {}
    if set(found) != set(HEADER_KEYS):
        raise ValueError("wrong fields")
    if not isinstance(found["algorithm"], str):
        raise TypeError("algorithm is not a string")
    for name in ("num_clients", "updates_per_round", "local_steps"):
        found[name] = _count(found[name])
    found["seed"] = _whole(found["seed"])
    for name in ("repeats", "interruptible", "lean"):
        if not isinstance(found[name], bool):
            raise TypeError(f"{name} is not true or false")
    return Header(**{field: found[key] for key, field in HEADER_KEYS.items()}, **extra)


def _read_state(found: dict[str, Any]) -> dict[str, Any]:
    state = tuple(_spec(*_array(row)) for row in _array(found.pop("state", None)))
    job_start, correction = _named(found.pop("job_start", None)), _named(found.pop("correction", []))
    return {"state": state, "job_start": job_start, "correction": correction}


def _named(values: Any) -> tuple[tuple[str, float], ...]:
    return tuple((_text(name), _number(c)) for name, c in _array(values))


def _short(value: Any) -> str:
    """Return an untrusted value, shortened for a message of one line."""
    return repr(value)[:40]


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{_short(value)} is not a whole number")
    return value


def _count(value: Any) -> int:
    if _whole(value) < 0:
        raise ValueError(f"{_short(value)} is below zero")
    return int(value)


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise TypeError(f"{_short(value)} is not a finite number")
    return float(value)


def _array(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{_short(value)} is not an array")
    return value


def _counts(values: Any) -> tuple[int, ...]:
    return tuple(_count(value) for value in _array(values))


def _outcome(value: Any) -> JobOutcome:
    if value not in get_args(JobOutcome):
        raise ValueError(f"{_short(value)} is not the outcome of a job")
    return value  # type: ignore[no-any-return]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{_short(value)} is not text")
    return value


def _spec(name: Any, count: Any, initial: Any, per_client: Any) -> StateSpec:
    if not isinstance(per_client, bool):
        raise TypeError(f"{_short(per_client)} is not true or false")
    return StateSpec(_text(name), _count(count), _text(initial), per_client)


def _past(values: Any) -> tuple[tuple[int, float], ...]:
    return tuple((_count(v), _number(a)) for v, a in _array(values))


def _updates(values: Any) -> Updates:
    return tuple((Update(*_counts(ids)), _number(b)) for *ids, b in _array(values))


def _states(values: Any) -> tuple[tuple[StateVector, float], ...]:
    return tuple((StateVector(_text(name), _count(index)), _number(c)) for name, index, c in _array(values))


def _assignment(name: Any, index: Any, past: Any, updates: Any, states: Any, transform: Any) -> Assignment:
    target = StateVector(_text(name), _count(index))
    return Assignment(target, _past(past), _updates(updates), _states(states), _text(transform))


def read_extension(found: Any) -> dict[str, Any]:
    """Check the extension of a merge and return the fields of ``Merge`` that it has."""
    if not isinstance(found, dict) or not found.keys() <= {"states", "before", "after", "rate_scale"}:
        raise ValueError("the extension of a round has unknown fields")
    fields: dict[str, Any] = {"states": _states(found.get("states", []))}
    for name in ("before", "after"):
        fields[name] = tuple(_assignment(*_array(row)) for row in _array(found.get(name, [])))
    return {**fields, "rate_scale": _number(found.get("rate_scale", 1.0))}


def _round(
    time: float, version: int, past: tuple[tuple[int, float], ...], updates: Updates, freed: tuple[int, ...],
    extension: dict[str, Any] | None = None,
) -> Round:  # fmt: skip
    return Round(time, Merge(version, past, updates, **(extension or {})), freed)


def _optional_count(value: Any) -> int | None:
    return None if value is None else _count(value)


def _number_or_inf(value: Any) -> float:
    return math.inf if value is None else _number(value)


_READERS: dict[str, tuple[Callable[..., Record], tuple[Callable[[Any], Any], ...]]] = {
    "job": (Job, (_count, _count, _count, _count, _number, _number, _outcome)),
    "upload": (Uploaded, (_count, _count, _number, _number)),
    "sent": (Sent, (_count, _optional_count, _number)),
    "round": (_round, (_number, _count, _past, _updates, _counts, read_extension)),
    "absence": (Absence, (_count, _number, _number_or_inf)),
    "replacement": (Timeout, (_number, _counts, _counts)),
    "stall": (Stall, (_number,)),
}
"""The kinds of records: how each is made, and how its values are checked."""


def _record(found: Any) -> Record:
    kind, *values = _array(found) or [None]
    make, readers = _READERS[kind] if isinstance(kind, str) and kind in _READERS else (Stall, ())
    optional = kind == "round" and len(readers) == len(values) + 1  # a round without an extension
    if not readers or (len(readers) != len(values) and not optional):
        raise ValueError(f"{_short(kind)} is unknown or has the wrong number of values")
    return make(*(read(value) for read, value in zip(readers, values, strict=False)))
