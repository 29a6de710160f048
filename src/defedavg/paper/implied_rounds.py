"""Rounds that Table 1 implies: the paper's seconds divided by the mean time of a planned round; nothing is trained.

Cells that share data, algorithm and rates need about the same number of rounds whatever n is, because a merge averages.
So the implied rounds test the readings of the time model, and show the cells in which Table 2 contradicts Table 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any, Final

from ..config.build import make_plan
from .paper_tables import markdown, stated_and_used
from .published import Cell
from .readings import Readings
from .run_grid import Choices, PaperRun

ROUNDS: Final = 400
WARM_UP: Final = 100
"""Rounds at the start of a plan that are left out of the mean, because all clients start together."""


Progress = Callable[[int, int], None]
"""Takes the number of cells that are planned, and the number of all cells."""


def round_seconds(cell: Cell, readings: Readings, seeds: Sequence[int]) -> float:
    """Return the mean time of a planned round after the warm-up, over seeds."""
    return fmean(_seconds_by_seed(cell, readings, seeds))


def _seconds_by_seed(cell: Cell, readings: Readings, seeds: Sequence[int]) -> Iterator[float]:
    settings = Choices(readings=readings).settings(PaperRun(cell, cell.rates))
    for seed in seeds:
        plan = make_plan(settings, seed, ROUNDS).rounds
        yield (plan[-1].time - plan[WARM_UP - 1].time) / (ROUNDS - WARM_UP)


def rows(
    cells: Sequence[Cell], readings: Readings, seeds: Sequence[int], progress: Progress = lambda _done, _all: None
) -> list[dict[str, Any]]:
    """Return one row per cell for which the paper has a time; ``progress`` is called after every plan."""
    timed = [(cell, cell.seconds) for cell in cells if cell.seconds is not None]
    found: list[dict[str, Any]] = []
    for cell, paper in timed:
        by_seed = []
        for seconds in _seconds_by_seed(cell, readings, seeds):
            by_seed.append(seconds)
            progress(len(found) + (len(by_seed) == len(seeds)), len(timed))
        rates, mean = {"stated_rates": cell.stated_rates, "rates": cell.rates}, fmean(by_seed)
        found.append({**asdict(cell), **rates, "round_seconds": mean, "implied_rounds": paper / mean})
    return found


def to_markdown(table: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a Markdown table; rates that replace those of Table 2 are in brackets."""
    lines = [
        f"| {row['setting']} | {row['dataset']} | {row['algorithm']} | {row['updates_per_round']} "
        f"| {stated_and_used(row['stated_rates'], row['rates'])} | {row['round_seconds']:.4f} "
        f"| {row['implied_rounds']:.0f} |"
        for row in table
    ]
    return markdown("setting | data | algorithm | n | η / η̄ of Table 2 [used] | s a round | implied rounds", lines)
