"""Many runs carried out together: those that share model, data and batch size share batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..config.build import build_task
from ..config.study import Settings
from ..errors import UserError, unknown
from ..tasks import Data, Task
from ..training import (
    BatchedRun,
    CheckpointHook,
    Evaluation,
    RunProgress,
    RunState,
    StackingError,
    Status,
    Trainer,
    run_batched,
)
from ..training.memory import parse_memory
from ..training.precision import DEFAULT, check_precision, computing_in
from .simulation import EXECUTORS, Simulation

if TYPE_CHECKING:
    from .ray import RayScheduler


def choose_device(name: str) -> str:
    """``cpu`` or ``cuda``, from what was asked for."""
    if name not in ("auto", "cpu", "cuda"):
        raise unknown("device", name, ("auto", "cpu", "cuda"))
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("there is no CUDA device here; use --device cpu")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, slots=True)
class ComputeConfig:
    """What runs are computed with."""

    executor: str = "batched"
    device: str = "cpu"
    width: int | None = None  # jobs in a batch at most
    memory: int | None = None  # bytes
    precision: str = "float32"
    ray_address: str | None = None  # of a cluster; None: one on this machine alone

    def __post_init__(self) -> None:
        if self.executor not in EXECUTORS:
            raise unknown("executor", self.executor, EXECUTORS)
        if self.width is not None and self.width < 1:
            raise UserError(f"--max-batch-jobs is {self.width}; it must be at least 1")
        check_precision(self.precision, self.device)

    @classmethod
    def choose(
        cls,
        executor: str,
        device: str,
        width: int | None = None,
        memory: str | None = None,
        precision: str = "auto",
        ray_address: str | None = None,
    ) -> ComputeConfig:
        """From what was asked for on the command line; a cluster is joined now, to see what it has."""
        size = None if memory is None else parse_memory(memory)
        if executor == "ray":
            from .ray import choose_device as of_cluster

            device = of_cluster(ray_address, device)
        elif ray_address is not None:
            raise UserError("--ray-address is for --executor ray; give both")
        else:
            device = choose_device(device)
        precision = DEFAULT[device] if precision == "auto" else precision
        return cls(executor, device, width, size, precision, ray_address)

    @property
    def here(self) -> str:
        """The device of this process."""
        return "cpu" if self.executor == "ray" else self.device

    def trainer(self, run: Simulation) -> Trainer:
        """For all runs that are like this one but for seed, algorithm and rates."""
        return Trainer(
            run.task,
            run.executor.module,
            batch_size=run.executor.local_training.batch_size,
            max_batch_jobs=self.width,
            memory=self.memory,
            precision=self.precision,
        )


@dataclass(frozen=True, slots=True)
class RunSpec:
    """One run of a sweep, by a name of its own."""

    name: Hashable
    settings: Settings
    seed: int


def part(settings: Settings, evaluation: Evaluation) -> float:
    """How much of what it may take a run has taken."""
    return max(evaluation.round / settings.stop.max_rounds, evaluation.seconds / settings.stop.max_seconds)


class PausableRun(Protocol):
    """A run that can be let wait for others, and dropped by its status."""

    held: bool

    @property
    def progress(self) -> RunProgress:
        """Where it stands."""


@dataclass(frozen=True, slots=True, eq=False)
class RunEvaluated:
    """Something was measured; ``lane`` is there if the run shares batches."""

    item: RunSpec
    run: Simulation
    evaluation: Evaluation
    lane: PausableRun | None

    @property
    def part(self) -> float:
        """How much of what it may take the run has taken."""
        return part(self.item.settings, self.evaluation)


@dataclass(frozen=True, slots=True, eq=False)
class RunFinished:
    """A run is over, however it ended."""

    item: RunSpec
    run: Simulation
    wall_seconds: float


Event = RunEvaluated | RunFinished
Watch = Callable[[Event], None]
"""Told of everything that happens."""

Resumed = tuple[RunState, Sequence[Evaluation]]
"""Where a run stood at the end of an earlier sitting, and what it had measured."""


def group_of(settings: Settings) -> Hashable:
    """The same for runs that can share batches."""
    task = settings.task
    return task.data, task.model, task.normalise, settings.training.batch_size


class Sweep:
    """Carries out runs and tells of them as they go; ``notes`` is what a user should know.

    ``rest`` is called wherever all that was computed has been told of: ``standings`` is then where every run under way
    stands, and ``fit`` is the width and the room of its batches. ``pauses`` are the parts of its time at which whoever
    listens will let a run wait: on a cluster it must know them beforehand.
    """

    def __init__(self, means: ComputeConfig, rest: CheckpointHook = lambda: None, pauses: Sequence[float] = ()) -> None:
        self.means = means
        self._pauses = tuple(pauses)
        self._crew: RayScheduler | None = None
        self.notes: list[str] = []
        self._rest = rest
        self._resumed: Mapping[RunSpec, Resumed] = {}
        self._fit: tuple[int, int] | None = None
        self._trainer: Trainer | None = None
        self._lanes: dict[RunSpec, BatchedRun] = {}
        self._tasks: dict[Any, Task] = {}
        self._data: dict[int, tuple[Data, Data]] = {}  # by id, which stays taken while the original is kept
        self._open: dict[RunSpec, tuple[Simulation, float]] = {}

    def task(self, settings: Settings, seed: int) -> Task:
        """The task of a run; runs that share data and split share it."""
        key = (settings.task, settings.clients.num_clients, seed)
        if key not in self._tasks:
            task = build_task(settings, seed)
            train, test = (
                self._data.setdefault(id(data), (data, data.to(self.means.here)))[1] for data in (task.train, task.test)
            )
            self._tasks[key] = replace(task, train=train, test=test)
        return self._tasks[key]

    def events(
        self,
        items: Sequence[RunSpec],
        resumed: Mapping[RunSpec, Resumed] | None = None,
        fit: tuple[int, int] | None = None,
    ) -> Iterator[Event]:
        """Everything that is measured, and every run that ends; ``resumed`` are those that were under way before."""
        self._resumed, self._fit = resumed or {}, fit
        if self.means.executor == "ray":
            yield from self._on_cluster(items)
            return
        groups: dict[Any, list[RunSpec]] = {}
        for item in items:
            groups.setdefault(group_of(item.settings), []).append(item)
        with computing_in(self.means.precision):
            for group in groups.values():
                yield from self._group(group)

    def standings(self) -> dict[RunSpec, RunState]:
        """Where every run under way stands, in the order in which they were begun; to be asked at a rest."""
        found = {}
        for item, (run, _) in self._open.items():
            if self._crew is not None:
                found[item] = self._crew.stood[item]
            elif item in self._lanes and self._trainer is not None:
                found[item] = RunState.of_batched_run(self._lanes[item], self._trainer)
            elif run.meter is not None:
                found[item] = RunState.of(run.executor, run.meter, run.progress)
        return found

    @property
    def fit(self) -> tuple[int, int] | None:
        """Jobs in a batch, and trained updates that may wait, of the runs under way."""
        trainer = self._trainer if self._lanes else None
        return (trainer.max_batch_jobs, trainer.max_pending_updates) if trainer else None

    def interrupt(self) -> list[RunFinished]:
        """Break off what is under way; gives it as it stands."""
        if self._crew is not None:
            self._crew.dismiss()
        for run, _ in self._open.values():
            if run.progress.status is Status.RUNNING:
                run.progress.status = Status.INTERRUPTED
        return [self._finish(item) for item in list(self._open)]

    def _begin(self, item: RunSpec) -> Simulation:
        if item not in self._open:
            run, before = Simulation(item.settings, item.seed, self.task(item.settings, item.seed)), 0.0
            if item in self._resumed:
                standing, evaluations = self._resumed[item]
                run.resume(standing, evaluations)
                before = standing.counters.wall_seconds
            self._open[item] = run, time.perf_counter() - before
        return self._open[item][0]

    def _finish(self, item: RunSpec) -> RunFinished:
        run, began = self._open.pop(item)
        self._lanes.pop(item, None)
        return RunFinished(item, run, time.perf_counter() - began)

    def _on_cluster(self, items: Sequence[RunSpec]) -> Iterator[Event]:
        from .ray import RayScheduler

        self._crew = RayScheduler(self.means, self._pauses, self.notes)
        started = {item: standing for item, (standing, _) in self._resumed.items()}
        for event in self._crew.events(items, started, self._begin, group_of, self._rest):
            if isinstance(event, RunFinished):
                del self._open[event.item]
            yield event

    def _group(self, group: Sequence[RunSpec]) -> Iterator[Event]:
        if self.means.executor == "batched":
            try:
                trainer = self.means.trainer(self._begin(group[0]))
            except StackingError as reason:
                self.notes.append(f"the model is trained one client at a time: {reason}")
            else:
                yield from self._together(group, trainer)
                return
        for item in group:
            run = self._begin(item)
            for evaluation in run.drive(self._rest):
                yield RunEvaluated(item, run, evaluation, None)
            yield self._finish(item)

    def _together(self, group: Sequence[RunSpec], trainer: Trainer) -> Iterator[Event]:
        begun: dict[BatchedRun, RunSpec] = {}
        self._trainer = trainer

        def begin(item: RunSpec) -> BatchedRun:
            lane = self._lanes[item] = self._begin(item).lane()
            begun[lane] = item
            return lane

        resumed = [begin(item) for item in self._resumed if item in group]
        if resumed and self._fit is not None:
            trainer.max_batch_jobs, trainer.max_pending_updates = self._fit
        for lane in resumed:
            self._resumed[begun[lane]][0].restore_batched_run(lane, trainer)
        others = (begin(item) for item in group if item not in self._resumed)
        for lane, evaluation in run_batched(others, trainer, resumed, self._rest):
            item = begun[lane]
            if evaluation is not None:
                yield RunEvaluated(item, self._open[item][0], evaluation, lane)
            for done in [other for other in begun if not other.running]:
                yield self._finish(begun.pop(done))
        for item in list(begun.values()):
            yield self._finish(item)
