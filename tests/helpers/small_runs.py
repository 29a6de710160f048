"""Small float64 tasks for six clients, and runs of them by both executors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from defedavg.config.build import make_executor, make_plan, make_simulator
from defedavg.config.study import Settings
from defedavg.tasks import Task, make_task
from defedavg.training import BatchedRun, RunProgress, StoppingRule, Trainer, drive_batched
from helpers.settings_tables import settings

CLIENTS = 6


RANDOM = np.random.default_rng(0)


X, Y = RANDOM.normal(size=(60, 1, 6, 6)), RANDOM.integers(0, 3, 60)


WORDS = RANDOM.integers(0, 7, size=(60, 4))


class Residual(nn.Module):
    """Something that is no chain of layers."""

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
    """A float64 task for six clients."""
    data = (WORDS if model in ("words", "attention") else X, Y)
    parts = [np.arange(i, 60, CLIENTS) for i in range(CLIENTS)]
    return make_task(model=lambda: MODELS[model]().double(), train=data, test=data, clients=parts, keep_dtype=True)


def how(algorithm: str, **training: Any) -> Settings:
    """Settings for six clients."""
    base = {"updates_per_round": 3, "local_steps": 4, "batch_size": 4, "global_lr": 0.5, "local_lr": 0.1}
    return settings(algorithm, clients={"num_clients": CLIENTS}, training={**base, **training})


def lane_of(chosen: Settings, task: Task, rounds: int, seed: int = 0) -> BatchedRun:
    """A run of so many rounds, measured at its ends only."""
    goal = StoppingRule(max_rounds=rounds, every_rounds=2**31)
    return BatchedRun(make_executor(chosen, seed, task), iter(make_simulator(chosen, seed)), goal, RunProgress())


def batched(lanes: list[BatchedRun], task: Task, width: int) -> list[Tensor]:
    """The last versions of runs that share batches."""
    trainer = Trainer(task, lanes[0].reference.module, width=width)
    for _ in drive_batched(lanes, trainer):
        pass
    return [lane.reference.versions[lane.newest] for lane in lanes]


def reference(chosen: Settings, task: Task, rounds: int, seed: int = 0) -> Tensor:
    """The same by the plain loop."""
    executor = make_executor(chosen, seed, task)
    for record in make_plan(chosen, seed, rounds).rounds:
        executor.apply(record)
    return executor.versions[rounds]
