"""Drive an executor through a plan: when to measure, and when to stop. Measuring reads versions and changes no run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from ..planning.records import Record, Round, Stall, moment
from ..rng import key, permutation
from ..tasks import Data, Task
from .reference import subset

SUSTAINED = 5
"""So many measurements in a row at the target are a sustained hit; its time is that of the first of them."""


class Status(StrEnum):
    """How a run ended, or that it did not."""

    RUNNING = "running"
    TARGET = "target"
    ROUNDS = "max_rounds"
    SECONDS = "max_seconds"
    DIVERGED = "diverged"
    STALLED = "stalled"
    INTERRUPTED = "interrupted"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class StoppingRule:
    """When to measure and when to stop; both ``every_rounds`` and ``every_seconds`` must have passed to measure."""

    target_accuracy: float | None = None
    max_rounds: int = 400
    max_seconds: float = math.inf
    stop_at_target: bool = True
    consecutive_hits: int = 1  # measurements in a row at the target before the run stops
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


@dataclass(frozen=True, slots=True, eq=False)
class PendingEval:
    """A version that was computed and not yet looked at."""

    round: int
    seconds: float
    weights: Tensor
    measured: bool  # whether to measure it; if not, only whether its weights are numbers is asked
    staleness: float
    updates: int
    ends: Status | None  # how the run ends here if nothing else ends it


@dataclass(frozen=True, slots=True)
class EvalResult:
    """What was seen of a version."""

    finite: bool
    loss: float = math.nan
    accuracy: float | None = None
    train_loss: float | None = None


class Executor(Protocol):
    """What can be driven."""

    task: Task
    versions: dict[int, Tensor]

    def apply(self, record: Round) -> Tensor:
        """Compute a round; gives the new version."""

    def measure(self, weights: Tensor, data: Data) -> tuple[float, float | None]:
        """Mean loss and accuracy of a version."""


@dataclass
class RunProgress:
    """Where a run stands; filled in as it goes, so that nothing is lost when it is broken off."""

    status: Status = Status.RUNNING
    rounds: int = 0
    seconds: float = 0.0
    diverged_at: int | None = None
    first_hit_seconds: float | None = None
    sustained_seconds: float | None = None
    evaluations: list[Evaluation] = field(default_factory=list)

    @property
    def best_accuracy(self) -> float | None:
        """The highest accuracy seen."""
        return max((e.accuracy for e in self.evaluations if e.accuracy is not None), default=None)

    @property
    def final_accuracy(self) -> float | None:
        """The last accuracy seen."""
        return self.evaluations[-1].accuracy if self.evaluations else None


@dataclass
class EvalCounters:
    """What a meter has counted."""

    staleness: list[int] = field(default_factory=list)  # since the last measurement
    updates: int = 0
    hits: int = 0  # in a row, up to now
    since: float = 0.0
    newest: tuple[int, float] = (0, 0.0)  # round and time
    measured: tuple[int, float] = (0, 0.0)
    wall_seconds: float = 0.0  # before the meter was made: a run may have been broken off and taken up again


class EvalSchedule:
    """Says which versions of a run to measure, and in ``progress``, from what was seen of them, when it is over.

    Versions may be looked at some time after they were computed, in their order.
    """

    def __init__(
        self, task: Task, goal: StoppingRule, progress: RunProgress, tally: EvalCounters | None = None
    ) -> None:
        self._goal = goal
        self._progress = progress
        self.tally = tally or EvalCounters()
        self._began = time.perf_counter() - self.tally.wall_seconds
        self.test = task.test
        chosen = permutation(key(0, "train-loss"), len(task.train))[: goal.train_samples]
        self.probe = subset(task.train, chosen.tolist()) if len(chosen) else None

    @property
    def begun(self) -> bool:
        """Whether version 0 was looked at."""
        return bool(self._progress.evaluations)

    @property
    def running(self) -> bool:
        """Whether there is more to compute, as far as is known."""
        return self._progress.status is Status.RUNNING

    @property
    def wall_seconds(self) -> float:
        """Real seconds that the run has taken."""
        return time.perf_counter() - self._began

    def start(self, weights: Tensor) -> PendingEval:
        """Version 0."""
        return self._due(weights, measured=True)

    def round(self, record: Round, weights: Tensor) -> PendingEval:
        """A round was computed."""
        goal = self._goal
        self.tally.newest = number, seconds = record.merge.version, record.time
        self.tally.staleness.extend(record.merge.staleness)
        self.tally.updates += sum(update.steps > 0 for update, _ in record.merge.updates)
        over = number >= goal.max_rounds
        last_number, last_seconds = self.tally.measured
        time_has_come = number - last_number >= goal.every_rounds and seconds - last_seconds >= goal.every_seconds
        return self._due(weights, over or time_has_come, Status.ROUNDS if over else None)

    def ended(self, record: Record, weights: Tensor) -> PendingEval:
        """The plan stalled, or its time is up: the newest version is the last, and measured if it was not."""
        status = Status.STALLED if isinstance(record, Stall) else Status.SECONDS
        return self._due(weights, self.tally.measured[0] < self.tally.newest[0], status)

    def _due(self, weights: Tensor, measured: bool, ends: Status | None = None) -> PendingEval:
        staleness = self.tally.staleness
        mean = sum(staleness) / len(staleness) if staleness else 0.0
        if measured:
            staleness.clear()
            self.tally.measured = self.tally.newest
        return PendingEval(*self.tally.newest, weights, measured, mean, self.tally.updates, ends)

    def settle(self, due: PendingEval, outcome: EvalResult) -> Evaluation | None:
        """Take in what was seen of a version; gives the measurement, if it was measured."""
        goal, progress = self._goal, self._progress
        progress.rounds, progress.seconds = due.round, due.seconds
        if not outcome.finite:
            progress.status, progress.diverged_at = Status.DIVERGED, due.round
            return None
        found = None
        if due.measured:
            loss, accuracy = outcome.loss, outcome.accuracy
            wall = self.wall_seconds
            found = Evaluation(
                due.round, due.seconds, accuracy, loss, outcome.train_loss, due.staleness, due.updates, wall
            )
            progress.evaluations.append(found)
            if not math.isfinite(loss):  # the weights still are, but nothing can be learned from here
                progress.status, progress.diverged_at = Status.DIVERGED, due.round
            elif goal.target_accuracy and accuracy is not None:
                self._count(due.seconds, accuracy >= goal.target_accuracy)
        if due.ends is not None and progress.status is Status.RUNNING:
            progress.status = due.ends
        return found

    def _count(self, seconds: float, hit: bool) -> None:
        """Follow the measurements in a row that are at the target."""
        goal, progress = self._goal, self._progress
        if not hit:
            self.tally.hits = 0
            return
        if self.tally.hits == 0:
            self.tally.since = seconds
        self.tally.hits += 1
        if progress.first_hit_seconds is None:
            progress.first_hit_seconds = seconds
        if self.tally.hits >= SUSTAINED and progress.sustained_seconds is None:
            progress.sustained_seconds = self.tally.since
        if goal.stop_at_target and self.tally.hits >= goal.consecutive_hits:
            progress.status = Status.TARGET


def look(executor: Executor, meter: EvalSchedule, due: PendingEval) -> EvalResult:
    """Look at a version now."""
    if not bool(torch.isfinite(due.weights).all()):
        return EvalResult(finite=False)
    if not due.measured:
        return EvalResult(finite=True)
    loss, accuracy = executor.measure(due.weights, meter.test)
    train_loss = executor.measure(due.weights, meter.probe)[0] if meter.probe else None
    return EvalResult(True, loss, accuracy, train_loss)


CheckpointHook = Callable[[], None]
"""Called where everything computed is looked at and told of: here a run can be broken off and taken up again."""


def drive(
    records: Iterable[Record],
    executor: Executor,
    goal: StoppingRule,
    meter: EvalSchedule,
    rest: CheckpointHook = lambda: None,
) -> Iterator[Evaluation]:
    """Compute rounds one after the other until the goal; yields every measurement, keeps the progress up to date."""
    for due in _dues(records, executor, goal, meter):
        found = meter.settle(due, look(executor, meter, due))
        if found is not None:
            yield found
        if not meter.running:
            return
        rest()


def _dues(
    records: Iterable[Record], executor: Executor, goal: StoppingRule, meter: EvalSchedule
) -> Iterator[PendingEval]:
    newest = executor.versions[meter.tally.newest[0]]
    if not meter.begun:
        yield meter.start(newest)
    for record in records:
        if goal.ended_by(record):
            yield meter.ended(record, newest)
        elif isinstance(record, Round):
            newest = executor.apply(record)
            yield meter.round(record, newest)
