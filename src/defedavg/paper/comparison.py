"""Table 1 under the first readings and under the present ones, as far as both are computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .infer_report import agreement, agreement_to_markdown
from .paper_tables import rows
from .published import cells
from .readings import FIRST
from .run_grid import Choices
from .run_request import PaperRequest

SEEDS = range(3)
Tables = dict[str, list[dict[str, Any]]]


def compared_tables(folder: Path) -> Tables:
    """Return the rows of Table 1 by title: the first results, at the rates of Table 2, and the present ones."""
    every = tuple(cells())
    requests = {
        "first readings": PaperRequest(
            folder / "first-reading", every, SEEDS, "stated", Choices(readings=FIRST), show_only=True
        ),
        "present readings": PaperRequest(folder, every, SEEDS, show_only=True),
    }
    tables: Tables = {}
    for title, request in requests.items():
        runs, store, _ = request.table_runs()
        if found := rows(store.results(runs, request.seeds)):
            tables[f"{title}, {len(found)} of {len(runs)} cells"] = found
    return tables


def to_markdown(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return how well each table agrees with the paper."""
    return "\n".join(f"{title}:\n\n{agreement_to_markdown(agreement(table))}" for title, table in tables.items())
