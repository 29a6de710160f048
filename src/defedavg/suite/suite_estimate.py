"""How long cells take: the updates of their plans, divided by the speed of this machine.

A plan does not depend on rates, so one plan per cell, of the tuning seed, has the updates of all its runs within a few
per cent. A run that reaches its target ends earlier: the estimate is an upper bound. The speed is measured with the
first rounds of a real cell of every batch, evaluations included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from ..config.build import make_simulator
from ..config.settings import Settings, StopSettings, TaskSettings
from ..experiments.compute import ComputeConfig
from ..experiments.run_events import RunFinished, RunSpec
from ..experiments.sweep import Sweep
from ..planning.records import Round, Stall, moment
from .benchmark import SEEDS, TUNING_SEED, TUNING_SHARE, SuiteCell, grid, reported_study, tuning_runs

MEASURED_SECONDS: Final = 1.5
MAX_DOUBLINGS: Final = 12


@dataclass(frozen=True, slots=True)
class CellWork:
    """The updates of all runs of a cell, at most."""

    cell: SuiteCell
    updates: int

    @property
    def equivalent(self) -> float:
        """The updates where several of a single gradient count as one, for a speed that is given."""
        return self.updates / self.cell.counted_as_one


def settings_of(cell: SuiteCell, plugins: Sequence[str] = ()) -> Settings:
    """Return the settings of a cell's reported runs, at the smallest rates of its grid."""
    rates = {cell.algorithm: {name: values[0] for name, values in grid(cell.task, cell.algorithm).items()}}
    (point,) = reported_study([cell], rates, plugins).points()
    return point.settings


def work_of(cell: SuiteCell, plugins: Sequence[str] = ()) -> CellWork:
    """Plan a cell without training, and return the updates of its tuning and of its reported runs."""
    # Plans do not depend on the data, the target and the rates: equal fleets and limits share one.
    settings = settings_of(cell, plugins)
    stop = StopSettings(max_rounds=settings.stop.max_rounds, max_seconds=settings.stop.max_seconds)
    training = replace(settings.training, global_lr=1.0, local_lr=1.0)
    tuning, reported = _planned_updates(replace(settings, task=TaskSettings(), training=training, stop=stop))
    return CellWork(cell, tuning_runs(cell.task, cell.algorithm) * tuning + len(SEEDS) * reported)


@lru_cache(maxsize=1024)
def _planned_updates(settings: Settings) -> tuple[int, int]:
    """Return the updates of a run that tunes rates, and of a reported run, without a target."""
    stop = settings.stop
    rounds, seconds = max(1, int(stop.max_rounds * TUNING_SHARE)), stop.max_seconds * TUNING_SHARE
    tuning = reported = 0
    for record in make_simulator(settings, TUNING_SEED):
        if isinstance(record, Stall) or moment(record) > stop.max_seconds:
            break
        if isinstance(record, Round):
            trained = sum(update.steps > 0 for update, _ in record.merge.updates)
            reported += trained
            if record.merge.version <= rounds and record.time <= seconds:
                tuning += trained
            if record.merge.version >= stop.max_rounds:
                break
    return tuning, reported


def measured_speed(cell: SuiteCell, compute: ComputeConfig, plugins: Sequence[str] = ()) -> float:
    """Return the updates per second of a cell's three seeds in shared batches, over about ``MEASURED_SECONDS``."""
    settings = settings_of(cell, plugins)
    rounds = settings.stop.eval_every_rounds
    for _ in range(MAX_DOUBLINGS):
        speed, spent = _speed(settings, rounds, compute)
        if spent >= MEASURED_SECONDS or rounds >= settings.stop.max_rounds:
            break
        rounds *= 2
    return speed


def _speed(settings: Settings, rounds: int, compute: ComputeConfig) -> tuple[float, float]:
    """Return the updates per second of a few rounds, and the seconds that they took without the set-up."""
    limited = replace(settings, stop=replace(settings.stop, max_rounds=rounds, target_accuracy=0.0))
    specs = [RunSpec("speed", limited, seed) for seed in SEEDS]
    updates, began, ended = 0, 0.0, 0.0
    for event in Sweep(compute).events(specs):
        ended = time.perf_counter()
        began = began or ended  # at the evaluation of the initial model: data and kernels are ready
        if isinstance(event, RunFinished):
            updates += event.run.executor.updates_trained
    spent = max(ended - began, 1e-6)
    return max(updates, 1) / spent, spent


def planned(
    cells: Iterable[SuiteCell], plugins: Sequence[str] = (), watch: Callable[[SuiteCell], None] = lambda _cell: None
) -> list[CellWork]:
    """Return the work of every cell; ``watch`` is called before each is planned."""
    found = []
    for cell in cells:
        watch(cell)
        found.append(work_of(cell, plugins))
    return found
