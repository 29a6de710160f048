"""docs/reproduction.md on tuned rates: every figure is that of the results in the repository."""

from __future__ import annotations

import re
from pathlib import Path

from defedavg.paper.paper_tables import ranking, rates_rows, rows
from defedavg.paper.published import COMPARED, Cell
from defedavg.paper.result_files import ResultFiles
from defedavg.paper.run_grid import Choices, PaperRun
from defedavg.paper.run_request import PaperRequest, select_cells

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "paper"
PAGE = re.sub(r"\s+", " ", (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8"))
SECTION = PAGE.partition("## Tuned rates ")[2].partition(" ## ")[0]
CELLS = select_cells(None, None, [10, 40])
REQUEST = PaperRequest(folder=RESULTS, cells=tuple(CELLS), seeds=range(3), rates="tuned", show_only=True)
TUNED = REQUEST.tuned_rates()[0]
RUNS = [PaperRun(cell, rates) for cell, rates in TUNED.items()]
RESULTS_OF_RUNS = ResultFiles(RESULTS / "table1-tuned", Choices()).results(RUNS, range(3))


def held_from(folder: str, cell: Cell, rates: tuple[float | None, float | None]) -> str:
    """Return the mean time from which three seeds of a cell hold the target."""
    (row,) = rows(ResultFiles(RESULTS / folder, Choices()).results([PaperRun(cell, rates)], range(3)))
    assert row["sustained_reached"] == row["seeds"] == 3
    return f"{row['sustained']:.0f} s"


def test_the_section_says_which_cells_are_tuned() -> None:
    assert f"{len(TUNED)} of the {len(CELLS)} cells are tuned." in SECTION
    missing = {Cell(dataset, "non-iid", "fedbuff", 40) for dataset in ("fashionmnist", "cifar10")}
    missing |= {Cell("cifar10", "non-iid", name, n) for name in ("fedavg", "defedavg-niid") for n in (10, 40)}
    assert set(CELLS) - set(TUNED) == missing
    few = {(row["dataset"], row["algorithm"]) for row in rows(RESULTS_OF_RUNS) if row["seeds"] < 3}
    assert few == {("cifar10", "favano"), ("fashionmnist", "fedbuff")}  # "there is one seed"


def test_the_section_says_how_tuned_rates_differ_from_the_papers() -> None:
    table = rates_rows(TUNED)
    same = [row for row in table if row["same"]]
    assert f"in {len(same)} of the {len(table)} cells, among them all twelve of FAVANO and AsySG" in SECTION
    alone = [row for row in table if row["algorithm"] in ("favano", "asysg")]
    assert len(alone) == 12
    assert all(row["same"] for row in alone)
    changed = (
        (Cell("fashionmnist", "iid", "fedavg", 40), "FedAvg on IID FashionMNIST at n = 40 holds the target from"),
        (Cell("cifar10", "non-iid", "fedbuff", 10), "FedBuff on non-IID CIFAR-10 at n = 10 from"),
        (Cell("fashionmnist", "iid", "defedavg-iid", 40), "DeFedAvg-IID on IID FashionMNIST at n = 40 from"),
    )
    for cell, text in changed:
        now, before = held_from("table1-tuned", cell, TUNED[cell]), held_from("table1", cell, cell.rates)
        assert f"{text} {now} instead of {before} on" in SECTION, cell


def test_the_section_says_who_wins_at_tuned_rates() -> None:
    table = {(row["setting"], row["dataset"], row["updates_per_round"]): row for row in ranking(RESULTS_OF_RUNS)}
    complete = {key: row["first"] for key, row in table.items() if set(row["here"]) == set(COMPARED[key[0]])}
    assert complete == {
        ("iid", "fashionmnist", 10): "defedavg-iid",
        ("iid", "cifar10", 10): "defedavg-iid",
        ("iid", "fashionmnist", 40): "fedavg",
        ("iid", "cifar10", 40): "fedavg",
        ("non-iid", "fashionmnist", 10): "fedbuff",
    }
    assert "*Five comparisons have all four algorithms.* DeFedAvg is the first in two of them" in SECTION
    assert "DeFedAvg is the first to hold the target in two of the five comparisons that are complete" in PAGE
    for dataset, factor in (("fashionmnist", 10), ("cifar10", 5)):  # "a local rate five or ten times the paper's"
        cell = Cell(dataset, "iid", "fedavg", 40)
        local, papers = TUNED[cell][1], cell.rates[1]
        assert local is not None
        assert papers is not None
        assert round(local / papers) == factor
    here = table["non-iid", "fashionmnist", 40]["here"]
    fedavg, defedavg = f"{here['fedavg']:.0f}", f"{here['defedavg-niid']:.0f}"
    assert f"FedAvg holds the target from {fedavg} s on and DeFedAvg-nIID from {defedavg} s on" in SECTION
    assert "fedbuff" not in here


def test_the_section_says_what_the_search_dropped() -> None:
    cell = Cell("fashionmnist", "non-iid", "defedavg-niid", 40)
    points = {tuple(point["rates"]): point for point in REQUEST.tuning_points()[cell]}
    dropped, kept = points[0.1, 0.1], points[1.0, 0.1]
    assert TUNED[Cell("fashionmnist", "non-iid", "defedavg-niid", 10)] == (0.1, 0.1)
    assert dropped["status"] == "dropped"
    assert f"after {dropped['seconds']:.0f} s with {100 * dropped['best_accuracy']:.1f} %" in SECTION
    assert kept["hit_seconds"] is None
    assert f"reached {100 * kept['best_accuracy']:.1f} % and never held 80 %" in SECTION
