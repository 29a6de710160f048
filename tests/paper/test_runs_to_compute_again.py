"""docs/reproduction.md on runs to compute again: the runs that it names, and the error of runs computed twice."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

from defedavg.paper.published import Cell
from defedavg.paper.result_files import ResultFiles
from defedavg.paper.run_grid import Choices, PaperRun

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "paper"
PAGE = re.sub(r"\s+", " ", (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8"))


def says(text: str) -> bool:
    """Return whether the page has a text, whatever its line breaks are."""
    return text in PAGE


def test_runs_to_compute_again_are_named_and_their_error_is_that_of_runs_computed_twice() -> None:
    stored = json.loads((RESULTS / "overwritten-operands.json").read_text(encoding="utf-8"))
    affected = [
        (Cell(*(row[name] for name in ("dataset", "setting", "algorithm", "updates_per_round"))), seed)
        for row in stored["to_compute_again"]["table1"]
        for seed in row["seeds"]
    ]
    store = ResultFiles(RESULTS / "table1", Choices())
    assert all(store.path(PaperRun(cell, cell.rates), seed).exists() for cell, seed in affected)
    assert says(f"{len(affected)} runs of the table and the 30 runs of figure 6 on CIFAR-10 were computed with kernels")
    twice = stored["computed_twice"]
    unstable = [row for row in twice if row["algorithm"] == "fedbuff" and row["updates_per_round"] == 40]
    assert [row["mended"]["status"] for row in unstable] == ["diverged", "target", "diverged"]
    assert {row["before"]["status"] for row in twice} == {"target"}
    stable = [row for row in twice if row not in unstable]
    assert says(f"{len(twice)} runs on FashionMNIST, at other rates than the paper's, were computed with both versions")
    same, worst = {}, {}
    for time in ("first_hit_seconds", "sustained_seconds"):
        errors = [abs(math.log(row["before"][time] / row["mended"][time])) for row in stable]
        same[time], worst[time] = errors.count(0.0), f"{100 * math.expm1(max(errors)):.1f} %"
    first, held = "first_hit_seconds", "sustained_seconds"
    assert says(
        f"In {len(stable)} of them, the first hit is the same in {same[first]} and differs by at most {worst[first]} "
        f"in the others, and the sustained time is the same in {same[held]} and differs by at most {worst[held]} "
        "in the others."
    )
