"""What planning costs: microseconds per event at several N, and seconds for 400 rounds at N = 100.

    python benchmarks/plan.py [--json]

The work per N is the same (EVENTS events, after a warm-up of one job per client), the sizes alternate, and medians
are reported, so that the ratios hold on a noisy machine.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time

from defedavg.algorithms import ALGORITHMS, Setup
from defedavg.plan import Plan
from defedavg.profiles import Fleet
from defedavg.timeline import Timeline

SIZES = (100, 1_000, 10_000, 100_000)
EVENTS = 300_000
REPEATS = 3


def cost(name: str, num_clients: int) -> float:
    """Microseconds per event, once every client has been seen."""
    timeline = Timeline(ALGORITHMS[name](Setup(num_clients, 10, 50)), Fleet(num_clients))
    stream = iter(timeline)
    while timeline.handled < 4 * num_clients:  # every client has had its first job
        next(stream)
    first, began = timeline.handled, time.perf_counter()
    while timeline.handled - first < EVENTS:
        next(stream)
    return (time.perf_counter() - began) / (timeline.handled - first) * 1e6


def rounds(name: str) -> float:
    """Seconds to plan 400 rounds at N = 100, n = 10."""
    began = time.perf_counter()
    Plan.collect(Timeline(ALGORITHMS[name](Setup(100, 10, 50)), Fleet(100)), 400)
    return time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    table: list[tuple[str, float, dict[int, float]]] = []
    for name in ALGORITHMS:
        found: dict[int, list[float]] = {size: [] for size in SIZES}
        for _ in range(REPEATS):
            for size in SIZES:
                found[size].append(cost(name, size))
        micro = {size: statistics.median(values) for size, values in found.items()}
        seconds = statistics.median(rounds(name) for _ in range(REPEATS))
        table.append((name, seconds, micro))
    if "--json" in sys.argv[1:]:
        keys = ("algorithm", "seconds_400_rounds", "microseconds_per_event")
        print(json.dumps([dict(zip(keys, row, strict=True)) for row in table], indent=1))
        return
    print(f"Python {platform.python_version()}, {platform.machine()}; µs per event by N; ratio of last to first")
    print(f"{'algorithm':<15}{'400 rounds':>12}" + "".join(f"{f'N={size:,}':>12}" for size in SIZES) + f"{'ratio':>8}")
    for name, seconds, micro in table:
        cells = "".join(f"{micro[size]:>12.2f}" for size in SIZES)
        print(f"{name:<15}{seconds:>10.3f} s{cells}{micro[SIZES[-1]] / micro[SIZES[0]]:>8.2f}")


if __name__ == "__main__":
    main()
