"""What each client gets, for the page: figures over clients, and the metric against speed, data and participation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..runstore.client_results import AGAINST, FIGURES, Row
from .seed_figures import mean
from .series import Series

MAX_POINTS = 120
"""Points of a series in one chart, over all its seeds."""


def clients_of(series: Series) -> dict[str, Any] | None:
    """Return figures and points of a series; None if none of its runs was evaluated per client."""
    figures = {name: mean(series.numbers, name) for name in FIGURES}
    if figures["clients_evaluated"] is None:
        return None
    runs = []
    for run in series.runs:
        rows, notes = series.folder.client_rows(run)
        series.notes += notes
        runs.append([row for row in rows if row["accuracy"] is not None])
    return {
        "figures": figures,
        "of_clients": not any(row["client"] is None for rows in runs for row in rows),
        "points": {name: _points(runs, column) for name, column in AGAINST.items()},
    }


def _points(runs: Sequence[Sequence[Row]], column: str) -> dict[str, Any] | None:
    """Return the metric by the values of a column, None if all are equal; a point may be the mean over neighbours."""
    each = [[(row[column], row["accuracy"]) for row in rows if row[column] is not None] for rows in runs]
    if len({value for some in each for value, _ in some}) < 2:
        return None
    pairs = [np.array(sorted(some, key=lambda pair: pair[0]), np.float64) for some in each if some]
    size = -(-max(map(len, pairs)) // max(10, MAX_POINTS // len(pairs)))
    groups = [some[i : i + size] for some in pairs for i in range(0, len(some), size)]
    x, y = np.array([group.mean(axis=0) for group in groups]).T
    return {"x": x.tolist(), "y": y.tolist(), "clients_per_point": size}
