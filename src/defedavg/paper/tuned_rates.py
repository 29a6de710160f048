"""Rates tuned on the paper's grid, in the same way for every cell and algorithm.

All pairs of a cell's grid run on the first seed; the pair that holds the target soonest wins. The paper's pair takes
part: where its result is stored it is not computed again, and no other pair runs for longer than it did. All points are
stored, one file per cell.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from ..algorithms import ALGORITHMS
from ..config.study import SweepPoint
from ..errors import UserError
from ..experiments.compute import ComputeConfig
from ..experiments.run_events import Event, RunFinished, Watch
from ..experiments.tune import PairOutcome, RatePair, Tuning, pairs_of, score
from ..fileio import file_name, read_regular
from ..jsonio import finite
from ..training import Status
from .published import GLOBAL_GRID, LOCAL_GRID, Cell, Rates
from .result_files import Result, ResultFiles, make_result, write_in_new_folder
from .run_grid import PaperRun

SEED = 0


class TunedRates:
    """The stored tuning results of all cells."""

    def __init__(self, store: ResultFiles, at_paper_rates: ResultFiles) -> None:
        self.store, self.at_paper_rates = store, at_paper_rates

    def path(self, cell: Cell) -> Path:
        """Return the path of a cell's tuning result."""
        return self.store.folder / "tuning" / f"{file_name(cell.label, SEED)}.json"

    def known(self, cells: Sequence[Cell], *, any_limit: bool = False) -> dict[Cell, Rates]:
        """Return the best rates of the cells that have been tuned.

        This leaves out a cell in which no pair held the target under a shorter time limit than the present one, unless
        ``any_limit`` is set.
        """
        stored = {cell: self._read(cell) for cell in cells if self.path(cell).exists()}
        return {
            cell: tuple(tuned["best"])
            for cell, tuned in stored.items()
            if any_limit or not self._limit_was_too_short(cell, tuned)
        }

    def points(self, cells: Sequence[Cell]) -> dict[Cell, list[Result]]:
        """Return the outcome of every pair of rates in the cells that have been tuned."""
        return {cell: self._read(cell)["points"] for cell in cells if self.path(cell).exists()}

    def _limit_was_too_short(self, cell: Cell, tuned: Result) -> bool:
        held = any(point["hit_seconds"] is not None for point in tuned["points"])
        return not held and bool(tuned["limit"] < self.store.choices.limit(PaperRun(cell, cell.rates)))

    def _read(self, cell: Cell) -> Result:
        path = self.path(cell)
        try:
            tuned = json.loads(read_regular(path))
            global_lr, local_lr = tuned["best"]
            matches = self.store.choices.match(tuned["choices"], cell)
            valid = all(rate is None or 0 < rate < 1e9 for rate in (global_lr, local_lr))
            self._limit_was_too_short(cell, tuned)  # reads the other fields, so a missing one is an error here
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(f"{path} cannot be read; delete it to tune the rates again") from None
        if not matches or not valid:
            raise UserError(f"{path} was made with other settings; use another --out")
        return dict(tuned)


class RateSearch:
    """A search over the grids of several cells; it stores each cell's result as soon as the cell is decided."""

    def __init__(self, rates: TunedRates, cells: Sequence[Cell]) -> None:
        self._rates, self._store = rates, rates.store
        self._cells: dict[SweepPoint, Cell] = {}
        self._known: dict[RatePair, dict[int, PairOutcome]] = {}
        self._reached: dict[RatePair, RunFinished] = {}
        self._pairs: list[RatePair] = []
        for cell in cells:
            self._add(cell, next(iter(rates.at_paper_rates.results([PaperRun(cell, cell.rates)], [SEED])), None))
        self._tuning: Tuning | None = None

    def _add(self, cell: Cell, stored: Result | None) -> None:
        settings = self._store.choices.settings(PaperRun(cell, cell.rates))
        if stored is not None and stored["status"] == Status.TARGET:
            settings = replace(settings, stop=replace(settings.stop, max_seconds=stored["seconds"]))
        swept = (("data", cell.dataset), ("setting", cell.setting), ("n", cell.updates_per_round))
        # An algorithm that has only the global rate searches the values of both grids.
        global_grid = GLOBAL_GRID if ALGORITHMS[cell.algorithm].uses_local_lr else (*LOCAL_GRID, GLOBAL_GRID[-1])
        for pair in pairs_of([SweepPoint(swept, settings)], global_grid, LOCAL_GRID):
            self._cells[pair.point] = cell
            self._pairs.append(pair)
            if stored is not None and _rates(pair) == cell.rates:
                self._known[pair] = {SEED: _outcome(stored)}

    @property
    def runs(self) -> int:
        """The number of pairs without a stored result; an upper bound on the runs to compute."""
        return len(self._pairs) - len(self._known)

    def run(self, compute: ComputeConfig, watch: Watch) -> bool:
        """Tune; return False if Ctrl-C stopped it. The results of cells decided by then are stored."""

        def remember_reached(event: Event) -> None:
            if isinstance(event, RunFinished) and event.run.progress.status is Status.TARGET:
                assert isinstance(event.spec.name, RatePair)
                self._reached[event.spec.name] = event
            watch(event)

        self._tuning = Tuning(self._pairs, [SEED], compute, known=self._known, decided=self._save)
        return self._tuning.run(remember_reached)

    def _save(self, rivals: Sequence[RatePair]) -> None:
        assert self._tuning is not None
        # If every pair diverged, the best of them still becomes the cell's pair: its run reports the divergence.
        outcomes = self._tuning.outcomes
        cell, best = self._cells[rivals[0].point], min(rivals, key=lambda pair: score(outcomes[pair].values()))
        if best in self._reached:
            run = PaperRun(cell, _rates(best))
            self._store.save(make_result(self._reached[best], run, self._store.choices), run)
        tuned = {
            **asdict(cell),
            "choices": self._store.choices.stored(),
            "limit": self._store.choices.limit(PaperRun(cell, cell.rates)),
            "best": _rates(best),
            "points": [
                {"rates": _rates(pair), **asdict(outcomes[pair][SEED]), "known": pair in self._known} for pair in rivals
            ],
        }
        text = json.dumps(finite(tuned), allow_nan=False, indent=1) + "\n"
        write_in_new_folder(self._rates.path(cell), text.encode())
        for pair in rivals:
            self._reached.pop(pair, None)


def _outcome(stored: Result) -> PairOutcome:
    held = stored["sustained_seconds"] if stored["status"] == Status.TARGET else None
    values = {**stored, "hit_seconds": held}
    return PairOutcome(**{name: values[name] for name in asdict(PairOutcome())})


def _rates(pair: RatePair) -> Rates:
    return pair.global_lr, pair.local_lr
