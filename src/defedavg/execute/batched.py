"""The batched executor: jobs of many clients, rounds, seeds and rates in one stacked step.

A job is ready as soon as its start version is there. So the executor looks ahead in every run's plan, trains ready jobs
together, merges every round whose jobs are trained, and looks ahead again. Which jobs share a batch changes no result
but for rounding: every job has its own weights, samples, rate and number of steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..errors import UserError
from ..plan import Record, Round
from ..protocol import Update
from .drive import Evaluation, Goal, Meter, Progress, Status
from .reference import Reference
from .trainer import Job, Trainer

LOOK_AHEAD = 256  # rounds; more would only keep more updates waiting


@dataclass(eq=False)
class Lane:
    """One run under the executor: its stream, what was read of it, and what was computed."""

    reference: Reference
    records: Iterator[Record]
    goal: Goal
    progress: Progress
    rounds: deque[Round] = field(default_factory=deque)
    deltas: dict[Update, Tensor] = field(default_factory=dict)
    newest: int = 0
    last: Record | None = None  # the record that ends the run before its rounds are full

    def __post_init__(self) -> None:
        self.meter = Meter(self.reference, self.goal, self.progress)

    @property
    def running(self) -> bool:
        """Whether there is more to compute."""
        return self.progress.status is Status.RUNNING

    def ready(self, wanted: int) -> list[Update]:
        """Jobs that can be trained now, the soonest needed first; reads ahead until there are ``wanted``."""
        found = [update for record in self.rounds for update in self._untrained(record)]
        while len(found) < wanted and len(self.rounds) < LOOK_AHEAD and self._read():
            found.extend(self._untrained(self.rounds[-1]))
        return found[:wanted]

    def advance(self) -> Iterator[Evaluation]:
        """Merge every round whose jobs are trained; yields what is measured on the way."""
        while self.running and (self.rounds or self._read()):
            merge = self.rounds[0].merge
            if any(update.steps and update not in self.deltas for update, _ in merge.updates):
                return
            record = self.rounds.popleft()
            trained = {update: self.deltas.pop(update) for update, _ in merge.updates if update.steps}
            self.newest = merge.version
            found = self.meter.round(record, self.reference.merge(record, trained))
            if found is not None:
                yield found
        if self.running and self.last is not None:
            found = self.meter.ended(self.last)
            if found is not None:
                yield found

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


def drive_batched(lanes: Sequence[Lane], trainer: Trainer, width: int) -> Iterator[tuple[Lane, Evaluation]]:
    """Compute many runs together until each has reached its goal; yields every measurement with its run."""
    if width < 1:
        raise UserError(f"the batch width is {width}; it must be at least 1")
    for lane in lanes:
        yield lane, lane.meter.start()
    while True:
        for lane in lanes:
            for found in lane.advance():
                yield lane, found
        batch = _gather([lane for lane in lanes if lane.running], width)
        if not batch:
            return
        jobs = [
            Job(lane.reference.recipe, lane.reference.task, lane.reference.versions[update.version], update)
            for lane, update in batch
        ]
        for (lane, update), delta in zip(batch, trainer.train(jobs), strict=True):
            lane.deltas[update] = delta
            lane.reference.updates_trained += 1


def _gather(lanes: Sequence[Lane], width: int) -> list[tuple[Lane, Update]]:
    """Ready jobs of all runs, an equal share of the batch for each; what one does not need goes to the others."""
    queues = deque((lane, deque(lane.ready(width))) for lane in lanes)
    batch: list[tuple[Lane, Update]] = []
    while queues and len(batch) < width:
        lane, queue = queues.popleft()
        if queue:
            batch.append((lane, queue.popleft()))
            queues.append((lane, queue))
    return batch
