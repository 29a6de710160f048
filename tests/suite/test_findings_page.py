"""The tables and sentences of docs/findings.md have the figures of results/suite and results/findings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from defedavg.report.marked_tables import with_tables
from defedavg.report.seed_figures import SeedFigure, over_seeds
from defedavg.suite.benchmark import FLEETS
from defedavg.suite.cell_files import stored_cells
from defedavg.suite.findings import (
    STUDIES,
    n_figures,
    n_summary,
    rank_correlation,
    read_studies,
    slow_figures,
    tables,
    tuning_figures,
)
from defedavg.suite.leaderboard import Board, boards, leaders, records, relative_times

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
TEXT = re.sub(r"\s+", " ", PAGE)
CELLS = stored_cells(ROOT / "results" / "suite")[0]
FOUND = read_studies(ROOT / "results" / "findings")
BOARDS = boards(CELLS)
RELATIVE = relative_times(BOARDS)


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


def of_fleet(name: str) -> list[Board]:
    return [board for board in BOARDS if board.fleet.name == name]


def held_by_all_seeds(algorithm: str, *fleets: str) -> list[float]:
    """Return the relative times of an algorithm where all seeds held the target."""
    pairs = zip(BOARDS, RELATIVE[algorithm], strict=True)
    found = [each for board, each in pairs if each is not None and board.fleet.name in (fleets or FLEETS)]
    return [ratio for ratio, seeds in found if seeds == 3]


def test_all_tasks_are_complete() -> None:
    assert len(BOARDS) == 21
    assert {len(board.cells) for board in BOARDS} == {17}
    assert "seven tasks and three fleets" in TEXT


def test_how_reliably_the_target_is_held() -> None:
    held = {name: len(held_by_all_seeds(name)) for name in RELATIVE}
    assert [name for name in held if held[name] >= 20] == ["defedavg-iid"]
    assert {name for name in held if held[name] == 19} == {"fedavg", "defedavg-niid"}
    assert sorted(held, key=lambda name: -held[name])[-2:] == ["quafl", "favano"]
    last = f"QuAFL in {held['quafl']}, FAVANO in {held['favano']}"
    assert f"in {held['defedavg-iid']} of the 21 cases (FedAvg and DeFedAvg-nIID in 19, {last})" in TEXT
    own = held_by_all_seeds("defedavg-iid")
    assert f"{median(own):.2f} times the fastest's time in the median, at most {max(own):.0f} times (phones)" in TEXT
    assert max(own) == max(held_by_all_seeds("defedavg-iid", "phones"))


def test_who_is_near_the_fastest_on_every_fleet() -> None:
    largest = {name: max(held_by_all_seeds(name)) for name in RELATIVE}
    near = {name for name in largest if largest[name] < 2.3}
    assert near == {"fedbuff", "delay-adaptive-sgd", "ringmaster"}
    assert {len(held_by_all_seeds(name)) for name in near} == {18}
    assert f"with at most {max(largest[name] for name in near):.2f} times its time" in TEXT


def test_who_is_near_the_fastest_on_the_papers_fleet() -> None:
    complete = {name: times for name in RELATIVE if len(times := held_by_all_seeds(name, "paper")) == 7}
    near = {name for name, times in complete.items() if max(times) < 2.3}
    assert near == {"defedavg-iid", "fedbuff", "ca2fl", "delay-adaptive-sgd", "ringmaster"}
    assert f"at most {max(max(complete[name]) for name in near):.2f} times its time. " in TEXT
    ranges = {
        name: f"{min(complete[name]):.3g} to {max(complete[name]):.3g}" for name in ("fedavg", "defedavg-niid", "mifa")
    }
    assert (
        f"FedAvg needs {ranges['fedavg']}, DeFedAvg-nIID {ranges['defedavg-niid']}, MIFA {ranges['mifa']} times" in TEXT
    )


def test_fadas_is_first_on_equal_devices_only() -> None:
    first = [{cell["algorithm"] for cell in leaders(board)} for board in of_fleet("equal")]
    assert sum("fadas" in names for names in first) == 5  # "the fastest on five of seven tasks"
    assert [names for names in first if "fadas" in names and len(names) > 1] == [{"fadas", "ca2fl"}]  # "once in a tie"
    assert "fadas" not in {cell["algorithm"] for board in of_fleet("paper") for cell in leaders(board)}
    assert len(held_by_all_seeds("fadas", "paper")) == 7 - 2


def test_the_order_does_not_carry_over_to_phones() -> None:
    orders = [[[cell["algorithm"] for cell in b.cells] for b in of_fleet(name)] for name in ("paper", "phones")]
    found = [rank_correlation(*pair) for pair in zip(*orders, strict=True)]
    low, high = (f"{end(each for each in found if each is not None):.2f}".replace("-", "−") for end in (min, max))
    assert f"ρ is between {low} and {high}" in TEXT
    for board in of_fleet("phones"):
        best = {cell["algorithm"]: over_seeds(records(cell), "best_accuracy").mean or 0.0 for cell in board.cells}
        assert set(sorted(best, key=lambda name: best[name])[:2]) == {"asofed", "area"}
        hits = [
            over_seeds(records(c), "first_hit_seconds") for c in board.cells if c["algorithm"] in ("asofed", "area")
        ]
        assert [hit.count for hit in hits] == [0, 0]


def test_who_is_first_on_phones() -> None:
    first = {board.task.name: leaders(board) for board in of_fleet("phones")}
    names = {task: {cell["algorithm"] for cell in cells} for task, cells in first.items()}
    tie = {"fedbuff", "delay-adaptive-sgd", "ringmaster"}
    assert names == {
        "digits-pairs": {"defedavg-iid"}, "mnist-writers": {"defedavg-iid"}, "flights": {"mifa"},
        "fashionmnist-iid": tie, "fashionmnist-pairs": {*tie, "ace"}, "shakespeare-roles": {"fedasync"},
        "cifar10-dirichlet": {*tie, "fedasync", "fedfa", "ace"},
    }  # fmt: skip
    single = "DeFedAvg-IID on `digits-pairs` and `mnist-writers`, MIFA on `flights`, FedAsync on `shakespeare-roles`"
    assert single in TEXT
    assert "are among the first on both tasks of FashionMNIST and on `cifar10-dirichlet`" in TEXT


def test_wrong_rates_miss_the_target_more_often_than_wrong_algorithms() -> None:
    found = [tuning_figures(board) for board in BOARDS]
    assert {(each["pairs"], each["algorithms"]) for each in found} == {(102, 17)}
    assert all(each["pairs_missed"] / 102 > each["algorithms_missed"] / 17 for each in found)
    pairs, algorithms = ([each[name] for each in found] for name in ("pairs_missed", "algorithms_missed"))
    assert len(found) == 21
    missing = f"{min(pairs)} to {max(pairs)} of 102 pairs miss it, and {min(algorithms)} to {max(algorithms)} of 17"
    assert f"in all 21 cases: {missing}" in TEXT


def test_what_rates_and_algorithms_are_worth_where_the_target_is_held() -> None:
    factors = {
        phones: [
            [tuning_figures(board)[name] for board in BOARDS if board.fleet.has_phones is phones]
            for name in ("pair_factor", "algorithm_factor")
        ]
        for phones in (False, True)
    }
    assert len(factors[False][0]) == 14
    medians = [f"{median(each):.2f}" for each in factors[False]]
    assert f"(median factors of 14 cases: {medians[0]} for rates, {medians[1]} for algorithms)" in TEXT
    rates, algorithms = (f"{median(own):.2f}" for own in factors[True])
    assert f"in six of seven cases (medians: {rates} and {algorithms})" in TEXT
    assert sum(one < other for one, other in zip(*factors[True], strict=True)) == 6


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
    assert "six merge only 28 % of their updates from the slow half" in TEXT


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
