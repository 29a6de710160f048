"""One run from Python: ``simulate`` returns its result, ``Simulation`` yields its evaluations as they are made."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ..config import study as config
from ..config.build import build_task, make_executor, make_plan, make_simulator, make_stopping_rule, with_client_tests
from ..config.settings import TABLES, Settings
from ..config.study import Study
from ..config.unused_settings import NoEffectWarning, replaced, unused_settings
from ..errors import FallbackWarning, UserError, unknown
from ..planning.availability_checks import available
from ..planning.plan import Plan
from ..planning.plan_checks import checked_for_use
from ..planning.plan_recorder import PlanRecorder
from ..planning.records import Record

if TYPE_CHECKING:
    from torch import Tensor

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
    from ..training.client_evaluation import ClientScores


LOCAL = ("batched", "reference")
EXECUTORS = (*LOCAL, "ray")


class Simulation:
    """One run: iterate over its evaluations; ``progress``, ``plan`` and ``weights`` are always up to date."""

    def __init__(self, settings: Settings, seed: int, task: Task | None = None) -> None:
        from ..training import RunProgress

        self.settings = settings
        self.seed = seed = config.checked_seed(seed)
        self.task = build_task(settings, seed) if task is None else task
        if settings.stop.target_accuracy and self.task.classes is None and self.task.metric is None:
            reason = "the task has no classes and no metric, so there is no accuracy"
            warnings.warn(f"stop.target_accuracy has no effect: {reason}", NoEffectWarning, stacklevel=3)
        self.simulator = make_simulator(settings, seed)
        self.executor = make_executor(settings, seed, self.task)
        self.progress: RunProgress = RunProgress()
        self.schedule: EvalSchedule | None = None  # of the reference executor, once it has started
        self._resumed: RunState | None = None
        self._recorder: PlanRecorder | None = None

    def resume(self, state: RunState, evaluations: Iterable[Evaluation]) -> None:
        """Continue from the state and the evaluations of an earlier session; call this before anything else."""
        state.restore(self.executor, self.progress, evaluations)
        self._resumed = state

    def _remaining(self) -> tuple[Iterator[Record], EvalCounters]:
        """Return the rest of the plan, and the counters of earlier sessions."""
        from ..training import EvalCounters

        checked = checked_for_use(self.simulator.header, available(self.simulator.fleet, self.simulator))
        stream = iter(checked if self._recorder is None else self._recorder)
        if self._resumed is None:
            return stream, EvalCounters()
        return self._resumed.skip(stream, self.executor), self._resumed.counters

    def reference_run(
        self, checkpoint_hook: CheckpointHook = lambda: None, memory: int | None = None
    ) -> Iterator[Evaluation]:
        """Yield the evaluations of the reference executor; ``memory`` limits its bytes."""
        from ..training import EvalSchedule, run_reference
        from ..training.memory import allowed, least_bytes
        from ..training.state_memory import StateMemory, StateNeed

        executor, first = self.executor, self.executor.versions[max(self.executor.versions)]
        need, size = executor.state_need(self.settings.stop.max_rounds), first.nbytes
        usable = allowed(memory, first.device)
        place = StateMemory.within(first.device, size, usable, least_bytes(size, 0), StateNeed(need, need))
        place.check(self.settings.algorithm, need)
        executor.state.place(place)
        limit = (usable - place.device_bytes) // (2 * size) if first.is_cuda else None
        executor.versions.place(place.for_versions(limit))
        records, counters = self._remaining()
        rule = make_stopping_rule(self.settings)
        self.schedule = EvalSchedule(self.task, rule, self.progress, counters)
        return run_reference(records, self.executor, rule, self.schedule, checkpoint_hook)

    def __iter__(self) -> Iterator[Evaluation]:
        return self.reference_run()

    def batched_run(self) -> BatchedRun:
        """Return the run for the batched executor, which reads the plan ahead."""
        from ..training import BatchedRun

        records, counters = self._remaining()
        return BatchedRun(self.executor, records, make_stopping_rule(self.settings), self.progress, counters=counters)

    def batched(self) -> Iterator[Evaluation]:
        """Yield the evaluations of the batched executor, or of the reference if the model cannot be stacked."""
        from ..training import StackingError, Trainer, run_batched
        from ..training.state_memory import StateNeed

        try:
            training = self.executor.local_training
            need = self.executor.state_need(self.settings.stop.max_rounds)
            trainer = Trainer(
                self.task, self.executor.module, batch_size=training.batch_size, local_training=training,
                state=StateNeed(need, need),
            )  # fmt: skip
        except StackingError as reason:
            warnings.warn(f"the model is trained one client at a time: {reason}", FallbackWarning, stacklevel=3)
            yield from self
            return
        for _, evaluation in run_batched([self.batched_run()], trainer):
            if evaluation is not None:
                yield evaluation

    def record_plan(self, sink: Callable[[Record], None]) -> None:
        """Pass the records of computed rounds to ``sink``, on ``commit_plan``; call this before the run starts."""
        self._recorder = PlanRecorder(self.simulator, sink)

    def commit_plan(self) -> None:
        """Pass on the records of the rounds that were computed since the last call."""
        if self._recorder is not None:
            self._recorder.commit(self._rounds)

    def finish_plan(self) -> None:
        """Pass on the records of all computed rounds, and the jobs that were running after them."""
        if self._recorder is not None:
            self._recorder.finish(self._rounds)

    @property
    def _rounds(self) -> int:
        """The rounds computed so far; a stalled plan is used to its end."""
        return 2**62 if str(self.progress.status) == "stalled" else self.progress.rounds

    @property
    def plan(self) -> Plan:
        """The plan of the rounds computed so far; it is planned again, because the simulator may be ahead."""
        return make_plan(self.settings, self.seed, self._rounds)

    @property
    def weights(self) -> Any:
        """The newest version of the model, as one vector."""
        return self.executor.versions[max(self.executor.versions)]

    def client_scores(self) -> ClientScores | None:
        """Return loss and accuracy of the newest version per client; None if the task has no samples for that."""
        from ..training.client_evaluation import evaluate_clients

        return evaluate_clients(self.executor, self.weights)


@dataclass(frozen=True)
class Result:
    """A finished run; ``client_scores`` are those of the last version, None if the task has no samples for them."""

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
    named_weights: Mapping[str, Tensor] = field(repr=False)
    client_scores: ClientScores | None = field(default=None, repr=False)

    def state_dict(self) -> dict[str, Tensor]:
        """Return weights and buffers of the last version by name, on the CPU, for ``model.load_state_dict``."""
        return {name: value.clone() for name, value in self.named_weights.items()}


def simulate(
    algorithm: str,
    *,
    task: Task | None = None,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    executor: str = "batched",
) -> Result:
    """Run one algorithm; ``settings`` are those of the TOML file, as ``{"training.local_steps": 20}``.

    A ``task`` of your own (see ``make_task``) defines the clients, and is computed on the device that holds its data;
    without one the settings name the task. ``executor`` is "batched" or "reference".
    """
    if executor not in LOCAL:
        raise unknown("executor", executor, LOCAL)
    if not isinstance(settings or {}, Mapping):
        raise UserError(f"settings is {type(settings).__name__}; pass a dict such as {{'training.local_steps': 20}}")
    if task is not None and not hasattr(task, "num_clients"):
        raise UserError(f"task is {type(task).__name__}; pass what make_task returns")
    chosen = _single_settings(algorithm, settings or {}, task)
    run = Simulation(chosen, seed, None if task is None else with_client_tests(task, chosen, seed))
    records: list[Record] = []
    run.record_plan(records.append)
    for _ in run.batched() if executor == "batched" else run:
        run.commit_plan()
    run.finish_plan()
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
        plan=Plan(run.simulator.header, tuple(records)),
        weights=run.weights,
        named_weights=run.executor.named(run.weights),
        client_scores=run.client_scores(),
    )


def _unused_beside(study: Study) -> list[str]:
    """Return the lines of settings without effect beside the argument ``task``."""
    others = [line for line in unused_settings(study) if not line.startswith("task.")]
    reason = "the argument task makes the whole task"
    return [*replaced(study, "task", reason, kept=("client_test_share",)), *others]


def _without_table(name: str) -> str:
    """Return the line for a setting without its table, with the name that it should have."""
    if name in ("seed", "seeds"):
        return f"{name!r} is not a setting of simulate, which runs one seed; pass the argument seed=…"
    tables = [table for table, kind in TABLES.items() if name in {item.name for item in fields(kind)}]
    hint = " or ".join(repr(f"{table}.{name}") for table in tables) or "'table.key'"
    return f"setting {name!r} cannot be read; write it as {hint}"


def _single_settings(algorithm: str, settings: Mapping[str, Any], task: Task | None) -> Settings:
    tables: dict[str, Any] = {"algorithms": [algorithm]}
    for name, value in settings.items():
        table, dot, key = name.partition(".")
        if not dot:
            raise UserError(_without_table(name))
        tables.setdefault(table, {})[key] = value
    if task is not None:
        if tables.get("task", {}).get("module"):
            raise UserError("task.module and the argument task both define the task; give one of them")
        tables.setdefault("clients", {}).setdefault("num_clients", task.num_clients)
    study = config.study(tables)
    lines = unused_settings(study) if task is None else _unused_beside(study)
    for line in lines:
        warnings.warn(line, NoEffectWarning, stacklevel=3)
    points = study.points()
    if len(points) != 1:
        raise UserError("simulate runs one setting; give single values, or use a study for a sweep")
    return points[0].settings
