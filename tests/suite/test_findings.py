"""The sentences of docs/findings.md have the figures of results/suite."""

from __future__ import annotations

import re
from pathlib import Path

from defedavg.report.seed_figures import over_seeds
from defedavg.suite.cell_files import stored_cells
from defedavg.suite.leaderboard import boards, page, records, row

ROOT = Path(__file__).parents[2]
TEXT = re.sub(r"\s+", " ", (ROOT / "docs" / "findings.md").read_text(encoding="utf-8"))
CELLS = stored_cells(ROOT / "results" / "suite")[0]
BOARDS = {board.fleet.name: board for board in boards(CELLS) if board.task.name == "digits-pairs"}


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


def test_the_pairs_that_reached_the_target_are_those_of_the_leaderboard() -> None:
    rows = re.findall(r"^\| digits-pairs \| (\w+) \|.*\| (\d+ of \d+) \|$", page(CELLS), re.MULTILINE)
    assert ", ".join(f"{number} ({fleet})" for fleet, number in rows) in TEXT
