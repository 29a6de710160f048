"""Client traces from CSV: ``client,step_seconds,up_mbps,down_mbps`` and, where clients leave, ``leaves_at,returns_at``.

A trace comes from outside: every value is checked, and an error names the file and the line.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from .devices import Trace

REQUIRED = ("client", "step_seconds", "up_mbps", "down_mbps")
OPTIONAL = ("leaves_at", "returns_at")


def read_trace(path: str | Path) -> Trace:
    """Read a trace; the order of its lines does not matter."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"there is no trace file {path}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"the trace file {path} cannot be read: {error}") from None
    rows = csv.reader(text.splitlines())
    header = [cell.strip() for cell in next(_rows(rows, path), [])]
    if sorted(header) != sorted({*REQUIRED, *(h for h in header if h in OPTIONAL)}):
        raise UserError(f"{path}, line 1: the columns must be {','.join(REQUIRED)} (and may be {','.join(OPTIONAL)})")
    found: dict[int, dict[str, float]] = {}
    for row in _rows(rows, path):
        if not row or not any(cell.strip() for cell in row):
            continue
        client, values = _row(
            dict(zip(header, row, strict=False)), len(row) == len(header), f"{path}, line {rows.line_num}"
        )
        if client in found:
            raise UserError(f"{path}, line {rows.line_num}: client {client} stands there twice")
        found[client] = values
    if not found:
        raise UserError(f"{path} has no clients; add a line for each")
    missing = next((i for i in range(len(found)) if i not in found), None)
    if missing is not None:
        raise UserError(f"{path}: clients must be numbered 0 to {len(found) - 1}, but {missing} is missing")
    ordered = [found[i] for i in range(len(found))]
    step, up, down = (np.array([row[name] for row in ordered]) for name in REQUIRED[1:])
    return Trace(
        step,
        up,
        down,
        absences={
            i: (row["leaves_at"], row["returns_at"]) for i, row in enumerate(ordered) if math.isfinite(row["leaves_at"])
        },
    )


def _rows(rows: Any, path: str | Path) -> Iterator[list[str]]:
    try:
        yield from rows
    except csv.Error as error:
        raise UserError(f"{path}, line {rows.line_num}: {error}") from None


def _row(cells: dict[str, str], whole: bool, where: str) -> tuple[int, dict[str, float]]:
    if not whole:
        raise UserError(f"{where}: the number of cells differs from the header's")
    values = {"leaves_at": math.inf, "returns_at": math.inf}
    for name, cell in cells.items():
        if name in OPTIONAL and not cell.strip():
            continue
        try:
            values[name] = float(cell)
        except ValueError:
            raise UserError(f"{where}: {name} is {cell.strip()!r}, not a number") from None
        if math.isnan(values[name]):
            raise UserError(f"{where}: {name} is not a number")
    client = values.pop("client")
    if client != int(client) if math.isfinite(client) else True:
        raise UserError(f"{where}: client is {client}, not a whole number")
    if client < 0:
        raise UserError(f"{where}: client is {int(client)}; clients are numbered from 0")
    for name in REQUIRED[1:]:
        if values[name] <= 0:
            raise UserError(f"{where}: {name} is {values[name]}; it must be above zero")
    if math.isinf(values["step_seconds"]):
        raise UserError(f"{where}: step_seconds must be finite")
    if math.isinf(values["leaves_at"]) and math.isfinite(values["returns_at"]):
        raise UserError(f"{where}: a client that returns must leave; give leaves_at, or leave returns_at empty")
    if values["leaves_at"] < 0 or (math.isfinite(values["leaves_at"]) and values["returns_at"] < values["leaves_at"]):
        raise UserError(f"{where}: a client leaves at zero or later and returns after that")
    return int(client), values
