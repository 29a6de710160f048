"""docs/reproduction.md on tuned rates: every figure is that of the results in the repository."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from defedavg.paper.infer_report import cell_of
from defedavg.paper.paper_tables import ranking, rates_rows, rows
from defedavg.paper.published import COMPARED, Cell, Rates
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


def held_rows(folder: str, rates: Mapping[Cell, Rates]) -> dict[Cell, Mapping[str, Any]]:
    """Return the rows of the cells whose three seeds all hold the target at these rates."""
    runs = [PaperRun(cell, pair) for cell, pair in rates.items()]
    made = rows(ResultFiles(RESULTS / folder, Choices()).results(runs, range(3)))
    assert all(row["seeds"] == 3 for row in made)
    return {cell_of(row): row for row in made if row["sustained_reached"] == 3}


NOW = held_rows("table1-tuned", TUNED)
BEFORE = held_rows("table1", {cell: cell.rates for cell in CELLS})


def test_all_cells_are_tuned() -> None:
    assert set(TUNED) == set(CELLS)
    assert f"All {len(CELLS)} cells are tuned." in SECTION


def test_the_section_says_how_tuned_rates_differ_from_the_papers() -> None:
    table = rates_rows(TUNED)
    same = [row for row in table if row["same"]]
    assert f"in {len(same)} of the {len(table)} cells, among them all twelve of FAVANO and AsySG" in SECTION
    alone = [row for row in table if row["algorithm"] in ("favano", "asysg")]
    assert len(alone) == 12
    assert all(row["same"] for row in alone)


def test_the_section_says_what_tuning_gains() -> None:
    changed = [cell for cell in CELLS if TUNED[cell] != cell.rates and cell in NOW and cell in BEFORE]
    gains = dict[str, list[float]]()
    for cell in changed:
        name = cell.algorithm.partition("-")[0]
        gains.setdefault(name, []).append(BEFORE[cell]["sustained"] / NOW[cell]["sustained"])
    assert gains.keys() == {"fedavg", "fedbuff", "defedavg"}
    assert len(gains["fedbuff"]) == 4
    lows, highs = ({name: pick(values) for name, values in gains.items()} for pick in (min, max))
    assert f"the target {lows['fedbuff']:.1f} to {highs['fedbuff']:.1f} times as early as at the paper's" in SECTION
    assert f"FedAvg gains a factor of {lows['fedavg']:.1f} to {highs['fedavg']:.1f} where its pair changes" in SECTION
    assert f"DeFedAvg one of {lows['defedavg']:.2f} to {highs['defedavg']:.2f} where its pair changes" in SECTION
    for name, text in (
        ("fedbuff", "at n = 40, FedBuff holds the target"),
        ("fedavg", "on, FedAvg"),
        ("defedavg-niid", "on, and DeFedAvg-nIID"),
    ):
        cell = Cell("cifar10", "non-iid", name, 40)
        now, before = NOW[cell]["sustained"], BEFORE[cell]["sustained"]
        assert f"{text} from {now:.0f} s instead of {before:.0f} s on" in SECTION


def test_the_section_says_who_wins_at_tuned_rates() -> None:
    table = {(row["setting"], row["dataset"], row["updates_per_round"]): row for row in ranking(RESULTS_OF_RUNS)}
    assert all(set(row["here"]) == set(COMPARED[key[0]]) for key, row in table.items())
    assert {key: row["first"] for key, row in table.items()} == {
        ("iid", "fashionmnist", 10): "defedavg-iid",
        ("iid", "cifar10", 10): "defedavg-iid",
        ("iid", "fashionmnist", 40): "fedavg",
        ("iid", "cifar10", 40): "fedavg",
        ("non-iid", "fashionmnist", 10): "fedbuff",
        ("non-iid", "fashionmnist", 40): "fedbuff",
        ("non-iid", "cifar10", 10): "fedbuff",
        ("non-iid", "cifar10", 40): "fedavg",
    }
    assert "*DeFedAvg is the first in two of the eight comparisons*, on IID data at n = 10." in SECTION
    assert "the first to hold the target in two of eight comparisons, FedAvg in three and FedBuff in three" in PAGE
    earlier = {
        key: row["here"][COMPARED[key[0]][-1]] < row["here"]["fedavg"] for key, row in table.items()
    }  # "in all four comparisons at n = 10, and in none of the four at n = 40"
    assert earlier == {key: key[2] == 10 for key in table}
    for dataset, factor in (("fashionmnist", 10), ("cifar10", 5)):  # "a local rate five or ten times the paper's"
        cell = Cell(dataset, "iid", "fedavg", 40)
        local, papers = TUNED[cell][1], cell.rates[1]
        assert local is not None
        assert papers is not None
        assert round(local / papers) == factor


def test_the_section_says_that_pairs_are_chosen_on_seed_0() -> None:
    cell = Cell("cifar10", "non-iid", "fedavg", 10)
    (result,) = ResultFiles(RESULTS / "table1-tuned", Choices()).results([PaperRun(cell, TUNED[cell])], [2])
    assert TUNED[cell] == (1.0, 0.1)
    assert result["status"] == "diverged"
    assert f"1 / 0.1, with which it diverges on seed 2 after {result['rounds']} rounds" in SECTION
    points = {tuple(point["rates"]): point for point in REQUEST.tuning_points()[cell]}
    chosen, other = points[1.0, 0.1], points[1.0, 0.05]
    assert chosen["hit_seconds"] == other["hit_seconds"]
    assert chosen["best_accuracy"] > other["best_accuracy"]
    assert f"1 / 0.05 holds the target from the same second on ({chosen['hit_seconds']:.0f} s)" in SECTION


def test_the_section_says_what_the_search_dropped() -> None:
    cell = Cell("fashionmnist", "non-iid", "defedavg-niid", 40)
    points = {tuple(point["rates"]): point for point in REQUEST.tuning_points()[cell]}
    dropped, kept = points[0.1, 0.1], points[1.0, 0.1]
    assert TUNED[Cell("fashionmnist", "non-iid", "defedavg-niid", 10)] == (0.1, 0.1)
    assert dropped["status"] == "dropped"
    assert f"after {dropped['seconds']:.0f} s with {100 * dropped['best_accuracy']:.1f} %" in SECTION
    assert kept["hit_seconds"] is None
    assert f"reached {100 * kept['best_accuracy']:.1f} % and never held 80 %" in SECTION
