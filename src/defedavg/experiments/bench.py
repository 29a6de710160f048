"""Measures the speed of this machine: reference and batched executor side by side, and the hardware limits.

The load is a real run of DeFedAvg-IID with several seeds, on random images or characters, so no data set is needed. The
executors alternate; medians are reported.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from ..config import study as config
from ..config.build import make_executor, make_simulator
from ..config.settings import Settings
from ..errors import UserError
from ..planning.plan import records
from ..planning.ready_jobs import ReadyJobs
from ..planning.records import Round
from ..tasks import Data, Task, build, cross_entropy, iid, token_accuracy, token_cross_entropy
from ..tasks.models import TEXT_MODELS
from ..training import BatchedRun, RunProgress, StackingError, StoppingRule, Trainer, run_batched
from ..training.local_training import TrainingJob
from ..training.precision import computing_in
from ..training.scoring import sample_losses
from ..training.threads import threads as using
from .compute import ComputeConfig, reference_precision

CLASSES = 10
CHARACTERS = 80
CLIENTS = 100
TRAIN = 6_000
TEST = {"cpu": 200, "cuda": 10_000}  # evaluation takes about the same share of the time as in a study

Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BenchLoad:
    """What the benchmark computes."""

    model: str = "cnn"
    image: tuple[int, ...] = (1, 28, 28)
    runs: int = 3
    updates: int = 300  # of all runs together, per repetition
    reference_updates: int = 20
    repeats: int = 3
    eval_every_rounds: int = 10
    turn_seconds: float | None = None  # a repetition of both executors, about; None: as long as the updates take

    def __post_init__(self) -> None:
        for name in ("runs", "updates", "reference_updates", "repeats", "eval_every_rounds"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")

    def updates_within(self, per_second: float) -> int:
        """Return the updates of a repetition at this speed: in two thirds of its time, and at least a round."""
        if self.turn_seconds is None:
            return self.updates
        least = self.settings.training.updates_per_round * self.runs
        return min(self.updates, max(least, round(per_second * self.turn_seconds * 2 / 3)))

    def reference_updates_within(self, per_second: float) -> int:
        """Return the updates of the reference executor in the rest of a repetition."""
        if self.turn_seconds is None:
            return self.reference_updates
        return min(self.reference_updates, max(2, round(per_second * self.turn_seconds / 3)))

    @property
    def settings(self) -> Settings:
        """The settings of the paper: N = 100, n = 10, K = 50, batch 10."""
        tables = {"algorithms": ["defedavg-iid"], "training": {"global_lr": 0.1}}
        return config.study(tables).points()[0].settings

    def task(self, device: str) -> Task:
        """Return a task of random images, or of random characters for a model of texts."""
        source, texts = torch.Generator().manual_seed(0), self.model in TEXT_MODELS
        classes = CHARACTERS if texts else CLASSES

        def part(count: int) -> Data:
            shape = (count, *self.image)
            if texts:
                return Data(*torch.randint(0, classes, (2, *shape), generator=source)).to(device)
            images = torch.randn(shape, generator=source)
            return Data(images, torch.randint(0, classes, (count,), generator=source)).to(device)

        train, test = part(TRAIN), part(TEST[device])
        clients = iid(np.zeros(TRAIN, np.int64), CLIENTS, 0)
        model = partial(build, self.model, self.image, classes)
        if texts:
            return Task("random", model, token_cross_entropy, train, test, clients, None, metric=token_accuracy)
        return Task("random", model, cross_entropy, train, test, clients, classes)


def bench(load: BenchLoad, compute: ComputeConfig, notify: Notify) -> dict[str, Any]:
    """Run the benchmark; ``notify`` receives a line per repetition."""
    device, settings = compute.device, load.settings
    task = load.task(device)
    task.model()  # raises if the model does not fit the images
    loop_precision = reference_precision(compute.precision, device)
    pair = (f"reference executor in {loop_precision}", f"batched executor in {compute.precision}")
    notify(f"{' and '.join(pair)} on {device}, {load.repeats} repetitions of each")
    with computing_in(compute.precision):
        try:
            batched = BatchedBench(load, settings, task, compute)
        except StackingError as reason:
            raise UserError(f"{load.model} cannot be trained in batches: {reason}") from reason
        first = batched(min(load.updates, 10 * load.runs))  # compiles kernels, captures graphs, warms up
        batched.sizes.clear()
        threads, loop = _best_threads(settings, task, device)
        updates, loop_updates = load.updates_within(first), load.reference_updates_within(loop)
        slow, fast = [], []
        for turn in range(load.repeats):
            with using(threads):
                slow.append(_reference(settings, task, loop_updates))
            fast.append(batched(updates))
            notify(f"{turn + 1} of {load.repeats}: {slow[-1]:.4g} and {fast[-1]:.4g} updates/s")
        gemm, bandwidth = _gemm(device), _bandwidth(device)
    update = _flops(task, settings)
    weights = sum(p.numel() * p.element_size() for p in task.model().parameters())
    traffic = 3 * weights * settings.training.local_steps  # read in the forward and the backward pass, written once
    found = statistics.median(fast)
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "precision": compute.precision,
        "reference_precision": loop_precision,
        "model": load.model,
        "image": list(load.image),
        "runs": load.runs,
        "width": batched.trainer.max_batch_jobs,
        "reference_threads": threads,
        "reference_updates_per_s": statistics.median(slow),
        "batched_updates_per_s": found,
        "ratio": found / statistics.median(slow),
        "gemm_gflops": gemm / 1e9,
        "gemm_share": found * update / gemm,
        "bandwidth_gb_per_s": bandwidth / 1e9,
        "bandwidth_share": found * traffic / bandwidth,
        "gflop_per_update": update / 1e9,
        "mean_batch": statistics.mean(batched.sizes),
        "ready_jobs_per_run": batched.ready_jobs(load.updates),
        "batch_fill": statistics.mean(batched.sizes) / batched.trainer.max_batch_jobs,
        "peak_memory_bytes": _peak(device),
    }


class BatchedBench:
    """The batched executor with its captured graphs, reused for all repetitions."""

    def __init__(self, load: BenchLoad, settings: Settings, task: Task, compute: ComputeConfig) -> None:
        self._load, self._settings, self._task = load, settings, task
        executor = make_executor(settings, 0, task)
        self.trainer = Trainer(
            task,
            executor.module,
            batch_size=settings.training.batch_size,
            max_batch_jobs=compute.max_batch_jobs,
            memory=compute.memory,
            precision=compute.precision,
        )
        self.sizes: list[int] = []
        train = self.trainer.train

        def counted(jobs: list[TrainingJob]) -> Any:
            if jobs:
                self.sizes.append(len(jobs))
            return train(jobs)

        self.trainer.train = counted  # type: ignore[method-assign,assignment]

    def _rounds(self, updates: int) -> int:
        return max(1, updates // (self._settings.training.updates_per_round * self._load.runs))

    def ready_jobs(self, updates: int) -> float:
        """Return how many jobs of one run can be trained at once, which its plan alone limits."""
        ready = ReadyJobs()
        for record in records(make_simulator(self._settings, 0), self._rounds(updates)):
            if isinstance(record, Round):
                ready.add(record)
        return ready.mean

    def __call__(self, updates: int) -> float:
        """Return the updates per second of real runs of several seeds, evaluation included."""
        load, rounds = self._load, self._rounds(updates)
        rule = StoppingRule(max_rounds=rounds, every_rounds=load.eval_every_rounds)
        runs = []
        for seed in range(load.runs):
            executor = make_executor(self._settings, seed, self._task)
            runs.append(BatchedRun(executor, iter(make_simulator(self._settings, seed)), rule, RunProgress()))
        began = _now(self._task)
        for _ in run_batched(runs, self.trainer):
            pass
        spent = _now(self._task) - began
        return sum(run.progress.evaluations[-1].updates for run in runs) / spent


def _now(task: Task) -> float:
    """Return the time after the device has finished its queue."""
    if task.train.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _best_threads(settings: Settings, task: Task, device: str) -> tuple[int, float]:
    """Return the number of threads with which the reference executor is fastest, and its updates per second."""
    most = torch.get_num_threads()
    if device == "cuda" or most == 1:
        _reference(settings, task, 1)
        return most, _reference(settings, task, 4)
    speeds = {}
    for count in sorted({1, most // 2, most} - {0}):
        with using(count):
            _reference(settings, task, 1)
            speeds[count] = _reference(settings, task, 4)
    best = max(speeds, key=lambda count: speeds[count])
    return best, speeds[best]


def _reference(settings: Settings, task: Task, updates: int) -> float:
    """Return the updates per second of the reference executor."""
    executor = make_executor(settings, 0, task)
    began = _now(task)
    for record in make_simulator(settings, 0):
        if isinstance(record, Round):
            executor.apply(record)
            if executor.updates_trained >= updates:
                break
    return executor.updates_trained / (_now(task) - began)


def _median_rate(work: Callable[[], object], device: str, amount: float) -> float:
    """Return ``amount`` per second, as the median of several calls."""
    rates = []
    for _ in range(7):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        rates.append(amount / (time.perf_counter() - began))
    return statistics.median(rates)


def _gemm(device: str) -> float:
    """Return the floating-point operations per second of a large matrix product."""
    size = 8192 if device == "cuda" else 2048
    a = torch.randn(size, size, device=device)
    return _median_rate(lambda: a @ a, device, 2.0 * size**3)


def _bandwidth(device: str) -> float:
    """Return the bytes per second of a large copy, reads plus writes."""
    source = torch.zeros((1 << 30) if device == "cuda" else (1 << 26), dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return _median_rate(lambda: target.copy_(source), device, 2.0 * source.numel() * 4)


def _flops(task: Task, settings: Settings) -> float:
    """Return the floating-point operations of one update, as the reference executor computes it."""
    model = task.model()
    size = settings.training.batch_size
    data = task.train[:size].to("cpu")
    counter = FlopCounterMode(display=False)
    with counter:
        sample_losses(task, model(data.inputs), data.targets).mean().backward()  # type: ignore[no-untyped-call]
    return float(counter.get_total_flops()) * settings.training.local_steps


def _peak(device: str) -> int:
    """Return the peak memory of the device, or of this process, in bytes."""
    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used << 10
