"""The tables of plans: means of counts, and the number of seeds."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console
from rich.table import Table

from defedavg.config import study as config
from defedavg.config.build import make_simulator
from defedavg.planning.plan import Plan
from defedavg.planning.plan_stats import PlanStats, summarise
from defedavg.report import tables


def stats() -> PlanStats:
    """Return the statistics of a small plan."""
    study = config.study({"algorithms": ["fedavg"], "clients": {"num_clients": 10}})
    simulator = make_simulator(study.points()[0].settings, seed=0)
    return summarise(Plan.collect(simulator, rounds=3), simulator.fleet)


def column(table: Table, name: str) -> list[str]:
    """Return the cells of a column."""
    (found,) = [each for each in table.columns if each.header == name]
    return [str(cell) for cell in found.cells]


def test_a_mean_count_over_seeds_that_is_not_whole_has_a_decimal() -> None:
    none, one = replace(stats(), never_heard=0, timed_out=4), replace(stats(), never_heard=1, timed_out=8)
    table = tables.clients_table(["half", "none"], [[none, one], [none, none]])
    assert column(table, "never") == ["0.5", "0"]
    assert column(table, "timed out") == ["6", "4"]
    few, more = replace(none, rounds=7), replace(none, rounds=10)
    assert column(tables.plan_table(["mixed"], [[few, more]], 0, 60.0), "rounds") == ["8.5"]


def test_the_title_counts_seeds_and_rounds() -> None:
    one = stats()
    console = Console(width=300)
    for seeds, rounds, title in ((1, 1, "1 round, mean over 1 seed"), (2, 3, "3 rounds, mean over 2 seeds")):
        with console.capture() as capture:
            console.print(tables.plan_table(["fedavg"], [[one] * seeds], rounds))
        assert capture.get().splitlines()[0].strip() == title


def test_a_stalled_row_says_after_how_many_rounds() -> None:
    whole = stats()
    one, six, nine = (replace(whole, rounds=rounds, stalled=True) for rounds in (1, 6, 9))
    groups = [[whole, whole], [one, one], [six, six], [nine, six], [whole, six]]
    cells = column(tables.plan_table(["fedavg"] * len(groups), groups, 30), "algorithm")
    assert cells == [
        "fedavg",
        "fedavg (stalled after 1 round)",
        "fedavg (stalled after 6 rounds)",
        "fedavg (stalled after 6 to 9 rounds)",
        "fedavg (1 of 2 seeds stalled after 6 rounds)",
    ]
