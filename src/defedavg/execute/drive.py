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

    def ended_by(self, record: Record) -> bool:
        """Whether nothing from this record on is computed: every client is lost, or the time is up."""
        return isinstance(record, Stall) or moment(record) > self.max_seconds


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


class Meter:
    """Measures one run as it goes, and says in ``progress`` when it is over."""

    def __init__(self, executor: Executor, goal: Goal, progress: Progress) -> None:
        self._executor = executor
        self._goal = goal
        self._progress = progress
        self._began = time.perf_counter()
        self._staleness: list[int] = []
        self._last = (0, 0.0)  # round and time of the last measurement
        train = executor.task.train
        chosen = permutation(key(0, "train-loss"), len(train))[: goal.train_samples]
        self._probe = subset(train, chosen.tolist()) if len(chosen) else None

    def start(self) -> Evaluation:
        """Measure version 0."""
        return self._measure(0, 0.0, self._executor.versions[0])

    def round(self, record: Round, weights: Tensor) -> Evaluation | None:
        """A round was computed: measure it if it is time, stop if it is over."""
        goal, progress = self._goal, self._progress
        number = progress.rounds = record.merge.version
        progress.seconds = record.time
        self._staleness.extend(record.merge.staleness)
        if not bool(torch.isfinite(weights).all()):
            progress.status, progress.diverged_at = Status.DIVERGED, number
            return None
        over = number >= goal.max_rounds
        found = None
        if over or (number - self._last[0] >= goal.every_rounds and record.time - self._last[1] >= goal.every_seconds):
            found = self._measure(number, record.time, weights)
        if over and progress.status is Status.RUNNING:
            progress.status = Status.ROUNDS
        return found

    def ended(self, record: Record) -> Evaluation | None:
        """The plan stalled, or its time is up: measure the last version if it was not."""
        progress = self._progress
        found = None
        if self._last[0] < progress.rounds:
            found = self._measure(progress.rounds, progress.seconds, self._executor.versions[progress.rounds])
        if progress.status is Status.RUNNING:
            progress.status = Status.STALLED if isinstance(record, Stall) else Status.SECONDS
        return found

    def _measure(self, number: int, seconds: float, weights: Tensor) -> Evaluation:
        executor, goal, progress, staleness = self._executor, self._goal, self._progress, self._staleness
        loss, accuracy = executor.measure(weights, executor.task.test)
        train_loss = executor.measure(weights, self._probe)[0] if self._probe else None
        mean = sum(staleness) / len(staleness) if staleness else 0.0
        staleness.clear()
        self._last = (number, seconds)
        wall = time.perf_counter() - self._began
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


def drive(records: Iterable[Record], executor: Executor, goal: Goal, progress: Progress) -> Iterator[Evaluation]:
    """Compute rounds one after the other until the goal; yields every measurement, keeps ``progress`` up to date."""
    meter = Meter(executor, goal, progress)
    yield meter.start()
    if progress.status is not Status.RUNNING:
        return
    for record in records:
        found = None
        if goal.ended_by(record):
            found = meter.ended(record)
        elif isinstance(record, Round):
            found = meter.round(record, executor.apply(record))
        if found is not None:
            yield found
        if progress.status is not Status.RUNNING:
            return
