"""The paper's published values, the tables of results, and the results in the repository; nothing is trained."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from defedavg.algorithms import ALGORITHMS
from defedavg.errors import UserError
from defedavg.paper.paper_tables import (
    ranking,
    ranking_to_markdown,
    rows,
    to_csv,
    to_markdown,
)
from defedavg.paper.published import COMPARED, FIGURE6_SIZES, Cell, cells
from defedavg.paper.readings import FIRST, Readings
from defedavg.paper.result_files import ResultFiles
from defedavg.paper.run_grid import Choices, PaperRun
from defedavg.paper.run_request import PaperRequest, select_cells
from defedavg.paper.tuned_rates import TunedRates
from helpers.command_line import call

CELLS = cells()
ROOT = Path(__file__).parents[2]
FIRST_READING = ROOT / "results" / "paper" / "first-reading"


def test_every_cell_is_listed_once() -> None:
    assert len(CELLS) == len(set(CELLS)) == 64
    assert sum(cell.seconds is None for cell in CELLS) == 3  # printed as ">880" and ">1400"
    assert Cell("fashionmnist", "iid", "defedavg-iid", 10).seconds == 26.39
    assert Cell("cifar10", "non-iid", "favano", 80).seconds == 4751.8
    assert Cell("cifar10", "iid", "defedavg-iid", 10).stated_rates == (1.0, 0.05)
    assert Cell("cifar10", "iid", "defedavg-iid", 10).rates == (0.1, 0.05)  # Table 2 contradicts Table 1 there
    assert Cell("cifar10", "iid", "defedavg-iid", 5).rates == (0.1, 0.05)  # of figure 6, in Table 2
    corrected = [cell.label for cell in CELLS if cell.correction]
    assert corrected == [
        "fashionmnist iid defedavg-iid n=80", "cifar10 iid defedavg-iid n=10", "cifar10 iid defedavg-iid n=20",
        "fashionmnist non-iid fedavg n=80", "cifar10 non-iid defedavg-niid n=20",
    ]  # fmt: skip
    assert all(cell.rates == cell.stated_rates for cell in CELLS if not cell.correction)
    assert Cell("fashionmnist", "non-iid", "fedbuff", 10).rates == (0.1, 0.005)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.label)
def test_every_cell_is_a_valid_run_with_the_rates_its_algorithm_has(cell: Cell) -> None:
    kind = ALGORITHMS[cell.algorithm]
    assert (cell.rates[0] is not None) == kind.uses_global_lr
    assert (cell.rates[1] is not None) == kind.uses_local_lr
    settings = Choices().settings(PaperRun(cell, cell.rates))
    assert settings.training.updates_per_round == cell.updates_per_round
    assert settings.training.local_steps == 50
    assert settings.clients.step_seconds == {"fashionmnist": 0.0017, "cifar10": 0.00314}[cell.dataset]
    assert settings.stop.target_accuracy == cell.target
    assert settings.stop.consecutive_hits == 5
    assert settings.task.split == ("iid" if cell.setting == "iid" else Readings().split)
    assert Choices(readings=FIRST).settings(PaperRun(cell, cell.rates)).task.normalise == "standard"
    if cell.rates[0] is not None:
        assert settings.training.global_lr == cell.rates[0]


def test_selection_of_cells() -> None:
    few = select_cells(None, None, [5], known_sizes=FIGURE6_SIZES)
    assert {c.algorithm for c in few} == {names[-1] for names in COMPARED.values()}
    assert select_cells(None, None, None, known_sizes=FIGURE6_SIZES) == [*CELLS, *few]
    assert select_cells(None, None, None) == CELLS
    assert {c.algorithm for c in select_cells(None, ["iid"], None, ["asysg"])} == {"asysg"}
    assert {c.updates_per_round for c in select_cells(["cifar10"], ["iid"], [10, 80])} == {10, 80}
    for wrong in ((["mnist"], None, None), (None, ["iidd"], None), (None, None, [11])):
        with pytest.raises(UserError):
            select_cells(*wrong)
    for size in (5, 7):  # Table 1 does not have n = 5
        with pytest.raises(UserError, match=rf"--n is {size}; it must be one of 10, 20, 40, 80$"):
            select_cells(None, None, [size])
    with pytest.raises(UserError, match=r"--n is 7; it must be one of 5, 10, 20, 40, 80$"):
        select_cells(None, None, [7], known_sizes=FIGURE6_SIZES)


def test_the_time_limit_follows_the_papers_seconds() -> None:
    def limit(choices: Choices, *cell: Any) -> float:
        return choices.limit(PaperRun(Cell(*cell), (1.0, 1.0)))

    assert limit(Choices(time_limit_factor=2.0), "fashionmnist", "iid", "fedavg", 20) == 2 * 179.1
    assert limit(Choices(), "cifar10", "iid", "favano", 80) == 1400.0  # the time that the paper states
    assert (
        limit(Choices(time_limit_factor=1.0), "fashionmnist", "iid", "defedavg-iid", 10) == 60.0
    )  # FedAvg needs 51.89
    assert limit(Choices(), "cifar10", "iid", "defedavg-iid", 10) == 302.12
    assert limit(Choices(), "cifar10", "non-iid", "favano", 80) == 2500.0
    searched = Choices(time_limit_factor=2.0, as_long_as_fedavg=False)
    assert limit(searched, "cifar10", "iid", "defedavg-iid", 10) == 2 * 54.41
    assert {Choices(max_seconds=7.0).limit(PaperRun(cell, cell.rates)) for cell in CELLS} == {7.0}


def entry(cell: Cell, **more: Any) -> dict[str, Any]:
    base = {
        "piece": asdict(PaperRun(cell, cell.rates)), "first_hit_seconds": None, "sustained_seconds": None,
        "diverged_at": None, "seconds": 900.0, "best_accuracy": 0.5,
    }  # fmt: skip
    return {**base, **more}


def test_rows_describe_missed_targets() -> None:
    cell = Cell("fashionmnist", "iid", "defedavg-iid", 10)
    other = replace(cell, algorithm="favano", updates_per_round=80)
    results = [
        entry(cell, first_hit_seconds=20.0, sustained_seconds=25.0),
        entry(cell, first_hit_seconds=30.0),
        entry(other, diverged_at=7),
        entry(other),
        entry(other, diverged_at=9, first_hit_seconds=30.0),
    ]
    ours, theirs = rows(results)
    assert ours["first_hit"] == 25.0
    assert ours["first_hit_sd"] == pytest.approx(50**0.5)
    assert (ours["sustained"], ours["sustained_reached"]) == (25.0, 1)
    assert ours["ratio"] == pytest.approx(25 / 26.39)
    assert theirs["ratio"] is None
    assert ours["note"] == "reached, but not held by 900 s (best 50.0 %)"
    assert theirs["note"] == "diverged at round 7, 9; not reached by 900 s (best 50.0 %)"
    text = to_markdown([ours, theirs])
    assert "25 ± 7.1 (2/2)" in text
    held = rows([entry(cell, first_hit_seconds=1.0, sustained_seconds=time) for time in (20.0, 30.0)])
    assert "1 ± 0 (2/2) | 25 ± 7.1 (2/2)" in to_markdown(held)
    assert held[0]["note"] == ""
    far = rows([entry(cell, first_hit_seconds=900.0), entry(cell, first_hit_seconds=1120.0)])
    assert "1010 ± 160 (2/2)" in to_markdown(far)
    assert ">880" in text
    assert len(to_csv([ours, theirs]).splitlines()) == 3
    partly = rows([entry(cell, first_hit_seconds=20.0), entry(cell)])[0]
    assert partly["ratio"] is None  # a mean over only the successful seeds would be biased
    assert "not reached" in partly["note"]


def test_ranking_counts_a_failed_seed_as_infinite_and_names_undecided_algorithms() -> None:
    defedavg, fedavg = Cell("cifar10", "iid", "defedavg-iid", 80), Cell("cifar10", "iid", "fedavg", 80)
    other = replace(defedavg, algorithm="favano")

    def seeds(cell: Cell, *held: float | None, **more: Any) -> list[dict[str, Any]]:
        return [entry(cell, seed=seed, sustained_seconds=time, **more) for seed, time in enumerate(held)]

    results = [
        *seeds(defedavg, 150.0, None, 90.0),
        *seeds(fedavg, 140.0, 170.0, None),
        *seeds(other, None, seconds=160.0),
    ]
    (found,) = ranking(results)
    assert list(found["here"].items())[:2] == [("defedavg-iid", 150.0), ("fedavg", 170.0)]
    assert (found["first"], found["first_in"], found["seeds"], found["open"]) == ("defedavg-iid", 1, 3, [])
    text = ranking_to_markdown([found]).replace("\N{NO-BREAK SPACE}", " ")
    assert "defedavg-iid 150, fedavg 170, favano >160 |" in text
    assert "defedavg-iid 154, fedavg 288, favano >1400 | 1 of 3 seeds | yes |" in text
    # FAVANO was given up before FedAvg's time, so it might have been faster.
    (found,) = ranking(
        [*seeds(defedavg, None, diverged_at=5), *seeds(fedavg, 170.0), *seeds(other, None, seconds=160.0)]
    )
    assert (found["first"], found["paper_first"], found["open"]) == ("fedavg", "defedavg-iid", ["favano"])
    assert "defedavg-iid\N{NO-BREAK SPACE}diverged" in ranking_to_markdown([found])
    assert "1 of 1 seed, unless favano is faster | no |" in ranking_to_markdown([found])
    (found,) = ranking([*seeds(defedavg, None), *seeds(fedavg, None)])
    assert (found["first"], found["open"]) == (None, [])
    assert "| – | no algorithm holds it |" in ranking_to_markdown([found])
    assert ranking(seeds(defedavg, 1.0)) == []  # a single algorithm has no ranking


def test_stored_results_are_recognised_and_not_computed_again() -> None:
    choices = Choices(max_seconds=1.0, readings=FIRST)
    request = PaperRequest(folder=FIRST_READING, cells=tuple(CELLS), choices=choices, show_only=True)
    for rates, count in (("stated", 64), ("tuned", 32)):
        runs, store, _ = replace(request, rates=rates).table_runs()
        assert len(runs) == count
        assert store.missing(runs, [0]) == []


def test_a_selection_is_shown_and_leaves_the_written_table_as_it_is(tmp_path: Path) -> None:
    shutil.copytree(FIRST_READING.parent / "table1", tmp_path / "table1")
    before = (tmp_path / "table1/table1.md").read_bytes()
    shown = call("paper", "table1", "--show", "--n", "10", "--out", tmp_path, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "table1.md keeps its content" in shown.stderr
    assert "| 10 |" in shown.stdout
    assert (tmp_path / "table1/table1.md").read_bytes() == before
    assert call("paper", "table1", "--show", "--seeds", "3", "--out", tmp_path, cwd=tmp_path).returncode == 0
    assert (tmp_path / "table1/table1.md").read_bytes() == before  # written, with the same runs


def test_results_in_the_repository_match_their_tables() -> None:
    present = ResultFiles(FIRST_READING.parent / "table1", Choices())
    results = present.results([PaperRun(cell, cell.rates) for cell in CELLS], range(3))
    assert (present.folder / "table1.md").read_text(encoding="utf-8") == to_markdown(rows(results))
    assert (present.folder / "table1.csv").read_text(encoding="utf-8") == to_csv(rows(results))
    assert (present.folder / "ranking.md").read_text(encoding="utf-8") == ranking_to_markdown(ranking(results))
    folder, choices = FIRST_READING, Choices(readings=FIRST)
    for name in ("table1-stated", "table1-tuned"):
        store = ResultFiles(folder / name, choices)
        tuned = TunedRates(store, ResultFiles(folder / "table1-stated", choices))
        stated = {cell: cell.stated_rates for cell in CELLS}
        rates = stated if name == "table1-stated" else tuned.known(CELLS, any_limit=True)
        results = store.results([PaperRun(cell, pair) for cell, pair in rates.items()], range(3))
        assert (folder / name / "table1.md").read_text(encoding="utf-8") == to_markdown(rows(results))
        assert (folder / name / "table1.csv").read_text(encoding="utf-8") == to_csv(rows(results))
        assert (folder / name / "ranking.md").read_text(encoding="utf-8") == ranking_to_markdown(ranking(results))
