"""Client traces from CSV: speeds, links, absences and intervals of availability.

The columns ``client,step_seconds,up_mbps,down_mbps`` are required. ``leaves_at,returns_at`` describe one absence;
``available_from,available_to`` one interval in which the client is available, in one row for each interval, and
``repeat_every`` the time after which its intervals repeat. A trace is untrusted: every value is checked, and an error
names the file and the line.
"""

from __future__ import annotations

import csv
import itertools
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import IgnoredWarning, UserError
from ..fileio import NotRegularError, open_regular
from .devices import Trace
from .intervals import MIN_SECONDS, Intervals, wrapped

REQUIRED = ("client", "step_seconds", "up_mbps", "down_mbps")
OPTIONAL = ("leaves_at", "returns_at")
INTERVAL = ("available_from", "available_to", "repeat_every")
MAX_TRACE_BYTES = 256 << 20  # about five million clients
MAX_SECONDS = 1e12  # of the times at which a client leaves and returns, and of intervals


@dataclass(slots=True)
class _Client:
    """What the rows of one client say: the values that must be equal in all of them, and its intervals by line."""

    where: str
    values: dict[str, float]
    spans: list[tuple[float, float, str]] = field(default_factory=list)


def read_trace(path: str | Path) -> Trace:
    """Read a trace; the order of its lines does not matter, except that names are numbered as they first appear."""
    clients: dict[str, _Client] = {}
    intervals = False
    for where, cells in table(text_of(path), path, REQUIRED, (*OPTIONAL, *INTERVAL), INTERVAL[:2]):
        name = cells.pop("client").strip()
        intervals = "available_from" in cells
        values = _numbers(cells, where)
        _check_values(values, where)
        span = values.pop("available_from"), values.pop("available_to")
        client = clients.setdefault(name, _Client(where, values))
        if client.where != where:
            _check_further_row(name, client, values, where, intervals)
        if intervals:
            client.spans.append((*_checked_span(name, cells, span, values["repeat_every"], where), where))
    if not clients:
        raise UserError(f"{path} has no clients; add a line for each")
    order, names = _numbered(clients, path)
    rows = [clients[name].values for name in order]
    step, up, down = (np.array([row[name] for row in rows]) for name in REQUIRED[1:])
    leaving = ((i, row) for i, row in enumerate(rows) if math.isfinite(row["leaves_at"]))
    absences = {i: (row["leaves_at"], row["returns_at"]) for i, row in leaving}
    return Trace(step, up, down, absences, _intervals(clients, order) if intervals else None, names)


def _check_further_row(name: str, client: _Client, values: Mapping[str, float], where: str, intervals: bool) -> None:
    if not intervals:
        raise UserError(f"{where}: client {name} appears twice; remove one line")
    for column, value in values.items():
        if value != client.values[column]:
            raise UserError(
                f"{where}: {column} of client {name} is {value:g}, but {client.values[column]:g} in "
                f"{client.where.rpartition(', ')[2]}; repeat the same value in every row of a client"
            )


def _checked_span(
    name: str, cells: Mapping[str, str], span: tuple[float, float], period: float, where: str
) -> tuple[float, float]:
    """Return an interval that is valid by itself; an empty ``available_to`` is infinity."""
    start, end = span
    if not cells["available_from"].strip():
        raise UserError(
            f"{where}: client {name} has no interval, so it is never available; give available_from (0, with an empty "
            "available_to: always)"
        )
    if not 0 <= start <= MAX_SECONDS or MAX_SECONDS < end < math.inf:
        raise UserError(f"{where}: available_from and available_to must be from 0 to {MAX_SECONDS:,.0f}")
    if not end - start >= MIN_SECONDS:
        raise UserError(f"{where}: available_to is {end:g}; it must be after available_from, which is {start:g}")
    if math.isfinite(period) and not (start < period and end - start <= period):
        raise UserError(
            f"{where}: the interval from {start:g} to {end:g} does not fit into repeat_every, which is {period:g}; it "
            "must start within it and not be longer"
        )
    return span


def _intervals(clients: Mapping[str, _Client], order: list[str]) -> Intervals:
    for name in order:
        client = clients[name]
        period = client.values["repeat_every"]
        pieces = sorted(
            (*piece, where) for *span, where in client.spans for piece in wrapped((span[0], span[1]), period)
        )
        for (_, end, earlier), (start, _, where) in itertools.pairwise(pieces):
            if start < end:
                line = earlier.rpartition(", ")[2]
                raise UserError(f"{where}: an interval of client {name} overlaps that of {line}; join the two")
    spans = ([(start, end) for start, end, _ in clients[name].spans] for name in order)
    return Intervals.of(zip(spans, (clients[name].values["repeat_every"] for name in order), strict=True))


def _numbered(clients: Mapping[str, _Client], path: str | Path) -> tuple[list[str], tuple[str, ...]]:
    """Return the clients in the order of their numbers, and their names; no names if all of them are numbers."""
    numbers: dict[int, str] = {}
    for name, client in clients.items():
        if not name:
            raise UserError(f"{client.where}: client is empty; give a number or a name")
        try:
            number = _client_number(float(name), client.where)
        except ValueError:
            return list(clients), tuple(clients)
        if number in numbers:
            raise UserError(f"{client.where}: client {number} appears twice; write its number in one way")
        numbers[number] = name
    missing = next((i for i in range(len(numbers)) if i not in numbers), None)
    if missing is not None:
        raise UserError(
            f"{path}: clients must be numbered 0 to {len(numbers) - 1}, but {missing} is missing; number them so, or "
            "give them names that are not numbers"
        )
    return [numbers[i] for i in range(len(numbers))], ()


def text_of(path: str | Path) -> str:
    """Return the text of a regular file of a limited size; a pipe or a device may be endless."""
    try:
        with open_regular(Path(path)) as file:
            data = file.read(MAX_TRACE_BYTES + 1)
        if len(data) > MAX_TRACE_BYTES:
            raise UserError(f"the trace file {path} has more than {MAX_TRACE_BYTES >> 20} MiB; describe fewer clients")
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"the trace file {path} is not text in UTF-8; give the path of a CSV file") from None
    except NotRegularError:
        raise UserError(f"the trace file {path} is not a regular file; give the path of a CSV file") from None
    except FileNotFoundError:
        raise UserError(f"the trace file {path} does not exist") from None
    except (OSError, ValueError) as error:
        raise UserError(f"the trace file {path} cannot be read: {error}") from None


def table(
    text: str,
    path: str | Path,
    required: tuple[str, ...],
    optional: tuple[str, ...] = (),
    together: tuple[str, ...] = (),
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the file and line of every row of a CSV text that is not empty, and its cells by column that is known.

    Cells are separated by commas or semicolons. Of the columns that belong ``together``, all or none are given.
    """
    lines = text.splitlines()
    separator = ";" if lines and lines[0].count(";") > lines[0].count(",") else ","
    rows = csv.reader(lines, delimiter=separator)
    header = [cell.strip() for cell in next(_rows(rows, path), [])]
    _check_header(header, path, required, optional, together)
    known = {*required, *optional}
    for row in _rows(rows, path):
        where = f"{path}, line {rows.line_num}"
        if not any(cell.strip() for cell in row):
            continue
        if len(row) != len(header):
            raise UserError(f"{where}: {len(row)} cells, but the header has {len(header)}")
        yield where, {name: cell for name, cell in zip(header, row, strict=True) if name in known}


def _check_header(
    header: list[str],
    path: str | Path,
    required: tuple[str, ...],
    optional: tuple[str, ...],
    together: tuple[str, ...],
) -> None:
    """Refuse a header without the columns needed; name the columns that are ignored."""
    if (
        not {*required} <= {*header}
        or len({*header}) != len(header)
        or 0 < len({*together} & {*header}) < len(together)
    ):
        also = f" (and may be {','.join(optional)})" if optional else ""
        raise UserError(f"{path}, line 1: the columns must be {','.join(required)}{also}")
    known = {*required, *optional}
    ignored = [name for name in header if name not in known]
    if ignored:
        message = (
            f"{path}: ignored the columns {', '.join(map(repr, ignored))}; known: {','.join((*required, *optional))}"
        )
        warnings.warn(message, IgnoredWarning, stacklevel=3)


def _rows(rows: Any, path: str | Path) -> Iterator[list[str]]:
    try:
        yield from rows
    except csv.Error as error:
        raise UserError(f"{path}, line {rows.line_num}: {error}") from None


def number(cell: str, name: str, where: str) -> float:
    """Return a cell as a number that is not NaN."""
    try:
        value = float(cell)
    except ValueError:
        raise UserError(f"{where}: {name} is {cell.strip()!r}, not a number") from None
    if math.isnan(value):
        raise UserError(f"{where}: {name} is not a number")
    return value


def _numbers(cells: Mapping[str, str], where: str) -> dict[str, float]:
    """Return the cells as numbers; empty optional ones as infinity."""
    values = dict.fromkeys((*OPTIONAL, *INTERVAL), math.inf)
    for name, cell in cells.items():
        if name not in values or cell.strip():
            values[name] = number(cell, name, where)
    return values


def _client_number(value: float, where: str) -> int:
    if not math.isfinite(value) or value != int(value):
        raise UserError(f"{where}: client is {value}, not a whole number")
    if value < 0:
        raise UserError(f"{where}: client is {int(value)}; clients are numbered from 0")
    return int(value)


def _check_values(values: Mapping[str, float], where: str) -> None:
    for name in REQUIRED[1:]:
        if values[name] <= 0:
            raise UserError(f"{where}: {name} is {values[name]}; it must be above zero")
    if math.isinf(values["step_seconds"]):
        raise UserError(f"{where}: step_seconds must be finite")
    if values["repeat_every"] <= 0 or MAX_SECONDS < values["repeat_every"] < math.inf:
        raise UserError(f"{where}: repeat_every must be above zero and at most {MAX_SECONDS:,.0f}, or empty for never")
    leaves, returns = values["leaves_at"], values["returns_at"]
    if any(MAX_SECONDS < time < math.inf for time in (leaves, returns)):
        raise UserError(f"{where}: leaves_at and returns_at must be at most {MAX_SECONDS:,.0f}, or empty for never")
    if math.isinf(leaves) and math.isfinite(returns):
        raise UserError(f"{where}: a client that returns must leave; give leaves_at, or leave returns_at empty")
    if leaves < 0 or (math.isfinite(leaves) and returns < leaves):
        raise UserError(f"{where}: leaves_at must be zero or more, and returns_at not before it")
