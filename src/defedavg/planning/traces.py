"""Client traces from CSV: ``client,step_seconds,up_mbps,down_mbps`` and, if clients leave, ``leaves_at,returns_at``.

A trace is untrusted: every value is checked, and an error names the file and the line.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..fileio import NotRegularError, open_regular
from .devices import Trace

REQUIRED = ("client", "step_seconds", "up_mbps", "down_mbps")
OPTIONAL = ("leaves_at", "returns_at")
MAX_TRACE_BYTES = 256 << 20  # about five million clients
MAX_SECONDS = 1e12  # of the times at which a client leaves and returns


def read_trace(path: str | Path) -> Trace:
    """Read a trace; the order of its lines does not matter."""
    clients: dict[int, dict[str, float]] = {}
    for where, cells in _table(_text(path), path):
        values = _numbers(cells, where)
        client = _client_number(values.pop("client"), where)
        _check_values(values, where)
        if client in clients:
            raise UserError(f"{where}: client {client} appears twice; remove one line")
        clients[client] = values
    if not clients:
        raise UserError(f"{path} has no clients; add a line for each")
    missing = next((i for i in range(len(clients)) if i not in clients), None)
    if missing is not None:
        raise UserError(f"{path}: clients must be numbered 0 to {len(clients) - 1}, but {missing} is missing")
    ordered = [clients[i] for i in range(len(clients))]
    step, up, down = (np.array([row[name] for row in ordered]) for name in REQUIRED[1:])
    leaving = ((i, row) for i, row in enumerate(ordered) if math.isfinite(row["leaves_at"]))
    return Trace(step, up, down, absences={i: (row["leaves_at"], row["returns_at"]) for i, row in leaving})


def _text(path: str | Path) -> str:
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


def _table(text: str, path: str | Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the file and line of every row that is not empty, and its cells by column."""
    rows = csv.reader(text.splitlines())
    header = [cell.strip() for cell in next(_rows(rows, path), [])]
    if sorted(header) != sorted({*REQUIRED, *(name for name in header if name in OPTIONAL)}):
        raise UserError(f"{path}, line 1: the columns must be {','.join(REQUIRED)} (and may be {','.join(OPTIONAL)})")
    for row in _rows(rows, path):
        where = f"{path}, line {rows.line_num}"
        if not any(cell.strip() for cell in row):
            continue
        if len(row) != len(header):
            raise UserError(f"{where}: {len(row)} cells, but the header has {len(header)}")
        yield where, dict(zip(header, row, strict=True))


def _rows(rows: Any, path: str | Path) -> Iterator[list[str]]:
    try:
        yield from rows
    except csv.Error as error:
        raise UserError(f"{path}, line {rows.line_num}: {error}") from None


def _numbers(cells: dict[str, str], where: str) -> dict[str, float]:
    """Return the cells as numbers; empty optional ones as infinity."""
    values = dict.fromkeys(OPTIONAL, math.inf)
    for name, cell in cells.items():
        if name in OPTIONAL and not cell.strip():
            continue
        try:
            values[name] = float(cell)
        except ValueError:
            raise UserError(f"{where}: {name} is {cell.strip()!r}, not a number") from None
        if math.isnan(values[name]):
            raise UserError(f"{where}: {name} is not a number")
    return values


def _client_number(value: float, where: str) -> int:
    if not math.isfinite(value) or value != int(value):
        raise UserError(f"{where}: client is {value}, not a whole number")
    if value < 0:
        raise UserError(f"{where}: client is {int(value)}; clients are numbered from 0")
    return int(value)


def _check_values(values: dict[str, float], where: str) -> None:
    for name in REQUIRED[1:]:
        if values[name] <= 0:
            raise UserError(f"{where}: {name} is {values[name]}; it must be above zero")
    if math.isinf(values["step_seconds"]):
        raise UserError(f"{where}: step_seconds must be finite")
    leaves, returns = values["leaves_at"], values["returns_at"]
    if any(MAX_SECONDS < time < math.inf for time in (leaves, returns)):
        raise UserError(f"{where}: leaves_at and returns_at must be at most {MAX_SECONDS:,.0f}, or empty for never")
    if math.isinf(leaves) and math.isfinite(returns):
        raise UserError(f"{where}: a client that returns must leave; give leaves_at, or leave returns_at empty")
    if leaves < 0 or (math.isfinite(leaves) and returns < leaves):
        raise UserError(f"{where}: leaves_at must be zero or more, and returns_at not before it")
