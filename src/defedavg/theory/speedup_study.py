"""The speedup study on disk: every run as a line of JSON when it ends, then a summary and a figure.

FOLDER/
  trials.jsonl         one line per run: task, algorithm, n, seed, T, mean, largest staleness, ε
  speedup.json         slopes and points of every task and algorithm that is finished
  speedup.png, .pdf    the figure
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..cli.options import err
from ..errors import UserError
from ..fileio import write_whole, writing
from ..jsonio import finite
from ..report.plots import save
from ..report.tables import make
from ..training.threads import threads
from .speedup import SpeedupTrial, check_lists, measure, with_epsilon
from .speedup_cases import CLIENTS, check_names, make_case
from .speedup_figure import speedup_figure

TRIALS = "trials.jsonl"
OURS = (TRIALS, "speedup.json", "speedup.png", "speedup.pdf")
QUIET_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Scope:
    """What to measure."""

    tasks: list[str]
    algorithms: list[str]
    ns: list[int]
    seeds: int
    epsilon: float | None
    tolerance: float

    def __post_init__(self) -> None:
        for task, algorithm in itertools.product(self.tasks, self.algorithms):
            check_names(task, algorithm)
        check_lists(self.ns, range(self.seeds))
        if max(self.ns) > CLIENTS:
            raise UserError(f"n is {max(self.ns)}, but the tasks have {CLIENTS} clients; use fewer")
        if self.epsilon is not None and not 0 < self.epsilon < math.inf:
            raise UserError(f"epsilon is {self.epsilon:g}; it must be a number above zero")
        if not 0 < self.tolerance < 1:
            raise UserError(f"tolerance is {self.tolerance:g}; give a share between 0 and 1")


def carry_out(
    scope: Scope, folder: Path, console: Console, *, force: bool = False, jobs: int | None = None
) -> tuple[bool, list[dict[str, Any]]]:
    """Measure everything, keep it as it comes; gives whether it was finished, and what is.

    Tasks and algorithms are measured side by side, in ``jobs`` processes (as many as there are cores).
    """
    _open(folder, force)
    order = list(itertools.product(scope.tasks, scope.algorithms))
    found: list[dict[str, Any]] = []
    finished = True
    try:
        for each in _results([_Order(scope, *pair, folder / TRIALS) for pair in order], jobs):
            found.append(each)
            found.sort(key=lambda one: order.index((one["task"], one["algorithm"])))
            write_whole(folder / "speedup.json", _text(found))
    except KeyboardInterrupt:
        finished = False
        console.print(f"stopped by Ctrl-C; every run so far is in {folder / TRIALS}", markup=False)
    if found:
        save(speedup_figure(found), folder / "speedup")
        console.print(f"results: {folder}", markup=False)
    return finished, found


@dataclass(frozen=True, slots=True)
class _Order:
    """What one process measures, and where it keeps its runs."""

    scope: Scope
    task: str
    algorithm: str
    trials: Path


def _results(orders: Sequence[_Order], jobs: int | None) -> Iterator[dict[str, Any]]:
    """What is measured, in the order in which it gets done."""
    count = min(len(orders), os.cpu_count() or 1 if jobs is None else jobs)
    if count == 1:
        with threads(1):  # every product here is small: more only wait for one another
            yield from map(_measure, orders)
        return
    with multiprocessing.get_context("spawn").Pool(count, _begin) as pool:  # leaving it early ends the processes
        yield from pool.imap_unordered(_measure, orders)


def _begin() -> None:
    """A process that leaves Ctrl-C to the one that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def _measure(order: _Order) -> dict[str, Any]:
    scope, began = order.scope, time.perf_counter()
    case = with_epsilon(make_case(order.task, order.algorithm), scope.epsilon)
    tell = _teller(order.trials)
    result = measure(case, scope.ns, range(scope.seeds), tell=tell, tolerance=scope.tolerance)
    return {**result.json(), "wall_seconds": time.perf_counter() - began}


def _teller(path: Path) -> Callable[[SpeedupTrial], None]:
    """Keeps every run, and says one now and then."""
    last, count = 0.0, 0

    def tell(trial: SpeedupTrial) -> None:
        nonlocal last, count
        count += 1
        with writing(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite(asdict(trial))) + "\n")
        if time.monotonic() - last >= QUIET_SECONDS:
            last = time.monotonic()
            err.print(
                f"{trial.task}, {trial.algorithm}, run {count}: n = {trial.n}, seed {trial.seed}, {trial.rounds} "
                f"rounds, mean {trial.mean:.4g}, wanted {trial.epsilon:g}",
                markup=False,
                soft_wrap=True,
            )

    return tell


def _open(folder: Path, force: bool) -> None:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        old = [folder / name for name in OURS if (folder / name).exists()]
        if old and not force:
            raise UserError(f"{folder} holds results already; use --force to replace them, or another --out")
        for path in old:
            path.unlink()
        (folder / TRIALS).touch()


def _text(found: list[dict[str, Any]]) -> bytes:
    return (json.dumps(finite(found), indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def speedup_table(found: Mapping[str, Any]) -> Table:
    """What was measured of one task and algorithm, for a terminal."""
    rows = [
        (
            str(point["n"]),
            f"{point['mean_rounds']:.0f}",
            ", ".join(map(str, point["rounds"])),
            str(point["max_staleness"]),
            "hold" if point["conditions_hold"] else "fail",
            f"{point['promised_rounds']:,}",
            f"{100 * point['first_share']:.1f} %",
        )
        for point in found["points"]
    ]
    columns = ("n", "rounds", "of every seed", "λ", "conditions", "promised", "first term")
    title = (
        f"{found['task']}, {found['algorithm']}, ε = {found['epsilon']:g}: slope {found['slope']:.3f} "
        f"[{found['slope_low']:.3f}, {found['slope_high']:.3f}]"
    )
    caption = (
        "rounds: geometric mean. λ: the largest staleness that occurred. promised: rounds for which the corrected "
        "bound is ε; first term: its share of that bound at the rounds needed."
    )
    return make(title, columns, rows, caption)
