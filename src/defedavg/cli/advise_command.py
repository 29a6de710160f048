"""``defedavg advise``: which algorithm, n, K, concurrency, rates and timeout reach the target first."""

from __future__ import annotations

import re
import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from typer import Option

from ..adviser.arguments import MAX_UPDATES, MOST_SEEDS
from ..adviser.interruption import NothingRacedError, before_racing
from ..adviser.notes import notes_on
from ..durations import parse_duration
from ..errors import UserError, counted
from ..jsonio import three_digits
from . import options as opt
from .data_command import DataDir
from .plain_lines import QUIET_SECONDS
from .stop_signals import stopped_by, stopped_code

if TYPE_CHECKING:
    from ..adviser.advice import Progress as AdviceProgress
    from ..adviser.recommendation import Advice
    from ..config.study import Study
    from ..deploy.replay import Replay

FIRST_SECONDS = 1.0
"""Until the first line of progress where the output is not a terminal."""
ROWS = 12
"""Rows of the ranking that are printed; the files have all of them."""
Budget = Annotated[
    str | None,
    Option(
        "--budget",
        metavar="UPDATES|TIME",
        help="What may be trained: a number of client updates, such as 20000 or 20k, each of training.local_steps "
        "steps, or a time with its unit, such as 90s, 10m or 2h, which counts from the start, planning included. The "
        "same number of updates gives the same advice. At most one update is trained beyond the budget, or one batch "
        "beyond the time.",
        show_default="40 runs of a mean candidate",
    ),
]
Algorithms = Annotated[
    str | None,
    Option("--algorithms", metavar="NAME,…", help="Algorithms to compare.", show_default="all that are registered"),
]


def parse_budget(text: str | None) -> tuple[float | None, float | None]:
    """Return the updates or the seconds of a budget; None for the other, or for both without a budget."""
    if text is None:
        return None, None
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(k?)\s*", text)
    try:
        if match is None:
            return None, parse_duration(text, "--budget")
        updates = float(match[1]) * (1000 if match[2] else 1)
    except (UserError, ValueError):  # the line about a duration would say that a number without a unit is a time
        updates = 0.0
    if not 0 < updates <= MAX_UPDATES:
        raise UserError(
            f"--budget is {text[:40]!r}; give a number of updates above zero, such as 20k, or a time with its unit, "
            "such as 90s or 10m"
        )
    return updates, None


def parse_algorithms(text: str | None) -> list[str] | None:
    """Return the names of ``--algorithms``; None without the option."""
    names = None if text is None else [name.strip() for name in text.split(",")]
    if names is not None and "" in names:
        raise UserError(
            f"--algorithms is {(text or '')[:40]!r}; give names separated by commas, such as fedavg,fedbuff, or leave "
            "it out to compare all; `defedavg algorithms` lists them"
        )
    return names


def advise(
    file: opt.StudyFile,
    overrides: opt.Set = None,
    budget: Budget = None,
    algorithms: Algorithms = None,
    seeds: Annotated[int, Option(min=1, max=MOST_SEEDS, help="Seeds of a finalist, at most.")] = 5,
    folder: opt.Out = Path("runs"),
    force: opt.Force = False,
    device: opt.Device = "auto",
    memory: opt.Memory = None,
    precision: opt.Precision = "auto",
    _data_dir: DataDir = None,
    plugin: opt.Plugin = None,
    as_json: opt.Json = False,
) -> None:
    """Recommend algorithm, n, K, concurrency, rates and timeout for the devices, the task and the target of a study.

    The study says what the advice is for: `[task]`, `[clients]` (a profile or a trace) and `stop.target_accuracy`. A
    grid over all algorithms is planned without training and screened; the rest is raced first on one seed, then around
    the leaders, then over seeds, until the leader is separated or the budget is spent. On the first seed, the
    candidates that reach the loss and the metric of the fastest one with the least delay continue, as many as a share
    of the budget can train. A list in the study is an axis of the grid, a list of one value fixes a setting. Ctrl-C
    ends the search with the best so far; before any candidate was raced, it ends without advice.

    FOLDER/NAME-advice receives advised.toml, ready for `run` and `deploy`, a page with the Pareto front of time, bytes
    and worst-decile accuracy, and advice.json with every candidate and the reason why it is not the first.

    Example: `defedavg advise my.toml --set stop.target_accuracy=0.8 --budget 10m`
    """
    parse_budget(budget)
    names = parse_algorithms(algorithms)
    with _explained_stop(), before_racing():
        study = opt.read_study(file, overrides, plugin)
        _print_notes(study, names)
    results = folder / f"{study.name}-advice"
    search_and_print(study, results, budget, algorithms, seeds, device, memory, precision, force=force, as_json=as_json)


def advise_from_log(found: Replay, file: Path, budget: str | None, folder: Path, *, force: bool) -> None:
    """Advise for the clients that a deployment log measured; the study names the task and the target."""
    from ..adviser.advice_files import check_advice_folder, folder_for_trace
    from ..adviser.log_advice import study_of_log

    parse_budget(budget)
    study = opt.read_study(file, (), None)
    _print_notes(study, None)
    results = folder / f"{study.name}-advice"
    check_advice_folder(results, force=force)
    with folder_for_trace(results):
        search_and_print(study_of_log(found, study, results), results, budget, force=True, as_json=False)


def search_and_print(
    study: Study,
    results: Path,
    budget: str | None,
    algorithms: str | None = None,
    seeds: int = 5,
    device: str = "auto",
    memory: str | None = None,
    precision: str = "auto",
    *,
    force: bool,
    as_json: bool,
) -> None:
    """Search, write the files into a folder, and print the ranking."""
    updates, seconds = parse_budget(budget)
    names = parse_algorithms(algorithms)
    with _explained_stop(), _progress() as progress:
        with before_racing():  # PyTorch is loaded here, after the first sign of progress
            from ..adviser.advice import advise as find_advice
            from ..adviser.advice_files import check_advice_folder, write_advice
            from ..experiments.compute import ComputeConfig
            from ..experiments.deferred_stop import DeferredStop
            from ..runstore.provenance import provenance

            check_advice_folder(results, force=force)
            compute = ComputeConfig.choose("batched", device, None, memory, precision)
            origin = provenance(executor="batched", device=compute.device, precision=compute.precision)
        advice = find_advice(
            study,
            algorithms=names,
            budget_updates=updates,
            budget_seconds=seconds,
            seeds=seeds,
            compute=compute,
            progress=progress,
        )
    with DeferredStop() as stop:
        write_advice(advice, results, origin)
        _print(advice, results, as_json)
        stop.stop_if_requested()


def _print_notes(study: Study, names: list[str] | None) -> None:
    """Print one line for every setting of the study that has no effect on the advice, or not that of a run."""
    opt.print_notes([f"defedavg: {line}" for line in notes_on(study, names)])


@contextmanager
def _explained_stop() -> Iterator[None]:
    """Say why there is no advice if Ctrl-C ends the block before any candidate was raced."""
    try:
        yield
    except NothingRacedError:
        opt.print_note(
            f"{stopped_by()}; no candidate had been raced yet, so there is no advice; run the command again, nothing "
            "needs to be removed"
        )
        raise typer.Exit(stopped_code()) from None


def _print(advice: Advice, results: Path, as_json: bool) -> None:
    from ..adviser.advice_files import ADVICE, PAGE, STUDY, advice_json

    if as_json:
        opt.print_json(advice_json(advice, {}))
    else:
        opt.out.print(ranking_table(advice))
        if len(advice.ranking) > ROWS:
            opt.print_line(f"{len(advice.ranking) - ROWS:,} more in {results / ADVICE}")
        opt.print_line(
            f"\n{counted(advice.candidates, 'candidate')}, {len(advice.ranking)} raced, {advice.hits} reached the "
            f"target, {advice.trained}; {advice.ended}"
        )
    say = opt.print_note if as_json else opt.print_line
    if advice.shortage is not None and advice.best.reached:
        say(advice.shortage)
    say(f"open in a browser: {results / PAGE}")
    failure = advice.failure()
    if failure is not None and advice.interrupted:
        opt.print_note(failure)
        raise typer.Exit(stopped_code())
    if failure is not None:
        raise UserError(failure)
    say(f"advice: {advice.sentence()}")
    say(f"run it: defedavg run {shlex.quote(str(results / STUDY))}")
    opt.exit_if_stopped(not advice.interrupted)


def ranking_table(advice: Advice) -> Table:
    """Return the first rows of the ranking."""
    table = Table(title=f"time to {advice.target_text}", title_justify="left", box=None, pad_edge=False)
    for name in ("candidate", "simulated time", "seeds", "MB", "why not"):
        table.add_column(name, justify="left" if name in ("candidate", "why not") else "right")
    first = "← advised" if advice.best.reached else "best so far; not advised"
    for each in advice.ranking[:ROWS]:
        megabytes = "–" if each.bytes is None else three_digits(each.bytes / 1e6)
        # How a candidate missed the target takes several short lines, which leaves room for the reason.
        time_text = advice.time_text(each).replace(" (", "\n(").replace("; ", ";\n")
        table.add_row(each.label, time_text, str(each.seeds), megabytes, each.reason or first)
    return table


class PlainProgress:
    """Prints what was reported last soon after the start, and then every ten seconds.

    It does so also while a phase computes for long without a report.
    """

    def __init__(self) -> None:
        self._line = "preparing …"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._print_regularly, name="progress", daemon=True)

    def report(self, text: str, share: float, left: float | None) -> None:
        """Keep what is printed next."""
        self._line = f"{text}; {100 * share:.0f} %{_time_left(left)}"

    def _print_regularly(self) -> None:
        wait = min(FIRST_SECONDS, QUIET_SECONDS)
        while not self._ended.wait(wait):
            wait = QUIET_SECONDS
            try:
                opt.print_note(self._line)
            except OSError:  # standard error was closed; the search goes on, and its result is written
                return

    def __enter__(self) -> PlainProgress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def _time_left(seconds: float | None) -> str:
    """Return the part of a line that tells the time left, at most; empty while it is unknown."""
    if seconds is None:
        return ""
    from .progress_table import duration  # loads PyTorch, so not before the first line

    return f", at most {duration(seconds)} left"


@contextmanager
def _progress() -> Iterator[AdviceProgress]:
    """Show what the search does, the share of the budget spent and the time left, at most."""
    if not opt.err.is_terminal:
        with PlainProgress() as plain:
            yield plain.report
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=opt.err, transient=True) as bar:
        task = bar.add_task("preparing …", total=1.0)

        def show(text: str, share: float, left: float | None) -> None:
            bar.update(task, description=text + _time_left(left), completed=share)

        yield show
