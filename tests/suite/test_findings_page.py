"""The tables and sentences of docs/findings.md have the figures of results/suite and results/findings."""

from __future__ import annotations

import re
from pathlib import Path

from defedavg.report.seed_figures import over_seeds
from defedavg.suite.cell_files import stored_cells
from defedavg.suite.findings import STUDIES, read_studies, tables, tuning_figures, with_tables
from defedavg.suite.leaderboard import boards, records, row

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
TEXT = re.sub(r"\s+", " ", PAGE)
CELLS = stored_cells(ROOT / "results" / "suite")[0]
FOUND = read_studies(ROOT / "results" / "findings")
BOARDS = {board.fleet.name: board for board in boards(CELLS) if board.task.name == "digits-pairs"}


def test_the_tables_are_those_of_the_stored_results() -> None:
    made = tables(CELLS, FOUND)
    assert set(made) == {"order", "tuning", *STUDIES}
    for name, table in made.items():
        assert f"<!-- table: {name} -->\n\n{table}\n<!-- end of the table -->" in PAGE, "run `defedavg suite page`"
    assert with_tables(PAGE, made) == PAGE


def test_the_page_has_at_most_two_pages() -> None:
    words = re.sub(r"<!--.*?-->", "", PAGE).split()
    assert len(words) <= 1400


def test_the_leaders_on_the_papers_fleet_are_the_last_on_phones() -> None:
    paper, phones = ({cell["algorithm"]: row(cell) for cell in BOARDS[name].cells} for name in ("paper", "phones"))
    assert list(paper)[:2] == ["asofed", "area"]
    assert f"({paper['asofed'][1]} and {paper['area'][1]}; FedAvg: {paper['fedavg'][1]})" in TEXT
    best = {
        cell["algorithm"]: over_seeds(records(cell), "best_accuracy").mean or 0.0 for cell in BOARDS["phones"].cells
    }
    assert len(best) == 17
    assert sorted(best, key=lambda name: best[name])[:2] == ["asofed", "area"]
    assert f"({phones['asofed'][4]} and {phones['area'][4]})" in TEXT


def test_the_first_eight_are_within_their_deviations() -> None:
    times = [over_seeds(records(cell), "first_hit_seconds") for cell in BOARDS["paper"].cells[:9]]
    means, deviations = [time.mean or 0.0 for time in times], [time.sd or 0.0 for time in times]
    assert (
        f"between {means[0]:.2f} s and {means[7]:.2f} s, with deviations of at least {min(deviations[:8]):.2f} s"
        in TEXT
    )
    assert means[7] - means[0] < min(deviations[:8]) < means[8] - means[0]


def test_one_algorithm_holds_the_target_on_phones_with_all_seeds() -> None:
    held = [c for c in BOARDS["phones"].cells if over_seeds(records(c), "first_hit_seconds").count == 3]
    assert [cell["algorithm"] for cell in held] == ["defedavg-iid"]
    assert row(held[0])[1] in TEXT


def listed(values: list[str]) -> str:
    return f"{', '.join(values[:-1])} and {values[-1]}"


def test_wrong_rates_miss_the_target_more_often_than_wrong_algorithms() -> None:
    found = [tuning_figures(BOARDS[fleet]) for fleet in ("equal", "paper", "phones")]
    assert {(each["pairs"], each["algorithms"]) for each in found} == {(102, 17)}
    assert all(each["pairs_missed"] / 102 > each["algorithms_missed"] / 17 for each in found)
    missed = [listed([str(each[name]) for each in found]) for name in ("pairs_missed", "algorithms_missed")]
    assert f"{missed[0]} of 102 pairs (equal, paper, phones) against {missed[1]} of 17 algorithms" in TEXT
    factors = [listed([f"{each[name]:.2f}" for each in found]) for name in ("pair_factor", "algorithm_factor")]
    assert f"{factors[0]} for rates, and {factors[1]} for algorithms" in TEXT
    slowest = listed([f"{each['slowest_factor']:.3g}" for each in found])
    assert f"The slowest algorithm is {slowest} times as slow as the fastest" in TEXT
