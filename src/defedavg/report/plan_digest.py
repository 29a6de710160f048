"""The figures of a plan that the page shows: traffic per round, staleness, participation and client activity.

A page may show a hundred plans, so records are read as columns of numbers, not as objects as ``Plan.load`` does.
Malformed records still raise ``UserError``.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError, first_line
from ..fileio import open_regular
from ..planning.plan import without_gc
from ..planning.plan_io import read_header

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

MAX_CLIENTS = 10_000_000
CHART_CLIENTS = 24
CHART_JOBS = 1200
FIRST_VIEW_JOBS = 300  # before the reader zooms out
UNUSED = -1  # the staleness of a job that no merge uses


@dataclass(frozen=True, slots=True)
class Digest:
    """The figures of one plan."""

    num_clients: int
    seconds: float  # of the last merge
    rounds: list[float]  # the time of each merge
    traffic: list[int]  # models sent, up and down, by the end of each round; [0] is before the first; empty: unknown
    staleness: Integers  # the number of merged updates of each staleness
    merged: Integers  # merged updates of each client
    jobs: Floats  # client, index, version, start, end
    uploads: Floats  # client, start, end
    absences: Floats  # client, start, end
    used: dict[tuple[int, int], int] = field(repr=False)  # (client, index) -> staleness


def digest(path: Path, *, bars: bool) -> Digest:
    """Read the figures of a plan file; without ``bars``, jobs and uploads are only counted, which is faster."""
    try:
        with without_gc(), open_regular(path) as file:  # the records are many small objects, and no cycles
            lines = io.TextIOWrapper(gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file, encoding="utf-8")
            head = read_header(json.loads(next(lines, "null")))
            records = _Records(head.num_clients)
            for row in _rows(lines, bars and not head.sparse):
                records.add(row)
        # A lean plan leaves out jobs and messages that no merge needs, so it does not say how much was sent.
        return replace(records.digest(), traffic=[]) if head.sparse else records.digest()
    except (OSError, EOFError, zlib.error, ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise UserError(f"the plan {path.name} cannot be read: {first_line(error)}") from None


def _rows(lines: Iterable[str], bars: bool) -> Iterator[Any]:
    """Yield the records; without ``bars``, skip jobs and leave out the fields of records that are only counted."""
    if bars:
        yield from json.loads("[" + ",".join(lines) + "]")
        return
    for line in lines:
        if line.startswith('["job",'):
            continue
        if line.startswith('["upload",'):
            yield ("upload",)
        elif line.startswith('["sent",'):
            yield ("sent", None, None if ",null," in line else 0)
        else:
            yield json.loads(line)


class _Records:
    def __init__(self, num_clients: int) -> None:
        if num_clients > MAX_CLIENTS:
            raise ValueError(f"{num_clients} clients are too many to show")
        self.num_clients = num_clients
        self.rows: defaultdict[str, list[tuple[Any, ...]]] = defaultdict(list)  # by kind
        self.messages = 0
        self.traffic = [0]

    def add(self, row: Sequence[Any]) -> None:
        kind = row[0]
        if kind == "job":
            self.rows[kind].append((row[1], row[2], row[3], row[5], row[6], row[7] == "running"))
        elif kind == "upload":
            self.messages += 1
            if len(row) > 1:
                self.rows[kind].append((row[1], row[3], row[4]))
        elif kind == "sent":
            self.messages += self.num_clients if row[2] is None else 1
        elif kind == "round":
            self.rows[kind].append((row[1],))
            self.traffic.append(self.messages)
            self.rows["update"] += [(u[0], u[1], row[2] - 1 - u[2]) for u in row[4]]  # client, index, staleness
        elif kind == "absence":
            self.rows[kind].append((row[1], row[2], math.inf if row[3] is None else row[3]))

    def digest(self) -> Digest:
        times = _columns(self.rows["round"], 1)[:, 0]
        end = float(times[-1]) if len(times) else 0.0
        jobs = _columns(self.rows["job"], 6)
        running = jobs[:, 5] > 0  # at the end of the plan
        jobs[:, 4] = np.where(running, np.maximum(end, jobs[:, 3]), jobs[:, 4])
        updates = np.array(self.rows["update"], dtype=np.int64).reshape(-1, 3)
        if len(updates) and (updates.min() < 0 or updates[:, 0].max() >= self.num_clients):
            raise ValueError("a merge names a client or a version that does not exist")
        return Digest(
            num_clients=self.num_clients,
            seconds=end,
            rounds=times.tolist(),
            traffic=self.traffic,
            staleness=np.bincount(updates[:, 2]) if len(updates) else np.zeros(1, np.int64),
            merged=np.bincount(updates[:, 0], minlength=self.num_clients),
            jobs=jobs[:, :5],
            uploads=_columns(self.rows["upload"], 3),
            absences=_columns(self.rows["absence"], 3, allow_infinite=True),
            used={(client, index): late for client, index, late in updates.tolist()} if len(jobs) else {},
        )


def _columns(rows: Sequence[Sequence[float]], width: int, *, allow_infinite: bool = False) -> Floats:
    columns = np.array(rows, dtype=np.float64).reshape(-1, width)
    if not (np.isfinite(columns).all() or (allow_infinite and not np.isnan(columns).any())):
        raise ValueError("a time is not a finite number")
    return columns


def participation(merged: Integers, step_times: Floats, max_points: int = 120) -> dict[str, Any]:
    """Return the share of merged updates (1: an equal share) by step time; a point may be a mean over clients."""
    order = np.argsort(step_times, kind="stable")
    clients_per_point = -(-len(order) // max_points)
    mean = merged.mean() or 1.0
    groups = [order[i : i + clients_per_point] for i in range(0, len(order), clients_per_point)]
    return {
        "step": [float(step_times[group].mean()) for group in groups],
        "share": [float(merged[group].mean() / mean) for group in groups],
        "clients_per_point": clients_per_point,
    }


def client_activity(plan: Digest, step_times: Floats | None) -> dict[str, Any]:
    """Return the activity of a few clients, from the fastest to the slowest, for at most ``CHART_JOBS`` jobs."""
    order = np.arange(plan.num_clients) if step_times is None else np.argsort(step_times, kind="stable")
    clients = order[np.linspace(0, len(order) - 1, min(CHART_CLIENTS, len(order))).round().astype(int)]
    row_of = {int(client): row for row, client in enumerate(clients)}
    jobs = plan.jobs[np.isin(plan.jobs[:, 0], clients)]
    jobs = jobs[np.argsort(jobs[:, 3], kind="stable")]
    end = max(plan.seconds, float(jobs[:, 4].max()) if len(jobs) else 0.0)
    until = float(jobs[CHART_JOBS, 3]) if len(jobs) > CHART_JOBS else end
    shown = [row for row in jobs.tolist() if row[3] < until]
    return {
        "clients": [int(client) for client in clients],
        "of": plan.num_clients,
        "by_speed": step_times is not None,
        "until": until,
        "first_view": float(jobs[FIRST_VIEW_JOBS, 3]) if len(jobs) > FIRST_VIEW_JOBS else until,
        "end": end,
        "jobs": {
            **_spans(jobs[:, [0, 3, 4]], row_of, until),
            "version": [int(row[2]) for row in shown],
            "staleness": [plan.used.get((int(row[0]), int(row[1])), UNUSED) for row in shown],
        },
        "uploads": _spans(plan.uploads, row_of, until),
        "absences": _spans(plan.absences, row_of, until),
        "merges": [time for time in plan.rounds if time <= until],
    }


def _spans(columns: Floats, row_of: Mapping[int, int], until: float) -> dict[str, list[float]]:
    """Return the spans (client, start, end) of the charted clients that start before the chart ends."""
    spans = [row for row in columns.tolist() if int(row[0]) in row_of and row[1] < until]
    rows = [row_of[int(client)] for client, _, _ in spans]
    return {"row": rows, "start": [row[1] for row in spans], "end": [min(row[2], until) for row in spans]}
