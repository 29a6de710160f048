"""``defedavg plan``: plans are made, checked, summed up and saved record by record, and held only to be drawn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..algorithms import ALGORITHMS
from ..config import study as config
from ..config.build import make_simulator
from ..config.study import Study, SweepPoint
from ..errors import UserError, unknown
from ..fileio import writing
from ..planning.plan import Plan, records, without_gc
from ..planning.plan_checks import checked
from ..planning.plan_io import saved
from ..planning.plan_stats import PlanStats, PlanStatsCollector
from ..planning.records import Record, Round
from ..report import tables
from .options import Json, Set, err, out, print_json

EXAMPLES = ("figure1",)
QUIET_SECONDS = 10.0

Tell = Callable[[str, int], None]
"""Told of a plan's name and of its rounds so far."""


def plan(
    file: Annotated[Path | None, typer.Argument(metavar="[CONFIG.toml]", help="The study to plan.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Merges to plan.")] = 400,
    num_clients: Annotated[
        int | None, typer.Option(help="N; short for --set clients.num_clients=N. A million is fine.")
    ] = None,
    updates_per_round: Annotated[
        int | None, typer.Option(help="n; short for --set training.updates_per_round=n.")
    ] = None,
    overrides: Set = None,
    gantt: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw clients over time (.png or .pdf).")
    ] = None,
    until: Annotated[
        float | None, typer.Option(help="Seconds that the drawing shows; default: about six rounds.")
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Save every plan there.")] = None,
    example: Annotated[str | None, typer.Option(help="A built-in study instead of a file: figure1.")] = None,
    as_json: Json = False,
) -> None:
    """Plan without training: round times, staleness, participation, idleness, bytes, and a Gantt chart.

    Every plan is checked as it is made. From 20,000 clients on only the jobs that are uploaded are followed
    (clients.plan_detail), so that a million clients take minutes and little memory.
    """
    short = {"clients.num_clients": num_clients, "training.updates_per_round": updates_per_round}
    said = (*(overrides or ()), *(f"{name}={value}" for name, value in short.items() if value is not None))
    study = _study(file, example, said)
    points = study.points()
    pending = [(point, seed) for point in points for seed in study.seeds]
    if gantt and len(points) > 8:
        raise UserError(f"a drawing of {len(points)} settings cannot be read; plan fewer with --gantt")
    if save:
        with writing(save):
            save.mkdir(parents=True, exist_ok=True)
    stats: list[PlanStats] = []
    drawn: dict[str, Plan] = {}
    with _telling(len(pending) * rounds) as tell:
        for point, seed in pending:
            keep = gantt is not None and point.label not in drawn
            found, held = _plan(point, seed, rounds, save, keep, tell)
            stats.append(found)
            if held is not None:
                drawn[point.label] = held
    if gantt:
        _draw(drawn, until, gantt)
    if as_json:
        print_json(tables.stats_json(stats, [dict(point.swept) for point, _ in pending]))
        return
    per = len(study.seeds)
    groups = [stats[i : i + per] for i in range(0, len(stats), per)]
    out.print(tables.plan_table([point.label for point in points], groups, rounds))


def _plan(
    point: SweepPoint, seed: int, rounds: int, save: Path | None, keep: bool, tell: Tell
) -> tuple[PlanStats, Plan | None]:
    timeline = make_simulator(point.settings, seed)
    header = timeline.header
    counting = PlanStatsCollector(header, timeline.fleet)
    stream: Iterator[Record] = checked(header, records(timeline, rounds))
    if save:
        from ..fileio import file_name

        stream = saved(save / (file_name(point.label, seed) + ".jsonl.gz"), header, stream)
    held: list[Record] = []
    name, done = f"{point.label} seed {seed}", 0
    tell(name, 0)
    with without_gc():
        for record in stream:
            counting.add(record)
            if keep:
                held.append(record)
            if isinstance(record, Round):
                done += 1
                tell(name, 1)
    tell(name, rounds - done)  # fewer where every client was lost
    return counting.stats(), Plan(header, tuple(held)) if keep else None


@contextmanager
def _telling(total: int) -> Iterator[Tell]:
    """A bar on a terminal, a plain line now and then elsewhere."""
    if not err.is_terminal:
        last, done = time.monotonic(), 0

        def say(name: str, more: int) -> None:
            nonlocal last, done
            done += more
            if time.monotonic() - last >= QUIET_SECONDS:
                last = time.monotonic()
                err.print(f"planning {name}: {done} of {total} rounds", markup=False, soft_wrap=True)

        yield say
        return
    columns = (TextColumn("planning"), BarColumn(30), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=err, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda name, more: bar.update(task, advance=more, description=name)


def _draw(plans: dict[str, Plan], until: float | None, path: Path) -> None:
    from ..report.gantt import gantt
    from ..report.plots import save

    if not any(p.rounds for p in plans.values()):
        raise UserError("there is nothing to draw: every client was lost before the first round")
    shown = until or max(p.rounds[min(6, len(p.rounds)) - 1].time for p in plans.values() if p.rounds)
    save(gantt(plans, until=shown), path)
    err.print(f"drawn: {path}", markup=False)


def _study(file: Path | None, example: str | None, overrides: tuple[str, ...]) -> Study:
    if example is not None:
        from ..config.examples import FIGURE1

        if file is not None:
            raise UserError("give a configuration file or --example, not both")
        if example not in EXAMPLES:
            raise unknown("example", example, EXAMPLES)
        return config.study(config.override(FIGURE1, overrides))
    if file is None:
        return config.study(config.override({"name": "plan", "algorithms": list(ALGORITHMS)}, overrides))
    return config.load(file, overrides)
