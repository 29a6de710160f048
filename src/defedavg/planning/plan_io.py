"""The file format of plans: lines of JSON, plain or gzip, written atomically and checked when read.

Line 1 is an object: ``{"format": "defedavg-plan", "format_version": 1, "algorithm": …, "num_clients": …, …}``.
Every other line is an array whose first item names the kind of record:

    ["job", client, index, version, steps, start, end, outcome]     outcome: ended, interrupted, lost, running
    ["upload", client, index, start, end]
    ["sent", version, client or null, time]
    ["round", time, version, [[version, a], …], [[client, index, version, steps, b], …], [freed versions]]
    ["absence", client, time, back or null]
    ["replacement", time, [missing], [drawn]]
    ["stall", time]

Times are in seconds. Numbers are written so that they read back exactly. In the header, "repeats" is the policy's
``allow_same_version``, and "lean" (absent: false) marks a sparse plan.
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

from ..algorithms.protocol import Merge, Update
from ..errors import UserError
from ..fileio import open_regular, replacing, writing
from .records import Absence, Header, Job, JobOutcome, Record, Round, Sent, Stall, Timeout, Uploaded

FORMAT = "defedavg-plan"
VERSION = 1

_SAME_KEYS = ("algorithm", "num_clients", "updates_per_round", "local_steps", "seed")
HEADER_KEYS = {name: name for name in _SAME_KEYS} | {
    "repeats": "allow_same_version", "interruptible": "interruptible", "lean": "sparse"
}  # fmt: skip
"""Keys of the file -> fields of ``Header``."""


def encode(item: Header | Record) -> str:
    """Return the line of a header or a record."""
    return json.dumps(_plain(item), separators=(",", ":"), allow_nan=False)


def _plain(item: Header | Record) -> Any:
    if isinstance(item, Header):
        values = {key: getattr(item, field) for key, field in HEADER_KEYS.items()}
        if not item.sparse:  # keeps the lines and the hash of complete plans independent of the later field
            del values["lean"]
        return {"format": FORMAT, "format_version": VERSION, **values}
    if isinstance(item, Job):
        return ["job", item.client, item.index, item.version, item.steps, item.start, item.end, item.outcome]
    if isinstance(item, Uploaded):
        return ["upload", item.client, item.index, item.start, item.end]
    if isinstance(item, Sent):
        return ["sent", item.version, item.client, item.time]
    if isinstance(item, Round):
        updates = [[u.client, u.index, u.version, u.steps, b] for u, b in item.merge.updates]
        return ["round", item.time, item.merge.version, item.merge.past, updates, item.freed]
    if isinstance(item, Absence):
        return ["absence", item.client, item.time, None if math.isinf(item.back) else item.back]
    if isinstance(item, Timeout):
        return ["replacement", item.time, item.missing, item.drawn]
    return ["stall", item.time]


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
    except (ValueError, TypeError, RecursionError) as error:
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
    if type(version) is not int or version != VERSION:
        raise ValueError(f"format version {_short(version)}, but this program reads {VERSION}")
    found.setdefault("lean", False)
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
    return Header(**{field: found[key] for key, field in HEADER_KEYS.items()})


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


def _round(time: float, version: int, past: list[Any], updates: list[Any], freed: tuple[int, ...]) -> Round:
    terms = tuple((_count(v), _number(a)) for v, a in past)
    merged = tuple((Update(*_counts(ids)), _number(b)) for *ids, b in updates)
    return Round(time, Merge(version, terms, merged), freed)


def _optional_count(value: Any) -> int | None:
    return None if value is None else _count(value)


def _number_or_inf(value: Any) -> float:
    return math.inf if value is None else _number(value)


_READERS: dict[str, tuple[Callable[..., Record], tuple[Callable[[Any], Any], ...]]] = {
    "job": (Job, (_count, _count, _count, _count, _number, _number, _outcome)),
    "upload": (Uploaded, (_count, _count, _number, _number)),
    "sent": (Sent, (_count, _optional_count, _number)),
    "round": (_round, (_number, _count, _array, _array, _counts)),
    "absence": (Absence, (_count, _number, _number_or_inf)),
    "replacement": (Timeout, (_number, _counts, _counts)),
    "stall": (Stall, (_number,)),
}
"""The kinds of records: how each is made, and how its values are checked."""


def _record(found: Any) -> Record:
    kind, *values = _array(found) or [None]
    make, readers = _READERS[kind] if isinstance(kind, str) and kind in _READERS else (Stall, ())
    if not readers or len(readers) != len(values):
        raise ValueError(f"{_short(kind)} is unknown or has the wrong number of values")
    return make(*(read(value) for read, value in zip(readers, values, strict=True)))
