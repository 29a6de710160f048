"""A worker: one GPU or a slice of cores, and the batched executor on it.

It works in a thread of its own on the runs that it was given. Whoever drives asks for news, gives runs, and says of
runs that wait whether they go on. Other workers ask it to train when it has nothing else to do.
"""

from __future__ import annotations

import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from threading import Condition, RLock, Thread
from typing import Any

import torch
from torch import Tensor

from ...algorithms.protocol import Update
from ...config.study import Settings
from ...errors import UserError, first_line
from ...tasks import Data, Task
from ...training import BatchedRun, Evaluation, LocalTraining, Reference, RunState, StackingError, Status, run_batched
from ...training.local_training import TrainingJob
from ...training.precision import computing_in
from ..simulation import Simulation
from ..sweep import part
from .connection import versions
from .shared_trainer import Shared, fetch

NEWS = 1.0  # seconds to wait for some


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What all workers are told."""

    device: str
    precision: str
    width: int | None
    memory: int | None
    cores: int
    pauses: tuple[float, ...]  # parts of the time at which a run waits to be told whether it goes on
    every: float  # seconds from one report of where runs stand to the next


@dataclass(frozen=True, slots=True)
class RunAssignment:
    """A run to be carried out."""

    number: int
    group: Any  # runs of one group can share batches
    settings: Settings
    seed: int
    task: Any  # a reference to the object store
    standing: RunState | None
    evaluations: tuple[Evaluation, ...]  # before it was taken up here
    passed: int  # pauses that are behind it


@dataclass(slots=True)
class _Work:
    """A run under way."""

    order: RunAssignment
    run: Simulation
    began: float
    passed: int
    lane: BatchedRun | None = None


@dataclass(slots=True)
class _Inbox:
    """What was said to the worker; ``changed`` guards it."""

    orders: deque[RunAssignment] = field(default_factory=deque)
    words: dict[int, list[str]] = field(default_factory=dict)
    news: list[tuple[Any, ...]] = field(default_factory=list)
    changed: Condition = field(default_factory=Condition)  # with a lock that can be taken twice
    hungry: bool = False


class RayWorker:
    """An actor of Ray."""

    def __init__(self, terms: WorkerConfig) -> None:
        self._terms = terms
        self._said = _Inbox()
        self._tasks: dict[Any, Task] = {}
        self._data: dict[Any, Data] = {}
        self._trainers: dict[Any, Shared] = {}
        self._helpers: list[Any] = []
        self._told = 0  # of the jobs that others trained
        self._busy = RLock()
        Thread(target=self._live, daemon=True).start()

    # What others call.

    def about(self) -> tuple[int, dict[str, str]]:
        """Its process, and versions of what it computes with."""
        return os.getpid(), versions()

    def news(self) -> list[tuple[Any, ...]]:
        """What happened since it was last asked; waits a little for something to happen."""
        with self._said.changed:
            self._said.changed.wait_for(lambda: self._said.news, NEWS)
            news, self._said.news = self._said.news, []
            return news

    def give(self, order: RunAssignment) -> None:
        """A run to be carried out."""
        with self._said.changed:
            self._said.orders.append(order)
            self._said.hungry = False
            self._said.changed.notify_all()

    def tell(self, number: int, word: str) -> None:
        """A run that waits goes on ("go"), or is dropped ("drop")."""
        with self._said.changed:
            self._said.words.setdefault(number, []).append(word)
            self._said.changed.notify_all()

    def help(self, helpers: Sequence[Any]) -> None:
        """Who can be asked to train."""
        self._helpers = list(helpers)
        for trainer in self._trainers.values():
            trainer.helpers = list(helpers)

    def train(self, order: RunAssignment, share: Sequence[tuple[LocalTraining, Any, Any, Update]]) -> list[Tensor]:
        """Δ of jobs of others' runs."""
        with self._busy, computing_in(self._terms.precision):
            torch.set_num_threads(self._terms.cores)
            trainer = self._trainer(order)
            device = torch.device(self._terms.device)
            starts = {ref: fetch(ref, device) for _, _, ref, _ in share}
            jobs = [TrainingJob(recipe, self._task(task), starts[ref], update) for recipe, task, ref, update in share]
            return [delta.cpu() for delta in trainer.alone(jobs)]

    # What it does by itself.

    def _say(self, *news: Any) -> None:
        with self._said.changed:
            self._said.news.append(news)
            self._said.changed.notify_all()

    def _task(self, task: Any) -> Task:
        import ray

        if task not in self._tasks:
            name, model, loss, train, test, clients, classes = ray.get(task)
            self._tasks[task] = Task(name, model, loss, self._samples(train), self._samples(test), clients, classes)
        return self._tasks[task]

    def _samples(self, refs: tuple[Any, Any]) -> Data:
        """From the object store: the arrays lie in memory that all workers of a node share, and are only read."""
        import ray

        if refs not in self._data:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that they cannot be written to is just as well
                inputs, targets = (torch.from_numpy(found) for found in ray.get(list(refs)))
            self._data[refs] = Data(inputs, targets).to(self._terms.device)
        return self._data[refs]

    def _trainer(self, order: RunAssignment) -> Shared:
        if order.group not in self._trainers:
            task, terms = self._task(order.task), self._terms
            size = order.settings.training.batch_size
            module = Reference(task, LocalTraining(order.seed, size)).module
            self._trainers[order.group] = Shared(
                self._busy,
                task,
                module,
                batch_size=size,
                max_batch_jobs=terms.width,
                memory=terms.memory,
                precision=terms.precision,
            )
        trainer = self._trainers[order.group]
        trainer.orders[id(self._task(order.task))] = order
        return trainer

    def _live(self) -> None:
        torch.set_num_threads(self._terms.cores)
        try:
            with computing_in(self._terms.precision):
                while True:
                    with self._said.changed:
                        if not self._said.orders:
                            self._ask_for_more()
                        self._said.changed.wait_for(lambda: self._said.orders)
                        order = self._said.orders[0]
                    try:
                        with self._busy:
                            trainer = self._trainer(order)
                            trainer.helpers = list(self._helpers)
                    except StackingError as reason:
                        self._say("note", f"the model is trained one client at a time: {reason}")
                        self._alone(order.group)
                    else:
                        self._together(order.group, trainer)
        except UserError as error:
            self._say("failed", str(error))
        except BaseException as error:
            self._say("failed", f"a worker failed: {type(error).__name__}: {first_line(error)}")

    def _ask_for_more(self) -> None:
        if not self._said.hungry:
            self._said.hungry = True
            self._said.news.append(("hungry",))
            self._said.changed.notify_all()

    def _next(self, group: Any) -> RunAssignment | None:
        """The next order, if it is of the group."""
        with self._said.changed:
            if self._said.orders and self._said.orders[0].group == group:
                return self._said.orders.popleft()
            if not self._said.orders:
                self._ask_for_more()
            return None

    def _begin(self, order: RunAssignment) -> _Work:
        run, before = Simulation(order.settings, order.seed, self._task(order.task)), 0.0
        if order.standing is not None:
            run.resume(order.standing, order.evaluations)
            before = order.standing.counters.wall_seconds
        return _Work(order, run, time.perf_counter() - before, order.passed)

    def _measured(self, work: _Work, evaluation: Evaluation) -> None:
        progress = work.run.progress
        hits = progress.first_hit_seconds, progress.sustained_seconds
        self._say("measured", work.order.number, evaluation, hits)

    def _finished(self, work: _Work) -> None:
        done = replace(work.run.progress, evaluations=[])
        helped = sum(trainer.helped for trainer in self._trainers.values())
        self._say("helped", helped - self._told)
        self._told = helped
        wall, trained = time.perf_counter() - work.began, work.run.executor.updates_trained
        self._say("finished", work.order.number, done, trained, wall, work.run.weights.cpu())

    def _alone(self, group: Any) -> None:
        """Runs of a model that cannot be stacked, one after the other."""
        while (order := self._next(group)) is not None:
            work = self._begin(order)

            def where(work: _Work = work) -> None:
                assert work.run.meter is not None
                self._stands(work, RunState.of(work.run.executor, work.run.meter, work.run.progress))

            rest = _Seldom(self._terms.every, where)
            for evaluation in work.run.drive(rest):
                self._measured(work, evaluation)
            self._finished(work)

    def _stands(self, work: _Work, standing: RunState) -> None:
        versions = {version: weights.cpu() for version, weights in standing.versions.items()}
        deltas = {update: delta.cpu() for update, delta in standing.deltas.items()}
        self._say("stands", work.order.number, replace(standing, versions=versions, deltas=deltas))

    def _together(self, group: Any, trainer: Shared) -> None:
        under_way: dict[BatchedRun, _Work] = {}

        def begin(order: RunAssignment) -> BatchedRun:
            work = self._begin(order)
            with self._busy:
                self._trainer(order)
            work.lane = lane = work.run.lane()
            lane.defer_results = True  # how far ahead it is when it has to wait depends on what else is computed here
            under_way[lane] = work
            if order.standing is not None:
                order.standing.restore_batched_run(lane, trainer)
            return lane

        def where() -> None:
            for lane, work in under_way.items():
                if lane.schedule.started and not lane.unreported:
                    self._stands(work, RunState.of_batched_run(lane, trainer))

        rest = _Seldom(self._terms.every, where)
        while under_way or self._waiting(group):
            queue = _Queue(lambda: self._next(group), begin)
            for lane, evaluation in run_batched(queue, trainer, list(under_way), rest):
                if evaluation is not None:
                    self._measured(under_way[lane], evaluation)
                    self._pause(under_way[lane], evaluation)
                self._heed(under_way)
            self._heed(under_way)
            if all(lane.held for lane in under_way):
                self._await({work.order.number for work in under_way.values()}, group)

    def _await(self, numbers: set[int], group: Any) -> None:
        """All runs that are left wait to be told."""
        with self._said.changed:
            if numbers:
                self._said.changed.wait_for(lambda: numbers & self._said.words.keys() or self._waiting(group))

    def _waiting(self, group: Any) -> bool:
        with self._said.changed:
            return bool(self._said.orders) and self._said.orders[0].group == group

    def _pause(self, work: _Work, evaluation: Evaluation) -> None:
        """A run that has come to a pause waits, unless it was told already."""
        pauses, lane = self._terms.pauses, work.lane
        if lane is not None and not lane.held and work.passed < len(pauses):
            lane.held = part(work.order.settings, evaluation) >= pauses[work.passed]

    def _heed(self, under_way: dict[BatchedRun, _Work]) -> None:
        """Do as was told, and tell of runs that are over."""
        for lane, work in list(under_way.items()):
            with self._said.changed:
                words = self._said.words.pop(work.order.number, ())
            for word in words:
                if word == "drop":
                    work.run.progress.status = Status.DROPPED
                else:
                    work.passed += 1
                    lane.held = False
            if not lane.running:
                del under_way[lane]
                self._finished(work)


class _Seldom:
    """Does something every so many seconds, or less often if it takes long."""

    def __init__(self, every: float, what: Callable[[], None]) -> None:
        self._every, self._what = every, what
        self._last, self._cost = time.monotonic(), 0.0

    def __call__(self) -> None:
        began = time.monotonic()
        if began - self._last >= max(self._every, 20 * self._cost):
            self._what()
            self._last = time.monotonic()
            self._cost = self._last - began


class _Queue:
    """Lanes of the runs that were given; empty now does not mean empty for ever."""

    def __init__(self, order: Callable[[], RunAssignment | None], begin: Callable[[RunAssignment], BatchedRun]) -> None:
        self._order, self._begin = order, begin

    def __iter__(self) -> Iterator[BatchedRun]:
        return self

    def __next__(self) -> BatchedRun:
        order = self._order()
        if order is None:
            raise StopIteration
        return self._begin(order)
