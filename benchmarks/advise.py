"""Regret and cost of the adviser on fleets and tasks drawn by key, against the best cell of an exhaustive grid.

    python benchmarks/advise.py [--scenarios 20] [--only 3,7] [--family published] [--out results/advise]

A scenario is a task (softmax regression or an MLP on scikit-learn's digits, or least squares), a split, a fleet and a
target, all drawn by key. The grid has 17 algorithms, two values of n, two of K, two of concurrency for FedBuff, three
local and two global rates. Every cell is trained on two seeds until all seeds reached the target or 1.5 times the best
cell's time has passed: a slower cell cannot be the best, and its shorter training only makes the grid look cheaper.

The adviser chooses from the same cells with other seeds and a budget of at most 4.5 % of the local steps that the grid
trained. Its regret is the time to the target of its choice over that of the best cell, minus one, both as geometric
means over the seeds of the grid. The best of a few hundred noisy cells is too good by chance, which counts against the
adviser. ``--budgets`` also runs the adviser with other shares of the budget and several seeds.

Finished grids and advice are read from the folder, so the benchmark can be interrupted and continued.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from defedavg import UserError, make_task
from defedavg.adviser.advice import Advice, advise
from defedavg.adviser.candidates import AlgorithmGrid, GridCell, grids_of
from defedavg.adviser.racing import Budget, Race
from defedavg.adviser.screening import Holders, screen
from defedavg.algorithms import ALGORITHMS
from defedavg.config import study as config
from defedavg.experiments.compute import ComputeConfig
from defedavg.rng import below, extend, generator, key, permutation
from defedavg.runstore.provenance import provenance
from defedavg.tasks import Task
from defedavg.tasks.least_squares_task import least_squares

GRID_SEEDS = (100, 101)
BEYOND = 1.5
SHARE = 0.045
STEPS = 6000  # local steps of the whole fleet within the horizon
EVALUATIONS = 150


@dataclass(frozen=True)
class Scenario:
    """A task, a fleet as lines of a trace, and a study that names them."""

    name: str
    summary: str
    task: Task
    trace: str
    tables: dict[str, Any]

    def study(self, folder: Path) -> config.Study:
        """Return the study; the trace is written to the folder."""
        path = folder / f"{self.name}.csv"
        path.write_text(self.trace)
        clients = {"trace": str(path), "model_megabytes": 1.0, "num_clients": self.task.num_clients}
        return config.study({**self.tables, "clients": clients})


def pick(k: int, values: tuple[Any, ...]) -> Any:
    """Return one of the values."""
    return values[below(k, len(values))]


def digits_task(k: int, clients: int, kind: str, split: str) -> Task:
    """Return a task of digits; the split depends on the key alone."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    inputs, labels = load_digits(return_X_y=True)
    order = permutation(extend(k, 1), len(inputs))
    x, y = (inputs[order] / 16).astype(np.float32), labels[order]
    train = np.arange(1400)
    draws = generator(extend(k, 2))
    if split == "iid":
        parts = np.array_split(train, clients)
    elif split == "classes":
        by_class = train[np.argsort(y[:1400], kind="stable")]
        shards = np.array_split(by_class, 2 * clients)
        dealt = permutation(extend(k, 3), 2 * clients).tolist()
        parts = [np.concatenate([shards[dealt[2 * i]], shards[dealt[2 * i + 1]]]) for i in range(clients)]
    else:
        owner = np.empty(1400, np.int64)
        for c in range(10):
            mine = train[y[:1400] == c]
            owner[mine] = draws.choice(clients, len(mine), p=draws.dirichlet(np.full(clients, 0.3)))
        owner[np.arange(2 * clients)] = np.arange(2 * clients) % clients  # none is empty
        parts = [np.flatnonzero(owner == i) for i in range(clients)]
    model = (
        partial(nn.Linear, 64, 10)
        if kind == "softmax"
        else lambda: nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
    )
    return make_task(model=model, train=(x[:1400], y[:1400]), test=(x[1400:], y[1400:]), clients=parts, classes=10)


def least_squares_task(k: int, clients: int, heterogeneity: float) -> Task:
    """Return least squares whose metric is the share of the initial excess loss that is gone."""
    problem = least_squares(
        clients, dimension=16, heterogeneity=heterogeneity, curvature=(0.02, 1.0), seed=k % 2**31, start=4.0
    )
    start, least = problem.value(np.full(16, 4.0)), problem.minimum

    def excess_gone(outputs: Tensor, targets: Tensor) -> Tensor:
        loss = 0.5 * (outputs - targets).square().sum(1).mean()
        return ((start - loss) / (start - least)).clamp(0.0, 1.0)

    from dataclasses import replace

    return replace(problem.task, metric=excess_gone)


def draw(family: str, number: int) -> Scenario:
    """Draw a scenario."""
    k = key(number, f"benchmarks.advise.{family}")
    kind = pick(extend(k, 10), ("softmax", "softmax", "mlp", "least-squares"))
    clients = pick(extend(k, 11), (10, 16, 24))
    split = pick(extend(k, 12), ("iid", "dirichlet", "classes"))
    speeds = pick(extend(k, 13), ("equal", "uniform(1, 5)", "lognormal(0.8)", "two-speed"))
    link = pick(extend(k, 14), (0.5, 5.0, 20.0))  # transfer of a model, in steps of the fastest client
    windows = pick(extend(k, 15), (False, False, True))
    draws = generator(extend(k, 16))
    slow = {
        "equal": np.ones(clients),
        "uniform(1, 5)": draws.uniform(1, 5, clients),
        "lognormal(0.8)": draws.lognormal(0.0, 0.8, clients),
        "two-speed": np.where(draws.random(clients) < 0.3, 8.0, 1.0),
    }[speeds]
    if kind == "least-squares":
        spread = {"iid": 0.0, "dirichlet": 0.5, "classes": 1.5}[split]
        task, target = least_squares_task(extend(k, 17), clients, spread), 0.98
    else:
        task = digits_task(extend(k, 17), clients, kind, split)
        target = {"iid": 0.9, "dirichlet": 0.88, "classes": 0.85}[split]
    step = 0.01 * slow
    megabits = 8.0 / (0.01 * link)  # a message has one megabyte
    horizon = STEPS / float((10 / (10 * step + 0.02 * link)).sum())
    lines = ["client,step_seconds,up_mbps,down_mbps" + (",available_from,available_to,repeat_every" if windows else "")]
    for i in range(clients):
        row = f"{i},{step[i]:.6g},{megabits:.6g},{megabits:.6g}"
        if windows:
            period, begin = horizon / 4, float(draws.random()) * horizon / 4
            row += f",{begin:.6g},{begin + 0.7 * period:.6g},{period:.6g}"
        lines.append(row)
    tables: dict[str, Any] = {
        "name": f"{family}-{number}",
        "training": {
            "updates_per_round": [max(1, clients // 8), clients // 2],
            "local_steps": [5, 20],
            "local_lr": [0.02, 0.1, 0.5],
            "global_lr": [0.3, 1.0],
            "timeout_seconds": [0.0],
        },
        "stop": {
            "target_accuracy": target,
            "max_seconds": horizon / (0.7 if windows else 1.0),
            "eval_every_seconds": horizon / EVALUATIONS,
        },
        "asysg": {"global_lr": [0.02, 0.1, 0.5]},
        "fadas": {"global_lr": [0.003, 0.03]},
        "fedbuff": {"concurrency": [clients // 2, 0]},
        **{name: {"wait_seconds": [float(f"{np.median(10 * step) / 2:.2g}")]} for name in ("favano", "quafl")},
    }
    for name, algorithm in ALGORITHMS.items():
        if name != "fedbuff" and "concurrency" in algorithm.settings_type.__dataclass_fields__:
            tables.setdefault(name, {})["concurrency"] = [0]
    summary = f"{kind}, {split}, {clients} clients, {speeds}, transfer {link:g} steps" + (
        ", windows" if windows else ""
    )
    return Scenario(f"{family}-{number}", summary, task, "\n".join(lines) + "\n", tables)


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


def geometric(race: Race, cell: GridCell) -> float:
    """Return the geometric mean time of a cell; infinite until all seeds have reached the target."""
    times = [race.runs[cell, seed].hit for seed in GRID_SEEDS]
    return mean_time(times)


def mean_time(times: list[float | None]) -> float:
    """Return the geometric mean; infinite if one is missing."""
    return math.inf if None in times else math.exp(fmean(math.log(t) for t in times if t is not None))


def time_of(study: config.Study, task: Task, advice: Advice, grid: dict[str, Any]) -> float:
    """Return the time of the advised cell on the seeds of the grid; one that the grid left early is trained on."""
    known = mean_time(grid["cells"][advice.best.label])
    if math.isfinite(known):
        return known
    grids = grids_of(study, [advice.best.algorithm], 0)[advice.best.algorithm]
    position = tuple(axis.values.index(advice.best.values[axis.name]) for axis in grids.axes)
    cell = GridCell(advice.best.algorithm, position)
    horizon = study.tables["stop"]["max_seconds"]
    race = Race({cell.algorithm: grids}, ComputeConfig(), horizon, Budget(), lambda _: 1.0, task)
    race.advance([(cell, seed) for seed in GRID_SEEDS], horizon)
    return geometric(race, cell)


def advised(study: config.Study, task: Task, grid: dict[str, Any], share: float, seed: int) -> dict[str, Any]:
    """Run the adviser; return its choice, regret and cost."""
    began = time.process_time()
    local_steps = study.tables["training"]["local_steps"][0]
    try:
        advice = advise(study, budget_updates=share * grid["steps"] / local_steps, seed=seed, task=task)
    except UserError as error:
        return {"error": str(error), "regret": math.inf, "share": share}
    best = min(map(mean_time, grid["cells"].values()))
    seconds = time_of(study, task, advice, grid)
    return {
        "advice": advice.best.label,
        "seed": seed,
        "budget_share": share,
        "seconds": seconds,
        "best_seconds": best,
        "regret": seconds / best - 1,
        "rank": 1 + sum(mean_time(times) < seconds for times in grid["cells"].values()),
        "steps": advice.steps,
        "cost": advice.steps / grid["steps"],
        "ended": advice.ended,
        "cpu_seconds": time.process_time() - began,
    }


def stored(path: Path, make: Any) -> dict[str, Any]:
    """Return what a file holds, or make and store it with its provenance."""
    if path.exists():
        return dict(json.loads(path.read_text()))
    made = {**make(), "provenance": {k: v for k, v in provenance().items() if k not in ("folder", "host", "pid")}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made, indent=1) + "\n")
    return made


def line(name: str, summary: str, grid: dict[str, Any], found: dict[str, Any]) -> str:
    """Return one row of the table."""
    cells = grid["cells"]
    best = min(cells, key=lambda label: mean_time(cells[label]))
    return (
        f"| {name} | {summary} | {best} | {mean_time(cells[best]):.3g} | {found.get('advice', found.get('error'))} | "
        f"{found.get('seconds', math.inf):.3g} | {100 * found['regret']:.0f} % | {100 * found.get('cost', 0):.1f} % |"
    )


def main() -> None:
    """Run the scenarios and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", type=int, default=20)
    parser.add_argument("--only", default="", help="numbers of scenarios, separated by commas")
    parser.add_argument("--family", default="published", help="the key of the scenarios")
    parser.add_argument("--out", type=Path, default=Path("results/advise"))
    parser.add_argument("--again", action="store_true", help="advise again, with the stored grids")
    parser.add_argument("--grids-only", action="store_true", help="train the grids alone")
    parser.add_argument(
        "--budgets", default="", help="further shares of the budget, such as 0.25,0.5: three seeds each"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    numbers = [int(n) for n in given.only.split(",")] if given.only else range(given.scenarios)
    regrets, costs = [], []
    by_budget: dict[str, list[float]] = {}
    print(
        "| scenario | task and fleet | best cell | s | advice | s | regret | cost |\n|---|---|---|---|---|---|---|---|"
    )
    for number in numbers:
        scenario = draw(given.family, number)
        with tempfile.TemporaryDirectory() as folder:
            study = scenario.study(Path(folder))
            grid = stored(given.out / f"grid-{scenario.name}.json", partial(run_grid, study, scenario.task))
            if not math.isfinite(min(map(mean_time, grid["cells"].values()))):
                print(f"| {scenario.name} | {scenario.summary} | no cell reaches the target |", flush=True)
                continue
            if given.grids_only:
                print(f"| {scenario.name} | {scenario.summary} | {grid['steps']:.0f} steps |", flush=True)
                continue
            path = given.out / f"advice-{scenario.name}.json"
            if given.again:
                path.unlink(missing_ok=True)
            found = stored(path, partial(advised, study, scenario.task, grid, SHARE, 0))
            print(line(scenario.name, scenario.summary, grid, found), flush=True)
            for share in filter(None, given.budgets.split(",")):
                for seed in range(3):
                    path = given.out / f"advice-{scenario.name}-{share}-{seed}.json"
                    part = stored(path, partial(advised, study, scenario.task, grid, SHARE * float(share), seed))
                    by_budget.setdefault(share, []).append(part["regret"])
        regrets.append(found["regret"])
        costs.append(found.get("cost", 0.0))
    if regrets:
        figures = f"median regret {100 * median(regrets):.1f} %, largest {100 * max(regrets):.0f} %"
        print(f"\n{len(regrets)} scenarios: {figures}; largest cost {100 * max(costs):.1f} %")
    for share, values in by_budget.items():
        logs = fmean(map(math.log1p, values))
        print(f"budget × {share}: median regret {100 * median(values):.1f} %, mean log of the ratio {logs:.3f}")


if __name__ == "__main__":
    main()
