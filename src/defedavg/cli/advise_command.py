"""``defedavg advise``: which algorithm, n, K, concurrency, rates and timeout reach the target first."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from typer import Option

from ..durations import parse_duration
from ..errors import UserError
from . import options as opt
from .data_command import DataDir

if TYPE_CHECKING:
    from ..adviser.advice import Advice
    from ..adviser.advice import Progress as AdviceProgress
    from ..config.study import Study
    from ..deploy.replay import Replay

QUIET_SECONDS = 10.0
ROWS = 12
"""Rows of the ranking that are printed; the files have all of them."""

Budget = Annotated[
    str | None,
    Option(
        "--budget",
        metavar="UPDATES|TIME",
        help="What may be trained: a number of client updates, such as 20000 or 20k, each of training.local_steps "
        "steps, or a time with its unit, such as 90s, 10m or 2h. The same number of updates gives the same advice.",
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
        updates = float(match[1]) * (1000 if match[2] else 1) if match else None
    except ValueError:
        updates = -1.0
    if updates is None:
        return None, parse_duration(text, "--budget")
    if not 0 < updates <= 1e15:
        raise UserError(f"--budget is {text[:40]!r}; give a number of updates, such as 20k, or a time, such as 10m")
    return updates, None


def advise(
    file: opt.StudyFile,
    overrides: opt.Set = None,
    budget: Budget = None,
    algorithms: Algorithms = None,
    seeds: Annotated[int, Option(min=1, max=100, help="Seeds of a finalist, at most.")] = 5,
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
    grid over all algorithms is planned without training and screened; the rest is raced in shared batches with
    successive halving, first on one seed, then around the leaders, then over seeds, until the leader is separated or
    the budget is spent. A list in the study is an axis of the grid, a list of one value fixes a setting. Ctrl-C ends
    the search with the best so far.

    FOLDER/NAME-advice receives advised.toml, ready for `run` and `deploy`, a page with the Pareto front of time, bytes
    and worst-decile accuracy, and advice.json with every candidate and the reason why it is not the first.

    Example: `defedavg advise my.toml --set stop.target_accuracy=0.8 --budget 10m`
    """
    parse_budget(budget)
    study = opt.load_study(file, overrides, plugin)
    results = folder / f"{study.name}-advice"
    with opt.working("preparing …"):  # shown before PyTorch is loaded
        from ..adviser.advice_files import check_advice_folder

        check_advice_folder(results, force=force)
    search_and_print(study, results, budget, algorithms, seeds, device, memory, precision, as_json=as_json)


def advise_from_log(found: Replay, file: Path, budget: str | None, folder: Path, *, force: bool) -> None:
    """Advise for the clients that a deployment log measured; the study names the task and the target."""
    from ..adviser.advice_files import check_advice_folder
    from ..adviser.log_advice import study_of_log

    parse_budget(budget)
    study = opt.load_study(file, (), None)
    results = folder / f"{study.name}-advice"
    check_advice_folder(results, force=force)
    search_and_print(study_of_log(found, study, results), results, budget, as_json=False)


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
    as_json: bool,
) -> None:
    """Search, write the files into a folder, and print the ranking."""
    updates, seconds = parse_budget(budget)
    names = None if algorithms is None else [name.strip() for name in algorithms.split(",")]
    with opt.working("preparing …"):  # shown before PyTorch is loaded
        from ..adviser.advice import advise as find_advice
        from ..adviser.advice_files import write_advice
        from ..experiments.compute import ComputeConfig
        from ..runstore.provenance import provenance

        compute = ComputeConfig.choose("batched", device, None, memory, precision)
    origin = provenance(executor="batched", device=compute.device, precision=compute.precision)
    with _progress() as progress:
        advice = find_advice(
            study,
            algorithms=names,
            budget_updates=updates,
            budget_seconds=seconds,
            seeds=seeds,
            compute=compute,
            progress=progress,
        )
    write_advice(advice, results, origin)
    _print(advice, results, as_json)


def _print(advice: Advice, results: Path, as_json: bool) -> None:
    from ..adviser.advice_files import PAGE, STUDY, advice_json

    if as_json:
        opt.print_json(advice_json(advice, {}))
    else:
        opt.out.print(ranking_table(advice))
        opt.print_line(
            f"\n{advice.candidates:,} candidates, {len(advice.ranking)} raced, {advice.updates:,} updates; "
            f"{advice.ended}"
        )
    say = opt.print_note if as_json else opt.print_line
    say(f"open in a browser: {results / PAGE}")
    failure = advice.failure()
    if failure is not None:
        raise UserError(failure)
    say(f"advice: {advice.sentence()}")
    say(f"run it: defedavg run {shlex.quote(str(results / STUDY))}")
    opt.exit_if_stopped(not advice.interrupted)


def ranking_table(advice: Advice) -> Table:
    """Return the first rows of the ranking."""
    table = Table(title=f"time to {advice.target:g}", title_justify="left", box=None, pad_edge=False)
    for name in ("candidate", "simulated time", "seeds", "MB", "why not"):
        table.add_column(name, justify="left" if name in ("candidate", "why not") else "right")
    for each in advice.ranking[:ROWS]:
        time_text = f"{each.metric:.3f} at {each.seconds:.3g} s" if each.time is None else each.time.text()
        megabytes = "–" if each.bytes is None else f"{each.bytes / 1e6:.3g}"
        seeds = "1" if each.time is None else str(each.time.seeds)
        table.add_row(each.label, time_text, seeds, megabytes, each.reason or "← advised")
    return table


@contextmanager
def _progress() -> Iterator[AdviceProgress]:
    """Show what the search does, the share of the budget spent and the time left, at most."""
    from .progress_table import duration

    if not opt.err.is_terminal:
        last = time.monotonic()

        def print_sometimes(text: str, share: float, left: float | None) -> None:
            nonlocal last
            if time.monotonic() - last >= QUIET_SECONDS:
                last = time.monotonic()
                opt.print_note(f"{text}; {100 * share:.0f} %, at most {duration(left)} left")

        yield print_sometimes
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=opt.err, transient=True) as bar:
        task = bar.add_task("preparing …", total=1.0)

        def show(text: str, share: float, left: float | None) -> None:
            rest = "" if left is None else f", at most {duration(left)} left"
            bar.update(task, description=text + rest, completed=share)

        yield show
