"""``advise``: from a study to a recommendation with intervals, reasons and a study file that is ready to run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..algorithms import ALGORITHMS
from ..config import study as config
from ..config.study import Study
from ..errors import UserError, counted, unknown
from ..experiments.compute import ComputeConfig
from ..experiments.deferred_stop import DeferredStop
from ..tasks import Task
from .arguments import checked_budget, checked_seeds, checked_study
from .budgets import AskedBudget
from .candidates import AlgorithmGrid, GridCell, grids_of
from .constants import TaskConstants, covered, excluded_cells, measure
from .interruption import NothingRacedError, before_racing
from .racing import Race
from .ranked import RankedCandidate
from .reasons import why
from .recommendation import Advice, single_value
from .screening import Holders, Screening, horizon_of, screen
from .search import INTERRUPTED, SEEDS, AdviceSearch
from .untrained import not_trained, trained

Progress = Callable[[str, float, float | None], None]
"""Receives what is being done, the share of it that is done, and the real seconds left, if they can be estimated."""


def advise(
    study: Study | str | Path | Mapping[str, Any],
    *,
    algorithms: Sequence[str] | None = None,
    budget_updates: float | None = None,
    budget_seconds: float | None = None,
    seed: int | None = None,
    seeds: int = SEEDS,
    task: Task | None = None,
    compute: ComputeConfig | None = None,
    progress: Progress | None = None,
) -> Advice:
    """Recommend algorithm, n, K, concurrency, rates and timeout for the task, fleet and target of a study.

    ``study`` is a file, a dictionary like one, or a ``Study`` with ``stop.target_accuracy``; its lists are the values
    to try. ``algorithms`` are those to compare, all registered ones by default. The budget is a number of updates of
    ``training.local_steps`` steps each, or real seconds from the call on, planning included; the same seed and budget
    of updates give the same advice. The search trains less than one update more than the budget, and in real time one
    batch at most (a model that is trained one client at a time: one round). ``seeds``, 1 to 100, are used at most, from
    ``seed`` on, by default the study's first. ``task`` is a task of your own. Ctrl-C ends the search with the best so
    far; before any candidate was raced, it raises ``KeyboardInterrupt``. After the search, the first one is ignored.
    """
    began = time.monotonic()
    updates, seconds = checked_budget(budget_updates, budget_seconds)
    seeds = checked_seeds(seeds)
    with before_racing():
        study = checked_study(study, task)
        budget = AskedBudget(updates, seconds, single_value(study.tables["training"]["local_steps"]), began)
        adviser = _Adviser(study, algorithms, seed, task, compute or ComputeConfig(), progress)
    return adviser.advise(budget, seeds)


class _Adviser:
    """The steps of one call of ``advise``."""

    def __init__(
        self,
        study: Study,
        algorithms: Sequence[str] | None,
        seed: int | None,
        task: Task | None,
        compute: ComputeConfig,
        progress: Progress | None,
    ) -> None:
        if isinstance(algorithms, str):
            raise UserError(f"algorithms is {algorithms!r}; pass a list of names, such as ['fedavg', 'fedbuff']")
        if algorithms is not None and not algorithms:
            raise UserError("algorithms is empty; name at least one, or leave it out to compare all")
        for name in algorithms or ():
            if name not in ALGORITHMS:
                raise unknown("algorithm", name, ALGORITHMS)
        self.study, self.compute, self.own_task = study, compute, task
        self.seed = study.seeds[0] if seed is None else config.single("seed", seed, int)
        self.report = progress or (lambda *_: None)
        names = list(ALGORITHMS) if algorithms is None else list(algorithms)
        self.grids, self.refused = self._grids(names)
        self.base = next(iter(self.grids.values())).base
        own = self.grids.get(study.algorithms[0])
        self.horizon = horizon_of(self.base if own is None else own.base, self.seed)

    def _grids(self, names: Sequence[str]) -> tuple[dict[str, AlgorithmGrid], list[tuple[str, str]]]:
        """Return the grids, and the algorithms that refuse the settings of the study."""
        grids: dict[str, AlgorithmGrid] = {}
        refused: list[tuple[str, str]] = []
        for name in names:
            try:
                grids |= grids_of(self.study, [name], self.seed)
            except UserError as error:
                if len(names) == 1 or "is swept" in str(error):
                    raise
                refused.append((name, f"refused: {error}"))
        if not grids:
            raise UserError(f"no algorithm can be advised; {refused[0][0]} is {refused[0][1]}")
        return grids, refused

    def advise(self, budget: AskedBudget, seeds: int) -> Advice:
        def planning(text: str, share: float) -> None:
            budget.require_time(text, "more time, fewer algorithms, or lists of fewer values")
            self.report(text, share, None)

        with before_racing():
            task = self._task()
            holders = Holders.of(task)
            screening = screen(self.grids, self.horizon, self.seed, holders, planning)
            constants = self._constants(task, budget)
            excluded = excluded_cells(self.grids, screening.kept, constants)
            race = Race(
                self.grids,
                self.compute,
                self.horizon,
                budget.of(screening),
                lambda each: screening.kept[self.grids[each.algorithm].shape_of(each)].steps_per_update,
                self.own_task,
                began=budget.began,
            )
            search = AdviceSearch(
                race,
                self.grids,
                screening,
                tuple(range(self.seed, self.seed + seeds)),
                self.seed,
                constants.usual_rate,
                excluded,
            )
        self._follow(search, race)
        search.search()
        with DeferredStop(lambda _: self.report("writing reasons; Ctrl-C again stops at once", 1.0, 0.0)):
            shortage = None if search.ended == INTERRUPTED else budget.shortage(search)
            return self._result(
                search, screening, constants, excluded, holders, task.metric_name, shortage, budget.began
            )

    def _task(self) -> Task:
        from ..config.build import build_task, check_clients, with_client_tests

        self.report("building the task", 0.0, None)
        own, base = self.own_task, self.base
        task = build_task(base, self.seed) if own is None else with_client_tests(own, base, self.seed)
        check_clients(task, base)
        if task.classes is None and task.metric is None:
            raise UserError("the task has no classes and no metric, so no target can be reached; give it a metric")
        return task

    def _constants(self, task: Task, budget: AskedBudget) -> TaskConstants:
        text = "measuring constants of the task"
        self.report(text, 0.0, None)
        found = measure(
            task, self.base.training.batch_size, self.seed, lambda point: self.report(f"{text}, {point}", 0.0, None)
        )
        budget.require_time(text, "more time, or a budget of updates, which does not count this")
        return found

    def _follow(self, search: AdviceSearch, race: Race) -> None:
        text = ["racing"]

        def phase(name: str) -> None:
            text[0] = name
            notify()

        def notify() -> None:
            self.report(text[0], min(1.0, race.spent_share), race.seconds_left)

        search.phase, race.notify = phase, notify

    def _result(
        self,
        search: AdviceSearch,
        screening: Screening,
        constants: TaskConstants,
        excluded: Mapping[GridCell, str],
        holders: Holders,
        metric: str,
        shortage: str | None,
        began: float,
    ) -> Advice:
        self.report("writing reasons", 1.0, 0.0)
        started = _started(search, shortage)
        close = search.close(started[0])
        ranked = tuple(self._ranked(search, each, started[0], close, holders, metric) for each in started)
        dropped = [*self.refused, *((screening.labels[shape], text) for shape, text in screening.dropped.items())]
        dropped += self._not_trained(search, excluded)
        rates = {name: len(grid.rate_positions()) for name, grid in self.grids.items()}
        grid_steps = sum(p.steps_per_second * self.horizon * rates[p.shape.algorithm] for p in screening.kept.values())
        return Advice(
            study=self.study,
            ranking=ranked,
            dropped=tuple(dropped),
            candidates=sum(rates[shape.algorithm] for shape in screening.labels),
            planned=len(screening.labels),
            horizon=self.horizon,
            target=self.base.stop.target_accuracy,
            metric_name=metric,
            seeds=tuple(sorted({seed for _, seed in search.race.runs})),
            stop=search.race.settings(started[0]).stop,
            steps=search.race.steps,
            updates=search.race.updates,
            grid_steps=grid_steps,
            ended=search.ended,
            notes=(*(() if shortage is None else (shortage,)), constants.note, *search.race.notes),
            theory=covered(self.grids[started[0].algorithm], started[0], search.planned(started[0]), constants),
            shortage=shortage,
            seconds=time.monotonic() - began,
        )

    def _not_trained(self, search: AdviceSearch, excluded: Mapping[GridCell, str]) -> Iterator[tuple[str, str]]:
        """Yield the candidates that were not trained, and why: their rates, a late first round, budget or order."""
        yield from ((self._label(each), text) for each, text in excluded.items())
        yield from ((self._label(each), text) for each, text in not_trained(search))

    def _label(self, candidate: GridCell) -> str:
        return self.grids[candidate.algorithm].label(candidate.position)

    def _ranked(
        self,
        search: AdviceSearch,
        candidate: GridCell,
        leader: GridCell,
        close: Collection[GridCell],
        holders: Holders,
        metric: str,
    ) -> RankedCandidate:
        run, plan = search.run(candidate), search.planned(candidate)
        assert run is not None
        missed = search.missed_runs(candidate)
        interval = search.interval(candidate)
        return RankedCandidate(
            label=self._label(candidate),
            algorithm=candidate.algorithm,
            values=self.grids[candidate.algorithm].chosen(candidate.position),
            reached=search.reached(candidate),
            time=interval,
            missed=missed,
            metric=run.value(),
            seconds=run.seconds,
            bytes=None if missed else search.traffic(candidate),
            worst_decile=None if missed else _worst_decile(run.simulation.client_scores()),
            staleness=plan.stats.staleness_mean,
            steps_per_second=plan.steps_per_second,
            reason="" if candidate == leader else why(search, candidate, leader, holders, metric),
            close=candidate in close,
        )


def _started(search: AdviceSearch, shortage: str | None) -> list[GridCell]:
    """Return the candidates of which something was trained, the best first; refuse a search without one."""
    started = [each for each in search.ranking() if trained(search, each)]
    if not started and search.ended == INTERRUPTED:
        raise NothingRacedError
    if not started:
        tried = counted(len(search.tried), "candidate")
        remedy = shortage or "give a larger budget"
        raise UserError(f"the search started {tried} and ended before any was evaluated; {remedy}")
    return started


def _worst_decile(scores: Any) -> float | None:
    """Return the mean accuracy of the tenth of the clients with the lowest; None if clients have no test samples."""
    if scores is None or scores.accuracy is None:
        return None
    values = np.sort(scores.accuracy[np.isfinite(scores.accuracy)])
    return float(values[: max(1, math.ceil(len(values) / 10))].mean()) if len(values) else None
