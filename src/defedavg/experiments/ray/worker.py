"""A worker: one GPU or several cores, and a batched executor.

The worker computes its assigned runs in a thread of its own. The scheduler polls it for messages, assigns runs, and
decides whether paused runs continue. Other workers may request that it trains jobs when it has no run.
"""

from __future__ import annotations

import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Condition, RLock, Thread
from typing import Any

import torch
from torch import Tensor

from ...config.build import local_training
from ...config.settings import Settings
from ...errors import UserError, first_line
from ...plugins import load_sources
from ...tasks import Data, Task
from ...training import BatchedRun, Evaluation, Reference, RunState, StackingError, Status, run_batched
from ...training.local_training import TrainingJob
from ...training.precision import computing_in
from ...training.state_memory import StateNeed
from ..compute import check_fallback
from ..run_events import completed_share
from ..simulation import Simulation
from .connection import versions
from .shared_trainer import SharedJob, SharedTrainer, fetch

POLL_SECONDS = 1.0  # to wait for messages

StoredData = tuple[tuple[str, ...] | None, tuple[Any, ...]]
"""Data in the object store: the names of the inputs, if they have some, and references to the inputs and targets."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The configuration that all workers share."""

    device: str
    precision: str
    max_batch_jobs: int | None
    memory: int | None
    cores: int
    pauses: tuple[float, ...]  # completed shares at which a run waits for a command
    state_seconds: float  # between two reports of the state of a run
    sources: Mapping[str, str]  # Python files of the study by path: plugins and task modules


@dataclass(frozen=True, slots=True)
class RunAssignment:
    """A run for a worker."""

    number: int
    group: Any  # runs of one group can share batches
    settings: Settings
    seed: int
    task: Any  # a reference to the object store
    state: RunState | None
    evaluations: tuple[Evaluation, ...]  # until that state
    reported: int  # the round of the last evaluation that the scheduler has, perhaps after that state; -1: none
    passed: int  # pauses that ended
    held: bool  # whether the run is paused at that evaluation
    need: StateNeed  # of the group


@dataclass(slots=True)
class ActiveRun:
    """A run in progress."""

    assignment: RunAssignment
    run: Simulation
    began: float
    passed: int
    batched: BatchedRun | None = None


@dataclass(slots=True)
class Mailbox:
    """Assignments and commands for the worker, and its messages; ``changed`` guards them."""

    assignments: deque[RunAssignment] = field(default_factory=deque)
    commands: dict[int, list[str]] = field(default_factory=dict)
    messages: list[tuple[Any, ...]] = field(default_factory=list)
    changed: Condition = field(default_factory=Condition)  # its lock is reentrant
    idle: bool = False


class RayWorker:
    """An actor of Ray."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._mailbox = Mailbox()
        self._tasks: dict[Any, Task] = {}
        self._data: dict[Any, Data] = {}
        self._trainers: dict[Any, SharedTrainer] = {}
        self._helpers: list[Any] = []
        self._helped = 0  # jobs by helpers that were reported
        self._busy = RLock()
        load_sources(config.sources)
        Thread(target=self._main_loop, daemon=True).start()

    # Remote calls.

    def about(self) -> tuple[int, dict[str, str]]:
        """Return the process id and the versions of the libraries."""
        return os.getpid(), versions()

    def messages(self) -> list[tuple[Any, ...]]:
        """Return the messages since the last call; wait a short time for one."""
        with self._mailbox.changed:
            self._mailbox.changed.wait_for(lambda: self._mailbox.messages, POLL_SECONDS)
            messages, self._mailbox.messages = self._mailbox.messages, []
            return messages

    def assign(self, assignment: RunAssignment) -> None:
        """Add a run to the queue."""
        with self._mailbox.changed:
            self._mailbox.assignments.append(assignment)
            self._mailbox.idle = False
            self._mailbox.changed.notify_all()

    def command(self, number: int, command: str) -> None:
        """Let a paused run "continue", or "drop" it."""
        with self._mailbox.changed:
            self._mailbox.commands.setdefault(number, []).append(command)
            self._mailbox.changed.notify_all()

    def set_helpers(self, helpers: Sequence[Any]) -> None:
        """Set the idle workers that train parts of this worker's batches."""
        self._helpers = list(helpers)
        for trainer in self._trainers.values():
            trainer.helpers = list(helpers)

    def train(self, assignment: RunAssignment, share: Sequence[SharedJob]) -> list[Tensor]:
        """Train jobs of another worker's runs and return their updates."""
        with self._busy, computing_in(self._config.precision):
            torch.set_num_threads(self._config.cores)
            trainer = self._trainer(assignment)
            device = torch.device(self._config.device)
            refs = {ref for job in share for ref in (job.start, job.centre, job.correction) if ref is not None}
            vectors = {ref: fetch(ref, device) for ref in refs}
            jobs = [
                TrainingJob(
                    job.local_training, self._task(job.task), vectors[job.start], job.update, job.rate,
                    vectors.get(job.centre), vectors.get(job.correction),
                )
                for job in share
            ]  # fmt: skip
            return [delta.cpu() for delta in trainer.train_locally(jobs)]

    # The main loop.

    def _report(self, *message: Any) -> None:
        with self._mailbox.changed:
            self._mailbox.messages.append(message)
            self._mailbox.changed.notify_all()

    def _task(self, task: Any) -> Task:
        import ray

        if task not in self._tasks:
            stored = ray.get(task)
            self._tasks[task] = Task(**stored | {name: self._samples(stored[name]) for name in ("train", "test")})
        return self._tasks[task]

    def _samples(self, stored: StoredData) -> Data:
        """Return data from the object store; all workers of a node share that memory and only read it."""
        import ray

        names, refs = stored
        if refs not in self._data:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # PyTorch warns that the arrays are read-only
                *inputs, targets = (torch.from_numpy(array) for array in ray.get(list(refs)))
            named = inputs[0] if names is None else dict(zip(names, inputs, strict=True))
            self._data[refs] = Data(named, targets).to(self._config.device)
        return self._data[refs]

    def _trainer(self, assignment: RunAssignment) -> SharedTrainer:
        if assignment.group not in self._trainers:
            task, config = self._task(assignment.task), self._config
            size = assignment.settings.training.batch_size
            training = local_training(assignment.settings, assignment.seed)
            module = Reference(task, training).module
            self._trainers[assignment.group] = SharedTrainer(
                self._busy,
                task,
                module,
                batch_size=size,
                max_batch_jobs=config.max_batch_jobs,
                memory=config.memory,
                precision=config.precision,
                local_training=training,
                state=assignment.need,
            )
        trainer = self._trainers[assignment.group]
        trainer.assignments[id(self._task(assignment.task))] = assignment
        return trainer

    def _main_loop(self) -> None:
        torch.set_num_threads(self._config.cores)
        try:
            with computing_in(self._config.precision):
                while True:
                    self._run_group(self._wait_for_assignment())
        except UserError as error:
            self._report("failed", str(error))
        except BaseException as error:
            self._report("failed", f"a worker failed: {type(error).__name__}: {first_line(error)}")

    def _wait_for_assignment(self) -> RunAssignment:
        with self._mailbox.changed:
            if not self._mailbox.assignments:
                self._request_run()
            self._mailbox.changed.wait_for(lambda: self._mailbox.assignments)
            return self._mailbox.assignments[0]

    def _run_group(self, first: RunAssignment) -> None:
        """Compute the assigned runs that can share batches with the first one."""
        try:
            with self._busy:
                trainer = self._trainer(first)
                trainer.helpers = list(self._helpers)
        except StackingError as reason:
            check_fallback(self._config.precision, self._config.device, reason)
            self._report("note", f"the model is trained one client at a time: {reason}")
            self._run_sequentially(first.group)
        else:
            self._run_batched(first.group, trainer)

    def _request_run(self) -> None:
        if not self._mailbox.idle:
            self._mailbox.idle = True
            self._mailbox.messages.append(("idle",))
            self._mailbox.changed.notify_all()

    def _next(self, group: Any) -> RunAssignment | None:
        """Return the next assignment if it belongs to the group."""
        with self._mailbox.changed:
            if self._has_next(group):
                return self._mailbox.assignments.popleft()
            if not self._mailbox.assignments:
                self._request_run()
            return None

    def _has_next(self, group: Any) -> bool:
        with self._mailbox.changed:
            return bool(self._mailbox.assignments) and self._mailbox.assignments[0].group == group

    def _begin(self, assignment: RunAssignment) -> ActiveRun:
        run, before = Simulation(assignment.settings, assignment.seed, self._task(assignment.task)), 0.0
        if assignment.state is not None:
            run.resume(assignment.state, assignment.evaluations)
            before = assignment.state.counters.wall_seconds
        return ActiveRun(assignment, run, time.perf_counter() - before, assignment.passed)

    def _report_evaluation(self, active: ActiveRun, evaluation: Evaluation) -> None:
        progress = active.run.progress
        hits = progress.first_hit_seconds, progress.sustained_seconds
        self._report("evaluated", active.assignment.number, evaluation, hits)

    def _report_state(self, active: ActiveRun, state: RunState) -> None:
        self._report("state", active.assignment.number, state.on_host())

    def _report_end(self, active: ActiveRun) -> None:
        final = replace(active.run.progress, evaluations=[])
        helped = sum(trainer.helped for trainer in self._trainers.values())
        self._report("helped", helped - self._helped)
        self._helped = helped
        wall_seconds, trained = time.perf_counter() - active.began, active.run.executor.updates_trained
        self._report("finished", active.assignment.number, final, trained, wall_seconds, active.run.weights.cpu())

    def _run_sequentially(self, group: Any) -> None:
        """Compute runs of a model that cannot be stacked, one after the other."""
        while (assignment := self._next(group)) is not None:
            active = self._begin(assignment)

            def report(active: ActiveRun = active) -> None:
                assert active.run.schedule is not None
                self._report_state(active, RunState.of(active.run.executor, active.run.schedule, active.run.progress))

            hook = Throttled(self._config.state_seconds, report)
            for evaluation in active.run.reference_run(hook):
                self._report_evaluation(active, evaluation)
            self._report_end(active)

    def _run_batched(self, group: Any, trainer: SharedTrainer) -> None:
        active: dict[BatchedRun, ActiveRun] = {}

        def begin(assignment: RunAssignment) -> BatchedRun:
            run = self._begin(assignment)
            with self._busy:
                self._trainer(assignment)
            run.batched = batched = run.run.batched_run()
            batched.defer_results = True  # how far a paused run is ahead depends on what else is computed here
            active[batched] = run
            if assignment.state is not None:
                assignment.state.restore_batched_run(batched, trainer)
            if assignment.evaluations:
                self._pause(run, assignment.evaluations[-1])
            return batched

        def report() -> None:
            for batched, run in active.items():
                if batched.schedule.started and not batched.unreported:
                    self._report_state(run, RunState.of_batched_run(batched, trainer))

        hook = Throttled(self._config.state_seconds, report)
        while active or self._has_next(group):
            runs = AssignedRuns(lambda: self._next(group), begin)
            for batched, evaluation in run_batched(runs, trainer, list(active), hook):
                if evaluation is not None:
                    self._report_evaluation(active[batched], evaluation)
                    self._pause(active[batched], evaluation)
                self._apply_commands(active)
            self._apply_commands(active)
            if all(batched.held for batched in active):
                self._wait_for_command({run.assignment.number for run in active.values()}, group)

    def _wait_for_command(self, numbers: set[int], group: Any) -> None:
        """Wait for a command or a new run: all runs in progress are paused."""
        with self._mailbox.changed:
            if numbers:
                self._mailbox.changed.wait_for(lambda: numbers & self._mailbox.commands.keys() or self._has_next(group))

    def _pause(self, active: ActiveRun, evaluation: Evaluation) -> None:
        """Pause a run at the next of its pauses, unless the command for it has already arrived.

        Of an evaluation that the scheduler has received before, it has decided whether the run pauses there.
        """
        pauses, batched, assignment = self._config.pauses, active.batched, active.assignment
        if batched is None or batched.held:
            return
        if evaluation.round <= assignment.reported:
            unchanged = evaluation.round == assignment.reported and active.passed == assignment.passed
            batched.held = assignment.held and unchanged
        elif active.passed < len(pauses):
            batched.held = completed_share(assignment.settings, evaluation) >= pauses[active.passed]

    def _apply_commands(self, active: dict[BatchedRun, ActiveRun]) -> None:
        """Apply the scheduler's commands and report runs that have ended."""
        for batched, run in list(active.items()):
            with self._mailbox.changed:
                commands = self._mailbox.commands.pop(run.assignment.number, ())
            for command in commands:
                if command == "drop":
                    run.run.progress.status = Status.DROPPED
                else:
                    run.passed += 1
                    batched.held = False
            if not batched.running:
                del active[batched]
                self._report_end(run)


class Throttled:
    """Calls a function at most once per interval, and less often if the call takes long."""

    def __init__(self, interval: float, function: Callable[[], None]) -> None:
        self._interval, self._function = interval, function
        self._last, self._cost = time.monotonic(), 0.0

    def __call__(self) -> None:
        """Call the function if the interval has passed."""
        began = time.monotonic()
        if began - self._last >= max(self._interval, 20 * self._cost):
            self._function()
            self._last = time.monotonic()
            self._cost = self._last - began


class AssignedRuns:
    """Iterates over assigned runs; after a ``StopIteration`` there may be more."""

    def __init__(
        self, next_assignment: Callable[[], RunAssignment | None], begin: Callable[[RunAssignment], BatchedRun]
    ) -> None:
        self._next, self._begin = next_assignment, begin

    def __iter__(self) -> Iterator[BatchedRun]:
        return self

    def __next__(self) -> BatchedRun:
        """Return the next run."""
        """Return the next run."""
        assignment = self._next()
        if assignment is None:
            raise StopIteration
        return self._begin(assignment)
