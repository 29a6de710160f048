"""What was asked for on the command line, and the runs that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..cli.options import err
from ..errors import UserError, unknown
from .published import (
    COMPARED,
    DATASETS,
    FIGURE6_SIZES,
    FIGURE7_STEPS,
    LOCAL_STEPS,
    SETTINGS,
    SIZES,
    Cell,
    Rates,
    cells,
)
from .run_grid import ROUNDS, Choices, Piece

if TYPE_CHECKING:
    from ..experiments.compute import ComputeConfig
    from .result_files import Result, ResultFiles
    from .tuned_rates import TunedRates

_NAMES = tuple(dict.fromkeys(name for own in COMPARED.values() for name in own))


def chosen(
    datasets: Sequence[str] | None,
    settings: Sequence[str] | None,
    sizes: Sequence[int] | None,
    algorithms: Sequence[str] | None = None,
) -> list[Cell]:
    """The cells that were asked for: of Table 1, and those of Figure 6 with n = 5."""
    for what, given, known in (
        ("dataset", datasets, DATASETS),
        ("setting", settings, SETTINGS),
        ("n", sizes, FIGURE6_SIZES),
        ("algorithm", algorithms, _NAMES),
    ):
        for value in given or ():
            if value not in known:
                raise unknown(what, str(value), [str(one) for one in known])
    few = [Cell(d, s, COMPARED[s][-1], n) for s in SETTINGS for d in DATASETS for n in FIGURE6_SIZES if n not in SIZES]
    return [
        cell
        for cell in (*cells(), *few)
        if cell.dataset in (datasets or DATASETS)
        and cell.setting in (settings or SETTINGS)
        and cell.updates_per_round in (sizes or FIGURE6_SIZES)
        and cell.algorithm in (algorithms or _NAMES)
    ]


def seeds_or_refuse(count: int) -> range:
    """Seeds 0, 1, …"""
    if count < 1:
        raise UserError(f"--seeds is {count}; it must be at least 1")
    return range(count)


def rates_or_refuse(word: str) -> str:
    """``paper`` or ``tuned``."""
    if word not in ("paper", "tuned"):
        raise unknown("rates", word, ("paper", "tuned"))
    return word


@dataclass(frozen=True)
class PaperRequest:
    """One command's cells, seeds, rates and means."""

    folder: Path
    cells: tuple[Cell, ...] = ()
    seeds: range = range(1)
    rates: str = "paper"
    choices: Choices = field(default_factory=Choices)
    means: ComputeConfig | None = None
    show: bool = False  # do no runs
    as_json: bool = False

    def cells_with_rates(self, size: int | None = None) -> tuple[list[Piece], ResultFiles, bool]:
        """The cells of Table 1 (of one n) with their rates, where they are kept, and whether all have rates."""
        from .result_files import ResultFiles

        wanted = [cell for cell in self.cells if cell.updates_per_round in (SIZES if size is None else (size,))]
        if not wanted:
            raise UserError("nothing is left of these choices; leave out --n, --algorithm or --setting")
        if self.rates == "paper":
            return [Piece(cell, cell.rates) for cell in wanted], ResultFiles(self.folder / "table1", self.choices), True
        found, finished = replace(self, cells=tuple(wanted)).tuned()
        pieces = [Piece(cell, own) for cell, own in found.items()]
        store, paper = (
            ResultFiles(self.folder / "table1-tuned", self.choices),
            ResultFiles(self.folder / "table1", self.choices),
        )
        store.adopt(paper, [piece for piece in pieces if piece.rates == piece.cell.rates], self.seeds)
        return pieces, store, finished

    def defedavg(self, figure: int) -> tuple[list[Piece], ResultFiles, bool]:
        """DeFedAvg for several n (figure 6), or for several K (figure 7, n = 10)."""
        from .result_files import ResultFiles

        sizes = FIGURE6_SIZES if figure == 6 else (SIZES[0],)
        own = [c for c in self.cells if c.algorithm == COMPARED[c.setting][-1] and c.updates_per_round in sizes]
        if not own:
            raise UserError("nothing is left of these choices; leave out --n, --algorithm or --setting")
        rates, finished = {cell: cell.rates for cell in own}, True
        if self.rates == "tuned":  # the paper's grid was not searched for n = 5: it has the rates of n = 10
            like = {cell: replace(cell, updates_per_round=max(cell.updates_per_round, SIZES[0])) for cell in own}
            found, finished = replace(self, cells=tuple(dict.fromkeys(like.values()))).tuned()
            rates = {cell: found[other] for cell, other in like.items() if other in found}
        steps = (LOCAL_STEPS,) if figure == 6 else FIGURE7_STEPS
        pieces = [Piece(cell, pair, k, ROUNDS) for cell, pair in rates.items() for k in steps]
        kind = "" if self.rates == "paper" else "-tuned"
        return pieces, ResultFiles(self.folder / f"figure{figure}{kind}", self.choices), finished

    def tuned(self) -> tuple[dict[Cell, Rates], bool]:
        """The best rates of the cells, found where they are not known; and whether nobody pressed Ctrl-C."""
        from ..cli.progress_table import watching
        from .history import note

        wanted, store, tuned = self._tuned_rates()
        found, finished = tuned.known(wanted, any_limit=self.show), True
        left = [cell for cell in wanted if cell not in found]
        if left and not self.show:
            assert self.means is not None
            err.print(f"rates of {len(left)} cells to find", markup=False, soft_wrap=True)
            race = tuned.race(left)
            with watching(err, "rates", race.runs) as watch, note(store.folder, self.means):
                finished = race.carry_out(self.means, watch)
            found = tuned.known(wanted)
        return found, finished

    def points(self) -> dict[Cell, list[Result]]:
        """How every pair of rates fared in the cells that have been tuned."""
        wanted, _, tuned = self._tuned_rates()
        return tuned.points(wanted)

    def _tuned_rates(self) -> tuple[list[Cell], ResultFiles, TunedRates]:
        from .result_files import ResultFiles
        from .tuned_rates import TunedRates

        store = ResultFiles(self.folder / "table1-tuned", self.choices)
        wanted = [cell for cell in self.cells if cell.updates_per_round in SIZES]
        return wanted, store, TunedRates(store, ResultFiles(self.folder / "table1", self.choices))

    def carry_out(self, store: ResultFiles, pieces: Sequence[Piece], title: str) -> bool:
        """Do what is missing; False if Ctrl-C ended it."""
        from ..cli.progress_table import watching
        from .history import note
        from .result_files import carry_out

        jobs = store.missing(pieces, self.seeds)  # reads what is there: it must fit before hours are spent
        if not jobs or self.show:
            return True
        assert self.means is not None
        there = len(pieces) * len(self.seeds) - len(jobs)
        err.print(f"{len(jobs)} runs to do, {there} are there", markup=False, soft_wrap=True)
        with watching(err, title, len(jobs)) as watch, note(store.folder, self.means):
            return carry_out(store, jobs, self.means, watch)
