"""The speedup study on disk: every trial as a line of JSON when it ends, then a summary and a figure.

FOLDER/
  trials.jsonl         one line per trial: task, algorithm, n, seed, T, mean, largest staleness, ε
  speedup.json         slopes and points of every finished task and algorithm
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Final

import torch

from ..errors import UserError
from ..fileio import write_whole, writing
from ..jsonio import finite, json_line
from ..runstore.replacement import Replacement
from ..training.threads import threads
from .estimates import Notify
from .speedup import OnTrial, check_lists, measure
from .speedup_cases import CLIENTS, check_names, make_case
from .speedup_result import SpeedupTrial

TRIALS: Final = "trials.jsonl"
FILES: Final = (TRIALS, "speedup.json", "speedup.png", "speedup.pdf")
NOTIFY_SECONDS: Final = 10.0  # between two progress lines


@dataclass(frozen=True, slots=True)
class SpeedupScope:
    """The tasks, algorithms, n and seeds to measure."""

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
            raise UserError(f"n is {max(self.ns)}, but the tasks have {CLIENTS} clients; use a smaller n")
        if self.epsilon is not None and not 0 < self.epsilon < math.inf:
            raise UserError(f"epsilon is {self.epsilon:g}; it must be a number above zero")
        if not 0 < self.tolerance < 1:
            raise UserError(f"tolerance is {self.tolerance:g}; it must be between 0 and 1")


def run_speedup_study(
    scope: SpeedupScope, folder: Path, notify: Notify, *, force: bool = False, jobs: int | None = None
) -> tuple[bool, list[dict[str, Any]]]:
    """Measure every task and algorithm; return whether all are finished, and the results of those that are.

    ``jobs`` processes measure tasks and algorithms in parallel (None: one per core). ``notify`` receives progress lines
    and is called in these processes, so it must be picklable: a function of a module. With ``force``, old results are
    replaced; they are restored if the study ends before its first trial.
    """
    old = _prepare(folder, force)
    notify(f"measuring {', '.join(scope.tasks)} with {', '.join(scope.algorithms)}; a line every few seconds")
    try:
        return _run(scope, folder, notify, jobs)
    finally:
        if (folder / TRIALS).is_file() and (folder / TRIALS).stat().st_size:
            old.commit()
        else:
            old.restore()


def _run(scope: SpeedupScope, folder: Path, notify: Notify, jobs: int | None) -> tuple[bool, list[dict[str, Any]]]:
    order = list(itertools.product(scope.tasks, scope.algorithms))
    results: list[dict[str, Any]] = []
    finished = True
    try:
        for result in _results([(scope, *pair, folder / TRIALS, notify) for pair in order], jobs):
            results.append(result)
            results.sort(key=lambda each: order.index((each["task"], each["algorithm"])))
            text = json.dumps(finite(results), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
            write_whole(folder / "speedup.json", text.encode())
    except KeyboardInterrupt:
        finished = False
        notify(f"stopped; all finished trials are in {folder / TRIALS}")
    if results:
        # The processes that measure do not load Matplotlib.
        from ..report.plots import save
        from .speedup_figure import speedup_figure

        save(speedup_figure(results), folder / "speedup")
        notify(f"results: {folder}")
    return finished, results


_Measurement = tuple[SpeedupScope, str, str, Path, Notify]
"""The task and algorithm that one process measures, and the file to which it appends its trials."""


def _results(measurements: Sequence[_Measurement], jobs: int | None) -> Iterator[dict[str, Any]]:
    """Yield the results in the order in which they finish."""
    count = min(len(measurements), os.cpu_count() or 1 if jobs is None else jobs)
    if count == 1:
        with threads(1):  # all matrix products here are small: more threads only add overhead
            yield from map(_measure, measurements)
        return
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    # After a signal that also ends its processes, a Pool could wait for ever for the lock that one of them held.
    with ProcessPoolExecutor(count, context, _start_process, (stop,)) as pool:
        try:
            for future in as_completed([pool.submit(_measure, each) for each in measurements]):
                yield future.result()
        except BrokenProcessPool as error:
            raise UserError("a process that measures was ended by the system; is there enough memory?") from error
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)


_stop: Event | None = None
"""In a process that measures: set when the study ends before it is finished."""


def _start_process(stop: Event) -> None:
    global _stop
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles it
    torch.set_num_threads(1)


def _measure(measurement: _Measurement) -> dict[str, Any]:
    (scope, task, algorithm, trials, notify), start = measurement, time.perf_counter()
    case = make_case(task, algorithm)
    if scope.epsilon is not None:
        case = replace(case, epsilon=scope.epsilon)
    on_trial = _trial_writer(trials, notify)
    result = measure(case, scope.ns, range(scope.seeds), on_trial=on_trial, tolerance=scope.tolerance)
    return {**result.json(), "wall_seconds": time.perf_counter() - start}


def _trial_writer(path: Path, notify: Notify) -> OnTrial:
    """Return a callback that appends every trial to a file and reports one every few seconds."""
    last, count = 0.0, 0

    def write(trial: SpeedupTrial) -> None:
        nonlocal last, count
        if _stop is not None and _stop.is_set():
            raise KeyboardInterrupt
        count += 1
        with writing(path), path.open("a", encoding="utf-8") as file:
            file.write(json_line(asdict(trial)) + "\n")
        if time.monotonic() - last >= NOTIFY_SECONDS:
            last = time.monotonic()
            name = f"{trial.task}, {trial.algorithm}, trial {count}: n = {trial.n}, seed {trial.seed}"
            notify(f"{name}, {trial.rounds} rounds, mean {trial.mean:.4g}, target {trial.epsilon:g}")

    return write


def _prepare(folder: Path, force: bool) -> Replacement:
    old = Replacement(folder, FILES)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        old.recover()
        if any((folder / name).exists() for name in FILES) and not force:
            raise UserError(f"{folder} already has results; use --force to replace them, or another --out")
        old.set_aside()
        (folder / TRIALS).touch()
    return old
