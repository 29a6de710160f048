"""The cost of planning: time per merged update and peak memory for fleets of a hundred to a million clients.

    python benchmarks/plan.py [--json] [--repeats 3] [--only NAME …]     the table for N = 10² … 10⁶
    python benchmarks/plan.py --events [--json]                          microseconds per event, and 400 rounds

Every cell of the table is a process that plans, checks and summarises one plan record by record, with n = N/10 but at
most 1,000, and 1,000 rounds at a million clients; the peak is that of the whole process. Sizes alternate, medians are
reported, and the table shows processor time of one thread, so that ratios hold on a noisy machine. Each cell is
appended to build/plan-cells.jsonl (--cells) when it is measured: an interrupted benchmark resumes there, and Ctrl-C
prints the table of the cells so far.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from defedavg.algorithms import ALGORITHMS, ServerMachine, Setup
from defedavg.planning.devices import Fleet
from defedavg.planning.plan import Plan, records, without_gc
from defedavg.planning.plan_checks import PlanError, checked
from defedavg.planning.plan_stats import PlanStatsCollector
from defedavg.planning.simulator import Simulator
from defedavg.planning.sparse_simulator import make_simulator_for

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ALGORITHMS},
    "defedavg-niid thrifty": ("defedavg-niid", {"mode": "thrifty"}),
}
SIZES = (100, 1_000, 10_000, 100_000, 1_000_000)
UPDATES = {100_000: 100_000, 1_000_000: 1_000_000}  # to merge
FEW = 50_000  # at smaller sizes
BASE = 1_000  # the size to which ratios refer

EVENT_SIZES = (100, 1_000, 10_000, 100_000)
EVENTS = 300_000


def server(case: str, num_clients: int, updates_per_round: int) -> ServerMachine:
    """Return a new server machine of a case."""
    name, settings = CASES[case]
    kind = ALGORITHMS[name]
    return kind(Setup(num_clients, updates_per_round, 50), kind.settings_type(**settings))


def cell(case: str, num_clients: int) -> dict[str, Any]:
    """Plan, check and summarise in this process."""
    n = min(1_000, num_clients // 10)
    rounds = UPDATES.get(num_clients, FEW) // n
    load = os.getloadavg()[0]
    start = time.process_time()
    fleet = Fleet(num_clients)
    simulator = make_simulator_for(server(case, num_clients, n), fleet, "auto")
    collector = PlanStatsCollector(simulator.header, fleet)
    broken = None
    try:
        with without_gc():  # as `defedavg plan` does
            for record in checked(simulator.header, records(simulator, rounds)):
                collector.add(record)
    except PlanError as error:
        broken = str(error)
    found = collector.stats()
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "case": case,
        "num_clients": num_clients,
        "rounds": found.rounds,
        "merged": found.jobs_merged,
        "seconds": seconds,
        "microseconds": seconds / max(1, found.jobs_merged) * 1e6,
        "peak_bytes": peak,
        "load": load,
        "checked": broken is None and found.rounds == rounds,
        "broken": broken,
    }


def apart(case: str, num_clients: int) -> dict[str, Any]:
    """Measure a cell in a new process, so that its peak is that of this plan."""
    command = [sys.executable, __file__, "--cell", case, str(num_clients)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(cases: list[str], repeats: int, file_path: Path) -> list[dict[str, Any]]:
    """Measure every cell ``repeats`` times, except those that the file already has; append each to the file."""
    file_path.parent.mkdir(parents=True, exist_ok=True)
    known = [json.loads(line) for line in file_path.read_text().splitlines()] if file_path.exists() else []
    cells = [found for found in known if found["case"] in cases]
    if cells:
        print(f"{len(cells)} cells are already in {file_path}; remove it to start over", file=sys.stderr)
    wanted = [(case, size) for _ in range(repeats) for case in cases for size in SIZES]
    for found in cells:
        with suppress(ValueError):
            wanted.remove((found["case"], found["num_clients"]))
    try:
        for number, (case, size) in enumerate(wanted, start=1):
            found = apart(case, size)
            cells.append(found)
            with file_path.open("a") as file:
                file.write(json.dumps(found) + "\n")
            result = f"{found['microseconds']:.1f} µs, load {found['load']:.1f}"
            print(f"{number} of {len(wanted)}: {case}, N = {size:,}: {result}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    return cells


def table(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per case and size."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for found in cells:
        groups.setdefault((found["case"], found["num_clients"]), []).append(found)
    middle = {name: statistics.median(run["microseconds"] for run in runs) for name, runs in groups.items()}
    return [
        {
            "case": case,
            "num_clients": size,
            "repeats": len(runs),
            "merged": runs[0]["merged"],
            "microseconds_per_merged_update": middle[case, size],
            "to_base": middle[case, size] / middle[case, BASE] if (case, BASE) in middle else None,
            "peak_mib": max(run["peak_bytes"] for run in runs) / 2**20,
            "load": [min(run["load"] for run in runs), max(run["load"] for run in runs)],
            "checked": all(run["checked"] for run in runs),
            "broken": next((run["broken"] for run in runs if run["broken"]), None),
        }
        for (case, size), runs in sorted(groups.items(), key=lambda item: (list(CASES).index(item[0][0]), item[0][1]))
    ]


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print Markdown: µs per merged update by size, their ratio, the peak, and whether every plan passed its checks."""
    repeats = sorted({row["repeats"] for row in rows})
    loads = [load for row in rows for load in row["load"]]
    print(
        f"Python {platform.python_version()}, NumPy {np.__version__}, {platform.machine()}; "
        f"median of {' or '.join(map(str, repeats))}, load {min(loads):.1f} to {max(loads):.1f}; "
        "µs of processor time per merged update, planned, checked and summarised\n"
    )
    powers = " | ".join(f"N = 10{'⁰¹²³⁴⁵⁶'[round(math.log10(size))]}" for size in SIZES)
    print(f"| | {powers} | 10⁶ to 10³ | peak at 10⁶ | plans checked |")
    print("|---" * (len(SIZES) + 4) + "|")
    for case in dict.fromkeys(row["case"] for row in rows):
        by_size = {row["num_clients"]: row for row in rows if row["case"] == case}
        cells = [f"{by_size[size]['microseconds_per_merged_update']:.1f}" if size in by_size else "–" for size in SIZES]
        last = by_size.get(SIZES[-1])
        ratio = f"{last['to_base']:.2f}" if last and last["to_base"] else "–"
        peak = f"{last['peak_mib'] / 1024:.2f} GiB" if last else "–"
        count = sum(row["repeats"] for row in by_size.values())
        broken = next((row["broken"] or "too few rounds" for row in by_size.values() if not row["checked"]), None)
        print(f"| {case} | {' | '.join(cells)} | {ratio} | {peak} | {f'NO: {broken}' if broken else f'all {count}'} |")


def cost(name: str, num_clients: int) -> float:
    """Return microseconds per event, after every client's first job."""
    simulator = Simulator(server(name, num_clients, 10), Fleet(num_clients))
    stream = iter(simulator)
    while simulator.handled < 4 * num_clients:  # every client has had its first job
        next(stream)
    first, start = simulator.handled, time.perf_counter()
    while simulator.handled - first < EVENTS:
        next(stream)
    return (time.perf_counter() - start) / (simulator.handled - first) * 1e6


def whole(name: str) -> float:
    """Return the seconds to plan 400 rounds at N = 100, n = 10."""
    start = time.perf_counter()
    Plan.collect(Simulator(server(name, 100, 10), Fleet(100)), 400)
    return time.perf_counter() - start


def events(repeats: int, show: Callable[[list[dict[str, Any]]], None]) -> None:
    """Measure ``Simulator`` per event."""
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
    """Print a line per algorithm."""
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
    parser.add_argument("--repeats", type=int, default=3, help="repeats of each cell; medians are reported")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), help="only these cases")
    parser.add_argument("--events", action="store_true", help="microseconds per event of the simulator instead")
    parser.add_argument("--cells", type=Path, default=Path("build/plan-cells.jsonl"), help="file of measured cells")
    parser.add_argument("--cell", nargs=2, metavar=("CASE", "N"), help="measure one cell in this process")
    options = parser.parse_args()
    if options.cell:
        print(json.dumps(cell(options.cell[0], int(options.cell[1]))))
        return

    def as_json(rows: list[dict[str, Any]]) -> None:
        print(json.dumps(rows, indent=1))

    if options.events:
        events(options.repeats, as_json if options.json else print_events)
        return
    rows = table(measure(options.only, options.repeats, options.cells))
    if rows:
        as_json(rows) if options.json else print_table(rows)
    sys.exit(0 if all(row["checked"] for row in rows) else 1)


if __name__ == "__main__":
    main()
