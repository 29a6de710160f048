"""The figures of the findings: how they follow from stored results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from defedavg.cli import main as cli
from defedavg.suite.benchmark import FLEETS, TASKS
from defedavg.suite.findings import (
    n_figures,
    n_summary,
    order,
    rank_correlation,
    read_studies,
    slow_figures,
    tables,
    tuning_figures,
)
from defedavg.suite.leaderboard import Board, leaders_text, relative_times, tied
from helpers.user_errors import line_of

RESULTS = Path(__file__).parents[2] / "results" / "suite"


def stored(algorithm: str, tried: list[float | None], reached: list[float | None] | None = None) -> dict[str, Any]:
    times = reached or [1.0, 1.0, 1.0]
    runs = [{"seconds_to_target": value, "status": "target", "diverged_at": None} for value in times]
    points = [{"seconds_to_target": value} for value in tried]
    return {"algorithm": algorithm, "target": 0.85, "runs": runs, "tuning": {"points": points}}


def board(fleet: str, *cells: Mapping[str, Any]) -> Board:
    return Board(TASKS["digits-pairs"], FLEETS[fleet], cells)


def test_the_correlation_of_orders_is_spearmans() -> None:
    assert rank_correlation("abcd", "abcd") == 1
    assert rank_correlation("abcd", "dcba") == -1
    assert rank_correlation("abcd", "bacd") == pytest.approx(0.8)
    assert rank_correlation("axbycd", "dcbza") == -1  # of the names that both have
    assert rank_correlation("ab", "ab") is None


def test_the_order_says_where_the_first_of_the_papers_fleet_is_on_phones() -> None:
    names = ("fedavg", "fedbuff", "area")
    paper = board("paper", *(stored(name, [1.0], [t, t, t]) for t, name in enumerate(names, start=1)))
    phones = board("phones", *(stored(name, [1.0], [t, t, t]) for t, name in enumerate(reversed(names), start=1)))
    (line,) = order([paper, phones]).splitlines()[2:]
    assert line == "| digits-pairs | – | fedavg, 1 ± 0 s | area, 1 ± 0 s | 3 of 3 | −1.00 |"
    (line,) = order([board("paper", stored("fedavg", [None], [None, None, None]))]).splitlines()[2:]
    assert line == "| digits-pairs | – | none holds 85 % | – | – | – |"


def test_a_tie_for_the_first_place_is_called_a_tie() -> None:
    two = board("paper", *(stored(name, [1.0], [3.0, 3.0, 3.0]) for name in ("fedavg", "area")))
    late = stored("fedbuff", [1.0], [9.0, 9.0, 9.0])
    phones = board("phones", late, *two.cells)
    (line,) = order([two, phones]).splitlines()[2:]
    assert line == "| digits-pairs | – | fedavg and area tie, 3 ± 0 s | fedbuff, 9 ± 0 s | 2 to 3 of 3 | – |"
    assert leaders_text(board("paper", *two.cells, late)) == "fedavg and area tie, 3 ± 0 s"
    near = [
        stored("a", [1.0], [1.0, 2.0, 3.0]),
        stored("b", [1.0], [1.5, 2.5, 3.5]),
        stored("c", [1.0], [1.0, 2.0, 9.0]),
    ]
    assert leaders_text(board("paper", *near)) == "a, b and c tie, 2.0 ± 1.0 s to 4.0 ± 4.4 s"


@pytest.mark.parametrize(
    ("first", "second", "tie"),
    [
        ([1.0, 2.0, 30.0], [1.5, 2.0, 2.1], True),  # equal medians
        ([1.0, 2.0, 3.0], [1.6, 2.6, 3.6], True),  # each mean within the deviation of the other
        ([1.0, 1.0, 1.0], [0.6, 2.4, 14.0], False),  # a wide interval that holds any time
        ([1.0, 2.0, 3.0], [2.5, 2.5, 2.5], False),
        ([1.0, 2.0, 3.0], [1.0, 2.0, None], False),  # fewer seeds held the target
        ([None, None, None], [None, None, None], False),
        ([2.0, None, None], [2.0, None, None], True),
    ],
)
def test_two_tie_if_medians_are_equal_or_each_mean_is_within_the_others_deviation(
    first: list[float | None], second: list[float | None], tie: bool
) -> None:
    one, other = stored("a", [1.0], first), stored("b", [1.0], second)
    assert tied(one, other) is tied(other, one) is tie


def test_the_overview_has_the_time_relative_to_the_first_and_the_seeds_that_held_the_target() -> None:
    first = board("equal", stored("a", [1.0], [2.0, 2.0, 2.0]), stored("b", [1.0], [3.0, 3.0, 3.0]))
    second = board("paper", stored("b", [1.0], [4.0, 4.0, 4.0]), stored("c", [1.0], [2.0, None, None]))
    nobody = board("phones", stored("a", [None], [None, None, None]), stored("b", [None], [None, None, None]))
    found = relative_times([first, second, nobody])
    assert found == {"b": [(1.5, 3), (1.0, 3), None], "a": [(1.0, 3), None, None], "c": [None, (0.5, 1), None]}
    assert list(found) == ["b", "a", "c"]  # held by all seeds on two boards, on one, on none


def test_rates_are_compared_within_an_algorithm_and_algorithms_at_their_best_rates() -> None:
    found = tuning_figures(
        board("paper", stored("a", [2.0, 4.0, None]), stored("b", [30.0, 10.0, None]), stored("c", [None, None, None]))
    )
    assert found == {
        "pairs": 9,
        "pairs_missed": 5,
        "pair_factor": 2.5,  # 4 / 2 and 30 / 10
        "algorithms": 3,
        "algorithms_missed": 1,
        "algorithm_factor": 5.0,  # 10 / 2
    }
    none = tuning_figures(board("paper", stored("a", [None])))
    assert none["pair_factor"] is None
    assert none["algorithm_factor"] is None


def test_slow_clients_are_compared_with_fast_ones_seed_by_seed() -> None:
    runs = [
        {"slow_accuracy": slow, "fast_accuracy": 0.8, "slow_updates": share} for slow, share in ((0.7, 0.2), (0.9, 0.4))
    ]
    found = slow_figures({"runs": runs})
    assert found["slower_worse"] == 1
    assert found["slow_updates"] == pytest.approx(0.3)
    assert [run["gap"] for run in found["runs"]] == pytest.approx([-0.1, 0.1])


def n_case(*rows: tuple[int, list[float | None], list[int | None], list[float] | None]) -> dict[str, Any]:
    names = ("n", "seconds", "rounds", "planned_seconds")
    return {"n": [dict(zip(names, row, strict=True)) for row in rows]}


def test_the_n_of_the_theory_is_that_of_the_shortest_plan() -> None:
    right = n_case((1, [4.0, 6.0], [40, 60], [3.0, 3.0]), (10, [2.0, 2.0], [8, 8], [2.0, 2.0]))
    found = n_figures(right)
    assert (found["theory"], found["best"], found["factor"]) == (10, 10, 1)
    assert found["growth"] == 80 / 50
    assert (found["planned_gain"], found["gain"]) == (1.5, 2.5)
    equal = n_case((10, [2.0], [8], [1.0]), (1, [2.0], [80], [1.0 + 1e-13]))
    assert (n_figures(equal)["theory"], n_figures(equal)["best"]) == (1, 1)  # the smaller of equal ones
    wrong = n_case((1, [3.0], [40], [1.0]), (10, [2.0], [8], [2.0]))
    assert n_figures(wrong)["factor"] == 1.5
    missed = n_case((1, [None], [None], [1.0]), (10, [2.0], [8], [2.0]))
    assert n_figures(missed)["factor"] is None
    unknown = n_case((1, [3.0], [40], None), (10, [None], [None], None))
    assert n_figures(unknown)["theory"] is None
    summary = n_summary({"cases": [right, wrong, missed, unknown]})
    assert summary == {
        "cases": 3, "best": 1, "close": 1, "missed": 1, "median_factor": 1.25, "largest_factor": 1.5,
    }  # fmt: skip


def test_a_damaged_study_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "best-n.json").write_text("[" * 100_000)
    assert "best-n.json is not a study" in line_of(lambda: read_studies(tmp_path))
    damage: list[dict[str, Any]] = [{"cases": [{}]}, {"cases": 3}, {}]
    for content in damage:
        (tmp_path / "best-n.json").write_text(json.dumps(content))
        assert "best-n.json is not a study" in line_of(lambda: tables([], read_studies(tmp_path)))
    assert read_studies(tmp_path / "none") == {}


def test_the_commands_print_and_write_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "findings.md"
    page.write_text("<!-- table: order -->\n<!-- end of the table -->\n")
    words = ["--out", str(RESULTS), "--studies", str(tmp_path)]
    cli.app(["suite", "page", *words, "-o", str(tmp_path / "board.md"), "--findings", str(page)], standalone_mode=False)
    assert "| task | fastest, equal |" in page.read_text()
    capsys.readouterr()
    cli.app(["suite", "findings", *words], standalone_mode=False)
    assert "| task | fastest, equal |" in capsys.readouterr().out
