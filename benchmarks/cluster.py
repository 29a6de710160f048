"""What a second worker brings: a sweep of 8 runs over one and over two workers of one core each, alternating.

    python benchmarks/cluster.py [--rounds 2] [--repeats 3]

The nodes are processes on this machine. Time counts from when all workers are up, before they are given their first
runs, to the end of the last; medians are reported, with every single time. A machine of two cores should have nothing
else to do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

from defedavg.config import study as config
from defedavg.experiments.compute import ComputeConfig
from defedavg.experiments.run_events import RunSpec
from defedavg.experiments.simulation import Simulation
from defedavg.experiments.sweep import Sweep


class Cluster:
    """So many nodes of one core, and a head without any."""

    def __init__(self, workers: int) -> None:
        from ray.cluster_utils import Cluster as Nodes

        self._nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        for _ in range(workers):
            self._nodes.add_node(num_cpus=1, object_store_memory=200 << 20)
        self.address = str(self._nodes.address)

    def close(self) -> None:
        """Stop the nodes."""
        self._nodes.shutdown()  # type: ignore[no-untyped-call]


def sweep(address: str, items: list[RunSpec]) -> tuple[float, int]:
    """Seconds and updates of a sweep."""
    import ray

    class Timed(Sweep):
        """Knows when the first run was handed out: all workers are up then, and none has anything to do."""

        began = 0.0

        def _begin(self, item: RunSpec) -> Simulation:
            self.began = self.began or time.perf_counter()
            return super()._begin(item)

    running, updates = Timed(ComputeConfig("ray", ray_address=address)), 0
    for event in running.events(items):
        if not hasattr(event, "evaluation"):
            updates += event.run.executor.updates_trained
    seconds = time.perf_counter() - running.began
    ray.shutdown()
    return seconds, updates


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    tables: dict[str, Any] = {
        "task": {"model": "cnn"},
        "stop": {"max_rounds": given.rounds, "eval_every_rounds": max(1, given.rounds // 2)},
    }
    (point,) = config.study(tables).points()
    items = [RunSpec("run", point.settings, seed) for seed in range(8)]
    times: dict[int, list[float]] = {1: [], 2: []}
    for turn in range(given.repeats):
        for workers, own in times.items():
            cluster = Cluster(workers)
            seconds, updates = sweep(cluster.address, items)
            cluster.close()
            own.append(seconds)
            load = os.getloadavg()[0]
            print(
                f"turn {turn + 1}, {workers} worker(s): {seconds:.2f} s, {updates} updates, load {load:.1f}", flush=True
            )
    one, two = (statistics.median(times[workers]) for workers in (1, 2))
    print(f"medians: {one:.2f} s and {two:.2f} s; two workers have {one / two:.2f} times the throughput of one")


if __name__ == "__main__":
    main()
