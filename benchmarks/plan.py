"""What planning costs: time per merged update and peak memory for fleets of a hundred to a million clients.

    python benchmarks/plan.py [--json] [--repeats 3] [--only NAME …]     the table for N = 10² … 10⁶
    python benchmarks/plan.py --events [--json]                          microseconds per event, and 400 rounds

Every cell of the table is a process of its own that plans, checks and sums up one plan record by record, with n = N/10
but 1,000 at most, and at a million clients 1,000 rounds; the peak is that of the whole process. Sizes alternate, and
medians are reported, and times of the table are those of the processor (all of it is one thread), so that the ratios
hold on a noisy machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from defedavg.algorithms import ALGORITHMS, Server, Setup
from defedavg.invariants import checked
from defedavg.lean import choose
from defedavg.plan import Plan, records
from defedavg.profiles import Fleet
from defedavg.stats import Counting
from defedavg.timeline import Timeline

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ALGORITHMS},
    "defedavg-niid thrifty": ("defedavg-niid", {"mode": "thrifty"}),
}
SIZES = (100, 1_000, 10_000, 100_000, 1_000_000)
UPDATES = 100_000  # to merge, below a million clients
BASE = 1_000  # the size that ratios are to

EVENT_SIZES = (100, 1_000, 10_000, 100_000)
EVENTS = 300_000


def server(case: str, num_clients: int, updates_per_round: int) -> Server:
    """A new machine of a case."""
    name, own = CASES[case]
    kind = ALGORITHMS[name]
    return kind(Setup(num_clients, updates_per_round, 50), kind.settings_type(**own))


def cell(case: str, num_clients: int) -> dict[str, float]:
    """Plan, check and sum up in this process."""
    n = min(1_000, num_clients // 10)
    rounds = (UPDATES if num_clients < 1_000_000 else 1_000_000) // n
    began = time.process_time()
    fleet = Fleet(num_clients)
    timeline = choose(server(case, num_clients, n), fleet, "auto")
    counting = Counting(timeline.header, fleet)
    for record in checked(timeline.header, records(timeline, rounds)):
        counting.add(record)
    merged = counting.stats().jobs_merged
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"merged": merged, "seconds": seconds, "microseconds": seconds / merged * 1e6, "peak_bytes": peak}


def apart(case: str, num_clients: int) -> dict[str, float]:
    """The same in a process of its own, so that its peak is that of this plan."""
    words = [sys.executable, __file__, "--cell", case, str(num_clients)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    print(f"{case}, N = {num_clients:,}: {found['microseconds']:.1f} µs", file=sys.stderr, flush=True)
    return found


def table(cases: list[str], repeats: int) -> list[dict[str, Any]]:
    """One row per case and size."""
    rows = []
    for case in cases:
        found: dict[int, list[dict[str, float]]] = {size: [] for size in SIZES}
        for _ in range(repeats):
            for size in SIZES:
                found[size].append(apart(case, size))
        middle = {size: statistics.median(run["microseconds"] for run in runs) for size, runs in found.items()}
        rows += [
            {
                "case": case,
                "num_clients": size,
                "merged": runs[0]["merged"],
                "microseconds_per_merged_update": middle[size],
                "to_base": middle[size] / middle[BASE],
                "peak_mib": max(run["peak_bytes"] for run in runs) / 2**20,
            }
            for size, runs in found.items()
        ]
    return rows


def print_table(rows: list[dict[str, Any]], repeats: int) -> None:
    """µs per merged update and MiB at the peak, a line per case."""
    print(
        f"Python {platform.python_version()}, {platform.machine()}, median of {repeats}: "
        "µs of processor time per merged update, MiB at the peak"
    )
    print(f"{'algorithm':<22}" + "".join(f"{f'N={size:,}':>18}" for size in SIZES) + "  10⁶ to 10³")
    for case in dict.fromkeys(row["case"] for row in rows):
        own = [row for row in rows if row["case"] == case]
        cells = "".join(f"{row['microseconds_per_merged_update']:>10.1f}{row['peak_mib']:>8.0f}" for row in own)
        print(f"{case:<22}{cells}{own[-1]['to_base']:>12.2f}")


def cost(name: str, num_clients: int) -> float:
    """Microseconds per event, once every client has been seen."""
    timeline = Timeline(server(name, num_clients, 10), Fleet(num_clients))
    stream = iter(timeline)
    while timeline.handled < 4 * num_clients:  # every client has had its first job
        next(stream)
    first, began = timeline.handled, time.perf_counter()
    while timeline.handled - first < EVENTS:
        next(stream)
    return (time.perf_counter() - began) / (timeline.handled - first) * 1e6


def whole(name: str) -> float:
    """Seconds to plan 400 rounds at N = 100, n = 10."""
    began = time.perf_counter()
    Plan.collect(Timeline(server(name, 100, 10), Fleet(100)), 400)
    return time.perf_counter() - began


def events(repeats: int, show: Callable[[list[dict[str, Any]]], None]) -> None:
    """Measure the plain clock by event."""
    rows = []
    for name in ALGORITHMS:
        found: dict[int, list[float]] = {size: [] for size in EVENT_SIZES}
        for _ in range(repeats):
            for size in EVENT_SIZES:
                found[size].append(cost(name, size))
        micro = {size: statistics.median(values) for size, values in found.items()}
        seconds = statistics.median(whole(name) for _ in range(repeats))
        rows.append({"algorithm": name, "seconds_400_rounds": seconds, "microseconds_per_event": micro})
    show(rows)


def print_events(rows: list[dict[str, Any]]) -> None:
    """A line per algorithm."""
    print(f"Python {platform.python_version()}, {platform.machine()}; µs per event by N; ratio of last to first")
    heads = "".join(f"{f'N={size:,}':>12}" for size in EVENT_SIZES)
    print(f"{'algorithm':<15}{'400 rounds':>12}{heads}{'ratio':>8}")
    for row in rows:
        micro = list(row["microseconds_per_event"].values())
        cells = "".join(f"{value:>12.2f}" for value in micro)
        print(f"{row['algorithm']:<15}{row['seconds_400_rounds']:>10.3f} s{cells}{micro[-1] / micro[0]:>8.2f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--repeats", type=int, default=3, help="turns; medians are reported")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), help="these cases alone")
    parser.add_argument("--events", action="store_true", help="microseconds per event of the plain clock instead")
    parser.add_argument("--cell", nargs=2, metavar=("CASE", "N"), help="one cell, in this process")
    words = parser.parse_args()
    if words.cell:
        print(json.dumps(cell(words.cell[0], int(words.cell[1]))))
        return

    def as_json(rows: list[dict[str, Any]]) -> None:
        print(json.dumps(rows, indent=1))

    if words.events:
        events(words.repeats, as_json if words.json else print_events)
        return
    rows = table(words.only, words.repeats)
    as_json(rows) if words.json else print_table(rows, words.repeats)


if __name__ == "__main__":
    main()
