"""Many runs carried out together: those that share model, data and batch size share batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .config import Settings
from .errors import UserError, unknown
from .execute import CannotStack, Evaluation, Lane, Status, Trainer, drive_batched
from .execute.memory import parse_memory
from .execute.precision import DEFAULT, check_precision, computing_in
from .simulation import EXECUTORS, Simulation, named_task
from .tasks import Data, Task


def choose_device(name: str) -> str:
    """``cpu`` or ``cuda``, from what was asked for."""
    if name not in ("auto", "cpu", "cuda"):
        raise unknown("device", name, ("auto", "cpu", "cuda"))
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("there is no CUDA device here; use --device cpu")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, slots=True)
class Means:
    """What runs are computed with."""

    executor: str = "batched"
    device: str = "cpu"
    width: int | None = None  # jobs in a batch at most
    memory: int | None = None  # bytes
    precision: str = "float32"

    def __post_init__(self) -> None:
        if self.executor not in EXECUTORS:
            raise unknown("executor", self.executor, EXECUTORS)
        if self.width is not None and self.width < 1:
            raise UserError(f"--width is {self.width}; it must be at least 1")
        check_precision(self.precision, self.device)

    @classmethod
    def choose(
        cls, executor: str, device: str, width: int | None = None, memory: str | None = None, precision: str = "auto"
    ) -> Means:
        """From what was asked for on the command line."""
        device = choose_device(device)
        precision = DEFAULT[device] if precision == "auto" else precision
        return cls(executor, device, width, None if memory is None else parse_memory(memory), precision)

    def trainer(self, run: Simulation) -> Trainer:
        """For all runs that are like this one but for seed, algorithm and rates."""
        return Trainer(
            run.task,
            run.executor.module,
            batch_size=run.executor.recipe.batch_size,
            width=self.width,
            memory=self.memory,
            precision=self.precision,
        )


@dataclass(frozen=True, slots=True)
class Item:
    """One run of a sweep, by a name of its own."""

    name: Hashable
    settings: Settings
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """Something was measured; ``lane`` is there if the run shares batches."""

    item: Item
    run: Simulation
    evaluation: Evaluation
    lane: Lane | None

    @property
    def part(self) -> float:
        """How much of what it may take the run has taken."""
        stop = self.item.settings.stop
        return max(self.evaluation.round / stop.max_rounds, self.evaluation.seconds / stop.max_seconds)


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """A run is over, however it ended."""

    item: Item
    run: Simulation
    wall_seconds: float


Event = Measured | Finished
Watch = Callable[[Event], None]
"""Told of everything that happens."""


class Sweep:
    """Carries out runs and tells of them as they go; ``notes`` is what a user should know."""

    def __init__(self, means: Means) -> None:
        self.means = means
        self.notes: list[str] = []
        self._tasks: dict[Any, Task] = {}
        self._data: dict[int, tuple[Data, Data]] = {}  # by id, which stays taken while the original is kept
        self._open: dict[Item, tuple[Simulation, float]] = {}

    def task(self, settings: Settings, seed: int) -> Task:
        """The task of a run; runs that share data and split share it."""
        key = (settings.task, settings.clients.num_clients, seed)
        if key not in self._tasks:
            task = named_task(settings, seed)
            train, test = (
                self._data.setdefault(id(data), (data, data.to(self.means.device)))[1]
                for data in (task.train, task.test)
            )
            self._tasks[key] = replace(task, train=train, test=test)
        return self._tasks[key]

    def events(self, items: Sequence[Item]) -> Iterator[Event]:
        """Everything that is measured, and every run that ends."""
        groups: dict[Any, list[Item]] = {}
        for item in items:
            t = item.settings.task
            groups.setdefault((t.data, t.model, t.normalise, item.settings.training.batch_size), []).append(item)
        with computing_in(self.means.precision):
            for group in groups.values():
                yield from self._group(group)

    def interrupt(self) -> list[Finished]:
        """Break off what is under way; gives it as it stands."""
        for run, _ in self._open.values():
            if run.progress.status is Status.RUNNING:
                run.progress.status = Status.INTERRUPTED
        return [self._finish(item) for item in list(self._open)]

    def _begin(self, item: Item) -> Simulation:
        if item not in self._open:
            run = Simulation(item.settings, item.seed, self.task(item.settings, item.seed))
            self._open[item] = run, time.perf_counter()
        return self._open[item][0]

    def _finish(self, item: Item) -> Finished:
        run, began = self._open.pop(item)
        return Finished(item, run, time.perf_counter() - began)

    def _group(self, group: Sequence[Item]) -> Iterator[Event]:
        if self.means.executor == "batched":
            try:
                trainer = self.means.trainer(self._begin(group[0]))
            except CannotStack as reason:
                self.notes.append(f"the model is trained one client at a time: {reason}")
            else:
                yield from self._together(group, trainer)
                return
        for item in group:
            run = self._begin(item)
            for evaluation in run:
                yield Measured(item, run, evaluation, None)
            yield self._finish(item)

    def _together(self, group: Sequence[Item], trainer: Trainer) -> Iterator[Event]:
        begun: dict[Lane, Item] = {}

        def lanes() -> Iterator[Lane]:
            for item in group:
                lane = self._begin(item).lane()
                begun[lane] = item
                yield lane

        for lane, evaluation in drive_batched(lanes(), trainer):
            item = begun[lane]
            if evaluation is not None:
                yield Measured(item, self._open[item][0], evaluation, lane)
            for done in [other for other in begun if not other.running]:
                yield self._finish(begun.pop(done))
        for item in list(begun.values()):
            yield self._finish(item)
