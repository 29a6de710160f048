"""Rounds that Table 1 implies: the paper's seconds divided by the mean time of a planned round; nothing is trained.

Cells that share data, algorithm and rates need about the same number of rounds whatever n is, because a merge averages.
So the implied rounds test the readings of the time model, and show the cells in which Table 2 contradicts Table 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any, Final

from ..config.build import make_plan
from .paper_tables import markdown, rates_pair
from .published import Cell
from .readings import Readings
from .run_grid import Choices, PaperRun

ROUNDS: Final = 400
WARM_UP: Final = 100
"""Rounds at the start of a plan that are left out of the mean, because all clients start together."""


def round_seconds(cell: Cell, readings: Readings, seeds: Sequence[int]) -> float:
    """Return the mean time of a planned round after the warm-up, over seeds."""
    settings = Choices(readings=readings).settings(PaperRun(cell, cell.rates))
    plans = (make_plan(settings, seed, ROUNDS).rounds for seed in seeds)
    return fmean((plan[-1].time - plan[WARM_UP - 1].time) / (ROUNDS - WARM_UP) for plan in plans)


def rows(cells: Sequence[Cell], readings: Readings, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return one row per cell for which the paper has a time."""
    found = []
    for cell in cells:
        if cell.seconds is not None:
            seconds = round_seconds(cell, readings, seeds)
            rates = {"stated_rates": cell.stated_rates, "rates": cell.rates}
            found.append({**asdict(cell), **rates, "round_seconds": seconds, "implied_rounds": cell.seconds / seconds})
    return found


def to_markdown(table: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a Markdown table; rates that replace those of Table 2 are in brackets."""
    lines = []
    for row in table:
        stated, used = rates_pair(*row["stated_rates"]), rates_pair(*row["rates"])
        lines.append(
            f"| {row['setting']} | {row['dataset']} | {row['algorithm']} | {row['updates_per_round']} "
            f"| {stated if stated == used else f'{stated} [{used}]'} | {row['round_seconds']:.4f} "
            f"| {row['implied_rounds']:.0f} |"
        )
    return markdown("setting | data | algorithm | n | η / η̄ of Table 2 [used] | s a round | implied rounds", lines)
