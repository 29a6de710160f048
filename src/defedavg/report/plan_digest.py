"""What a page shows of a plan: traffic by round, staleness, who took part, and bars for a chart of clients over time.

A page may show a hundred plans, so records are taken as columns of numbers and not one by one as ``Plan.load`` does;
anything that is not of the right form still raises ``UserError``.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError, first_line
from ..planning.plan_io import read_header

Floats = NDArray[np.float64]

MOST_CLIENTS = 10_000_000
MOST_ROWS = 24  # clients in a chart
MOST_BARS = 1200  # jobs in a chart
FIRST_BARS = 300  # jobs in its first view
UNUSED = -1  # staleness of what no merge uses


@dataclass(frozen=True, slots=True)
class Digest:
    """The figures of one plan."""

    num_clients: int
    seconds: float  # of the last merge
    rounds: list[float]  # when each merge happened
    traffic: list[int]  # models sent, up and down, by the end of each round; [0] is before the first; empty: not known
    staleness: NDArray[np.int64]  # how many merged updates had each
    merged: NDArray[np.int64]  # updates of each client
    jobs: Floats  # client, index, version, start, end
    uploads: Floats  # client, start, end
    absences: Floats  # client, start, end
    used: dict[tuple[int, int], int] = field(repr=False)  # (client, index) -> staleness


def digest(path: Path, *, bars: bool) -> Digest:
    """Read a plan file for its figures; without ``bars``, jobs and uploads are only counted, which is faster."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            head = read_header(json.loads(next(lines, "null")))
            found = _digest(head.num_clients, _rows(lines, bars and not head.sparse))
        # A lean plan leaves out jobs and messages that no merge needs: what was sent cannot be counted from it.
        return replace(found, traffic=[]) if head.sparse else found
    except (OSError, EOFError, zlib.error, ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise UserError(f"the plan {path.name} cannot be read: {first_line(error)}") from None


def _rows(lines: Iterable[str], bars: bool) -> Iterator[Any]:
    """The records; those that only count come without their numbers where no bars are wanted."""
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


def _digest(clients: int, rows: Iterable[Any]) -> Digest:
    if clients > MOST_CLIENTS:
        raise ValueError(f"{clients} clients are too many to show")
    jobs, uploads, absences, merges, updates = [], [], [], [], []
    messages, traffic = 0, [0]
    for row in rows:
        kind = row[0]
        if kind == "job":
            jobs.append((row[1], row[2], row[3], row[5], row[6], row[7] == "running"))
        elif kind == "upload":
            messages += 1
            if len(row) > 1:
                uploads.append((row[1], row[3], row[4]))
        elif kind == "sent":
            messages += clients if row[2] is None else 1
        elif kind == "round":
            merges.append(row[1])
            traffic.append(messages)
            updates += [(u[0], u[1], row[2] - 1 - u[2]) for u in row[4]]
        elif kind == "absence":
            absences.append((row[1], row[2], float("inf") if row[3] is None else row[3]))
    times = _columns([(time,) for time in merges], 1)[:, 0]
    end = float(times[-1]) if len(times) else 0.0
    done = _columns(jobs, 6)
    done[:, 4] = np.where(done[:, 5] > 0, np.maximum(end, done[:, 3]), done[:, 4])  # what runs on, runs to the end
    taken = np.array(updates, dtype=np.int64).reshape(-1, 3)
    if len(taken) and (taken.min() < 0 or taken[:, 0].max() >= clients):
        raise ValueError("a merge names a client that is not there, or a version that is not made")
    gone = _columns(absences, 3, endless=True)
    return Digest(
        num_clients=clients,
        seconds=end,
        rounds=times.tolist(),
        traffic=traffic,
        staleness=np.bincount(taken[:, 2]) if len(taken) else np.zeros(1, np.int64),
        merged=np.bincount(taken[:, 0], minlength=clients),
        jobs=done[:, :5],
        uploads=_columns(uploads, 3),
        absences=gone,
        used={(client, index): late for client, index, late in taken.tolist()} if jobs else {},
    )


def _columns(rows: Sequence[Sequence[float]], width: int, *, endless: bool = False) -> Floats:
    found = np.array(rows, dtype=np.float64).reshape(-1, width)
    if not (np.isfinite(found).all() or (endless and not np.isnan(found).any())):
        raise ValueError("a time is not a finite number")
    return found


def participation(merged: NDArray[np.int64], speeds: Floats, most: int = 120) -> dict[str, Any]:
    """Against the time of a local step, how often a client's updates were merged; 1 is an equal share.

    Where there are more clients than ``most``, neighbours in speed are taken together.
    """
    order = np.argsort(speeds, kind="stable")
    each = -(-len(order) // most)
    mean = merged.mean() or 1.0
    groups = [order[i : i + each] for i in range(0, len(order), each)]
    return {
        "step": [float(speeds[group].mean()) for group in groups],
        "share": [float(merged[group].mean() / mean) for group in groups],
        "each": each,
    }


def gantt(found: Digest, speeds: Floats | None) -> dict[str, Any]:
    """Bars of a few clients, spread evenly from the fastest to the slowest, up to a time at which they are enough."""
    order = np.arange(found.num_clients) if speeds is None else np.argsort(speeds, kind="stable")
    count = min(MOST_ROWS, len(order))
    chosen = order[np.linspace(0, len(order) - 1, count).round().astype(int)]
    place = {int(client): row for row, client in enumerate(chosen)}
    mine = found.jobs[np.isin(found.jobs[:, 0], chosen)]
    mine = mine[np.argsort(mine[:, 3], kind="stable")]
    horizon = max(found.seconds, float(mine[:, 4].max()) if len(mine) else 0.0)
    until = float(mine[MOST_BARS, 3]) if len(mine) > MOST_BARS else horizon
    first = float(mine[FIRST_BARS, 3]) if len(mine) > FIRST_BARS else until

    def spans(rows: Floats) -> dict[str, list[float]]:
        kept = [row for row in rows.tolist() if int(row[0]) in place and row[1] < until]
        return {
            "row": [place[int(row[0])] for row in kept],
            "start": [row[1] for row in kept],
            "end": [min(row[2], until) for row in kept],
        }

    bars = [row for row in mine.tolist() if row[3] < until]
    return {
        "clients": [int(client) for client in chosen],
        "of": found.num_clients,
        "speeds": None if speeds is None else [float(speeds[client]) for client in chosen],
        "until": until,
        "first": first,
        "whole": horizon,
        "jobs": {
            **spans(mine[:, [0, 3, 4]]),
            "version": [int(row[2]) for row in bars],
            "late": [found.used.get((int(row[0]), int(row[1])), UNUSED) for row in bars],
        },
        "uploads": spans(found.uploads),
        "away": spans(found.absences),
        "merges": [time for time in found.rounds if time <= until],
    }
