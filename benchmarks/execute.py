"""Updates per second of the reference and the batched executor, side by side in one run.

    python benchmarks/execute.py [--device cpu|cuda] [--model cnn|mlp] [--runs 3] [--width 64] [--updates 300] [--json]

A real run of DeFedAvg-IID (N = 100, n = 10, K = 50, batch 10) with several seeds together, on random images of 28×28:
the data do not matter for speed, so none need be there. The two alternate, and medians are reported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np
import torch

from defedavg import config
from defedavg.config import Settings
from defedavg.execute import Goal, Lane, Progress, Trainer, drive_batched
from defedavg.plan import Round
from defedavg.simulation import make_executor, make_timeline
from defedavg.tasks import Task, build, cross_entropy, iid
from defedavg.tasks.task import Data


def random_task(model: str, device: str, seed: int) -> Task:
    """4,000 random images, dealt to 100 clients."""
    source = torch.Generator().manual_seed(seed)
    x, y = torch.randn(4000, 1, 28, 28, generator=source), torch.randint(0, 10, (4000,), generator=source)
    clients = iid(np.asarray(y), 100, seed)
    task = Task(
        "random", partial(build, model, (1, 28, 28), 10), cross_entropy, Data(x, y), Data(x[:10], y[:10]), clients, 10
    )
    return task.to(device)


def sync(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def reference(settings: Settings, task: Task, updates: int, device: str) -> float:
    """Updates per second of the plain loop, one client at a time."""
    executor = make_executor(settings, 0, task)
    sync(device)
    began = time.perf_counter()
    for record in make_timeline(settings, 0):
        if isinstance(record, Round):
            executor.apply(record)
            if executor.updates_trained >= updates:
                break
    sync(device)
    return executor.updates_trained / (time.perf_counter() - began)


class Batched:
    """The batched executor with its captured graphs, used again and again."""

    def __init__(self, settings: Settings, task: Task, runs: int, width: int) -> None:
        self.settings, self.task, self.runs, self.width = settings, task, runs, width
        self.trainer = Trainer(task, make_executor(settings, 0, task).module)
        self.batches: list[int] = []

    def __call__(self, updates: int, device: str) -> float:
        """Updates per second inside real runs of several seeds."""
        lanes = []
        for seed in range(self.runs):
            executor = make_executor(self.settings, seed, self.task)
            goal = Goal(max_rounds=max(1, updates // (10 * self.runs)), every_rounds=2**31)
            lanes.append(Lane(executor, iter(make_timeline(self.settings, seed)), goal, Progress()))
        train = self.trainer.train

        def counted(jobs):  # type: ignore[no-untyped-def]
            self.batches.append(len(jobs))
            return train(jobs)

        self.trainer.train = counted  # type: ignore[method-assign]
        sync(device)
        began = time.perf_counter()
        for _ in drive_batched(lanes, self.trainer, self.width):
            pass
        sync(device)
        spent = time.perf_counter() - began
        self.trainer.train = train  # type: ignore[method-assign]
        return sum(lane.reference.updates_trained for lane in lanes) / spent


def gemm(device: str) -> float:
    """GFLOP/s of a large product."""
    size = 8192 if device == "cuda" else 2048
    a = torch.randn(size, size, device=device)
    rates = []
    for _ in range(5):
        sync(device)
        began = time.perf_counter()
        a @ a
        sync(device)
        rates.append(2 * size**3 / (time.perf_counter() - began) / 1e9)
    return statistics.median(rates)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=["cnn", "mlp"], default="cnn")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--reference-updates", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    settings = config.study({"task": {"model": options.model}, "training": {"global_lr": 0.1}}).points()[0].settings
    settings = replace(settings, algorithm="defedavg-iid")
    task = random_task(options.model, options.device, 0)
    batched = Batched(settings, task, options.runs, options.width)
    batched(10 * options.runs, options.device)  # warm up
    batched.batches.clear()
    slow: list[float] = []
    fast: list[float] = []
    for turn in count():
        slow.append(reference(settings, task, options.reference_updates, options.device))
        fast.append(batched(options.updates, options.device))
        if turn + 1 >= options.repeats:
            break
    peak = torch.cuda.max_memory_allocated() if options.device == "cuda" else None
    result = {
        "device": torch.cuda.get_device_name()
        if options.device == "cuda"
        else f"cpu, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "model": options.model,
        "reference_updates_per_s": statistics.median(slow),
        "batched_updates_per_s": statistics.median(fast),
        "ratio": statistics.median(fast) / statistics.median(slow),
        "gemm_gflops": gemm(options.device),
        "mean_batch": statistics.mean(batched.batches),
        "peak_memory_bytes": peak,
    }
    print(json.dumps(result, indent=1) if options.json else "\n".join(f"{k:<26}{v}" for k, v in result.items()))


if __name__ == "__main__":
    main()
