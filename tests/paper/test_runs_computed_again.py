"""docs/reproduction.md on runs computed again: which they are, how far they moved, and runs computed twice.

``before`` in ``overwritten-operands.json`` is the only record of the replaced results; ``now`` must be what is stored.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from defedavg.paper.infer_report import agreement
from defedavg.paper.paper_tables import ranking, rows
from defedavg.paper.published import FIGURE6_SIZES, LOCAL_STEPS, SIZES, Cell, cells
from defedavg.paper.result_files import Result, ResultFiles
from defedavg.paper.run_grid import ROUNDS, Choices, PaperRun

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "paper"
PAGE = re.sub(r"\s+", " ", (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8"))
SECTION = PAGE.partition("## Runs computed again ")[2].partition(" ## ")[0]
STORED = json.loads((RESULTS / "overwritten-operands.json").read_text(encoding="utf-8"))
AGAIN = STORED["computed_again"]
TIMES = ("first_hit_seconds", "sustained_seconds")
NEW = Cell("cifar10", "non-iid", "fedbuff", 40), 2

Record = Mapping[str, Any]


def says(text: str) -> bool:
    """Return whether the section has a text, whatever its line breaks are."""
    return text in SECTION


def run_of(record: Record) -> tuple[Cell, int]:
    """Return the cell and the seed of a record."""
    return Cell(*(record[name] for name in ("dataset", "setting", "algorithm", "updates_per_round"))), record["seed"]


def moved(records: Sequence[Record], other: str) -> str:
    """Return how often both times of ``before`` and another version agree, and by how much they differ at most."""
    found = []
    for time in TIMES:
        errors = [abs(math.log(each["before"][time] / each[other][time])) for each in records]
        found.append(f"the same in {errors.count(0.0)} and differs by at most {100 * math.expm1(max(errors)):.1f} %")
    return f"the first hit is {found[0]} in the others, and the sustained time is {found[1]} in the others."


def test_the_runs_that_were_computed_again_are_those_that_the_page_names() -> None:
    """The page names them by algorithm; the records list them one by one, and have the results that are stored now."""
    named = {(Cell("cifar10", "non-iid", "favano", n), 0) for n in SIZES}
    for algorithm in ("fedavg", "fedbuff", "defedavg-niid"):
        named |= {(Cell("cifar10", "non-iid", algorithm, n), seed) for n in SIZES for seed in (1, 2)}
    named |= {(Cell("cifar10", "iid", "defedavg-iid", 40), seed) for seed in (1, 2)}
    named -= {NEW}  # "n = 40: seed 1 only"
    affected = {run_of(record): record for record in AGAIN["table1"]}
    assert affected.keys() == named
    assert len(affected) == len(AGAIN["table1"])
    store = ResultFiles(RESULTS / "table1", Choices())
    for (cell, seed), record in affected.items():
        (result,) = store.results([PaperRun(cell, cell.rates)], [seed])
        assert record["now"] == {name: result[name] for name in ("status", *TIMES, "rounds")}, (cell, seed)
    runs = len(AGAIN["table1"]), len(AGAIN["figure6"])
    assert says(f"{runs[0]} runs of the table and the {runs[1]} runs of figure 6 on CIFAR-10 were first computed")
    assert says(f"All {sum(runs)} runs were computed again")


def test_the_page_says_how_far_the_times_of_table_1_moved() -> None:
    held = [record for record in AGAIN["table1"] if record["before"]["status"] == record["now"]["status"] == "target"]
    assert all(record[version][time] for record in held for version in ("before", "now") for time in TIMES)
    (missed,) = (record for record in AGAIN["table1"] if record not in held)
    assert run_of(missed) == (Cell("cifar10", "non-iid", "favano", 80), 0)
    assert all(missed[version][time] is None for version in ("before", "now") for time in TIMES)
    assert says(
        f"Of the {len(AGAIN['table1'])} runs of the table, {len(held)} hold the target both times; seed 0 of FAVANO at "
        f"n = 80 does not reach it either time. In the {len(held)}, {moved(held, 'now')}"
    )


def test_the_page_says_how_far_the_accuracies_of_figure_6_moved() -> None:
    store = ResultFiles(RESULTS / "figure6", Choices())
    apart = dict[tuple[Cell, int], float]()
    for record in AGAIN["figure6"]:
        cell, seed = run_of(record)
        (result,) = store.results([PaperRun(cell, cell.rates, LOCAL_STEPS, ROUNDS)], [seed])
        assert result["curve"]["rounds"][-1] == ROUNDS
        assert record["now"] == {"accuracy": result["curve"]["accuracy"][-1]}, (cell, seed)
        apart[cell, seed] = 100 * abs(record["now"]["accuracy"] - record["before"]["accuracy"])
    algorithms = {"iid": "defedavg-iid", "non-iid": "defedavg-niid"}
    assert apart.keys() == {
        (Cell("cifar10", setting, algorithm, n), seed)
        for setting, algorithm in algorithms.items()
        for n in FIGURE6_SIZES
        for seed in range(3)
    }
    assert len(apart) == len(AGAIN["figure6"])
    unsteady = {run for run in apart if run[0] == Cell("cifar10", "iid", "defedavg-iid", 5)}
    others = apart.keys() - unsteady
    assert says(
        f"the accuracy of a run after {ROUNDS} rounds differs by at most {max(apart[run] for run in unsteady):.2f} "
        "percentage points for DeFedAvg-IID with n = 5, which oscillates, and by at most "
        f"{max(apart[run] for run in others):.2f} in the other {len(others)} runs"
    )


def within(results: Sequence[Result]) -> tuple[int, int]:
    """Return how many first hits and how many sustained times agree with the paper."""
    first, held = (row["within"] for row in agreement(rows(results)) if row["cells"] == "all")
    return first, held


def winners(results: Iterable[Result]) -> list[str]:
    return [str(row["first"]) for row in ranking(list(results))]


def test_the_page_says_what_the_new_results_change() -> None:
    now = ResultFiles(RESULTS / "table1", Choices()).results([PaperRun(c, c.rates) for c in cells()], range(3))
    known = [result for result in now if run_of({**result["piece"]["cell"], **result}) != NEW]
    assert len(known) == len(now) - 1
    replaced = {run_of(record): record["before"] for record in AGAIN["table1"]}
    before = [{**result, **replaced.get(run_of({**result["piece"]["cell"], **result}), {})} for result in known]
    assert winners(before) == winners(known) == winners(now)
    assert says(f"The same algorithm holds the target first in all {len(winners(now))} comparisons before and now.")
    assert within(before) == within(known)
    assert says(
        "With the earlier results of the 29 runs, {} cells are within a factor of 1.25 for first hits and {} for "
        "sustained times. With the new ones, these are {} and {}. The difference comes from seed 2 of FedBuff on "
        "non-IID CIFAR-10 at n = 40, which is new: without it, they are {} and {} both times.".format(
            *within(before), *within(now), *within(known)
        )
    )


def test_runs_computed_with_both_versions_of_the_loads_have_the_error_that_the_page_says() -> None:
    twice = STORED["computed_twice"]
    unstable = [row for row in twice if row["algorithm"] == "fedbuff" and row["updates_per_round"] == 40]
    assert [row["mended"]["status"] for row in unstable] == ["diverged", "target", "diverged"]
    assert {row["before"]["status"] for row in twice} == {"target"}
    assert {row["dataset"] for row in twice} == {"fashionmnist"}
    assert {tuple(row["rates"]) for row in unstable} == {(1.0, 0.1)}
    assert all(tuple(row["rates"]) != run_of(row)[0].rates for row in twice)  # "other rates than the paper's"
    stable = [row for row in twice if row not in unstable]
    assert says(f"{len(twice)} runs on FashionMNIST, at other rates than the paper's, were computed with both versions")
    assert says(f"In {len(stable)} of them, {moved(stable, 'mended')}")
    assert says("two of the three runs diverge, which reached the target before")
    (cell,) = {run_of(row)[0] for row in unstable}
    present = ResultFiles(RESULTS / "table1-tuned", Choices()).results([PaperRun(cell, (1.0, 0.1))], range(3))
    assert [result["status"] for result in present] == ["target"] * 3  # "with the present version, all three seeds"


def lines_of_provenance() -> list[tuple[str, dict[str, Any]]]:
    names = ("table1", "figure6")
    logs = {name: (RESULTS / name / "provenance.jsonl").read_text(encoding="utf-8") for name in names}
    return [(name, json.loads(line)) for name, log in logs.items() for line in log.splitlines()]


def test_provenance_says_which_runs_were_computed_again_and_when() -> None:
    """The affected commands have the commit of ``before``; the page says what the commands of ``now`` took."""
    said = ("; these runs were computed again", "; the affected runs were computed again")
    lines = lines_of_provenance()
    affected = [line for _, line in lines if "see overwritten-operands.json" in line.get("note", "")]
    assert len(affected) == 8
    for line in affected:
        assert line["commit"].startswith(AGAIN["before"]["commit"])
        # Seed 0 of the other commands had been computed earlier, with other kernels, and stays.
        complete = "favano" in line["command"] or "figure6" in line["command"]
        assert line["note"].endswith(said[0] if complete else said[1]), line["command"]
    latest = [(name, line) for name, line in lines if line["commit"].startswith(AGAIN["now"]["commit"])]
    assert {name for name, _ in latest} == {"table1", "figure6"}
    assert len(latest) == 7  # "seven commands side by side"
    minutes = max(line["real_seconds"] for _, line in latest) / 60
    runs = len(AGAIN["table1"]) + len(AGAIN["figure6"])
    assert f"include {runs + 1} runs that took {minutes:.0f} minutes, with seven commands side by side, " in PAGE
    assert f"device: the [{runs} that were computed again](#runs-computed-again), and seed 2 of FedBuff" in PAGE
