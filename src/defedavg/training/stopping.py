"""When a run stops, how it ended, and its progress."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ..planning.records import Record, Stall, moment

SUSTAINED = 5
"""Evaluations in a row at the target that make a sustained hit; its time is that of the first of them."""


class Status(StrEnum):
    """How a run ended, or that it still runs."""

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
    """When to evaluate and when to stop; an evaluation waits for both ``every_rounds`` and ``every_seconds``."""

    target_accuracy: float | None = None
    max_rounds: int = 400
    max_seconds: float = math.inf
    stop_at_target: bool = True
    consecutive_hits: int = 1  # evaluations in a row at the target before the run stops
    every_rounds: int = 1
    every_seconds: float = 0.0
    train_samples: int = 0

    def ended_by(self, record: Record) -> bool:
        """Return whether the run ends before this record: the plan has stalled, or the simulated time is up."""
        return isinstance(record, Stall) or moment(record) > self.max_seconds


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The evaluation of one version."""

    round: int
    seconds: float
    accuracy: float | None
    loss: float
    train_loss: float | None
    staleness: float
    updates: int
    wall_seconds: float

    def by_name(self) -> dict[str, Any]:
        """Return the values by name; ``asdict`` would also copy each of them, which takes ten times as long."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass
class RunProgress:
    """The progress of a run, updated after every evaluation, so that an interrupted run keeps its results."""

    status: Status = Status.RUNNING
    rounds: int = 0
    seconds: float = 0.0
    diverged_at: int | None = None
    first_hit_seconds: float | None = None
    sustained_seconds: float | None = None
    evaluations: list[Evaluation] = field(default_factory=list)

    @property
    def best_accuracy(self) -> float | None:
        """The highest accuracy of all evaluations."""
        return max((e.accuracy for e in self.evaluations if e.accuracy is not None), default=None)

    @property
    def final_accuracy(self) -> float | None:
        """The accuracy of the last evaluation."""
        return self.evaluations[-1].accuracy if self.evaluations else None


def hit_times(evaluations: Iterable[Evaluation], target: float | None) -> tuple[float | None, float | None]:
    """Return the simulated time of the first hit and that of the first of ``SUSTAINED`` hits in a row, if any."""
    first: float | None = None
    hits: list[float] = []  # in a row
    for each in evaluations:
        hits = [*hits, each.seconds] if target and each.accuracy is not None and each.accuracy >= target else []
        first = hits[0] if hits and first is None else first
        if len(hits) >= SUSTAINED:
            return first, hits[0]
    return first, None
