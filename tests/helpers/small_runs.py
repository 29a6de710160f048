"""Small float64 tasks for six clients, and runs of them by both executors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from defedavg.algorithms import ALGORITHMS
from defedavg.algorithms.protocol import FROM_VERSION
from defedavg.config.build import make_executor, make_plan, make_simulator
from defedavg.config.study import Settings
from defedavg.tasks import Task, make_task
from defedavg.training import BatchedRun, RunProgress, StoppingRule, Trainer, run_batched
from helpers.settings_tables import settings

CLIENTS = 6

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(60, 1, 6, 6)), RANDOM.integers(0, 3, 60)
WORDS = RANDOM.integers(0, 7, size=(60, 4))


class Residual(nn.Module):
    """A module that is not a chain of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.inner, self.leave = nn.Linear(36, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.enter(x.flatten(1)))
        out: Tensor = self.leave(hidden + torch.nn.functional.gelu(self.inner(hidden)))
        return out


class Attention(nn.Module):
    """A small Transformer block over four words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(7, 4), nn.LayerNorm(4)
        self.query, self.value, self.leave = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.words(x))
        weight = torch.softmax(self.query(hidden) @ hidden.transpose(-1, -2), dim=-1)
        out: Tensor = self.leave((hidden + weight @ self.value(hidden)).flatten(1))
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 3, bias=False)),
    "cnn": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    ),
    "strided": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.GELU(), nn.GroupNorm(2, 4), nn.Conv2d(4, 5, (2, 1), bias=False),
        nn.AvgPool2d((2, 3)), nn.Flatten(), nn.LayerNorm(5), nn.Linear(5, 3),
    ),
    "words": lambda: nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Flatten(), nn.Linear(16, 3)),
    "residual": Residual,
    "attention": Attention,
}  # fmt: skip


def task_of(model: str) -> Task:
    """Return a float64 task for six clients."""
    data = (WORDS if model in ("words", "attention") else X, Y)
    parts = [np.arange(i, 60, CLIENTS) for i in range(CLIENTS)]
    return make_task(model=lambda: MODELS[model]().double(), train=data, test=data, clients=parts, keep_dtype=True)


def how(algorithm: str, **training: Any) -> Settings:
    """Return settings for six clients, with rates at which rounding errors do not grow from merge to merge."""
    kind = ALGORITHMS[algorithm]
    own_models = kind.job_start != FROM_VERSION  # clients that never start from the server's model diverge sooner
    rates = {"global_lr": 0.5 if kind.server_optimizer == "sgd" else 0.01, "local_lr": 0.02 if own_models else 0.1}
    base = {"updates_per_round": 3, "local_steps": 4, "batch_size": 4, **rates}
    return settings(algorithm, clients={"num_clients": CLIENTS}, training={**base, **training})


def batched_run(chosen: Settings, task: Task, rounds: int, seed: int = 0, *, every_rounds: int = 2**31) -> BatchedRun:
    """Return a run of ``rounds`` rounds that is evaluated at its start, its end, and every ``every_rounds`` rounds."""
    rule = StoppingRule(max_rounds=rounds, every_rounds=every_rounds)
    return BatchedRun(make_executor(chosen, seed, task), iter(make_simulator(chosen, seed)), rule, RunProgress())


def final_versions(runs: list[BatchedRun], task: Task, max_batch_jobs: int) -> list[Tensor]:
    """Return the last versions of runs that share batches."""
    trainer = Trainer(task, runs[0].reference.module, max_batch_jobs=max_batch_jobs)
    for _ in run_batched(runs, trainer):
        pass
    return [run.reference.versions[run.newest] for run in runs]


def reference(chosen: Settings, task: Task, rounds: int, seed: int = 0) -> Tensor:
    """Return the last version of a run of the reference executor."""
    executor = make_executor(chosen, seed, task)
    for record in make_plan(chosen, seed, rounds).rounds:
        executor.apply(record)
    return executor.versions[rounds]
