"""Traces from files of other projects: availability, with speeds and links assigned to clients by key.

* ``fedscale``: the client behaviour trace of FedScale as JSON, {client: {"active": [...], "inactive": [...],
  "finish_time": seconds}}. FedScale publishes it as a pickle, which is never read, since it can execute code.
* ``flhetbench``: {phone: {"ready_time": [[from, to], ...], "trace_end": seconds}}, {phone: [[from, to], ...]} or
  {phone: {"messages": "date time<TAB>state" lines}} as JSON, or the CSV columns
  phone,day_offset,seconds,ready_from,ready_to.

Availability repeats at the end of a phone's trace, as in these projects.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError, first_line
from ..fileio import open_regular
from ..rng import below, extend, extend_all, key
from . import phones
from .intervals import MIN_SECONDS, Floats, wrapped
from .traces import INTERVAL, MAX_SECONDS, REQUIRED, number, table, text_of

MEASURED = ("phone", "day_offset", "seconds", "ready_from", "ready_to")
Spans = list[tuple[float, float]]
Phones = Iterable[tuple[str, Spans, float]]
"""The name, the intervals and the period (infinity: none) of every phone."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """A trace as CSV text, and notes on what was left out."""

    text: str
    clients: int
    intervals: int
    notes: tuple[str, ...]


def convert(
    path: Path,
    kind: str,
    *,
    latency: Path | None = None,
    links: Path | None = None,
    step_seconds: float = 0.172,
    seed: int = 0,
) -> Conversion:
    """Convert a file; ``step_seconds`` is the median, and without files of latencies and links, phones are drawn."""
    notes: list[str] = []
    found = [(name, _joined(spans, period), period) for name, spans, period in READERS[kind](path)]
    kept = [(name, spans, period) for name, spans, period in found if spans]
    if not kept:
        raise UserError(f"{path} has no client that is ever available; check that --format {kind} is its format")
    if len(kept) < len(found):
        notes.append(f"left out {len(found) - len(kept)} clients that are never available")
    ids = np.arange(len(kept))
    if latency is None:
        steps = phones.slowness(extend_all(key(seed, "slowness"), ids)) * step_seconds
    else:
        values = _latencies(latency, notes)
        steps = _assigned(values, seed, "trace-latency", len(kept)) / np.median(values) * step_seconds
    if links is None:
        up, down = phones.links(seed, ids)
    else:
        pairs = _links(links)
        up, down = (_assigned(column, seed, "trace-links", len(kept)) for column in pairs)
    rows = _rows(kept, steps, up, down)
    return Conversion(rows, len(kept), sum(len(spans) for _, spans, _ in kept), tuple(notes))


def _rows(kept: list[tuple[str, Spans, float]], steps: Floats, up: Floats, down: Floats) -> str:
    # A number that is not the place of its client would be refused as a number, so it becomes part of a name.
    numbered = all(name == str(i) for i, (name, _, _) in enumerate(kept))
    prefix = "phone-" if not numbered and all(_is_number(name) for name, _, _ in kept) else ""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow((*REQUIRED, *INTERVAL))
    for i, (name, spans, period) in enumerate(kept):
        speeds = f"{steps[i]:.6g}", f"{up[i]:.6g}", f"{down[i]:.6g}"
        for start, end in spans:
            writer.writerow((prefix + name, *speeds, _cell(start), _cell(end), _cell(period)))
    return out.getvalue()


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True


def _cell(seconds: float) -> str:
    return "" if math.isinf(seconds) else repr(int(seconds) if seconds == int(seconds) else seconds)


def _joined(spans: Spans, period: float) -> Spans:
    """Return the intervals within one period, in order; those that touch or overlap are joined."""
    joined: Spans = []
    for start, end in sorted(piece for span in spans for piece in wrapped(span, period)):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return [(start, end) for start, end in joined if end - start >= MIN_SECONDS]


def _assigned(values: Floats, seed: int, purpose: str, clients: int) -> Floats:
    """Return a value for each client, drawn by key."""
    start = key(seed, purpose)
    return values[[below(extend(start, client), len(values)) for client in range(clients)]]


# Readers.


def _fedscale(path: Path) -> Phones:
    for name, entry in _entries(path):
        where = f"{path}, client {name}"
        if not (isinstance(entry, dict) and isinstance(entry.get("active"), list) and "finish_time" in entry):
            raise UserError(f"{where}: expected active, inactive and finish_time; is this FedScale's behaviour trace?")
        active, inactive = entry["active"], entry.get("inactive")
        if not isinstance(inactive, list) or len(inactive) != len(active):
            raise UserError(f"{where}: active and inactive must be lists of the same length")
        period = _seconds(entry["finish_time"], "finish_time", where)
        yield name, [_span(pair, period, where) for pair in zip(active, inactive, strict=True)], period


def _flhetbench(path: Path) -> Phones:
    if path.suffix.lower() == ".csv":
        yield from _measured(path)
        return
    for name, entry in _entries(path):
        where = f"{path}, client {name}"
        spans: Any
        end: Any
        if isinstance(entry, dict) and isinstance(entry.get("messages"), str):
            spans, end = _ready(entry["messages"], where)
        elif isinstance(entry, dict):
            spans, end = entry.get("ready_time"), entry.get("trace_end") or 0
        else:
            spans, end = entry, math.inf
        if not isinstance(spans, list):
            raise UserError(f"{where}: expected messages, ready_time or a list of intervals")
        # A trace without a length, of which nothing is known, is left out like one without intervals.
        period = end if end == math.inf else _seconds(end, "trace_end", where) or math.inf
        yield name, [_span(pair, period, where) for pair in (spans if end else [])], period


def _measured(path: Path) -> Phones:
    """Read the CSV form; time 0 becomes midnight, so that the daily cycles of phones coincide."""
    found: dict[str, tuple[Spans, float]] = {}
    for where, cells in table(text_of(path), path, MEASURED):
        name = cells.pop("phone").strip()
        offset, period, *span = (_seconds(number(cells[c], c, where), c, where) for c in MEASURED[1:])
        start, end = _span(span, period, where)
        if not period or found.setdefault(name, ([], period))[1] != period:
            raise UserError(f"{where}: seconds is {period:g}; it must be above zero and the same for a phone")
        first = (start + offset) % period
        found[name][0].append((first, first + (end - start)))
    return ((name, spans, period) for name, (spans, period) in found.items())


READERS: Mapping[str, Callable[[Path], Phones]] = {"fedscale": _fedscale, "flhetbench": _flhetbench}


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    if path.suffix.lower() in (".pkl", ".pickle") or _starts_like_a_pickle(path):
        raise UserError(
            f"{path} is a pickle, which can execute code and is never read; load it where you trust it, write the same "
            "content with json.dump, and convert that file"
        )
    try:
        found = json.loads(text_of(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {first_line(error)}; give the same content as JSON") from None
    if not isinstance(found, dict):
        raise UserError(f'{path}: expected one entry per client, as in {{"0": …}}')
    yield from found.items()


def _starts_like_a_pickle(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return file.read(1) == b"\x80"
    except OSError:
        return False  # ``text_of`` reports it


def _seconds(value: Any, name: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_SECONDS:
        shown = value if isinstance(value, int | float) else type(value).__name__
        raise UserError(f"{where}: {name} is {shown}; it must be a number from 0 to {MAX_SECONDS:,.0f}")
    return float(value)


def _span(pair: Any, period: float, where: str) -> tuple[float, float]:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise UserError(f"{where}: an interval must be a pair of numbers, from and to")
    start, end = (_seconds(value, "the edge of an interval", where) for value in pair)
    if not (start <= end and start <= period and end - start <= period):
        raise UserError(
            f"{where}: the interval from {start:g} to {end:g} is reversed or outside its trace ({period:g})"
        )
    return start, end


STATES: Mapping[str, tuple[str, bool]] = {
    "battery_charged_on": ("charging", True),
    "battery_charged_off": ("charging", False),
    "wifi": ("wifi", True),
    **dict.fromkeys(("unknown", "2g", "3g", "4g", "5g"), ("wifi", False)),
    "screen_off": ("screen off", True),
    "screen_on": ("screen off", False),
    "screen_lock": ("locked", True),
    "screen_unlock": ("locked", False),
}
"""The messages of FLASH's state traces that matter: what each says of a phone."""


def _ready(messages: str, where: str) -> tuple[list[list[float]], float]:
    """Return when a phone was charging, on Wi-Fi, and locked or dark, from its first message, and its last message."""
    state = dict.fromkeys(("charging", "wifi", "screen off", "locked"), False)
    edges: list[tuple[float, bool]] = []
    origin: datetime | None = None
    for line in filter(str.strip, messages.splitlines()):
        moment, _, message = line.partition("\t")
        try:
            time = datetime.strptime(moment.strip(), "%Y-%m-%d %H:%M:%S")
        except ValueError:
            raise UserError(f"{where}: {line.strip()[:60]!r} does not start with a date and a time") from None
        origin = origin or time
        if (change := STATES.get(message.strip().lower())) is not None:
            state[change[0]] = change[1]
        ready = state["charging"] and state["wifi"] and (state["screen off"] or state["locked"])
        edges.append(((time - origin).total_seconds(), ready))
    edges.sort(key=lambda edge: edge[0])
    return [[start, end] for (start, ready), (end, _) in pairwise(edges) if ready], edges[-1][0] if edges else 0.0


# Speeds and links.


def _latencies(path: Path, notes: list[str]) -> Floats:
    required, optional = ("phone_model", "resnet"), ("vit", "vit_sd", "resnet_sd")
    cells = [(row["resnet"], where) for where, row in table(text_of(path), path, required, optional)]
    values: Floats = np.array([number(cell, "resnet", where) for cell, where in cells if cell.strip()], np.float64)
    valid = values[(values > 0) & np.isfinite(values)]
    if not len(valid):
        raise UserError(f"{path} has no latency above zero in the column resnet")
    if len(valid) < len(cells):
        notes.append(f"left out {len(cells) - len(valid)} latencies that are empty, infinite or not above zero")
    return np.asarray(valid)


def _links(path: Path) -> tuple[Floats, Floats]:
    columns = ("up_mbps", "down_mbps")
    rows = [[number(row[c], c, where) for c in columns] for where, row in table(text_of(path), path, columns)]
    values = np.array(rows, np.float64).reshape(-1, 2)
    if not len(values) or not (values > 0).all():
        raise UserError(f"{path} must have links, and every up_mbps and down_mbps must be above zero")
    return values[:, 0], values[:, 1]
