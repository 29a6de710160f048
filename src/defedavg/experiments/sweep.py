"""Computes many runs together: runs that share model, data and batch size share batches."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch

from ..algorithms import ALGORITHMS
from ..config.build import build_task, local_training, make_executor, state_need
from ..config.settings import Settings
from ..tasks import Data, Task
from ..training import BatchedRun, CheckpointHook, RunState, StackingError, Status, Trainer, run_batched
from ..training.kernels.plain import LayerKernels
from ..training.memory import allowed, least_bytes
from ..training.precision import computing_in
from ..training.stacked_optimizer import LocalMethod
from ..training.stacking.stacked_model import stack
from ..training.state_memory import StateMemory, StateNeed
from .compute import ComputeConfig, check_fallback, reference_precision
from .run_events import Event, OnResume, ResumedRun, RunEvaluated, RunFinished, RunSpec
from .simulation import Simulation

if TYPE_CHECKING:
    from .ray.scheduler import RayScheduler

LIMITS = ("max_batch_jobs", "max_pending_updates", "max_new_versions")
"""The limits of a trainer on which it depends how far a run is when it pauses, in the order of a checkpoint."""


class Sweep:
    """Computes runs and reports events; ``notes`` are lines for the user.

    ``checkpoint_hook`` is called whenever everything computed so far has been reported: ``run_states`` then returns the
    states of the runs in progress, and ``batch_limits`` the limits of their batches. ``pauses`` are the completed
    shares at which the receiver of the events may pause a run; a cluster must know them in advance. ``on_begin`` is
    called with every run before it starts. ``on_resume`` is called with every run of an earlier session that can be
    paused, before it continues: it pauses the run again if it was paused, and returns how many of its pauses ended.
    """

    def __init__(
        self,
        compute: ComputeConfig,
        checkpoint_hook: CheckpointHook = lambda: None,
        pauses: Sequence[float] = (),
        on_begin: Callable[[RunSpec, Simulation], None] | None = None,
        on_resume: OnResume = lambda _spec, _run: 0,
    ) -> None:
        self.compute = compute
        self.notes: list[str] = []
        self._pauses = tuple(pauses)
        self._checkpoint_hook = checkpoint_hook
        self._on_begin = on_begin
        self._on_resume = on_resume
        self._scheduler: RayScheduler | None = None
        self._trainer: Trainer | None = None
        self._resumed: Mapping[RunSpec, ResumedRun] = {}
        self._limits: Sequence[int] | None = None
        self._batched: dict[RunSpec, BatchedRun] = {}
        self._tasks: dict[Any, Task] = {}
        self._data: dict[int | str, tuple[Data, Data]] = {}  # with the original, whose id must not be used again
        self._in_progress: dict[RunSpec, tuple[Simulation, float]] = {}

    def task(self, settings: Settings, seed: int) -> Task:
        """Return the task of a run; runs with the same data and partition share it."""
        # A task module may read every setting.
        key = (settings if settings.task.module else (settings.task, settings.clients.num_clients), seed)
        if key not in self._tasks:
            task = build_task(settings, seed)
            # Built-in data sets are loaded once; a task module may make new ones, equal or not, for every run.
            name = _digest if settings.task.module else id
            train, test = (
                self._data.setdefault(name(data), (data, data.to(self.compute.local_device)))[1]
                for data in (task.train, task.test)
            )
            self._tasks[key] = replace(task, train=train, test=test)
        return self._tasks[key]

    def group_of(self, spec: RunSpec) -> Hashable:
        """Return a key that is equal for runs that can share batches."""
        settings = spec.settings
        if settings.task.module:
            task = self.task(settings, spec.seed)
            model: Hashable = (repr(task.model()), task.function_names, id(task.train), id(task.test))
        else:
            model = tuple(getattr(settings.task, name) for name in ("data", "model", "normalise", "test_share"))
        # A round of one-step jobs is short; in a batch of longer jobs it would last as long as these.
        one_step = ALGORITHMS[settings.algorithm].steps_per_job(settings.training.local_steps) == 1
        return model, settings.training.batch_size, one_step, LocalMethod.of(local_training(settings, spec.seed))

    def state_need(self, group: Sequence[RunSpec]) -> StateNeed:
        """Return the numbers of state vectors of runs that can share batches."""
        needs = self._state_needs(group)
        return StateNeed(max(needs.values()), needs.total())

    def _state_needs(self, specs: Sequence[RunSpec]) -> Counter[tuple[RunSpec, ...]]:
        """Return the state vectors of runs that must be in progress together."""
        sets: dict[Hashable, list[RunSpec]] = {}
        for spec in specs:
            # A run that pauses waits for those with other rates and seeds.
            training = replace(spec.settings.training, global_lr=1.0, local_lr=1.0)
            sets.setdefault(replace(spec.settings, training=training) if self._pauses else spec, []).append(spec)
        return Counter({tuple(runs): sum(state_need(run.settings, run.seed) for run in runs) for runs in sets.values()})

    def check(self, specs: Sequence[RunSpec]) -> None:
        """Raise ``UserError`` if some run cannot be computed as asked, before anything is computed."""
        self._check_precision(specs)
        self._check_state(specs)

    def _check_precision(self, specs: Sequence[RunSpec]) -> None:
        """Refuse a model that cannot be stacked if only stacked models are trained in the precision."""
        compute = self.compute
        if reference_precision(compute.precision, compute.device) == compute.precision:
            return
        for spec in {self.group_of(spec): spec for spec in specs}.values():
            task = self.task(spec.settings, spec.seed)
            try:  # whether a model can be stacked depends on no kernel
                stack(make_executor(spec.settings, spec.seed, task).module, LayerKernels(), task.train[:3].inputs)
            except StackingError as reason:
                check_fallback(compute.precision, compute.device, reason)

    def _check_state(self, specs: Sequence[RunSpec]) -> None:
        """Refuse a run whose state vectors cannot fit into memory."""
        if self.compute.executor == "ray":  # the memory of other machines is not known here
            return
        sizes: dict[Hashable, int] = {}
        device = torch.device(self.compute.device)
        for (first, *others), vectors in self._state_needs(specs).items():
            if not vectors:
                continue
            group = self.group_of(first)
            if group not in sizes:
                executor = make_executor(first.settings, first.seed, self.task(first.settings, first.seed))
                sizes[group] = executor.versions[0].nbytes
            usable = allowed(self.compute.memory, device)
            memory = StateMemory.within(device, sizes[group], usable, least_bytes(sizes[group], 0))
            who = first.settings.algorithm
            memory.check(f"{who}, in {len(others) + 1} runs that are compared," if others else who, vectors)

    def events(
        self,
        specs: Sequence[RunSpec],
        resumed: Mapping[RunSpec, ResumedRun] | None = None,
        batch_limits: Sequence[int] | None = None,
    ) -> Iterator[Event]:
        """Compute all runs and yield their events; ``resumed`` are the states of runs from an earlier session."""
        self._resumed, self._limits = resumed or {}, batch_limits
        if self.compute.executor == "ray":
            yield from self._on_cluster(specs)
            return
        groups: dict[Any, list[RunSpec]] = {}
        for spec in specs:
            groups.setdefault(self.group_of(spec), []).append(spec)
        # The group of an earlier session goes first: a checkpoint holds the states of one group only.
        ordered = sorted(groups.values(), key=self._resumed.keys().isdisjoint)
        with computing_in(self.compute.precision):
            for group in ordered:
                yield from self._group(group)

    def run_states(self) -> dict[RunSpec, RunState]:
        """Return the states of the runs in progress, in the order in which they began; only within the hook."""
        if self._scheduler is not None:
            return dict(self._scheduler.states)  # with those of resumed runs that no worker has yet
        states = {}
        for spec, (run, _) in self._in_progress.items():
            if spec in self._batched and self._trainer is not None:
                states[spec] = RunState.of_batched_run(self._batched[spec], self._trainer)
            elif run.schedule is not None:
                states[spec] = RunState.of(run.executor, run.schedule, run.progress)
        return states

    @property
    def batch_limits(self) -> tuple[int, ...] | None:
        """The jobs per batch, pending updates and new versions of the runs in progress, at most."""
        return tuple(getattr(self._trainer, name) for name in LIMITS) if self._trainer and self._batched else None

    def interrupt(self) -> list[RunFinished]:
        """Stop the runs in progress and return them as they are."""
        if self._scheduler is not None:
            self._scheduler.stop_workers()
        for run, _ in self._in_progress.values():
            if run.progress.status is Status.RUNNING:
                run.progress.status = Status.INTERRUPTED
        return [self._finish(spec) for spec in list(self._in_progress)]

    def _begin(self, spec: RunSpec) -> Simulation:
        if spec not in self._in_progress:
            run, before = Simulation(spec.settings, spec.seed, self.task(spec.settings, spec.seed)), 0.0
            if spec in self._resumed:
                state, evaluations = self._resumed[spec]
                run.resume(state, evaluations)
                before = state.counters.wall_seconds
            if self._on_begin is not None:
                self._on_begin(spec, run)
            self._in_progress[spec] = run, time.perf_counter() - before
        return self._in_progress[spec][0]

    def _finish(self, spec: RunSpec) -> RunFinished:
        run, began = self._in_progress.pop(spec)
        run.executor.finish()
        self._batched.pop(spec, None)
        return RunFinished(spec, run, time.perf_counter() - began)

    def _on_cluster(self, specs: Sequence[RunSpec]) -> Iterator[Event]:
        from .ray.scheduler import RayScheduler

        self._scheduler = RayScheduler(self.compute, self._pauses, self.notes)
        started = {spec: state for spec, (state, _) in self._resumed.items()}
        for event in self._scheduler.events(
            specs, started, self._begin, self._on_resume, self.group_of, self.state_need, self._checkpoint_hook
        ):
            if isinstance(event, RunFinished):
                del self._in_progress[event.spec]
            yield event

    def _group(self, group: Sequence[RunSpec]) -> Iterator[Event]:
        if self.compute.executor == "batched":
            try:
                self._trainer = self.compute.trainer(self._begin(group[0]), self.state_need(group))
            except StackingError as reason:
                self.notes.append(f"the model is trained one client at a time: {reason}")
            else:
                yield from self._in_shared_batches(group, self._trainer)
                return
        for spec in group:
            run = self._begin(spec)
            for evaluation in run.reference_run(self._checkpoint_hook, self.compute.memory):
                yield RunEvaluated(spec, run, evaluation, None)
            yield self._finish(spec)

    def _in_shared_batches(self, group: Sequence[RunSpec], trainer: Trainer) -> Iterator[Event]:
        specs: dict[BatchedRun, RunSpec] = {}

        def begin(spec: RunSpec) -> BatchedRun:
            run = self._batched[spec] = self._begin(spec).batched_run()
            specs[run] = spec
            return run

        resumed = [begin(spec) for spec in self._resumed if spec in group]
        if resumed and self._limits is not None:
            for name, limit in zip(LIMITS, self._limits, strict=False):  # an earlier version saved the first two
                setattr(trainer, name, limit)
        for run in resumed:
            self._resumed[specs[run]][0].restore_batched_run(run, trainer)
            self._on_resume(specs[run], run)
        others = (begin(spec) for spec in group if spec not in self._resumed)
        for run, evaluation in run_batched(others, trainer, resumed, self._checkpoint_hook):
            if evaluation is not None:
                spec = specs[run]
                yield RunEvaluated(spec, self._in_progress[spec][0], evaluation, run)
            yield from self._finish_ended(specs)
        for spec in list(specs.values()):
            yield self._finish(spec)

    def _finish_ended(self, specs: dict[BatchedRun, RunSpec]) -> Iterator[RunFinished]:
        for run in [run for run in specs if not run.running]:
            yield self._finish(specs.pop(run))


def _digest(data: Data) -> str:
    tensors = [tensor.cpu().contiguous() for tensor in data.tensors]
    names = list(data.inputs) if isinstance(data.inputs, dict) else None
    digest = sha256(repr((names, [(tensor.dtype, tensor.shape) for tensor in tensors])).encode())
    for tensor in tensors:
        digest.update(tensor.numpy().data)
    return digest.hexdigest()
