"""docs/reproduction.md on tuned rates: every figure is that of the results in the repository."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from defedavg.paper.infer_report import cell_of
from defedavg.paper.paper_tables import ranking, rates_rows, rows
from defedavg.paper.published import COMPARED, Cell, Rates, cells
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
AT_PAPER_RATES = {cell: cell.rates for cell in CELLS}


def held_rows(folder: str, rates: Mapping[Cell, Rates]) -> dict[Cell, Mapping[str, Any]]:
    """Return the rows of the cells whose three seeds all hold the target at these rates."""
    runs = [PaperRun(cell, pair) for cell, pair in rates.items()]
    made = rows(ResultFiles(RESULTS / folder, Choices()).results(runs, range(3)))
    assert all(row["seeds"] == 3 for row in made)
    return {cell_of(row): row for row in made if row["sustained_reached"] == 3}


NOW = held_rows("table1-tuned", TUNED)
BEFORE = held_rows("table1", AT_PAPER_RATES)


def ranked(folder: str, rates: Mapping[Cell, Rates]) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Return the ranking by setting, data set and n; ``here`` has the median times from which the target is held."""
    runs = [PaperRun(cell, pair) for cell, pair in rates.items()]
    table = ranking(ResultFiles(RESULTS / folder, Choices()).results(runs, range(3)))
    return {(row["setting"], row["dataset"], row["updates_per_round"]): row for row in table}


RANKED, RANKED_BEFORE = ranked("table1-tuned", TUNED), ranked("table1", AT_PAPER_RATES)


def first_hits(folder: str, rates: Mapping[Cell, Rates]) -> dict[tuple[str, str, int], dict[str, float]]:
    """Return the median first hit of every algorithm in every comparison."""
    found = dict[tuple[str, str, int], dict[str, float]]()
    store = ResultFiles(RESULTS / folder, Choices())
    for cell, pair in rates.items():
        hits = [result["first_hit_seconds"] for result in store.results([PaperRun(cell, pair)], range(3))]
        own = found.setdefault((cell.setting, cell.dataset, cell.updates_per_round), {})
        own[cell.algorithm] = median(math.inf if seconds is None else seconds for seconds in hits)
    return found


def test_at_the_papers_rates_another_algorithm_reaches_the_target_first_in_two_comparisons() -> None:
    firsts = first_hits("table1", {cell: cell.rates for cell in cells()})
    winners = {key: min(times, key=times.__getitem__) for key, times in firsts.items()}
    others = {key: name for key, name in winners.items() if not name.startswith("defedavg")}
    assert others == {("non-iid", "cifar10", 10): "fedbuff", ("non-iid", "fashionmnist", 40): "fedavg"}
    assert f"By the medians of first hits, DeFedAvg is the first in {len(winners) - 2} of the {len(winners)}" in PAGE


def test_at_the_papers_rates_defedavg_is_the_first_in_seven_of_the_tuned_comparisons() -> None:
    wins = [str(row["first"]).startswith("defedavg") for row in RANKED_BEFORE.values()]
    assert (sum(wins), len(wins)) == (7, 8)
    assert "at the paper's rates, DeFedAvg is the first in seven of these eight." in PAGE


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
    used = [cell for cell in CELLS if TUNED[cell] == cell.rates != cell.stated_rates]
    assert used == [Cell("cifar10", "iid", "defedavg-iid", 10)]  # "In a 15th"
    (point,) = (p for p in REQUEST.tuning_points()[used[0]] if tuple(p["rates"]) == used[0].stated_rates)
    assert point["status"] == "diverged"


def test_the_section_says_what_tuning_gains() -> None:
    changed = [cell for cell in CELLS if TUNED[cell] != cell.rates]
    gains = dict[str, dict[Cell, float]]()
    for cell in changed:
        own = gains.setdefault(cell.algorithm.partition("-")[0], {})
        if cell in NOW and cell in BEFORE:
            own[cell] = BEFORE[cell]["sustained"] / NOW[cell]["sustained"]
    assert gains.keys() == {"fedavg", "fedbuff", "defedavg"}
    fedbuff, fedavg = sorted(gains["fedbuff"].values()), sorted(gains["fedavg"].values())
    assert len(fedbuff) == 4
    assert f"FedBuff, on non-IID data, gains a factor of {fedbuff[0]:.1f} to {fedbuff[-1]:.1f}." in SECTION
    assert f"FedAvg gains a factor of {fedavg[0]:.1f} to {fedavg[-1]:.1f} in five of the seven cells" in SECTION
    assert len(fedavg) == 5
    others = {cell for cell in changed if cell.algorithm == "fedavg"} - gains["fedavg"].keys()
    missed, diverged = Cell("fashionmnist", "non-iid", "fedavg", 40), Cell("cifar10", "non-iid", "fedavg", 10)
    assert others == {missed, diverged}
    assert missed not in BEFORE
    assert diverged not in NOW
    slower, *faster = sorted(gains["defedavg"].values())
    assert f"DeFedAvg gains a factor of {faster[0]:.1f} to {faster[-1]:.1f} in five cells." in SECTION
    assert len(faster) == 5
    assert gains["defedavg"][Cell("cifar10", "iid", "defedavg-iid", 40)] == slower
    assert f"at n = 40, it takes {100 * (1 / slower - 1):.0f} % longer" in SECTION


def test_the_section_says_which_gains_are_the_largest() -> None:
    for name, text in (
        ("fedavg", "FedAvg holds the target"),
        ("defedavg-niid", "DeFedAvg-nIID"),
        ("fedbuff", "FedBuff"),
    ):
        cell = Cell("cifar10", "non-iid", name, 40)
        now, before = (table["non-iid", "cifar10", 40]["here"][name] for table in (RANKED, RANKED_BEFORE))
        assert f"{text} from {now:.0f} s instead of {before:.0f} s on" in SECTION
        if name != "fedbuff":
            known = [other for other in NOW if other in BEFORE and other.algorithm.startswith(name[:5])]
            assert max(known, key=lambda other: BEFORE[other]["sustained"] / NOW[other]["sustained"]) == cell


def test_the_section_says_who_wins_at_tuned_rates() -> None:
    assert all(set(row["here"]) == set(COMPARED[key[0]]) for key, row in RANKED.items())
    assert {key: row["first"] for key, row in RANKED.items()} == {
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
        key: row["here"][COMPARED[key[0]][-1]] < row["here"]["fedavg"] for key, row in RANKED.items()
    }  # "in all four comparisons at n = 10, and in none of the four at n = 40"
    assert earlier == {key: key[2] == 10 for key in RANKED}
    for dataset, factor in (("fashionmnist", 10), ("cifar10", 5)):  # "a local rate five or ten times the paper's"
        cell = Cell(dataset, "iid", "fedavg", 40)
        local, papers = TUNED[cell][1], cell.rates[1]
        assert local is not None
        assert papers is not None
        assert round(local / papers) == factor


def test_the_section_says_who_is_first_by_first_hits() -> None:
    firsts = first_hits("table1-tuned", TUNED)
    winners = [min(times, key=times.__getitem__) for times in firsts.values()]
    assert {name: winners.count(name) for name in winners} == {"fedbuff": 4, "fedavg": 2, "defedavg-iid": 2}
    assert "first hits, FedBuff is the first in four comparisons, and FedAvg and DeFedAvg in two each." in SECTION
    at_ten = {key: times for key, times in firsts.items() if key[2] == 10}
    earlier = {key: times["fedavg"] < times[COMPARED[key[0]][-1]] for key, times in at_ten.items()}
    assert earlier == {key: key[0] == "non-iid" for key in at_ten}


def test_the_section_says_that_fedavgs_rates_decide_at_n_40() -> None:
    """Tuned FedAvg against DeFedAvg at the paper's rates."""
    earlier = {
        key for key, row in RANKED.items() if row["here"]["fedavg"] < RANKED_BEFORE[key]["here"][COMPARED[key[0]][-1]]
    }
    assert earlier == {key for key in RANKED if key[2] == 40} | {("non-iid", "cifar10", 10)}


def test_the_section_says_how_sure_fedbuffs_first_place_is() -> None:
    names = {name: NOW[Cell("fashionmnist", "non-iid", name, 40)] for name in ("fedbuff", "fedavg")}
    shown = {name: f"{row['sustained']:.0f} ± {row['sustained_sd']:.0f} s" for name, row in names.items()}
    assert f"the target after {shown['fedbuff']}, FedAvg after {shown['fedavg']}, and it is first on two of" in SECTION
    assert TUNED[Cell("fashionmnist", "non-iid", "fedbuff", 40)] == (1.0, 0.1)
    row = RANKED["non-iid", "fashionmnist", 40]
    assert (row["first"], row["first_in"], row["seeds"]) == ("fedbuff", 2, 3)


def test_the_section_says_that_pairs_are_chosen_on_seed_0() -> None:
    cell = Cell("cifar10", "non-iid", "fedavg", 10)
    (result,) = ResultFiles(RESULTS / "table1-tuned", Choices()).results([PaperRun(cell, TUNED[cell])], [2])
    assert TUNED[cell] == (1.0, 0.1)
    assert result["status"] == "diverged"
    assert f"1 / 0.1, with which it diverges on seed 2 after {result['rounds']} rounds" in SECTION
    points = {tuple(point["rates"]): point for point in REQUEST.tuning_points()[cell]}
    chosen, other = points[1.0, 0.1], points[1.0, 0.05]
    assert chosen["hit_seconds"] == other["hit_seconds"]
    assert f"both 1 / 0.1 and 1 / 0.05 hold the target from {chosen['hit_seconds']:.0f} s on" in SECTION
    best = [f"{100 * point['best_accuracy']:.1f}" for point in (chosen, other)]
    assert f"the higher best accuracy decided ({best[0]} against {best[1]} %)" in SECTION


def test_the_section_says_what_the_search_dropped() -> None:
    cell = Cell("fashionmnist", "non-iid", "defedavg-niid", 40)
    points = {tuple(point["rates"]): point for point in REQUEST.tuning_points()[cell]}
    dropped, kept = points[0.1, 0.1], points[1.0, 0.1]
    assert TUNED[Cell("fashionmnist", "non-iid", "defedavg-niid", 10)] == (0.1, 0.1)
    assert dropped["status"] == "dropped"
    assert f"after {dropped['seconds']:.0f} s with {100 * dropped['best_accuracy']:.1f} %" in SECTION
    assert kept["hit_seconds"] is None
    assert f"reached {100 * kept['best_accuracy']:.1f} % and never held 80 %" in SECTION
