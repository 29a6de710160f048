"""Table 1 under the first readings and under the present ones, as far as both are computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import counted
from .infer_report import agreement, agreement_to_markdown, cell_of
from .paper_tables import rows
from .published import cells
from .readings import FIRST
from .run_grid import Choices
from .run_request import PaperRequest

SEEDS = range(3)
Rows = Sequence[Mapping[str, Any]]
Tables = dict[str, Rows]


def present_rows(folder: Path) -> Rows:
    """Return the stored rows of Table 1 under the present readings."""
    return _stored_rows(PaperRequest(folder, tuple(cells()), SEEDS, show_only=True))


def _stored_rows(request: PaperRequest) -> Rows:
    runs, store, _ = request.table_runs()
    return rows(store.results(runs, request.seeds))


def compared_tables(folder: Path) -> Tables:
    """Return the rows of Table 1 by title: the first results, at the rates of Table 2, and the present ones."""
    every, first = tuple(cells()), folder / "first-reading"
    tables = {
        "first readings": _stored_rows(
            PaperRequest(first, every, SEEDS, "stated", Choices(readings=FIRST), show_only=True)
        ),
        "present readings": present_rows(folder),
    }
    return {
        f"{title}, {len(found)} of {counted(len(every), 'cell')}": found for title, found in tables.items() if found
    }


def to_markdown(tables: Mapping[str, Rows]) -> str:
    """Return how well each table agrees with the paper; of a longer one also its cells that the shortest has."""
    shown = dict(tables)
    shortest = min(tables.values(), key=len)
    common = {cell_of(row) for row in shortest}
    for title, table in tables.items():
        if len(table) > len(shortest):
            name = f"{title.partition(',')[0]}, the {counted(len(shortest), 'cell')} that both have"
            shown[name] = [row for row in table if cell_of(row) in common]
    return "\n".join(f"{title}:\n\n{agreement_to_markdown(agreement(table))}" for title, table in shown.items())
