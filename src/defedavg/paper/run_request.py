"""A request for a part of the paper's experiments, and the runs that it needs.

The library does not print: ``notify`` receives lines for the user, and ``watching`` makes the callback that follows
the progress of runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..errors import UserError, counted, unknown
from ..experiments.compute import ComputeConfig
from ..experiments.run_events import Event, Watch
from .published import (
    ALGORITHM_NAMES,
    DATASETS,
    FIGURE7_STEPS,
    LOCAL_STEPS,
    SETTINGS,
    SIZES,
    Cell,
    Rates,
    cells,
    figure6_cells,
    figure_cells,
)
from .result_files import Result, ResultFiles, StoredRun, compute_runs, logged_session
from .run_grid import ROUNDS, Choices, PaperRun
from .tuned_rates import RateSearch, TunedRates

Watching = Callable[[str, int], AbstractContextManager[Watch]]
"""Takes the title and the number of runs; returns a context that yields the callback for their events."""


def select_cells(
    datasets: Sequence[str] | None,
    settings: Sequence[str] | None,
    sizes: Sequence[int] | None,
    algorithms: Sequence[str] | None = None,
    known_sizes: Sequence[int] = SIZES,
) -> list[Cell]:
    """Return the selected cells; None selects all values.

    They are those of Table 1, and with ``FIGURE6_SIZES`` as ``known_sizes`` also those that Figure 6 alone has.
    """
    selected: list[tuple[str, Sequence[object]]] = [
        ("dataset", _checked("dataset", datasets, DATASETS)),
        ("setting", _checked("setting", settings, SETTINGS)),
        ("updates_per_round", _checked_sizes(sizes, known_sizes)),
        ("algorithm", _checked("algorithm", algorithms, ALGORITHM_NAMES)),
    ]
    every = (*cells(), *figure6_cells())
    return [cell for cell in every if all(getattr(cell, name) in values for name, values in selected)]


def _checked(what: str, values: Sequence[str] | None, known: Sequence[str]) -> Sequence[str]:
    for value in values or ():
        if value not in known:
            raise unknown(what, value, known)
    return values or known


def _checked_sizes(sizes: Sequence[int] | None, known: Sequence[int]) -> Sequence[int]:
    for size in sizes or ():
        if size not in known:
            raise UserError(f"--n is {size}; it must be one of {', '.join(map(str, known))}")
    return sizes or known


def _watch_session(watch: Watch, began: Callable[[], None]) -> Watch:
    def callback(event: Event) -> None:
        began()
        watch(event)

    return callback


def _quiet(_title: str, _runs: int) -> AbstractContextManager[Watch]:
    return nullcontext(lambda _event: None)


@dataclass(frozen=True)
class PaperRequest:
    """The cells, seeds, rates and choices of one command, and what computes the runs."""

    folder: Path
    cells: tuple[Cell, ...] = ()
    seeds: range = range(1)
    rates: str = "paper"
    choices: Choices = field(default_factory=Choices)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    show_only: bool = False  # compute no runs
    notify: Callable[[str], None] = lambda _line: None
    watching: Watching = _quiet

    @property
    def suffix(self) -> str:
        """What the names of folders and files add for rates other than the paper's."""
        return "" if self.rates == "paper" else f"-{self.rates}"

    def table_runs(self, size: int | None = None) -> tuple[list[PaperRun], ResultFiles, bool]:
        """Return the runs of Table 1 (or of one n), their store, and False if Ctrl-C stopped the tuning of rates."""
        wanted = _not_empty(c for c in self.cells if c.updates_per_round in (SIZES if size is None else (size,)))
        if self.rates == "stated":
            return [PaperRun(cell, cell.stated_rates) for cell in wanted], self._store("table1-stated"), True
        if self.rates == "paper":
            return [PaperRun(cell, cell.rates) for cell in wanted], self._store("table1"), True
        tuned, finished = replace(self, cells=tuple(wanted)).tuned_rates()
        runs = [PaperRun(cell, rates) for cell, rates in tuned.items()]
        store = self._store("table1-tuned")
        store.adopt(self._store("table1"), [run for run in runs if run.rates == run.cell.rates], self.seeds)
        return runs, store, finished

    def defedavg_runs(self, figure: int) -> tuple[list[PaperRun], ResultFiles, bool]:
        """Return the same for DeFedAvg with several n (figure 6) or with several K and n = 10 (figure 7)."""
        steps = (LOCAL_STEPS,) if figure == 6 else FIGURE7_STEPS
        wanted = _not_empty(cell for cell in figure_cells(figure) if cell in self.cells)
        rates, finished = self._figure_rates(wanted)
        runs = [PaperRun(cell, pair, k, ROUNDS) for cell, pair in rates.items() for k in steps]
        return runs, self._store(f"figure{figure}{self.suffix}"), finished

    def _figure_rates(self, wanted: Sequence[Cell]) -> tuple[dict[Cell, Rates], bool]:
        if self.rates != "tuned":
            return {cell: cell.rates if self.rates == "paper" else cell.stated_rates for cell in wanted}, True
        # Table 1 has no n = 5, so its rates are not tuned: these cells use the rates of n = 10.
        tuned_as = {cell: replace(cell, updates_per_round=max(cell.updates_per_round, SIZES[0])) for cell in wanted}
        tuned, finished = replace(self, cells=tuple(dict.fromkeys(tuned_as.values()))).tuned_rates()
        return {cell: tuned[other] for cell, other in tuned_as.items() if other in tuned}, finished

    def tuned_rates(self) -> tuple[dict[Cell, Rates], bool]:
        """Return the best rates of the cells, tuning those that are not known; False if Ctrl-C stopped it."""
        wanted, store, tuned = self._tuning()
        rates, finished = tuned.known(wanted, any_limit=self.show_only), True
        untuned = [cell for cell in wanted if cell not in rates]
        if untuned and not self.show_only:
            self.notify(f"rates to tune: {counted(len(untuned), 'cell')}")
            search = RateSearch(tuned, untuned)
            with self.watching("rates", search.runs) as watch, logged_session(store.folder, self.compute) as began:
                finished = search.run(self.compute, _watch_session(watch, began))
            rates = tuned.known(wanted)
        return rates, finished

    def tuning_points(self) -> dict[Cell, list[Result]]:
        """Return the outcome of every pair of rates in the cells that have been tuned."""
        wanted, _, tuned = self._tuning()
        return tuned.points(wanted)

    def _tuning(self) -> tuple[list[Cell], ResultFiles, TunedRates]:
        store = self._store("table1-tuned")
        wanted = [cell for cell in self.cells if cell.updates_per_round in SIZES]
        return wanted, store, TunedRates(store, self._store("table1"))

    def _store(self, name: str) -> ResultFiles:
        return ResultFiles(self.folder / name, self.choices)

    def compute_missing(self, store: ResultFiles, runs: Sequence[PaperRun], title: str) -> bool:
        """Compute the runs that have no result; return False if Ctrl-C stopped it."""
        missing = store.missing(runs, self.seeds)  # reads the stored results, which must fit before hours are spent
        if self.show_only:
            return True
        stored = len(runs) * len(self.seeds) - len(missing)
        return self.compute_stored(
            [(StoredRun(store, run), seed) for run, seed in missing], stored, store.folder, title
        )

    def compute_stored(self, missing: Sequence[tuple[StoredRun, int]], stored: int, folder: Path, title: str) -> bool:
        """Compute and store runs; return False if Ctrl-C stopped it, or if runs are missing and only shown."""
        if not missing:
            return True
        if self.show_only:
            return False
        self.notify(f"runs to compute: {len(missing)}; already stored: {stored}")
        with self.watching(title, len(missing)) as watch, logged_session(folder, self.compute) as began:
            return compute_runs(missing, self.compute, watch, self.notify, began)


def _not_empty(selected: Iterable[Cell]) -> list[Cell]:
    wanted = list(selected)
    if not wanted:
        raise UserError("no run matches the options; leave out --n, --algorithm or --setting")
    return wanted
