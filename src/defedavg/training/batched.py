"""The batched executor: trains jobs of many clients, rounds, seeds and learning rates in one stacked step.

A job is ready as soon as its start version exists. The executor therefore reads ahead in every run's plan, trains ready
jobs together, merges every round whose jobs are trained, and repeats. Which jobs share a batch changes results by
rounding at most, because every job has its own weights, samples, learning rate and number of steps. Versions are
evaluated in batches, while the device trains the next jobs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, zip_longest

import torch
from torch import Tensor

from ..algorithms.protocol import Update
from ..errors import UserError
from ..planning.records import Record, Round
from ..tasks import Data
from .evaluation import EvalCounters, EvalResult, EvalSchedule, PendingEval
from .local_training import TrainingJob
from .reference import CheckpointHook, Reference
from .state_vectors import all_finite
from .stopping import Evaluation, RunProgress, StoppingRule
from .trainer import Trainer

LOOK_AHEAD = 256  # rounds read ahead at most, or as many as a batch has jobs
MAX_ROUNDS_WITHOUT_READY_JOBS = 32  # in a row; later rounds are not searched
STARTED_TOGETHER = 4  # runs: one that is left alone at the end rarely fills a batch
MIN_NEW_VERSIONS = 64  # of one run before they are evaluated, if memory allows; more for larger batches


@dataclass(eq=False)
class BatchedRun:
    """One run of the batched executor: its stream of records, the rounds read ahead, and the results."""

    reference: Reference
    records: Iterator[Record]
    rule: StoppingRule
    progress: RunProgress
    rounds: deque[Round] = field(default_factory=deque)
    deltas: dict[Update, Tensor] = field(default_factory=dict)  # trained updates that wait for their round
    counters: EvalCounters = field(default_factory=EvalCounters)
    final_record: Record | None = None  # ends the run before it reaches its number of rounds
    ended: bool = False
    held: bool = False  # the caller pauses a run by setting this
    read_until: float = math.inf  # the caller pauses a run before the first round after this simulated time
    later: Round | None = None  # the first round after that time
    defer_results: bool = False  # report no result while the run is held, even where it was computed before
    unreported: deque[tuple[PendingEval, EvalResult]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.schedule = EvalSchedule(self.reference.task, self.rule, self.progress, self.counters)
        self.newest = self.counters.newest[0]

    @property
    def running(self) -> bool:
        """Whether the run continues, according to the results known so far."""
        return self.schedule.running

    @property
    def paused(self) -> bool:
        """Whether the caller holds the run, or its next round is after the time at which the caller pauses it."""
        return self.held or (not self.rounds and self.later is not None and self.later.time > self.read_until)

    def ready(self, wanted: int, max_pending_updates: int) -> list[Update]:
        """Return up to ``wanted`` jobs that can be trained now, those needed soonest first.

        At most ``max_pending_updates`` trained updates may wait for their rounds, except those of the next round.
        """
        if self.ended or self.held:
            return []
        jobs: list[Update] = []
        rounds_without_ready_jobs = 0
        for number in range(max(LOOK_AHEAD, wanted)):  # a round may have one job only
            if rounds_without_ready_jobs == MAX_ROUNDS_WITHOUT_READY_JOBS:
                break
            if number >= len(self.rounds) and not self._read():
                break
            limit = wanted if number == 0 else min(wanted, max_pending_updates - len(self.deltas))
            if len(jobs) >= limit:
                break
            more = self._untrained(self.rounds[number])
            rounds_without_ready_jobs = 0 if more else rounds_without_ready_jobs + 1
            jobs.extend(more[: limit - len(jobs)])
        return jobs

    def advance(self, limit: int) -> Iterator[PendingEval]:
        """Merge every round whose jobs are trained, at most ``limit`` rounds, and yield the new versions."""
        for _ in range(limit):
            if self.ended or self.held or not (self.rounds or self._read()):
                break
            if any(update.steps and update not in self.deltas for update, _ in self.rounds[0].merge.updates):
                break
            yield self._merge(self.rounds.popleft())
        if self.final_record is not None and not self.rounds and not self.ended and not self.held:
            self.ended = True
            yield self.schedule.ended(self.final_record, self.reference.versions[self.newest])

    @property
    def state_need(self) -> int:
        """The number of state vectors that the rest of the run keeps at most."""
        return 0 if self.ended or not self.running else self.reference.state_need(self.rule.max_rounds)

    def job(self, update: Update) -> TrainingJob:
        """Return the job of an update whose start version exists."""
        reference = self.reference
        start, rate = reference.start_of(update), reference.local_rate(update)
        correction = reference.correction_of(update)
        return TrainingJob(reference.local_training, reference.task, start, update, rate, correction=correction)

    def record(self, pending: PendingEval, result: EvalResult) -> Evaluation | None:
        """Update the progress from a result; where it ends the run, discard the speculative work past that version."""
        evaluation = self.schedule.record(pending, result)
        if not self.running:
            self.reference.state.clear()
            self.reference.versions.replace({pending.round: pending.weights})
            self.newest = pending.round
            self.deltas.clear()
        return evaluation

    def _merge(self, record: Round) -> PendingEval:
        trained = {update: self.deltas.pop(update) for update, _ in record.merge.updates if update.steps}
        self.newest = record.merge.version
        pending = self.schedule.round(record, self.reference.merge(record, trained))
        self.ended = pending.ends is not None
        return pending

    def _untrained(self, record: Round) -> list[Update]:
        updates = (update for update, _ in record.merge.updates if update.steps and update.version <= self.newest)
        return [update for update in updates if update not in self.deltas]

    def _read(self) -> bool:
        """Read one more round, and return False where the run ends or pauses."""
        planned = self.rounds[-1].merge.version if self.rounds else self.newest
        while self.later is None and self.final_record is None and planned < self.rule.max_rounds:
            record = next(self.records)
            if self.rule.ended_by(record):
                self.final_record = record
            elif isinstance(record, Round):
                self.later = record
        if self.later is None or self.later.time > self.read_until:
            return False
        self.rounds.append(self.later)
        self.later = None
        return True


Batch = list[tuple[BatchedRun, Update]]
PendingEvals = list[tuple[BatchedRun, PendingEval]]
RunEvaluation = tuple[BatchedRun, Evaluation | None]
JobLimit = Callable[[], float]
"""Returns the most jobs that may be trained from now on."""


def _start_evaluation(pending: PendingEvals, trainer: Trainer) -> Callable[[], list[EvalResult]]:
    """Start to evaluate versions, on a CUDA device without waiting for it; the returned call waits for the results."""
    if not trainer.asynchronous:
        return partial(_evaluated_now, pending, trainer)
    if not pending:
        return list
    rows = _evaluated(pending, trainer)
    host = torch.empty((len(rows), 4), dtype=torch.float64, pin_memory=True)
    host.copy_(rows, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()

    def results() -> list[EvalResult]:
        done.synchronize()
        values = []
        for (finite, loss, accuracy, train_loss), (run, _) in zip(host.tolist(), pending, strict=True):
            subset = run.schedule.train_subset
            seen = loss, None if math.isnan(accuracy) else accuracy, train_loss if subset else None
            values.append(EvalResult(bool(finite), *seen))
        return values

    return results


def _evaluated_now(pending: PendingEvals, trainer: Trainer) -> list[EvalResult]:
    """Return the results on the CPU; a version that is not finite has no loss."""
    finite = [all_finite(one.weights) for _, one in pending]
    chosen = [(i, run.schedule, one.weights) for i, (run, one) in enumerate(pending) if one.evaluate and finite[i]]
    tested = _evaluate([(i, schedule.test, weights) for i, schedule, weights in chosen], trainer)
    trained = _evaluate([(i, schedule.train_subset, weights) for i, schedule, weights in chosen], trainer)
    results = [EvalResult(each) for each in finite]
    for i, figures in tested.items():
        loss, metric = figures.tolist()
        train_loss = float(trained[i][0]) if i in trained else None
        results[i] = EvalResult(True, loss, None if math.isnan(metric) else metric, train_loss)
    return results


def _evaluated(pending: PendingEvals, trainer: Trainer) -> Tensor:
    """Return for every version whether it is finite, its loss, its metric and its training loss; NaN for none."""
    # A norm is finite if and only if all values are; one call computes the norms of all versions.
    norms = torch.stack(list(torch._foreach_norm([one.weights for _, one in pending], math.inf)))
    rows = torch.full((len(pending), 4), math.nan, dtype=torch.float64, device=norms.device)
    rows[:, 0] = norms.isfinite()
    chosen = [(i, run.schedule, one.weights) for i, (run, one) in enumerate(pending) if one.evaluate]
    for i, figures in _evaluate([(i, schedule.test, weights) for i, schedule, weights in chosen], trainer).items():
        rows[i, 1:3] = figures
    subsets = [(i, schedule.train_subset, weights) for i, schedule, weights in chosen]
    for i, figures in _evaluate(subsets, trainer).items():
        rows[i, 3] = figures[0]
    return rows


def _evaluate(entries: Sequence[tuple[int, Data | None, Tensor]], trainer: Trainer) -> dict[int, Tensor]:
    """Return loss and accuracy by number of the entry; versions with the same data are evaluated together."""
    values: dict[int, Tensor] = {}
    for data in {id(data): data for _, data, _ in entries if data is not None}.values():
        group = {i: weights for i, other, weights in entries if other is data}
        values.update(zip(group, trainer.evaluate(list(group.values()), data), strict=True))
    return values


class _ActiveRuns:
    """The runs in progress; starts queued runs when these are few or cannot fill a batch, and memory allows it."""

    def __init__(
        self, trainer: Trainer, queued: Iterator[BatchedRun], resumed: Sequence[BatchedRun], job_limit: JobLimit
    ) -> None:
        self._trainer, self._job_limit = trainer, job_limit
        self.runs: list[BatchedRun] = []
        new = next((i for i, run in enumerate(resumed) if not self._resume(run)), len(resumed))
        self._waiting = deque(resumed[new:])  # for memory
        self._queued = queued
        self._started = _version_0(self.runs)

    def _resume(self, run: BatchedRun) -> bool:
        """Continue a run; one that was waiting for memory when it was checkpointed waits again."""
        resumed = run.schedule.started or self._fits(run)
        if resumed:
            self._add(run)
        return resumed

    def _fits(self, run: BatchedRun, *, stuck: bool = False) -> bool:
        """Return whether the state vectors of a run fit beside those of the others, or it must start in any case."""
        used, need, memory = sum(other.state_need for other in self.runs), run.state_need, self._trainer.state_memory
        return not need or not used or stuck or used + need <= memory.reserved

    def _add(self, run: BatchedRun) -> None:
        self.runs.append(run)
        memory = self._trainer.state_memory
        if run.state_need:
            keeping = [other for other in self.runs if other.state_need]
            owner = run.reference.state.layout.owner
            who = owner if len(keeping) == 1 else f"{owner}, with the {len(keeping) - 1} runs that wait for it,"
            memory.check(who, sum(other.state_need for other in keeping))
        run.reference.state.place(memory)
        run.reference.versions.place(self._trainer.version_memory)

    def advance(self) -> PendingEvals:
        """Merge what can be merged, and return all new versions, those of started runs first."""
        # A merge needs at least one trained job. Fewer merges than jobs in a batch would leave the next batch unfilled.
        most = max(MIN_NEW_VERSIONS, self._trainer.max_batch_jobs)
        # A resumed computation has no ended runs, so these do not count.
        running = [run for run in self.runs if run.running]
        limit = max(1, min(most, self._trainer.max_new_versions // max(1, len(running))))
        return self._started + [(run, pending) for run in running for pending in run.advance(limit)]

    def next_batch(self) -> Batch:
        """Return the jobs to train next; drops ended runs, and starts queued ones while the batch has free slots."""
        trainer = self._trainer
        # The limit of the trainer stays: buffers on a device have its size.
        most = int(min(trainer.max_batch_jobs, self._job_limit()))
        self.runs = [run for run in self.runs if run.running]
        self._started = []
        while len(self.runs) < STARTED_TOGETHER and (run := self._next(stuck=not self.runs)) is not None:
            self._start(run)
        batch = _gather(self.runs, most, trainer.max_pending_updates)
        while len(batch) < most and (run := self._next(stuck=not batch)) is not None:
            self._start(run)
            batch += _gather([run], most - len(batch), trainer.max_pending_updates)
        return batch

    def _start(self, run: BatchedRun) -> None:
        if not self._trainer.accepts(run.reference.module):
            raise UserError(
                "the model differs each time it is built; only its initial weights may differ, so build the same "
                "layers and constants for every seed"
            )
        self._add(run)
        self._started += _version_0([run])

    def _next(self, *, stuck: bool) -> BatchedRun | None:
        """Return the next queued run, unless it must wait for memory; ``stuck``: no run in progress has a job."""
        run = self._waiting.popleft() if self._waiting else next(self._queued, None)
        stuck = stuck and all(other.paused or other.ended for other in self.runs)
        if run is None or self._fits(run, stuck=stuck):
            return run
        self._waiting.appendleft(run)
        return None


def _version_0(runs: Sequence[BatchedRun]) -> PendingEvals:
    return [(run, run.schedule.start(run.reference.versions[0])) for run in runs if not run.schedule.started]


def run_batched(
    runs: Iterable[BatchedRun], trainer: Trainer, resumed: Sequence[BatchedRun] = (),
    checkpoint_hook: CheckpointHook = lambda: None, job_limit: JobLimit = lambda: math.inf,
) -> Iterator[RunEvaluation]:  # fmt: skip
    """Compute many runs together until the rule of each stops it, and yield every evaluation with its run.

    A run whose weights are no longer finite ends without an evaluation, and is yielded with None. A run is started
    when few are in progress or they cannot fill a batch, so that a long sweep needs no more memory than a short one.
    ``resumed`` are the runs that were in progress when an earlier call was checkpointed, in their order. ``job_limit``
    is asked before every batch; at zero, what is trained is merged and evaluated, and the call ends.
    """
    try:
        yield from _computed(_ActiveRuns(trainer, iter(runs), resumed, job_limit), trainer, checkpoint_hook)
    except BaseException:
        # On a device that failed, every call raises that error again: it must not replace the first one.
        with suppress(RuntimeError):
            _wait_for_device(trainer)
        raise
    _wait_for_device(trainer)


def _wait_for_device(trainer: Trainer) -> None:
    """Let the device finish the speculative work that a run leaves when it ends.

    With CUDA's multi-process service, a process that exits before that can end the processes of all others with an
    error.
    """
    if trainer.asynchronous:
        torch.cuda.synchronize()


def _computed(active: _ActiveRuns, trainer: Trainer, checkpoint_hook: CheckpointHook) -> Iterator[RunEvaluation]:
    batch: Batch | None = None
    while True:
        checkpoint_hook()
        for run in [run for run in active.runs if run.unreported and not run.held]:
            batch = None  # the caller may release further runs when it receives these results
            yield from _report(run)
        pending = active.advance()
        if batch == [] and not pending:
            return
        results = _start_evaluation(pending, trainer)
        if not trainer.asynchronous:
            yield from _record(pending, results())
            pending, results = [], list
        batch = active.next_batch()
        # A CUDA device trains this batch while the host waits for the results of the last one.
        deltas = trainer.train([run.job(update) for run, update in batch])
        for (run, update), delta in zip(batch, deltas, strict=True):
            run.deltas[update] = delta
            run.reference.updates_trained += 1
        for run in active.runs:
            run.reference.release()
        yield from _record(pending, results())
        if pending:
            batch = None  # the caller may have released runs since it was chosen


def _record(pending: PendingEvals, results: Sequence[EvalResult]) -> Iterator[RunEvaluation]:
    for (run, one), result in zip(pending, results, strict=True):
        run.unreported.append((one, result))
        yield from _report(run)


def _report(run: BatchedRun) -> Iterator[RunEvaluation]:
    """Record the unreported results of a run, and yield its evaluations."""
    while run.unreported and run.running and not (run.held and run.defer_results):
        evaluation = run.record(*run.unreported.popleft())
        if evaluation is not None or not run.running:
            yield run, evaluation


def _gather(runs: Sequence[BatchedRun], max_batch_jobs: int, max_pending_updates: int) -> Batch:
    """Return ready jobs of all runs, with an equal share of the batch for each; unused shares go to other runs."""
    share = max(1, max_pending_updates // max(1, len(runs)))
    queues = [[(run, update) for update in run.ready(max_batch_jobs, share)] for run in runs]
    in_turn = (entry for entries in zip_longest(*queues) for entry in entries if entry is not None)
    return list(islice(in_turn, max_batch_jobs))
