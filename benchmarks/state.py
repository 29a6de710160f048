"""Updates per second of FedBuff and of every algorithm with state vectors, in alternating turns.

    python benchmarks/state.py [--device cpu|cuda] [--runs 3] [--updates 3000] [--turns 5] …
    python benchmarks/state.py --device cuda --clients 10000 --memory 20G --runs 1 --updates 30000 --turns 1

The images are random, so no data set is needed. A turn computes real runs of several seeds, evaluation included. The
medians, their ratios to FedBuff, and the state, versions and memory of every algorithm are printed as JSON. FedAvg is
measured, too: a synchronous algorithm fills a batch only with many runs, whether it has state or not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from defedavg.algorithms import ALGORITHMS
from defedavg.config import study as config
from defedavg.config.build import make_executor, make_setup, make_simulator, state_need
from defedavg.config.settings import Settings
from defedavg.experiments.compute import ComputeConfig
from defedavg.tasks import Data, Task, build, cross_entropy, iid
from defedavg.training import BatchedRun, RunProgress, StoppingRule, Trainer, run_batched
from defedavg.training.precision import computing_in
from defedavg.training.state_memory import StateNeed

BASE, SYNCHRONOUS, CLASSES, IMAGE = "fedbuff", "fedavg", 10, (1, 28, 28)


def settings_of(name: str, given: argparse.Namespace, training: Mapping[str, Any] | None = None) -> Settings:
    """Return the settings of the paper (n = 10, K = 50, batch 10) for one algorithm; ``training`` changes some."""
    tables = {
        "algorithms": [name],
        "clients": {"num_clients": given.clients, "plan_detail": "all"},
        "training": {"local_steps": given.local_steps, **(training or {})},
        "stop": {"max_rounds": 10**6},
    }
    return config.study(tables).points()[0].settings


def with_state(given: argparse.Namespace) -> list[str]:
    """Return the algorithms that declare state vectors."""
    found = []
    for name, kind in ALGORITHMS.items():
        settings = settings_of(name, given)
        if kind.state_vectors(make_setup(settings, 0), settings.algorithm_settings):
            found.append(name)
    return found


def random_task(clients: int, device: str) -> Task:
    """Return random images for the clients, ten or more for each."""
    source = torch.Generator().manual_seed(0)
    sizes = max(6_000, 10 * clients), 10_000 if device == "cuda" else 200
    parts = [
        Data(torch.randn(count, *IMAGE, generator=source), torch.randint(0, CLASSES, (count,), generator=source)).to(
            device
        )
        for count in sizes
    ]
    split = iid(parts[0].targets.cpu().numpy(), clients, 0)
    return Task("random", partial(build, "cnn", IMAGE, CLASSES), cross_entropy, parts[0], parts[1], split, CLASSES)


class Contestant:
    """One algorithm with a trainer of its own, which keeps its captured graphs from turn to turn."""

    def __init__(
        self, name: str, given: argparse.Namespace, task: Task, compute: ComputeConfig,
        training: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.settings, self.given, self.task = settings_of(name, given, training), given, task
        executor = make_executor(self.settings, 0, task)
        self.need = executor.state_need(self.rounds(given.updates))
        self.trainer = Trainer(
            task,
            executor.module,
            batch_size=self.settings.training.batch_size,
            max_batch_jobs=compute.max_batch_jobs,
            memory=compute.memory,
            precision=compute.precision,
            local_training=executor.local_training,
            state=StateNeed(self.need, given.runs * self.need),
        )
        self.declared = state_need(self.settings, 0)
        self.speeds: list[float] = []
        self.peak_bytes = self.host_vectors = self.host_versions = self.assigned = 0
        self.statuses: set[str] = set()

    def rounds(self, updates: int) -> int:
        """Return the rounds in which so many updates are merged."""
        per_merge = ALGORITHMS[self.settings.algorithm].updates_per_merge(self.settings.training.updates_per_round)
        return max(1, updates // (per_merge * int(self.given.runs)))

    def turn(self, updates: int) -> float:
        """Return the updates per second of one turn."""
        rounds = self.rounds(updates)
        rule = StoppingRule(max_rounds=rounds, every_rounds=max(1, rounds // self.given.evaluations))
        runs = [
            BatchedRun(
                make_executor(self.settings, seed, self.task), iter(make_simulator(self.settings, seed)), rule,
                RunProgress(),
            )
            for seed in range(self.given.runs)
        ]  # fmt: skip
        cuda = self.task.train.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        for run, _ in run_batched(runs, self.trainer):
            vectors = run.reference.state.assigned() if run.running else {}
            self.assigned = max(self.assigned, len(vectors))
            in_host_memory = sum(not value.is_cuda for value in vectors.values()) if cuda else 0
            self.host_vectors = max(self.host_vectors, in_host_memory)
            versions = run.reference.versions
            self.host_versions = max(self.host_versions, len(versions) - versions.on_device)
        if cuda:
            torch.cuda.synchronize()
            self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated())
        self.statuses |= {str(run.progress.status) for run in runs}  # a run that diverges leaves batches unfilled
        return sum(run.progress.evaluations[-1].updates for run in runs) / (time.perf_counter() - began)

    def result(self, base: float) -> dict[str, Any]:
        """Return the figures of this algorithm."""
        median = statistics.median(self.speeds)
        return {
            "updates_per_s": median,
            "ratio": median / base,
            "turns": self.speeds,
            "declared_vectors": self.declared,
            "vectors_of_one_run": self.assigned,
            "vectors_in_host_memory": self.host_vectors,
            "versions_in_host_memory": self.host_versions,
            "statuses": sorted(self.statuses),
            "vector_bytes": self.trainer.state_memory.vector_bytes,
            "peak_device_bytes": self.peak_bytes,
            "max_batch_jobs": self.trainer.max_batch_jobs,
        }


def main() -> None:
    """Run the benchmark and print its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--local-steps", type=int, default=50)
    parser.add_argument("--runs", type=int, default=3, help="seeds that are computed together")
    parser.add_argument("--updates", type=int, default=3_000, help="of all runs together, in a turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--evaluations", type=int, default=5, help="of each run in a turn")
    parser.add_argument("--algorithms", help="names with commas; the default is every algorithm with state")
    parser.add_argument("--max-batch-jobs", type=int)
    parser.add_argument("--memory")
    parser.add_argument("--precision", default="auto")
    given = parser.parse_args()
    compute = ComputeConfig.choose("batched", given.device, given.max_batch_jobs, given.memory, given.precision)
    task = random_task(given.clients, compute.device)
    names = given.algorithms.split(",") if given.algorithms else with_state(given)
    say = partial(print, file=sys.stderr, flush=True)
    with computing_in(compute.precision):
        contestants = {
            name: Contestant(name, given, task, compute) for name in dict.fromkeys([BASE, SYNCHRONOUS, *names])
        }
        for contestant in contestants.values():
            contestant.turn(min(given.updates, 300))  # compiles kernels, captures graphs, warms up
        for number in range(given.turns):
            for name, contestant in contestants.items():
                contestant.speeds.append(contestant.turn(given.updates))
                say(f"turn {number + 1} of {given.turns}: {name} {contestant.speeds[-1]:,.4g} updates/s")
    base = statistics.median(contestants[BASE].speeds)
    found = {name: contestant.result(base) for name, contestant in contestants.items()}
    for name, figures in found.items():
        say(f"{name:15} {figures['updates_per_s']:>9,.5g} updates/s  {figures['ratio']:.3f} of {BASE}")
    device = torch.cuda.get_device_name() if compute.device == "cuda" else "cpu"
    about = {"device": device, "torch": torch.__version__, "precision": compute.precision, "memory": given.memory}
    print(json.dumps({**about, "clients": given.clients, "runs": given.runs, "algorithms": found}, indent=1))


if __name__ == "__main__":
    main()
