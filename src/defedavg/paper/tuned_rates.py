"""Rates tuned on the paper's grid, for every cell and algorithm alike.

A cell's pairs race for the target on the first seed. The paper's own pair takes part: where it was run before, it is
not run again, and nobody needs longer than it did. Every point is kept, one file per cell.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..algorithms import ALGORITHMS
from ..config.study import SweepPoint
from ..errors import UserError
from ..experiments.compute import ComputeConfig
from ..experiments.run_events import Event, RunFinished, Watch
from ..experiments.tune import PairOutcome, RatePair, Tuning, pairs_of, score
from ..fileio import file_name, write_whole, writing
from ..jsonio import finite
from ..training import Status
from .published import GLOBAL_GRID, LOCAL_GRID, Cell, Rates
from .result_files import Result, ResultFiles, record
from .run_grid import Piece

SEED = 0


class TunedRates:
    """The best pair of every cell: read where it is known, else found."""

    def __init__(self, store: ResultFiles, at_paper_rates: ResultFiles) -> None:
        self._store = store
        self._paper = at_paper_rates

    def path(self, cell: Cell) -> Path:
        """Where all points of a cell are."""
        return self._store.folder / "tuning" / f"{file_name(cell.label, SEED)}.json"

    def known(self, cells: Sequence[Cell], *, any_limit: bool = False) -> dict[Cell, Rates]:
        """The best rates of the cells that have been tuned.

        A cell of which all pairs were given up sooner than they would be now is not among them, unless any limit will
        do.
        """
        found = {cell: self._read(cell) for cell in cells if self.path(cell).exists()}
        return {cell: tuple(own["best"]) for cell, own in found.items() if any_limit or not self._too_soon(cell, own)}

    def points(self, cells: Sequence[Cell]) -> dict[Cell, list[Result]]:
        """How every pair of the cells that have been tuned fared."""
        return {cell: self._read(cell)["points"] for cell in cells if self.path(cell).exists()}

    def _too_soon(self, cell: Cell, found: Result) -> bool:
        held = any(point["hit_seconds"] is not None for point in found["points"])
        return not held and bool(found["limit"] < self._store.choices.limit(Piece(cell, cell.rates)))

    def _read(self, cell: Cell) -> Result:
        path = self.path(cell)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            wide, near = found["best"]
            ours = found["choices"] == self._store.choices.open()
            sound = all(rate is None or 0 < rate < 1e9 for rate in (wide, near))
            self._too_soon(cell, found)  # has all that is asked of it
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(f"{path} cannot be read; delete it, and the rates are tuned again") from None
        if not ours or not sound:
            raise UserError(f"{path} is of other choices; use another --out")
        return dict(found)

    def race(self, cells: Sequence[Cell]) -> Race:
        """What is to be run to tune these cells."""
        return Race(self, cells, self._store, self._paper)


class Race:
    """The pairs of some cells on their way; there are ``runs`` to do at most."""

    def __init__(self, rates: TunedRates, cells: Sequence[Cell], store: ResultFiles, paper: ResultFiles) -> None:
        self._rates = rates
        self._store = store
        self._cells: dict[SweepPoint, Cell] = {}
        self._known: dict[RatePair, dict[int, PairOutcome]] = {}
        self._ended: dict[RatePair, RunFinished] = {}
        self._pairs: list[RatePair] = []
        for cell in cells:
            self._enter(cell, next(iter(paper.results([Piece(cell, cell.rates)], [SEED])), None))
        self._tuning: Tuning | None = None

    def _enter(self, cell: Cell, before: Result | None) -> None:
        settings = self._store.choices.settings(Piece(cell, cell.rates))
        if before is not None and before["status"] == Status.TARGET:
            settings = replace(settings, stop=replace(settings.stop, max_seconds=before["seconds"]))
        swept = (("data", cell.dataset), ("setting", cell.setting), ("n", cell.updates_per_round))
        point = SweepPoint(swept, settings)
        # An algorithm with a single rate may have any that the others can have.
        wide = GLOBAL_GRID if ALGORITHMS[cell.algorithm].uses_local_lr else (*LOCAL_GRID, GLOBAL_GRID[-1])
        for pair in pairs_of([point], wide, LOCAL_GRID):
            self._cells[pair.point] = cell
            self._pairs.append(pair)
            if before is not None and _rates(pair) == cell.rates:
                self._known[pair] = {SEED: _outcome(before)}

    @property
    def runs(self) -> int:
        """Pairs that were not run before."""
        return len(self._pairs) - len(self._known)

    def carry_out(self, means: ComputeConfig, watch: Watch) -> bool:
        """Tune; False if Ctrl-C ended it: cells that were decided are kept."""
        self._tuning = Tuning(self._pairs, [SEED], means, known=self._known, decided=self._decided)
        return self._tuning.carry_out(self._seeing(watch))

    def _seeing(self, watch: Watch) -> Watch:
        """Remembers the pairs that held the target, and passes everything on."""

        def see(event: Event) -> None:
            if isinstance(event, RunFinished) and event.run.progress.status is Status.TARGET:
                assert isinstance(event.item.name, RatePair)
                self._ended[event.item.name] = event
            watch(event)

        return see

    def _decided(self, rivals: Sequence[RatePair]) -> None:
        assert self._tuning is not None
        # Where every pair diverged, that is the result: the best of them is run, and says so.
        outcomes = self._tuning.outcomes
        cell, best = self._cells[rivals[0].point], min(rivals, key=lambda pair: score(outcomes[pair].values()))
        if best in self._ended:
            piece = Piece(cell, _rates(best))
            self._store.keep(record(self._ended[best], piece, self._store.choices), piece)
        points = [self._point(pair) for pair in rivals]
        limit = self._store.choices.limit(Piece(cell, cell.rates))
        choices = self._store.choices.open()
        found = {**asdict(cell), "choices": choices, "limit": limit, "best": _rates(best), "points": points}
        path = self._rates.path(cell)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, (json.dumps(finite(found), allow_nan=False, indent=1) + "\n").encode())
        for pair in rivals:
            self._ended.pop(pair, None)

    def _point(self, pair: RatePair) -> dict[str, Any]:
        assert self._tuning is not None
        return {"rates": _rates(pair), **asdict(self._tuning.outcomes[pair][SEED]), "known": pair in self._known}


def _outcome(before: Result) -> PairOutcome:
    held = before["sustained_seconds"] if before["status"] == Status.TARGET else None
    return PairOutcome(
        hit_seconds=held, **{name: before[name] for name in asdict(PairOutcome()) if name != "hit_seconds"}
    )


def _rates(pair: RatePair) -> Rates:
    return pair.global_lr, pair.local_lr
