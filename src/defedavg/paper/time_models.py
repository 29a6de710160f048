"""How well other readings of the time model would fit Table 1, from planned round times; nothing is trained.

A stored time to the target is multiplied by the ratio of the planned times of a round. So the rounds to the target are
taken as they are: that another time model also changes the staleness is left out. FAVANO is not scored, because its
rounds have a fixed length, in which clients make more or fewer steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Final

from .implied_rounds import Progress, round_seconds
from .infer import TIMES, error
from .infer_report import KINDS, WITHIN, cell_of, complete_time
from .paper_tables import markdown
from .published import Cell
from .readings import READINGS, Readings
from .run_grid import Choices, PaperRun

READ: Final = ("slowness", "upload")
SCORED: Final = ("fedavg", "asysg", "fedbuff", "defedavg-iid", "defedavg-niid")
Rows = Sequence[Mapping[str, Any]]


@dataclass
class _RoundTimes:
    """Planned round times; a cell that a reading does not concern is planned once."""

    seeds: Sequence[int]
    found: dict[str, float]

    def of(self, cell: Cell, readings: Readings) -> float:
        key = repr(Choices(readings=readings).settings(PaperRun(cell, cell.rates)))
        if key not in self.found:
            self.found[key] = round_seconds(cell, readings, self.seeds)
        return self.found[key]


def time_models() -> list[Readings]:
    """Return the present readings with every combination of the readings of the time model."""
    slownesses, uploads = (READINGS[name].values for name in READ)
    return [replace(Readings(), slowness=slowness, upload=upload) for slowness in slownesses for upload in uploads]


def scores(table: Rows, seeds: Sequence[int], progress: Progress = lambda _done, _all: None) -> list[dict[str, Any]]:
    """Return one row for every time model: mean errors by algorithm, and those of all cells for both kinds of time.

    There are none if the table has no cell that can be scored.
    """
    scored = [row for row in table if row["algorithm"] in SCORED and cell_of(row).seconds is not None]
    if not scored:
        return []
    models, times, found = time_models(), _RoundTimes(seeds, {}), []
    for number, readings in enumerate(models):
        ratios = []
        for row in scored:
            cell = cell_of(row)
            ratios.append(times.of(cell, readings) / times.of(cell, Readings()))
            progress(number * len(scored) + len(ratios), len(models) * len(scored))
        found.append({name: getattr(readings, name) for name in READ} | _errors(scored, ratios))
    return found


def _errors(scored: Rows, ratios: Sequence[float]) -> dict[str, Any]:
    errors = {kind: [_error(row, kind, ratio) for row, ratio in zip(scored, ratios, strict=True)] for kind in KINDS}
    algorithms = [row["algorithm"] for row in scored]
    by_algorithm = {
        name: fmean(each for each, own in zip(errors["first_hit"], algorithms, strict=True) if own == name)
        for name in SCORED
        if name in algorithms
    }
    within = sum(each <= math.log(WITHIN) for each in errors["first_hit"])
    return {
        "algorithms": by_algorithm,
        **{kind: fmean(each) for kind, each in errors.items()},
        "within": within,
        "number": len(scored),
    }


def _error(row: Mapping[str, Any], kind: str, ratio: float) -> float:
    seconds = complete_time(row, kind)
    return error(cell_of(row), None if seconds is None else seconds * ratio)


def to_markdown(table: Rows) -> str:
    """Return the scores as a Markdown table."""
    names = list(table[0]["algorithms"])
    lines = []
    for row in table:
        errors = [*(row["algorithms"][name] for name in names), row["first_hit"], row["sustained"]]
        shown = " | ".join(f"{each:.3f}" for each in errors)
        lines.append(f"| {row['slowness']} | {row['upload']} | {shown} | {row['within']} of {row['number']} |")
    columns = " | ".join([*names, *(f"all, {name}" for name in TIMES.values())])
    return markdown(f"slowness | upload | {columns} | within a factor of {WITHIN:g}", lines)
