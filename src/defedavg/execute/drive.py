"""Drive an executor through a plan: when to measure, and when to stop. Measuring reads versions and changes no run."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from ..keyed import key, permutation
from ..plan import Record, Round, Stall, moment
from ..tasks import Data, Task
from .reference import subset


class Status(StrEnum):
    """How a run ended, or that it did not."""

    RUNNING = "running"
    TARGET = "target"
    ROUNDS = "max_rounds"
    SECONDS = "max_seconds"
    DIVERGED = "diverged"
    STALLED = "stalled"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Goal:
    """When to measure and when to stop; both ``every_rounds`` and ``every_seconds`` must have passed to measure."""

    target_accuracy: float | None = None
    max_rounds: int = 400
    max_seconds: float = math.inf
    stop_at_target: bool = True
    every_rounds: int = 1
    every_seconds: float = 0.0
    train_samples: int = 0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A version, measured."""

    round: int
    seconds: float
    accuracy: float | None
    loss: float
    train_loss: float | None
    staleness: float
    updates: int
    wall_seconds: float


class Executor(Protocol):
    """What can be driven."""

    task: Task
    updates_trained: int
    versions: dict[int, Tensor]

    def apply(self, record: Round) -> Tensor:
        """Compute a round; gives the new version."""

    def measure(self, weights: Tensor, data: Data) -> tuple[float, float | None]:
        """Mean loss and accuracy of a version."""


@dataclass
class Progress:
    """Where a run stands; filled in as it goes, so that nothing is lost when it is broken off."""

    status: Status = Status.RUNNING
    rounds: int = 0
    seconds: float = 0.0
    diverged_at: int | None = None
    first_hit_seconds: float | None = None
    evaluations: list[Evaluation] = field(default_factory=list)

    @property
    def best_accuracy(self) -> float | None:
        """The highest accuracy seen."""
        return max((e.accuracy for e in self.evaluations if e.accuracy is not None), default=None)

    @property
    def final_accuracy(self) -> float | None:
        """The last accuracy seen."""
        return self.evaluations[-1].accuracy if self.evaluations else None


def drive(records: Iterable[Record], executor: Executor, goal: Goal, progress: Progress) -> Iterator[Evaluation]:
    """Compute rounds until the goal; yields every measurement and keeps ``progress`` up to date."""
    began = time.perf_counter()
    task = executor.task
    chosen = permutation(key(0, "train-loss"), len(task.train))[: goal.train_samples]
    probe = subset(task.train, chosen.tolist()) if len(chosen) else None
    staleness: list[int] = []
    last = (0, 0.0)

    def measure(number: int, seconds: float, weights: Tensor) -> Evaluation:
        loss, accuracy = executor.measure(weights, task.test)
        train_loss = executor.measure(weights, probe)[0] if probe else None
        mean = sum(staleness) / len(staleness) if staleness else 0.0
        staleness.clear()
        wall = time.perf_counter() - began
        found = Evaluation(number, seconds, accuracy, loss, train_loss, mean, executor.updates_trained, wall)
        progress.evaluations.append(found)
        if not math.isfinite(loss):  # the weights still are, but nothing can be learned from here
            progress.status, progress.diverged_at = Status.DIVERGED, number
        elif goal.target_accuracy and accuracy is not None and accuracy >= goal.target_accuracy:
            if progress.first_hit_seconds is None:
                progress.first_hit_seconds = seconds
            if goal.stop_at_target:
                progress.status = Status.TARGET
        return found

    yield measure(0, 0.0, executor.versions[0])
    if progress.status is not Status.RUNNING:
        return
    for record in records:
        if isinstance(record, Stall) or moment(record) > goal.max_seconds:
            if last[0] < progress.rounds:
                yield measure(progress.rounds, progress.seconds, executor.versions[progress.rounds])
            if progress.status is Status.RUNNING:
                progress.status = Status.STALLED if isinstance(record, Stall) else Status.SECONDS
            return
        if not isinstance(record, Round):
            continue
        weights = executor.apply(record)
        number = progress.rounds = record.merge.version
        progress.seconds = record.time
        staleness.extend(record.merge.staleness)
        if not bool(torch.isfinite(weights).all()):
            progress.status, progress.diverged_at = Status.DIVERGED, number
            return
        over = number >= goal.max_rounds
        if over or (number - last[0] >= goal.every_rounds and record.time - last[1] >= goal.every_seconds):
            last = (number, record.time)
            yield measure(number, record.time, weights)
        if over and progress.status is Status.RUNNING:
            progress.status = Status.ROUNDS
        if progress.status is not Status.RUNNING:
            return
