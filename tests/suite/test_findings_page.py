"""The tables and sentences of docs/findings.md have the figures of results/suite and results/findings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from defedavg.report.marked_tables import with_tables
from defedavg.report.seed_figures import SeedFigure, over_seeds
from defedavg.suite.cell_files import stored_cells
from defedavg.suite.findings import (
    STUDIES,
    n_figures,
    n_summary,
    read_studies,
    slow_figures,
    tables,
    tuning_figures,
)
from defedavg.suite.leaderboard import boards, leaders, records, row

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
TEXT = re.sub(r"\s+", " ", PAGE)
CELLS = stored_cells(ROOT / "results" / "suite")[0]
FOUND = read_studies(ROOT / "results" / "findings")
BOARDS = {board.fleet.name: board for board in boards(CELLS) if board.task.name == "digits-pairs"}
FLIGHTS = {board.fleet.name: board for board in boards(CELLS) if board.task.name == "flights"}


def test_the_tables_are_those_of_the_stored_results() -> None:
    made = tables(CELLS, FOUND)
    assert set(made) == {"order", "tuning", *STUDIES}
    for name, table in made.items():
        assert f"<!-- table: {name} -->\n\n{table}\n<!-- end of the table -->" in PAGE, "run `defedavg suite page`"
    assert with_tables(PAGE, made) == PAGE


def test_the_commands_of_the_studies_are_those_of_the_page() -> None:
    for name in STUDIES:
        assert f"`{FOUND[name]['provenance']['command']}`" in TEXT


def test_the_text_beside_the_tables_is_short() -> None:
    """Two pages with the tables."""
    text = "\n".join(line for line in PAGE.splitlines() if not line.startswith(("|", "<!--")))
    assert len(text.split()) <= 900


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
    assert leaders(BOARDS["paper"]) == BOARDS["paper"].cells[:8]


def test_one_algorithm_holds_the_target_on_phones_with_all_seeds() -> None:
    held = [c for c in BOARDS["phones"].cells if over_seeds(records(c), "first_hit_seconds").count == 3]
    assert [cell["algorithm"] for cell in held] == ["defedavg-iid"]
    assert row(held[0])[1] in TEXT


def test_the_orders_on_flights() -> None:
    equal, paper, phones = (
        {cell["algorithm"]: row(cell) for cell in FLIGHTS[name].cells} for name in ("equal", "paper", "phones")
    )
    assert [cell["algorithm"] for cell in leaders(FLIGHTS["paper"])] == ["fedasync"]
    assert f"({paper['fedasync'][1]})" in TEXT
    assert [cell["algorithm"] for cell in leaders(FLIGHTS["equal"])] == ["fedasync", "asofed", "area"]
    assert {equal[name][1] for name in ("fedasync", "asofed", "area")} == {equal["fedasync"][1]}
    assert f"On equal devices it ties with ASO-Fed and AREA ({equal['fedasync'][1]})" in TEXT
    assert str(phones["fedasync"][1]).endswith("1 of 3 seeds")
    held = [c["algorithm"] for c in FLIGHTS["phones"].cells if over_seeds(records(c), "first_hit_seconds").count == 3]
    assert held == ["mifa"]
    assert list(paper)[-2] == "mifa"
    assert f"with all three seeds ({phones['mifa'][1]})" in TEXT
    assert set(list(phones)[-2:]) == {"asofed", "area"}
    assert phones["asofed"][4] == phones["area"][4]
    assert f"(best accuracies {phones['area'][4]} each)" in TEXT


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
    flights = tuning_figures(FLIGHTS["phones"])
    assert f"with phones {flights['pair_factor']:.2f} and {flights['algorithm_factor']:.2f})" in TEXT


# Slow clients.

SLOW = {(row["data"], row["algorithm"]): slow_figures(row) for row in FOUND["slow-clients"]["rows"]}
OWN = {algorithm: figures for (data, algorithm), figures in SLOW.items() if data == "own digit"}


def gap(figures: Mapping[str, Any]) -> SeedFigure:
    return over_seeds(figures["runs"], "gap", 100.0)


def signed(figure: SeedFigure) -> str:
    return figure.text().replace("-", "−")


def test_slow_clients_are_not_behind_where_data_are_alike() -> None:
    alike = {algorithm: figures for (data, algorithm), figures in SLOW.items() if data == "alike"}
    assert len(alike) == len(OWN) == 8
    assert all(len(figures["runs"]) == 20 for figures in SLOW.values())
    largest = max(abs(gap(figures).mean or 0.0) for figures in alike.values())
    assert f"at most {largest:.1f} points with all eight algorithms" in TEXT
    shares = [f"{100 * figures['slow_updates']:.0f}" for figures in alike.values()]
    assert shares.count("28") == 6
    assert "six of them merge only 28 % of their updates from the slow half" in TEXT


def test_slow_clients_are_behind_where_they_alone_have_their_data() -> None:
    behind = {name: figures["slower_worse"] for name, figures in OWN.items()}
    assert {name for name, seeds in behind.items() if seeds >= 16} == {
        "fedasync", "delay-adaptive-sgd", "defedavg-iid", "fedbuff",
    }  # fmt: skip
    assert behind["delay-adaptive-sgd"] == behind["defedavg-iid"]
    assert (
        f"in {behind['fedasync']} of 20 seeds with FedAsync ({signed(gap(OWN['fedasync']))} points), in "
        f"{behind['defedavg-iid']} with delay-adaptive SGD and DeFedAvg-IID, in {behind['fedbuff']} with FedBuff"
        in TEXT
    )
    assert f"ahead by {gap(OWN['ca2fl']).text()} and {gap(OWN['ace']).text()} points" in TEXT
    assert {f"{100 * OWN[name]['slow_updates']:.0f}" for name in ("ca2fl", "ace")} == {"28"}


def test_the_worst_clients_are_those_of_the_page() -> None:
    worst = {name: over_seeds(figures["runs"], "worst_accuracy", 100.0) for name, figures in OWN.items()}
    ranked = sorted(worst, key=lambda name: worst[name].mean or 0.0)
    assert (ranked[0], ranked[-1]) == ("fedavg", "ace")
    assert (
        f"({signed(gap(OWN['fedavg']))} points), but the lowest worst client of all, {worst['fedavg'].text()} %" in TEXT
    )
    assert abs(gap(OWN["fedavg"]).mean or 0.0) < (gap(OWN["fedavg"]).sd or 0.0) / 20**0.5
    assert f"ACE has the highest, {worst['ace'].text()} %" in TEXT


# The n of the theory.

CASES = {(case["algorithm"], case["split"], case["fleet"]): case for case in FOUND["best-n"]["cases"]}
FIGURES = {key: n_figures(case) for key, case in CASES.items()}


FIRST_FLEETS, OTHER_FLEETS = ("equal", "paper"), ("two-speed", "phones")


def n_seconds(algorithm: str, split: str, fleet: str) -> dict[int, list[float | None]]:
    return {row["n"]: row["seconds"] for row in CASES[algorithm, split, fleet]["n"]}


def holding(seconds: list[float | None]) -> int:
    """Return with how many seeds the target is held."""
    return sum(each is not None for each in seconds)


def test_the_theorys_n_is_as_often_the_fastest_as_the_page_says() -> None:
    first = n_summary({"cases": [case for case in CASES.values() if case["fleet"] in FIRST_FLEETS]})
    assert first["missed"] == 0
    assert f"the theory's n is the fastest in {first['best']} of {first['cases']} cases" in TEXT
    assert f"at most {first['largest_factor']:.2f} times as slow as the fastest" in TEXT
    other = n_summary({"cases": [case for case in CASES.values() if case["fleet"] in OTHER_FLEETS]})
    assert (other["best"], other["cases"]) == (0, 3)  # "On the other fleets it never is"
    slower = [FIGURES["defedavg-niid", split, "two-speed"] for split in ("iid", "classes")]
    assert "it is {:.2f} and {:.2f} times as slow as n = 1".format(*(figures["factor"] for figures in slower)) in TEXT
    assert {figures["best"] for figures in slower} == {1}
    phones = FIGURES["defedavg-iid", "iid", "phones"]
    assert phones["theory"] == 1
    held = holding(n_seconds("defedavg-iid", "iid", "phones")[1])
    assert f"n = 1 of DeFedAvg-IID holds the target with {held} of 5 seeds" in TEXT
    unknown = [key for key, figures in FIGURES.items() if figures["theory"] is None]
    assert len(unknown) == 3
    assert all(holding(n_seconds(*key)[10]) < 5 for key in unknown)


def test_the_study_of_n_is_the_one_that_the_page_describes() -> None:
    assert {fleet for _, _, fleet in CASES} == {*FIRST_FLEETS, *OTHER_FLEETS}
    assert FOUND["best-n"]["reference_n"] == 10
    assert {tuple(row["n"] for row in case["n"]) for case in CASES.values()} == {(1, 4, 10, 40)}
    assert {len(row["seconds"]) for case in CASES.values() for row in case["n"]} == {5}
    assert {(algorithm, split) for algorithm, split, _ in CASES} == {
        ("defedavg-iid", "iid"), ("defedavg-niid", "iid"), ("defedavg-niid", "classes"),
    }  # fmt: skip


def of_first_fleets(name: str) -> list[dict[str, Any]]:
    chosen = FIGURES.items()
    return [figures for (algorithm, _, fleet), figures in chosen if algorithm == name and fleet in FIRST_FLEETS]


def test_n_hardly_matters_with_defedavg_iid() -> None:
    own = of_first_fleets("defedavg-iid")
    change = max(abs(figures["growth"] - 1) for figures in own)
    assert f"stay within {100 * change:.0f} % between n = 1 and n = 40" in TEXT
    assert f"at most {max(figures['gain'] for figures in own):.2f} times the time of the fastest" in TEXT
    held = {n: holding(seconds) for n, seconds in n_seconds("defedavg-iid", "iid", "two-speed").items()}
    assert held == {1: 0, 4: 5, 10: 3, 40: 5}
    assert "n = 1 holds the target with no seed, n = 10 with 3 of 5" in TEXT


def test_the_largest_n_gains_less_than_the_theory_says_with_defedavg_niid() -> None:
    own = of_first_fleets("defedavg-niid")
    assert {figures["best"] for figures in own} == {40}
    assert all(figures["gain"] < figures["planned_gain"] for figures in own)
    planned, measured, growth = (
        f"{min(figures[name] for figures in own):.2f} to {max(figures[name] for figures in own):.2f}"
        for name in ("planned_gain", "gain", "growth")
    )
    assert f"a factor of {planned} between the slowest n and the fastest, training shows {measured}" in TEXT
    assert f"n = 40 needs {growth} times the updates of n = 1" in TEXT
    for split in ("iid", "classes"):  # "On phones only n = 4 holds the target with all seeds"
        held = {n for n, seconds in n_seconds("defedavg-niid", split, "phones").items() if holding(seconds) == 5}
        assert held == {4}
