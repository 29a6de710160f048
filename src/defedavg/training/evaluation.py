"""The evaluation schedule of a run: which versions to evaluate, and what their results mean for its progress.

An executor may evaluate versions some time after it computed them, but in their order.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..planning.records import Record, Round, Stall
from ..rng import key, permutation
from ..tasks import Task
from .stopping import SUSTAINED, Evaluation, RunProgress, Status, StoppingRule


@dataclass(frozen=True, slots=True, eq=False)
class PendingEval:
    """A version that was computed and whose result is not yet known."""

    round: int
    seconds: float
    weights: Tensor
    evaluate: bool  # whether to compute loss and accuracy; otherwise only whether the weights are finite
    staleness: float
    updates: int
    ends: Status | None  # the status with which the run ends here, unless the result ends it otherwise


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The result of a pending evaluation."""

    finite: bool
    loss: float = math.nan
    accuracy: float | None = None
    train_loss: float | None = None


@dataclass
class EvalCounters:
    """The counters of an evaluation schedule; checkpoints store them (``run_state.COUNTER_KEYS``)."""

    staleness: list[int] = field(default_factory=list)  # of the updates merged since the last evaluation
    updates: int = 0
    consecutive_hits: int = 0  # evaluations in a row at the target, up to the last one
    hits_since: float = 0.0  # simulated time of the first of them
    newest: tuple[int, float] = (0, 0.0)  # round and simulated time
    evaluated: tuple[int, float] = (0, 0.0)  # round and simulated time of the last evaluation
    wall_seconds: float = 0.0  # of earlier sessions of the run


class EvalSchedule:
    """Chooses the versions to evaluate, and updates ``progress`` from their results."""

    def __init__(
        self, task: Task, rule: StoppingRule, progress: RunProgress, counters: EvalCounters | None = None
    ) -> None:
        self._rule = rule
        self._progress = progress
        self.counters = counters or EvalCounters()
        self._began = time.perf_counter() - self.counters.wall_seconds
        self.test = task.test
        chosen = torch.as_tensor(permutation(key(0, "train-loss"), len(task.train))[: rule.train_samples].tolist())
        self.train_subset = task.train[chosen] if len(chosen) else None

    @property
    def started(self) -> bool:
        """Whether version 0 was evaluated."""
        return bool(self._progress.evaluations)

    @property
    def running(self) -> bool:
        """Whether the run continues, according to the results known so far."""
        return self._progress.status is Status.RUNNING

    @property
    def wall_seconds(self) -> float:
        """Real seconds that the run has taken, over all its sessions."""
        return time.perf_counter() - self._began

    def start(self, weights: Tensor) -> PendingEval:
        """Return the pending evaluation of version 0."""
        return self._pending(weights, evaluate=True)

    def round(self, record: Round, weights: Tensor) -> PendingEval:
        """Count a computed round, and return the pending evaluation of its version."""
        rule, counters = self._rule, self.counters
        counters.newest = number, seconds = record.merge.version, record.time
        counters.staleness.extend(record.merge.staleness)
        counters.updates += sum(update.steps > 0 for update, _ in record.merge.updates)
        last = number >= rule.max_rounds
        before, then = counters.evaluated
        due = number - before >= rule.every_rounds and seconds - then >= rule.every_seconds
        return self._pending(weights, last or due, Status.ROUNDS if last else None)

    def ended(self, record: Record, weights: Tensor) -> PendingEval:
        """Return the last pending evaluation of a plan that stalled or whose time is up.

        It is that of the newest version, which is evaluated unless it was before.
        """
        status = Status.STALLED if isinstance(record, Stall) else Status.SECONDS
        return self._pending(weights, self.counters.evaluated[0] < self.counters.newest[0], status)

    def _pending(self, weights: Tensor, evaluate: bool, ends: Status | None = None) -> PendingEval:
        staleness = self.counters.staleness
        mean = sum(staleness) / len(staleness) if staleness else 0.0
        if evaluate:
            staleness.clear()
            self.counters.evaluated = self.counters.newest
        return PendingEval(*self.counters.newest, weights, evaluate, mean, self.counters.updates, ends)

    def record(self, pending: PendingEval, result: EvalResult) -> Evaluation | None:
        """Update the progress from a result, and return the evaluation if the version was evaluated."""
        progress = self._progress
        progress.rounds, progress.seconds = pending.round, pending.seconds
        if not result.finite:
            progress.status, progress.diverged_at = Status.DIVERGED, pending.round
            return None
        evaluation = self._evaluation(pending, result) if pending.evaluate else None
        if pending.ends is not None and progress.status is Status.RUNNING:
            progress.status = pending.ends
        return evaluation

    def _evaluation(self, pending: PendingEval, result: EvalResult) -> Evaluation:
        progress, target = self._progress, self._rule.target_accuracy
        measured = result.accuracy, result.loss, result.train_loss, pending.staleness, pending.updates
        evaluation = Evaluation(pending.round, pending.seconds, *measured, self.wall_seconds)
        progress.evaluations.append(evaluation)
        if not math.isfinite(result.loss):  # the weights are finite, but training cannot recover from here
            progress.status, progress.diverged_at = Status.DIVERGED, pending.round
        elif target and result.accuracy is not None:
            self._count_hit(pending.seconds, result.accuracy >= target)
        return evaluation

    def _count_hit(self, seconds: float, hit: bool) -> None:
        rule, progress, counters = self._rule, self._progress, self.counters
        if not hit:
            counters.consecutive_hits = 0
            return
        if counters.consecutive_hits == 0:
            counters.hits_since = seconds
        counters.consecutive_hits += 1
        if progress.first_hit_seconds is None:
            progress.first_hit_seconds = seconds
        if counters.consecutive_hits >= SUSTAINED and progress.sustained_seconds is None:
            progress.sustained_seconds = counters.hits_since
        if rule.stop_at_target and counters.consecutive_hits >= rule.consecutive_hits:
            progress.status = Status.TARGET
