"""How fast this machine computes: the plain loop and the batched executor side by side, and the limits they run into.

A real run of DeFedAvg-IID with several seeds together, on random images: what the data are does not matter for speed,
so none need be there. The two executors alternate, and medians are reported.
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

import torch
from torch.utils.flop_counter import FlopCounterMode

from ..config import study as config
from ..config.build import make_executor, make_simulator
from ..config.study import Settings
from ..errors import UserError
from ..planning.plan import Round
from ..tasks import Data, Task, build, cross_entropy, iid
from ..training import BatchedRun, RunProgress, StackingError, StoppingRule, Trainer, run_batched
from ..training.local_training import TrainingJob
from ..training.precision import computing_in
from ..training.reference import sample_losses
from ..training.threads import threads as using
from .sweep import ComputeConfig

CLASSES = 10
CLIENTS = 100
TRAIN = 6_000
TEST = {"cpu": 200, "cuda": 10_000}  # about as long to measure, against training, as in a study

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Load:
    """What is computed."""

    model: str = "cnn"
    image: tuple[int, ...] = (1, 28, 28)
    runs: int = 3
    updates: int = 300  # of all runs together, in each turn
    reference_updates: int = 20
    repeats: int = 3
    eval_every_rounds: int = 10

    def __post_init__(self) -> None:
        for name in ("runs", "updates", "reference_updates", "repeats", "eval_every_rounds"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")

    @property
    def settings(self) -> Settings:
        """The paper's: N = 100, n = 10, K = 50, batch 10."""
        tables = {"algorithms": ["defedavg-iid"], "training": {"global_lr": 0.1}}
        return config.study(tables).points()[0].settings

    def task(self, device: str) -> Task:
        """Random images, dealt to the clients."""
        source = torch.Generator().manual_seed(0)
        parts = [
            Data(
                torch.randn(count, *self.image, generator=source),
                torch.randint(0, CLASSES, (count,), generator=source),
            ).to(device)
            for count in (TRAIN, TEST[device])
        ]
        clients = iid(parts[0].targets.cpu().numpy(), CLIENTS, 0)
        model = partial(build, self.model, self.image, CLASSES)
        return Task("random", model, cross_entropy, parts[0], parts[1], clients, CLASSES)


def bench(load: Load, means: ComputeConfig, say: Say) -> dict[str, Any]:
    """Measure; ``say`` is told what goes on."""
    device, settings = means.device, load.settings
    task = load.task(device)
    task.model()  # one that does not fit its images says so before anything else is said
    say(f"the plain loop and the batched executor on {device}, {load.repeats} turns of each")
    with computing_in(means.precision):
        try:
            batched = _Batched(load, settings, task, means)
        except StackingError as reason:
            raise UserError(f"{load.model} cannot be trained in batches: {reason}") from reason
        batched(min(load.updates, 10 * load.runs))  # compiles, captures, warms up
        batched.sizes.clear()
        threads = _best_threads(settings, task, device)
        slow, fast = [], []
        for turn in range(load.repeats):
            with using(threads):
                slow.append(_reference(settings, task, load.reference_updates, device))
            fast.append(batched(load.updates))
            say(f"turn {turn + 1} of {load.repeats}: {slow[-1]:.4g} and {fast[-1]:.4g} updates/s")
        gemm, bandwidth = _gemm(device), _bandwidth(device)
    update = _flops(task, settings)
    weights = sum(p.numel() * p.element_size() for p in task.model().parameters())
    traffic = 3 * weights * settings.training.local_steps  # read on both ways, written once
    found = statistics.median(fast)
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "precision": means.precision,
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
        "batch_fill": statistics.mean(batched.sizes) / batched.trainer.max_batch_jobs,
        "peak_memory_bytes": _peak(device),
    }


class _Batched:
    """The batched executor with its captured graphs, used again and again."""

    def __init__(self, load: Load, settings: Settings, task: Task, means: ComputeConfig) -> None:
        self._load, self._settings, self._task = load, settings, task
        executor = make_executor(settings, 0, task)
        self.trainer = Trainer(
            task,
            executor.module,
            batch_size=settings.training.batch_size,
            max_batch_jobs=means.width,
            memory=means.memory,
            precision=means.precision,
        )
        self.sizes: list[int] = []
        train = self.trainer.train

        def counted(jobs: list[TrainingJob]) -> Any:
            if jobs:
                self.sizes.append(len(jobs))
            return train(jobs)

        self.trainer.train = counted  # type: ignore[method-assign,assignment]

    def __call__(self, updates: int) -> float:
        """Updates per second inside real runs of several seeds, measuring included."""
        load = self._load
        rounds = max(1, updates // (self._settings.training.updates_per_round * load.runs))
        goal = StoppingRule(max_rounds=rounds, every_rounds=load.eval_every_rounds)
        lanes = []
        for seed in range(load.runs):
            executor = make_executor(self._settings, seed, self._task)
            lanes.append(BatchedRun(executor, iter(make_simulator(self._settings, seed)), goal, RunProgress()))
        began = _now(self._task)
        for _ in run_batched(lanes, self.trainer):
            pass
        spent = _now(self._task) - began
        return sum(lane.progress.evaluations[-1].updates for lane in lanes) / spent


def _now(task: Task) -> float:
    """The time, when the device has done all it was told."""
    if task.train.inputs.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def _best_threads(settings: Settings, task: Task, device: str) -> int:
    """The number of threads with which the plain loop is fastest."""
    most = torch.get_num_threads()
    if device == "cuda" or most == 1:
        return most
    speeds = {}
    for count in sorted({1, most // 2, most} - {0}):
        with using(count):
            _reference(settings, task, 1, device)
            speeds[count] = _reference(settings, task, 4, device)
    return max(speeds, key=lambda count: speeds[count])


def _reference(settings: Settings, task: Task, updates: int, device: str) -> float:
    """Updates per second of the plain loop, one client at a time."""
    executor = make_executor(settings, 0, task)
    began = _now(task)
    for record in make_simulator(settings, 0):
        if isinstance(record, Round):
            executor.apply(record)
            if executor.updates_trained >= updates:
                break
    return executor.updates_trained / (_now(task) - began)


def _median_rate(work: Callable[[], object], device: str, amount: float) -> float:
    """``amount`` per second, the median of several calls."""
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
    """Operations per second of a large product."""
    size = 8192 if device == "cuda" else 2048
    a = torch.randn(size, size, device=device)
    return _median_rate(lambda: a @ a, device, 2.0 * size**3)


def _bandwidth(device: str) -> float:
    """Bytes per second of a large copy, read and written."""
    source = torch.zeros((1 << 30) if device == "cuda" else (1 << 26), dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return _median_rate(lambda: target.copy_(source), device, 2.0 * source.numel() * 4)


def _flops(task: Task, settings: Settings) -> float:
    """Operations of one update, as the plain loop does it."""
    model = task.model()
    size = settings.training.batch_size
    inputs, targets = task.train.inputs[:size].cpu(), task.train.targets[:size].cpu()
    counter = FlopCounterMode(display=False)
    with counter:
        sample_losses(task, model(inputs), targets).mean().backward()  # type: ignore[no-untyped-call]
    return float(counter.get_total_flops()) * settings.training.local_steps


def _peak(device: str) -> int:
    """Bytes: of the device, or of this process."""
    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used << 10
