"""The plan's file format: lines of JSON, plain or gzip, written in one stroke and checked when read.

Line 1 is an object: ``{"format": "defedavg-plan", "format_version": 1, "algorithm": …, "num_clients": …, …}``.
Every other line is an array whose first item says what it is:

    ["job", client, index, version, steps, start, end, fate]        fate: ended, interrupted, lost, running
    ["upload", client, index, start, end]
    ["sent", version, client or null, time]
    ["round", time, version, [[version, a], …], [[client, index, version, steps, b], …], [freed versions]]
    ["absence", client, time, back or null]
    ["replacement", time, [missing], [drawn]]
    ["stall", time]

Times are seconds. Numbers are written so that they read back exactly.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, get_args

from ..algorithms.protocol import Merge, Update
from ..errors import UserError
from ..fileio import writing
from .plan import Absence, Header, Job, JobOutcome, Record, Replacement, Round, Sent, Stall, Uploaded

FORMAT = "defedavg-plan"
VERSION = 1
T = TypeVar("T")


def encode(item: Header | Record) -> str:
    """One line of the file."""
    return json.dumps(_plain(item), separators=(",", ":"), allow_nan=False)


def _plain(item: Header | Record) -> Any:
    if isinstance(item, Header):
        said = asdict(item)
        if not item.lean:  # so that a plan that leaves nothing out has the lines and the hash it always had
            del said["lean"]
        return {"format": FORMAT, "format_version": VERSION, **said}
    if isinstance(item, Job):
        return ["job", item.client, item.index, item.version, item.steps, item.start, item.end, item.fate]
    if isinstance(item, Uploaded):
        return ["upload", item.client, item.index, item.start, item.end]
    if isinstance(item, Sent):
        return ["sent", item.version, item.client, item.time]
    if isinstance(item, Round):
        updates = [[u.client, u.index, u.version, u.steps, b] for u, b in item.merge.updates]
        return ["round", item.time, item.merge.version, item.merge.past, updates, item.freed]
    if isinstance(item, Absence):
        return ["absence", item.client, item.time, None if math.isinf(item.back) else item.back]
    if isinstance(item, Replacement):
        return ["replacement", item.time, item.missing, item.drawn]
    return ["stall", item.time]


class Hashed:
    """``encode`` that also sums up its lines, for the hash of a plan that is not held."""

    def __init__(self) -> None:
        self._digest = sha256()

    def __call__(self, item: Header | Record) -> str:
        line = encode(item)
        self._digest.update(line.encode() + b"\n")
        return line

    def hash(self) -> str:
        """SHA-256 of the lines so far."""
        return self._digest.hexdigest()


def write(path: str | Path, lines: Iterable[str]) -> None:
    """Write the lines, compressed if the name ends in .gz."""
    for _ in _written(Path(path), lines, str):
        pass


def saved(
    path: str | Path, header: Header, records: Iterable[Record], line: Callable[[Header | Record], str] = encode
) -> Iterator[Record]:
    """The same records, each written before it is given on; the file is in its place when the last one has been."""
    items = _written(Path(path), itertools.chain([header], records), line)
    next(items)
    for item in items:
        assert not isinstance(item, Header)
        yield item


def _written(path: Path, items: Iterable[T], line: Callable[[T], str]) -> Iterator[T]:
    """Write line by line beside the path, then move there in one stroke; nothing is held."""
    scratch = path.with_name(path.name + ".part")
    try:
        with writing(path), scratch.open("wb") as file:
            # Without a name and a time in it, the same plan is the same file.
            packed = gzip.GzipFile("", "wb", fileobj=file, mtime=0) if path.suffix == ".gz" else None
            for item in items:
                (packed or file).write(line(item).encode() + b"\n")
                yield item
            if packed:
                packed.close()
        with writing(path):
            scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def read(path: str | Path) -> tuple[Header, list[Record]]:
    """Read a plan file; every value is checked."""
    header, records = stream(path)
    return header, list(records)


def stream(path: str | Path) -> tuple[Header, Iterator[Record]]:
    """The header of a plan file, and its records as they are read: nothing is held."""
    path = Path(path)
    lines = _lines(path)
    first = next(lines, None)
    if first is None:
        raise UserError(f"the plan {path} is empty")
    try:
        header = read_header(json.loads(first))
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{path}, line 1: not the header of a plan ({error})") from None
    return header, _records(path, lines)


def _lines(path: Path) -> Iterator[str]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for line in file:
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
    """The first line of a file, checked."""
    if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
        raise ValueError("not a plan")
    version = found.pop("format_version", None)
    if type(version) is not int or version != VERSION:
        raise ValueError(f"format version {_short(version)}, but this program reads {VERSION}")
    found.setdefault("lean", False)
    if set(found) != {f.name for f in fields(Header)}:
        raise ValueError("wrong fields")
    if not isinstance(found["algorithm"], str):
        raise TypeError("algorithm is not text")
    for name in ("num_clients", "updates_per_round", "local_steps"):
        found[name] = _count(found[name])
    found["seed"] = _whole(found["seed"])
    for name in ("repeats", "interruptible", "lean"):
        if not isinstance(found[name], bool):
            raise TypeError(f"{name} is not true or false")
    return Header(**found)


def _short(value: Any) -> str:
    """A value from outside, fit for a message of one line."""
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


def _fate(value: Any) -> JobOutcome:
    if value not in get_args(JobOutcome):
        raise ValueError(f"{_short(value)} is no fate of a job")
    return value  # type: ignore[no-any-return]


def _record(found: Any) -> Record:
    if not isinstance(found, list) or not found:
        raise TypeError("not an array")
    kind, *rest = found
    match kind, *rest:
        case "job", client, index, version, steps, start, end, fate:
            ids = (_count(client), _count(index), _count(version), _count(steps))
            return Job(*ids, _number(start), _number(end), _fate(fate))
        case "upload", client, index, start, end:
            return Uploaded(_count(client), _count(index), _number(start), _number(end))
        case "sent", version, client, time:
            return Sent(_count(version), None if client is None else _count(client), _number(time))
        case "round", time, version, past, updates, freed:
            terms = tuple((_count(v), _number(a)) for v, a in _array(past))
            merged = tuple((Update(*_counts(ids)), _number(b)) for *ids, b in _array(updates))
            return Round(_number(time), Merge(_count(version), terms, merged), _counts(freed))
        case "absence", client, time, back:
            return Absence(_count(client), _number(time), math.inf if back is None else _number(back))
        case "replacement", time, missing, drawn:
            return Replacement(_number(time), _counts(missing), _counts(drawn))
        case "stall", time:
            return Stall(_number(time))
    raise ValueError(f"unknown or misshapen {_short(kind)}")
