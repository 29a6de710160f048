"""Races candidates: runs advance in shared batches to equal simulated times, then continue or are dropped.

A run pauses before the first round after the time, so that rounds which are not compared are not trained.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from ..config.build import with_client_tests
from ..config.settings import MAX_COUNT, Settings
from ..experiments.compute import ComputeConfig
from ..experiments.run_events import RunSpec
from ..experiments.simulation import Simulation
from ..experiments.sweep import Sweep
from ..tasks import Task
from ..training import BatchedRun, Evaluation, StackingError, Status, Trainer, run_batched
from ..training.precision import computing_in
from .candidates import AlgorithmGrid, GridCell

EVALUATIONS = 256
"""Of a run until the horizon, where the study does not set ``stop.eval_every_seconds``."""
SMOOTHED = 3
"""Evaluations whose mean is the metric at a time."""


class BudgetSpentError(Exception):
    """The budget of training is spent."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How much may be trained: local steps, or real seconds since the search began, planning included."""

    steps: float = math.inf
    seconds: float = math.inf


@dataclass(eq=False)
class RacedRun:
    """One candidate with one seed."""

    candidate: GridCell
    seed: int
    simulation: Simulation
    steps_per_update: float
    batched: BatchedRun | None = None
    alone: Iterator[Evaluation] | None = None  # where the model cannot be stacked
    counted: int = 0  # updates that the race has counted

    @property
    def running(self) -> bool:
        """Whether the run can advance."""
        return self.simulation.progress.status is Status.RUNNING

    @property
    def seconds(self) -> float:
        """The simulated time that was reached."""
        return self.simulation.progress.seconds

    @property
    def hit(self) -> float | None:
        """The simulated time at which the target was reached and, where the study asks for it, held."""
        progress = self.simulation.progress
        if progress.status is not Status.TARGET:
            return None
        return progress.first_hit_seconds if progress.sustained_seconds is None else progress.sustained_seconds

    @property
    def resolution(self) -> float:
        """The simulated time since the evaluation before the target, as a share of the time to the target."""
        if self.hit is None:
            return 0.0
        before = max((e.seconds for e in self.evaluations if e.seconds < self.hit), default=0.0)
        return 1.0 - before / self.hit if self.hit > 0 else 0.0

    @property
    def complete(self) -> bool:
        """Whether the run ended by itself: at the target, at the horizon, or because it diverged or stalled."""
        return self.simulation.progress.status not in (Status.RUNNING, Status.DROPPED, Status.INTERRUPTED)

    @property
    def diverged_at(self) -> int | None:
        """The round at which the run diverged, if it did."""
        return self.simulation.progress.diverged_at

    @property
    def rounds(self) -> int:
        """The rounds that were merged."""
        return self.simulation.progress.rounds

    @property
    def evaluations(self) -> Sequence[Evaluation]:
        """The evaluations so far."""
        return self.simulation.progress.evaluations

    def loss(self, seconds: float = math.inf) -> float:
        """Return the test loss at a simulated time; infinite if the run diverged or was not evaluated."""
        found = [e.loss for e in self.evaluations if e.seconds <= seconds]
        return found[-1] if found and self.diverged_at is None and math.isfinite(found[-1]) else math.inf

    def seconds_to_loss(self, loss: float) -> float:
        """Return the simulated time at which the test loss was first as low; infinite if it never was."""
        return next((e.seconds for e in self.evaluations if e.loss <= loss), math.inf)

    def value(self, seconds: float = math.inf) -> float:
        """Return the metric at a simulated time, the mean of the last evaluations until then."""
        found = [e.accuracy or 0.0 for e in self.simulation.progress.evaluations if e.seconds <= seconds]
        return fmean(found[-SMOOTHED:]) if found and self.diverged_at is None else 0.0


@dataclass(eq=False)
class Race:
    """Creates and advances runs, and counts what they train.

    ``began`` is when the budget of real seconds began. What is trained exceeds a budget of steps by less than one
    update, and one of seconds by a batch at most; where the model cannot be stacked, both by a round at most.
    """

    grids: Mapping[str, AlgorithmGrid]
    compute: ComputeConfig
    horizon: float
    budget: Budget
    steps_per_update: Callable[[GridCell], float]
    task: Task | None = None
    notify: Callable[[], None] = lambda: None
    began: float = field(default_factory=time.monotonic)
    runs: dict[tuple[GridCell, int], RacedRun] = field(default_factory=dict)
    steps: float = 0.0  # trained
    updates: int = 0

    def __post_init__(self) -> None:
        self._sweep = Sweep(self.compute)
        self._trainers: dict[Hashable, Trainer | None] = {}
        self._groups: dict[tuple[GridCell, int], Hashable] = {}
        self._own_tasks: dict[int, Task] = {}  # by seed, which draws the samples that clients hold out
        self._started = time.monotonic()  # of the race itself

    @property
    def notes(self) -> list[str]:
        """Lines for the user."""
        return self._sweep.notes

    @property
    def spent_share(self) -> float:
        """The share of the budget that is spent."""
        return max(self.steps / self.budget.steps, (time.monotonic() - self.began) / self.budget.seconds)

    def steps_left(self, share: float) -> float:
        """Return the local steps until a share of the budget is spent; of real time, at the speed so far."""
        now = time.monotonic()
        speed = self.steps / (now - self._started) if self.steps else math.inf
        by_time = (share * self.budget.seconds - (now - self.began)) * speed
        return min(share * self.budget.steps - self.steps, by_time)

    @property
    def seconds_left(self) -> float | None:
        """The real seconds until the budget is spent, at the speed so far; None while it is unknown."""
        now = time.monotonic()
        if math.isfinite(self.budget.seconds):
            return max(0.0, self.budget.seconds - (now - self.began))
        return max(0.0, self.budget.steps / self.steps - 1.0) * (now - self._started) if self.steps else None

    def settings(self, candidate: GridCell) -> Settings:
        """Return the settings of a candidate's runs: they end at the target or at the horizon."""
        settings = self.grids[candidate.algorithm].settings(candidate.position)
        every = settings.stop.eval_every_seconds
        stop = replace(
            settings.stop,
            stop_at_target=True,
            max_rounds=MAX_COUNT,
            max_seconds=self.horizon,
            eval_every_rounds=1,
            eval_every_seconds=every or self.horizon / EVALUATIONS,
            train_samples=0,
        )
        return replace(settings, stop=stop)

    def task_of(self, settings: Settings, seed: int) -> Task:
        """Return the task of a run."""
        if self.task is None:
            return self._sweep.task(settings, seed)
        if seed not in self._own_tasks:
            self._own_tasks[seed] = with_client_tests(self.task, settings, seed)
        return self._own_tasks[seed]

    def run_of(self, candidate: GridCell, seed: int) -> RacedRun:
        """Return the run of a candidate with a seed, at its initialisation if it is new."""
        if (candidate, seed) not in self.runs:
            settings = self.settings(candidate)
            task = self.task_of(settings, seed)
            steps = self.steps_per_update(candidate)
            run = RacedRun(candidate, seed, Simulation(settings, seed, task), steps)
            self.runs[candidate, seed] = run
            self._groups[candidate, seed] = self._group(settings, seed, candidate)
        return self.runs[candidate, seed]

    def _group(self, settings: Settings, seed: int, candidate: GridCell) -> Hashable:
        spec = RunSpec(candidate, settings, seed)
        return self._sweep.group_of(spec)

    def advance(self, entries: Sequence[tuple[GridCell, int]], until: float) -> None:
        """Advance runs to a simulated time; raise ``BudgetSpentError`` when the budget is spent."""
        groups: dict[Hashable, list[RacedRun]] = {}
        for candidate, seed in entries:
            run = self.run_of(candidate, seed)
            if run.running and run.seconds < until:
                groups.setdefault(self._groups[candidate, seed], []).append(run)
        with computing_in(self.compute.precision):
            for group, runs in groups.items():
                trainer = self._trainer(group, runs)
                if trainer is None:
                    self._one_by_one(runs, until)
                else:
                    self._together(runs, trainer, until)

    def _trainer(self, group: Hashable, runs: Sequence[RacedRun]) -> Trainer | None:
        if group not in self._trainers:
            need = self._sweep.state_need([RunSpec(r.candidate, r.simulation.settings, r.seed) for r in runs])
            try:
                self._trainers[group] = self.compute.trainer(runs[0].simulation, need)
            except StackingError as reason:
                self.notes.append(f"the model is trained one client at a time: {reason}")
                self._trainers[group] = None
        return self._trainers[group]

    def _together(self, runs: Sequence[RacedRun], trainer: Trainer, until: float) -> None:
        batches: list[BatchedRun] = []
        for run in runs:
            run.batched = run.batched or run.simulation.batched_run()
            run.batched.read_until = until
            batches.append(run.batched)
        for _ in run_batched((), trainer, batches, job_limit=lambda: self._jobs_left(runs)):
            self.notify()
        self._count(runs)
        self._require_budget()

    def _one_by_one(self, runs: Sequence[RacedRun], until: float) -> None:
        for run in runs:

            def hook(run: RacedRun = run) -> None:
                self._count([run])
                self._require_budget()

            run.alone = run.alone or run.simulation.reference_run(hook)
            for evaluation in run.alone:
                if evaluation.seconds >= until:
                    break
            hook()

    def _jobs_left(self, runs: Sequence[RacedRun]) -> float:
        """Return how many jobs of these runs the rest of the budget trains."""
        self._count(runs)
        left = (self.budget.steps - self.steps) / max(1.0, *(run.steps_per_update for run in runs))
        if self.spent_share >= 1.0:
            return 0.0
        return math.ceil(left) if math.isfinite(left) else left

    def _count(self, runs: Sequence[RacedRun]) -> None:
        for run in runs:
            trained = run.simulation.executor.updates_trained
            self.updates += trained - run.counted
            self.steps += (trained - run.counted) * run.steps_per_update
            run.counted = trained
        self.notify()

    def _require_budget(self) -> None:
        if self.spent_share >= 1.0:
            raise BudgetSpentError

    def drop(self, candidate: GridCell, seed: int) -> None:
        """Free the memory of a run that does not continue; its evaluations are kept."""
        run = self.runs[candidate, seed]
        if run.running:
            run.simulation.progress.status = Status.DROPPED
        run.batched = run.alone = None
        executor = run.simulation.executor
        executor.state.clear()
        executor.versions.replace({max(executor.versions): run.simulation.weights})
