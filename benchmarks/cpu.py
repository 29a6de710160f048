"""Models on the CPU, side by side in one run: the plain loop, the batched executor, and the same in bf16.

    python benchmarks/cpu.py [--models cnn28,cnn32,resnet] [--turns 5] [--updates 60] [--reference-updates 10]

N = 100, n = 10, K = 50, batches of 10, random images: no data set is needed. The plain loop is the reference executor
with one thread and with all of them, whichever is faster. All alternate; the table shows medians of updates per second
of wall-clock time and, for machines with other load, of processor seconds per update, with their ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch

from defedavg.config.build import make_executor, make_simulator
from defedavg.experiments.bench import BatchedBench, BenchLoad
from defedavg.experiments.compute import ComputeConfig
from defedavg.planning.records import Round
from defedavg.tasks import Task
from defedavg.training.precision import cpu_has_bf16
from defedavg.training.threads import threads

MODELS = {
    "cnn28": ("cnn", (1, 28, 28)),
    "cnn32": ("cnn", (3, 32, 32)),
    "resnet": ("resnet", (3, 32, 32)),
    "mlp": ("mlp", (1, 28, 28)),
    "transformer": ("transformer", (1, 28, 28)),
}
Turn = Callable[[], tuple[float, float]]
"""One measurement: updates per wall-clock second, and processor seconds per update."""


def timed(work: Callable[[], int]) -> tuple[float, float]:
    """Return the rates of ``work``, which returns the number of updates that it has trained."""
    wall, cpu = time.perf_counter(), time.process_time()
    updates = work()
    return updates / (time.perf_counter() - wall), (time.process_time() - cpu) / updates


def plain_loop(load: BenchLoad, task: Task, updates: int, cores: int) -> Turn:
    """Return a turn of the reference executor with that many threads."""

    def work() -> int:
        executor = make_executor(load.settings, 0, task)
        for record in make_simulator(load.settings, 0):
            if isinstance(record, Round):
                executor.apply(record)
                if executor.updates_trained >= updates:
                    break
        return executor.updates_trained

    def turn() -> tuple[float, float]:
        with threads(cores):
            return timed(work)

    return turn


def batched(load: BenchLoad, task: Task, precision: str) -> Turn:
    """Return a turn of the batched executor."""
    bench = BatchedBench(load, load.settings, task, ComputeConfig(precision=precision))
    rounds = max(1, load.updates // (load.settings.training.updates_per_round * load.runs))
    updates = rounds * load.settings.training.updates_per_round * load.runs

    def work() -> int:
        bench(updates)
        return updates

    return lambda: timed(work)


def contestants(model: str, given: argparse.Namespace) -> Iterator[tuple[str, Turn]]:
    """Yield the names and the turns of one model."""
    name, image = MODELS[model]
    load = BenchLoad(model=name, image=image, runs=given.runs, updates=given.updates)
    task, cores = load.task("cpu"), torch.get_num_threads()
    for count in sorted({1, cores}):
        yield f"plain loop, {count} threads", plain_loop(load, task, given.reference_updates, count)
    for precision in ("float32", *(["bf16"] if cpu_has_bf16() else [])):
        yield f"batched, {precision}", batched(load, task, precision)


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="cnn28,cnn32,resnet", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--runs", type=int, default=3, help="seeds that are computed together")
    parser.add_argument("--updates", type=int, default=60, help="of all runs together, in a turn")
    parser.add_argument("--reference-updates", type=int, default=10)
    given = parser.parse_args()
    print(f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads, medians of {given.turns} turns")
    print("| model | executor | updates/s | ratio | CPU s per update | ratio |\n|---|---|---|---|---|---|")
    for model in given.models.split(","):
        turns = dict(contestants(model, given))
        for turn in turns.values():
            turn()  # warms up
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in turns}
        for number in range(given.turns):
            for name, turn in turns.items():
                found[name].append(turn())
            print(f"{model}: turn {number + 1} of {given.turns}", file=sys.stderr, flush=True)
        speeds, costs = ({n: statistics.median(r[i] for r in rates) for n, rates in found.items()} for i in (0, 1))
        plain = [name for name in turns if name.startswith("plain")]
        best, cheapest = max(speeds[name] for name in plain), min(costs[name] for name in plain)
        for name in turns:
            ratios = speeds[name] / best, cheapest / costs[name]
            print(f"| {model} | {name} | {speeds[name]:.2f} | {ratios[0]:.2f} | {costs[name]:.3f} | {ratios[1]:.2f} |")


if __name__ == "__main__":
    main()
