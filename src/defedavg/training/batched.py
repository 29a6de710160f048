"""The batched executor: jobs of many clients, rounds, seeds and rates in one stacked step.

A job is ready as soon as its start version is there. So the executor looks ahead in every run's plan, trains ready jobs
together, merges every round whose jobs are trained, and looks ahead again. Which jobs share a batch changes no result
but for rounding: every job has its own weights, samples, rate and number of steps. Versions are measured in batches,
while the device trains on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..algorithms.protocol import Update
from ..errors import UserError
from ..planning.records import Record, Round
from .evaluation import Evaluator
from .reference import Reference
from .stopping import (
    CheckpointHook,
    EvalCounters,
    EvalResult,
    EvalSchedule,
    Evaluation,
    PendingEval,
    RunProgress,
    StoppingRule,
)
from .trainer import Trainer, TrainingJob

LOOK_AHEAD = 256  # rounds read ahead at most
BARREN = 32  # rounds without a job that is ready, and those behind them are not looked at either
AT_ONCE = 64  # versions of a run that may wait to be measured


@dataclass(eq=False)
class BatchedRun:
    """One run under the executor: its stream, what was read of it, and what was computed."""

    reference: Reference
    records: Iterator[Record]
    goal: StoppingRule
    progress: RunProgress
    rounds: deque[Round] = field(default_factory=deque)
    deltas: dict[Update, Tensor] = field(default_factory=dict)
    tally: EvalCounters = field(default_factory=EvalCounters)
    last: Record | None = None  # the record that ends the run before its rounds are full
    ended: bool = False
    held: bool = False  # whoever reads the measurements may let a run wait for others
    exact: bool = False  # while it waits nothing is told of it, though it may have been computed further
    later: deque[tuple[PendingEval, EvalResult]] = field(default_factory=deque)  # so this was seen meanwhile

    def __post_init__(self) -> None:
        self.meter = EvalSchedule(self.reference.task, self.goal, self.progress, self.tally)
        self.newest = self.tally.newest[0]

    @property
    def running(self) -> bool:
        """Whether there is more to compute, as far as is known."""
        return self.meter.running

    def ready(self, wanted: int, room: int) -> list[Update]:
        """Jobs that can be trained now, the soonest needed first; reads ahead until there are ``wanted``.

        ``room`` is how many trained updates may wait for their rounds: those of the next round always may.
        """
        if self.ended or self.held:
            return []
        found: list[Update] = []
        barren = 0  # rounds in a row without a job that is ready
        for number in range(LOOK_AHEAD):
            if barren == BARREN or (number >= len(self.rounds) and not self._read()):
                break
            free = wanted if number == 0 else min(wanted, room - len(self.deltas))
            if len(found) >= free:
                break
            more = self._untrained(self.rounds[number])
            barren = 0 if more else barren + 1
            found.extend(more[: free - len(found)])
        return found

    def advance(self) -> Iterator[PendingEval]:
        """Merge every round whose jobs are trained; yields the versions as they come."""
        for _ in range(AT_ONCE):
            if self.ended or self.held or not (self.rounds or self._read()):
                break
            merge = self.rounds[0].merge
            if any(update.steps and update not in self.deltas for update, _ in merge.updates):
                return
            record = self.rounds.popleft()
            trained = {update: self.deltas.pop(update) for update, _ in merge.updates if update.steps}
            self.newest = merge.version
            due = self.meter.round(record, self.reference.merge(record, trained))
            self.ended = due.ends is not None
            yield due
        if self.last is not None and not self.rounds and not self.ended and not self.held:
            self.ended = True
            yield self.meter.ended(self.last, self.reference.versions[self.newest])

    def job(self, update: Update) -> TrainingJob:
        """The work of an update whose start version is there."""
        return TrainingJob(self.reference.recipe, self.reference.task, self.reference.versions[update.version], update)

    def settle(self, due: PendingEval, outcome: EvalResult) -> Evaluation | None:
        """Take in what was seen of a version; where the run is over, what was computed beyond is forgotten."""
        found = self.meter.settle(due, outcome)
        if not self.running:
            self.reference.versions = {due.round: due.weights}
            self.newest = due.round
            self.deltas.clear()
        return found

    def _untrained(self, record: Round) -> list[Update]:
        return [
            update
            for update, _ in record.merge.updates
            if update.steps and update.version <= self.newest and update not in self.deltas
        ]

    def _read(self) -> bool:
        """Read one more round; False where the run ends."""
        planned = self.rounds[-1].merge.version if self.rounds else self.newest
        while self.last is None and planned < self.goal.max_rounds:
            record = next(self.records)
            if self.goal.ended_by(record):
                self.last = record
            elif isinstance(record, Round):
                self.rounds.append(record)
                return True
        return False


def drive_batched(
    lanes: Iterable[BatchedRun],
    trainer: Trainer,
    resumed: Sequence[BatchedRun] = (),
    rest: CheckpointHook = lambda: None,
) -> Iterator[tuple[BatchedRun, Evaluation | None]]:
    """Compute many runs together until each has reached its goal; yields every measurement with its run.

    A run that ends without one, because its weights are no numbers any more, is yielded with None.

    A run is begun when those before it cannot fill a batch, so that a long sweep needs no more memory than a short one.
    ``resumed`` are runs that were under way at a rest of an earlier call, in their order.
    """
    judge, waiting = Evaluator(trainer), iter(lanes)
    running = list(resumed)
    begun = [(lane, lane.meter.start(lane.reference.versions[0])) for lane in running if not lane.meter.begun]
    batch: list[tuple[BatchedRun, Update]] | None = None
    while True:
        rest()
        for waited in [lane for lane in running if lane.later and not lane.held]:
            batch = None  # whoever hears of it may let others go on
            yield from _catch_up(waited)
        fresh = begun + [(lane, due) for lane in running if lane.running for due in lane.advance()]
        if batch == [] and not fresh:
            return
        verdict = judge.look(fresh)
        if not trainer.asynchronous:
            yield from _settle(fresh, verdict())
            fresh, verdict = [], judge.look([])
        running = [lane for lane in running if lane.running]
        batch = _gather(running, trainer.width, trainer.room)
        begun = []
        while len(batch) < trainer.width and (lane := next(waiting, None)) is not None:
            if not trainer.accepts(lane.reference.module):
                raise UserError("the model is another each time it is built; only its first weights may differ")
            running.append(lane)
            if not lane.meter.begun:
                begun.append((lane, lane.meter.start(lane.reference.versions[0])))
            batch += _gather([lane], trainer.width - len(batch), trainer.room)
        # On a device the next batch is under way before anyone waits for what is known of the last one.
        for (lane, update), delta in zip(
            batch, trainer.train([lane.job(update) for lane, update in batch]), strict=True
        ):
            lane.deltas[update] = delta
            lane.reference.updates_trained += 1
        yield from _settle(fresh, verdict())


def _settle(
    fresh: Sequence[tuple[BatchedRun, PendingEval]], outcomes: Sequence[EvalResult]
) -> Iterator[tuple[BatchedRun, Evaluation | None]]:
    for (lane, due), outcome in zip(fresh, outcomes, strict=True):
        lane.later.append((due, outcome))
        yield from _catch_up(lane)


def _catch_up(lane: BatchedRun) -> Iterator[tuple[BatchedRun, Evaluation | None]]:
    """Take in what was seen of a run."""
    while lane.later and lane.running and not (lane.held and lane.exact):
        found = lane.settle(*lane.later.popleft())
        if found is not None or not lane.running:
            yield lane, found


def _gather(lanes: Sequence[BatchedRun], width: int, room: int) -> list[tuple[BatchedRun, Update]]:
    """Ready jobs of all runs, an equal share of the batch for each; what one does not need goes to the others."""
    each = max(1, room // max(1, len(lanes)))
    queues = deque((lane, deque(lane.ready(width, each))) for lane in lanes)
    batch: list[tuple[BatchedRun, Update]] = []
    while queues and len(batch) < width:
        lane, queue = queues.popleft()
        if queue:
            batch.append((lane, queue.popleft()))
            queues.append((lane, queue))
    return batch
