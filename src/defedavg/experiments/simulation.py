"""From settings to a run: fleet, machines, timeline, task, executor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config import study as config
from ..config.build import build_task, make_executor, make_plan, make_simulator, make_stopping_rule
from ..config.study import Settings
from ..errors import UserError, unknown
from ..planning.plan import Plan, records
from ..planning.records import Record
from ..planning.simulator import Simulator

if TYPE_CHECKING:
    from ..tasks import Task
    from ..training import (
        BatchedRun,
        CheckpointHook,
        EvalCounters,
        EvalSchedule,
        Evaluation,
        RunProgress,
        RunState,
    )


LOCAL = ("batched", "reference")
EXECUTORS = (*LOCAL, "ray")


class Simulation:
    """One run: iterate for its measurements; ``progress``, ``plan`` and ``weights`` are up to date at any moment."""

    def __init__(self, settings: Settings, seed: int, task: Task | None = None) -> None:
        from ..training import RunProgress

        self.settings = settings
        self.seed = seed
        self.task = build_task(settings, seed) if task is None else task
        self.timeline = make_simulator(settings, seed)
        self.executor = make_executor(settings, seed, self.task)
        self.progress: RunProgress = RunProgress()
        self.meter: EvalSchedule | None = None  # of the reference executor, once it is under way
        self._from: RunState | None = None

    def resume(self, standing: RunState, evaluations: Iterable[Evaluation]) -> None:
        """Go on from where an earlier sitting stood, and from what it had measured; to be called before anything."""
        standing.restore(self.executor, self.progress, evaluations)
        self._from = standing

    def _taken_up(self) -> tuple[Iterator[Record], EvalCounters]:
        """What is left of the plan, and what was counted before."""
        from ..training import EvalCounters

        stream = iter(self.timeline)
        return (stream, EvalCounters()) if self._from is None else (self._from.skip(stream), self._from.counters)

    def drive(self, rest: CheckpointHook = lambda: None) -> Iterator[Evaluation]:
        """The measurements from the reference executor."""
        from ..training import EvalSchedule, run_reference

        records, tally = self._taken_up()
        goal = make_stopping_rule(self.settings)
        self.meter = EvalSchedule(self.task, goal, self.progress, tally)
        return run_reference(records, self.executor, goal, self.meter, rest)

    def __iter__(self) -> Iterator[Evaluation]:
        return self.drive()

    def lane(self) -> BatchedRun:
        """The run for the batched executor, which reads its plan ahead."""
        from ..training import BatchedRun

        records, tally = self._taken_up()
        return BatchedRun(self.executor, records, make_stopping_rule(self.settings), self.progress, counters=tally)

    def batched(self) -> Iterator[Evaluation]:
        """The same measurements from the batched executor; from the reference, if the model cannot be stacked."""
        from ..training import StackingError, Trainer, run_batched

        try:
            trainer = Trainer(self.task, self.executor.module, batch_size=self.executor.local_training.batch_size)
        except StackingError:
            yield from self
            return
        for _, evaluation in run_batched([self.lane()], trainer):
            if evaluation is not None:
                yield evaluation

    @property
    def _rounds(self) -> int:
        """To be planned for what was carried out so far: again, since the clock itself may have run ahead."""
        stalled = str(self.progress.status) == "stalled"
        return 2**62 if stalled else self.progress.rounds

    @property
    def plan(self) -> Plan:
        """What was carried out so far."""
        return make_plan(self.settings, self.seed, self._rounds)

    def planned(self) -> tuple[Simulator, Iterator[Record]]:
        """The same as a stream of records with its clock, without holding it."""
        timeline = make_simulator(self.settings, self.seed)
        return timeline, records(timeline, self._rounds)

    @property
    def weights(self) -> Any:
        """The newest version, as one vector."""
        return self.executor.versions[max(self.executor.versions)]


@dataclass(frozen=True)
class Result:
    """A finished run."""

    evaluations: tuple[Evaluation, ...]
    status: str
    rounds: int
    seconds: float
    first_hit_seconds: float | None
    sustained_seconds: float | None
    diverged_at: int | None
    best_accuracy: float | None
    plan: Plan
    weights: Any


def simulate(
    algorithm: str,
    *,
    task: Task | None = None,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    executor: str = "batched",
) -> Result:
    """Run one algorithm from Python; ``settings`` are those of the TOML file, as ``{"training.local_steps": 20}``.

    A ``task`` of your own (see ``make_task``) brings its own clients, and is computed on the device where its data are;
    without one the settings name it. ``executor`` is "batched" or "reference".
    """
    if executor not in LOCAL:
        raise unknown("executor", executor, LOCAL)
    if not isinstance(seed, int):
        raise UserError(f"seed is {seed!r}; it must be a whole number")
    tables: dict[str, Any] = {"algorithms": [algorithm]}
    for name, value in (settings or {}).items():
        table, dot, word = name.partition(".")
        if not dot:
            raise UserError(f"setting {name!r} cannot be read; write it as 'table.key'")
        tables.setdefault(table, {})[word] = value
    if task is not None:
        tables.setdefault("clients", {}).setdefault("num_clients", task.num_clients)
    points = config.study(tables).points()
    if len(points) != 1:
        raise UserError("simulate runs one setting; give single values, or use a study for a sweep")
    run = Simulation(points[0].settings, seed, task)
    for _ in run.batched() if executor == "batched" else run:
        pass
    done = run.progress
    return Result(
        evaluations=tuple(done.evaluations),
        status=str(done.status),
        rounds=done.rounds,
        seconds=done.seconds,
        first_hit_seconds=done.first_hit_seconds,
        sustained_seconds=done.sustained_seconds,
        diverged_at=done.diverged_at,
        best_accuracy=done.best_accuracy,
        plan=run.plan,
        weights=run.weights,
    )
