"""Regret and cost of the adviser on fleets and tasks drawn by key, against the best cell of an exhaustive grid.

    python benchmarks/advise.py [--scenarios 20] [--only 3,7] [--family fresh6] [--out results/advise] [--jobs 16]
        [--docs docs/advise.md]

``advise_scenarios.py`` draws the scenarios. The grid has 17 algorithms, two values of n, two of K, two of concurrency
for FedBuff, three local and two global rates. Every cell is trained on two seeds until all seeds reached the target or
1.5 times the best cell's time has passed: a slower cell cannot be the best, and its shorter training only makes the
grid look cheaper.

The adviser chooses from the same cells with other seeds and a budget of at most 4.95 % of the local steps that the grid
trained. Its regret is the time to the target of its choice over that of the best cell, minus one, both as geometric
means over the seeds of the grid. The best of a few hundred noisy cells is too good by chance, which counts against the
adviser: a second figure compares the advised cell with the grid's best on seeds that chose neither. ``--budgets`` also
runs the adviser with other shares of the budget and several seeds.

Every process computes one scenario at a time with one thread. Finished grids and advice are read from the folder, so
the benchmark can be interrupted and continued, and a command with all files there only prints the table. ``--docs``
writes the table between the marks of a page.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from advise_scenarios import draw
from defedavg import UserError
from defedavg.adviser.advice import advise
from defedavg.adviser.candidates import AlgorithmGrid, GridCell, grids_of
from defedavg.adviser.racing import Budget, Race
from defedavg.adviser.screening import Holders, screen
from defedavg.algorithms import ALGORITHMS
from defedavg.config import study as config
from defedavg.experiments.compute import ComputeConfig
from defedavg.fileio import write_whole
from defedavg.runstore.provenance import provenance
from defedavg.tasks import Task

GRID_SEEDS = (100, 101)
NEW_SEEDS = (200, 201, 202, 203)
BEYOND = 1.5
SHARE = 0.0495
BUDGET_SEEDS = 3
MOST_RATIO = 10.0  # in the mean over budgets; a choice that misses the target has an infinite one
MARKS = "<!-- scenarios: begin -->", "<!-- scenarios: end -->"
HEADER = (
    "| | task and fleet | best cell | s | advice | s | regret | on new seeds | rank | cost |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def run_grid(study: config.Study, task: Task) -> dict[str, Any]:
    """Train every cell of the grid; return its times by label, and what it cost."""
    grids = grids_of(study, list(ALGORITHMS), 0)
    horizon = study.tables["stop"]["max_seconds"]
    screening = screen(grids, horizon, GRID_SEEDS[0], Holders(None), lambda *_: None)

    def steps_of(cell: GridCell) -> float:
        shape = screening.kept.get(grids[cell.algorithm].shape_of(cell))
        return study_steps(grids[cell.algorithm], cell) if shape is None else shape.steps_per_update

    race = Race(grids, ComputeConfig(), horizon, Budget(), steps_of, task)
    cells = [
        GridCell(shape.algorithm, (*shape.position, *rates))
        for grid in grids.values()
        for shape in grid.shapes()
        if not screening.dropped.get(shape, "").startswith("refused")
        for rates in grid.rate_positions()
    ]
    entries = [(cell, seed) for cell in cells for seed in GRID_SEEDS]
    until, best = horizon / 16, math.inf
    while until < min(horizon, BEYOND * best):
        race.advance(entries, until)
        best = min((geometric(race, cell) for cell in cells), default=math.inf)
        until = min(1.3 * until, BEYOND * best)
    race.advance(entries, min(horizon, BEYOND * best))
    found = {}
    for cell in cells:
        label = grids[cell.algorithm].label(cell.position)
        found[label] = [race.runs[cell, seed].hit for seed in GRID_SEEDS]
    return {"cells": found, "steps": race.steps, "updates": race.updates, "runs": len(entries)}


def study_steps(grid: AlgorithmGrid, cell: GridCell) -> float:
    """Return K of a cell."""
    return float(grid.settings(cell.position).training.local_steps)


def geometric(race: Race, cell: GridCell, seeds: Sequence[int] = GRID_SEEDS) -> float:
    """Return the geometric mean time of a cell; infinite until all seeds have reached the target."""
    return mean_time([race.runs[cell, seed].hit for seed in seeds])


def mean_time(times: list[float | None]) -> float:
    """Return the geometric mean; infinite if one is missing."""
    return math.inf if None in times else math.exp(fmean(math.log(t) for t in times if t is not None))


def time_of(study: config.Study, task: Task, label: str, seeds: Sequence[int]) -> float:
    """Train a cell on seeds until the horizon; return its geometric mean time to the target."""
    name = label.split()[0]
    grid = grids_of(study, [name], 0)[name]
    cells = (GridCell(name, (*shape.position, *rates)) for shape in grid.shapes() for rates in grid.rate_positions())
    cell = next(each for each in cells if grid.label(each.position) == label)
    horizon = study.tables["stop"]["max_seconds"]
    race = Race({name: grid}, ComputeConfig(), horizon, Budget(), lambda _: 1.0, task)
    race.advance([(cell, seed) for seed in seeds], horizon)
    return geometric(race, cell, seeds)


def advised(study: config.Study, task: Task, grid: dict[str, Any], share: float, seed: int) -> dict[str, Any]:
    """Run the adviser; return its choice, regret and cost."""
    began = time.process_time()
    local_steps = study.tables["training"]["local_steps"][0]
    try:
        advice = advise(study, budget_updates=share * grid["steps"] / local_steps, seed=seed, task=task)
    except UserError as error:
        return {"error": str(error), "regret": math.inf, "share": share}
    cells = {label: mean_time(times) for label, times in grid["cells"].items()}
    best = min(cells, key=lambda label: cells[label])
    seconds = cells[advice.best.label]
    if math.isinf(seconds):  # the grid left the cell early
        seconds = time_of(study, task, advice.best.label, GRID_SEEDS)
    return {
        "advice": advice.best.label,
        "seed": seed,
        "budget_share": share,
        "seconds": seconds,
        "best_seconds": cells[best],
        "regret": seconds / cells[best] - 1,
        "new_seeds": [time_of(study, task, label, NEW_SEEDS) for label in (advice.best.label, best)],
        "rank": 1 + sum(other < seconds for other in cells.values()),
        "steps": advice.steps,
        "cost": advice.steps / grid["steps"],
        "ended": advice.ended,
        "cpu_seconds": time.process_time() - began,
    }


def stored(path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a file holds, or make and store it with its provenance."""
    if not path.exists():
        made = {**make(), "provenance": {k: v for k, v in provenance().items() if k not in ("folder", "host", "pid")}}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, (json.dumps(made, indent=1) + "\n").encode())
    return dict(json.loads(path.read_text()))


@dataclass(frozen=True)
class Row:
    """The results of one scenario; ``found`` is None if no cell reaches the target or advice is not asked for."""

    number: int
    summary: str
    grid: dict[str, Any]
    found: dict[str, Any] | None
    by_budget: dict[str, list[dict[str, Any]]]

    def text(self) -> str:
        """Return the row of the table."""
        cells = self.grid["cells"]
        best = min(cells, key=lambda label: mean_time(cells[label]))
        start = f"| {self.number} | {self.summary} |"
        if not math.isfinite(mean_time(cells[best])):
            return f"{start} no cell reaches the target | | | | | | | |"
        start += f" {shown(best)} | {mean_time(cells[best]):.3g} |"
        if self.found is None:
            return f"{start} | | | | | |"
        if "error" in self.found:
            return f"{start} {self.found['error']} | | | | | |"
        start += f" {shown(self.found['advice'])} | {self.found['seconds']:.3g} |"
        return (
            f"{start} {100 * self.found['regret']:.0f} % | {100 * on_new_seeds(self.found):.0f} % | "
            f"{self.found['rank']} of {len(cells)} | "
            f"{100 * self.found['cost']:.1f} % |"
        )


def on_new_seeds(found: dict[str, Any]) -> float:
    """Return how much longer the advised cell takes than the best of the grid on seeds that chose neither."""
    if "new_seeds" not in found:
        return math.inf
    advised, best = found["new_seeds"]
    return float(advised / best - 1 if math.isfinite(advised) else math.inf)


def shown(label: str) -> str:
    """Return a label without the settings that all cells have."""
    return label.replace(" timeout=auto", "").replace(" concurrency=all", "")


@dataclass(frozen=True)
class Job:
    """What one process computes: a scenario of a family."""

    family: str
    number: int
    out: Path
    again: bool
    grids_only: bool
    budgets: tuple[str, ...]

    def run(self) -> Row:
        """Compute or read the results."""
        torch.set_num_threads(1)
        scenario = draw(self.family, self.number)
        with tempfile.TemporaryDirectory() as folder:
            study = scenario.study(Path(folder))
            grid = stored(self.out / f"grid-{scenario.name}.json", partial(run_grid, study, scenario.task))
            if self.grids_only or not math.isfinite(min(map(mean_time, grid["cells"].values()))):
                return Row(self.number, scenario.summary, grid, None, {})

            def advice(share: float, seed: int) -> dict[str, Any]:
                return advised(study, scenario.task, grid, share, seed)

            def over_seeds(share: float) -> dict[str, Any]:
                return {"advice": [advice(share, seed) for seed in range(BUDGET_SEEDS)]}

            found = self.found(scenario.name, partial(advice, SHARE, 0))
            by_budget = {
                share: self.found(f"{scenario.name}-{share}", partial(over_seeds, SHARE * float(share)))["advice"]
                for share in self.budgets
            }
        return Row(self.number, scenario.summary, grid, found, by_budget)

    def found(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return stored advice, or make and store it."""
        path = self.out / f"advice-{name}.json"
        if self.again:
            path.unlink(missing_ok=True)
        return stored(path, make)


def rows(jobs: Sequence[Job], processes: int) -> Iterator[Row]:
    """Yield the rows in the order of the scenarios; report finished ones on standard error."""
    if processes == 1:
        yield from (job.run() for job in jobs)
        return
    began = time.monotonic()
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(job.run): job for job in jobs}
        for done, future in enumerate(as_completed(running), 1):
            seconds = time.monotonic() - began
            text = f"scenario {running[future].number}: {done} of {len(jobs)} done after {seconds:.0f} s"
            print(text, file=sys.stderr, flush=True)
        yield from (future.result() for future in running)


def figures(found: Sequence[dict[str, Any]]) -> str:
    """Return the figures over all scenarios in a sentence."""
    regrets = [each["regret"] for each in found]
    within = ", ".join(f"{sum(r <= limit / 100 for r in regrets)} within {limit} %" for limit in (10, 25, 100))
    cost = 100 * max(each.get("cost", 0.0) for each in found)
    new = [on_new_seeds(each) for each in found]
    return (
        f"{len(found)} searches: median regret {100 * median(regrets):.1f} %, largest {100 * max(regrets):.0f} %; "
        f"{within}; on new seeds, median {100 * median(new):.1f} % and {sum(r <= 0.1 for r in new)} within 10 %; "
        f"largest cost {cost:.1f} %"
    )


def main() -> None:
    """Run the scenarios and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", type=int, default=20)
    parser.add_argument("--only", default="", help="numbers of scenarios, separated by commas")
    parser.add_argument("--family", default="fresh6", help="the key of the scenarios")
    parser.add_argument("--out", type=Path, default=Path("results/advise"))
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--again", action="store_true", help="advise again, with the stored grids")
    parser.add_argument("--grids-only", action="store_true", help="train the grids alone")
    parser.add_argument(
        "--budgets", default="", help=f"further shares of the budget, such as 0.25,0.5: {BUDGET_SEEDS} seeds each"
    )
    parser.add_argument("--docs", type=Path, help="the page between whose marks the table is written")
    given = parser.parse_args()
    numbers = [int(n) for n in given.only.split(",")] if given.only else range(given.scenarios)
    budgets = tuple(filter(None, given.budgets.split(",")))
    jobs = [Job(given.family, number, given.out, given.again, given.grids_only, budgets) for number in numbers]
    table = [HEADER]
    print(HEADER, flush=True)
    found: list[dict[str, Any]] = []
    by_budget: dict[str, list[dict[str, Any]]] = {}
    for row in rows(jobs, given.jobs):
        table.append(row.text())
        print(row.text(), flush=True)
        found += [] if row.found is None else [row.found]
        for share, values in row.by_budget.items():
            by_budget.setdefault(share, []).extend(values)
    if found:
        print(f"\n{figures(found)}")
        if given.docs:
            publish(given.docs, f"{figures(found)}.\n\n" + "\n".join(table))
    for share, several in by_budget.items():
        logs = fmean(math.log(min(1 + each["regret"], MOST_RATIO)) for each in several)
        print(f"budget × {share}, {BUDGET_SEEDS} seeds: {figures(several)}; mean log of the ratio {logs:.3f}")


def publish(page: Path, text: str) -> None:
    """Write the figures and the table between the marks of a page."""
    before, rest = page.read_text().split(MARKS[0])
    page.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{rest.split(MARKS[1])[1]}")


if __name__ == "__main__":
    main()
