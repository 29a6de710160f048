"""``defedavg plan``: simulate without training.

Plans are streams of records: each is checked, summarised and saved as it is made, and kept in memory only to be drawn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from typer import Argument, Option

from ..algorithms import ALGORITHMS
from ..config import study as config
from ..config.build import energy_of, make_simulator, server_vectors
from ..config.planned_settings import swept_with_equal_figures, swept_without_effect_on_plans
from ..config.study import Study, SweepPoint
from ..durations import duration
from ..errors import UserError, unknown
from ..fileio import file_name, writing
from ..planning.plan import Plan, records, without_gc
from ..planning.plan_checks import checked_for_use
from ..planning.plan_io import saved
from ..planning.plan_stats import PlanStats, PlanStatsCollector
from ..planning.records import Record, Round
from ..report import tables
from .options import (
    Json,
    Plugin,
    Seconds,
    Set,
    err,
    horizon,
    load_study,
    out,
    print_json,
    print_note,
    print_notes,
    reported,
    working,
)
from .plain_lines import LineTimer

MAX_GANTT_PLANS = 8
GANTT_ROUNDS = 6
DEFAULT_ROUNDS = 400
MAX_ROUNDS = 10**9

Advance = Callable[[str, float], None]
"""Receives the name of a plan, and how many more of its rounds or simulated seconds are planned."""


def plan(
    file: Annotated[
        Path | None,
        Argument(metavar="[CONFIG.toml]", help="The study to plan.", show_default="every algorithm, default settings"),
    ] = None,
    rounds: Annotated[
        int | None, Option(min=1, help="Rounds to plan.", show_default=f"stop.max_rounds, at most {DEFAULT_ROUNDS}")
    ] = None,
    seconds: Seconds = None,
    num_clients: Annotated[int | None, Option(help="N, short for --set clients.num_clients=N; up to millions.")] = None,
    updates_per_round: Annotated[int | None, Option(help="n, short for --set training.updates_per_round=n.")] = None,
    overrides: Set = None,
    gantt: Annotated[
        Path | None, Option(metavar="FILE.png", help="Draw client activity over time (.png or .pdf).")
    ] = None,
    until: Annotated[
        float | None, Option(help="Simulated seconds that the chart shows.", show_default="about six rounds")
    ] = None,
    save: Annotated[Path | None, Option(metavar="FOLDER", help="Save every plan there.")] = None,
    example: Annotated[str | None, Option(help="A built-in study instead of a file: figure1.")] = None,
    plugin: Plugin = None,
    as_json: Json = False,
) -> None:
    """Plan without training: round times, staleness, participation, timeouts, idle time, traffic, energy, state.

    With `--seconds` all algorithms get the same simulated time, otherwise the same number of rounds. Every plan is
    checked while it is made. From 20,000 clients on, a plan follows only the jobs whose updates are uploaded
    (`clients.plan_detail`), so a million clients take minutes and little memory.

    Example: `defedavg plan my.toml --seconds 6h --set 'training.updates_per_round=[5, 10, 20]' --gantt plan.png`
    """
    if until is not None and gantt is None:
        raise UserError("--until sets what the chart shows, but no chart is drawn; add --gantt FILE.png")
    study = _study(file, example, _with_short_options(overrides or (), num_clients, updates_per_round), plugin)
    _print_notes(swept_without_effect_on_plans(study))
    points = study.points()
    if gantt and len(points) > MAX_GANTT_PLANS:
        raise UserError(f"a chart of {len(points)} settings is not readable; plan at most {MAX_GANTT_PLANS}")
    limits = _limits(rounds, horizon(seconds), points)
    stats, kept = _make_plans(study, limits, save, keep=gantt is not None)
    groups = _by_setting(stats, len(study.seeds))
    _print_notes(swept_with_equal_figures(study, [repr(group) for group in groups]))  # NaN is not equal to itself
    if gantt:
        _draw(kept, until, gantt, first_number=0 if example is None else 1)  # the paper counts clients from 1
    if as_json:
        print_json(tables.stats_json(stats, [dict(point.swept) for point in points for _ in study.seeds]))
        return
    labels = [point.label for point in points]
    out.print(tables.plan_table(labels, groups, limits.rounds, limits.seconds))
    out.print()
    out.print(tables.clients_table(labels, groups))


def _with_short_options(
    overrides: Sequence[str], num_clients: int | None, updates_per_round: int | None
) -> tuple[str, ...]:
    """Return the settings of ``--set`` and of the options that are short for one; refuse a setting given by both."""
    given = {text.partition("=")[0].strip() for text in overrides}
    settings = list(overrides)
    for option, name, value in (
        ("--num-clients", "clients.num_clients", num_clients),
        ("--updates-per-round", "training.updates_per_round", updates_per_round),
    ):
        if value is None:
            continue
        if name in given:
            raise UserError(f"{option} and --set {name}=… set the same value; give one of them")
        settings.append(f"{name}={value}")
    return tuple(settings)


def _study(file: Path | None, example: str | None, overrides: tuple[str, ...], plugins: Sequence[Path] | None) -> Study:
    if example is not None:
        from ..config.examples import FIGURE1

        if file is not None:
            raise UserError("give a configuration file or --example, not both")
        if example != "figure1":
            raise unknown("example", example, ("figure1",))
        return reported(config.study(config.override(FIGURE1, overrides)))
    if file is None:
        return reported(config.study(config.override({"name": "plan", "algorithms": list(ALGORITHMS)}, overrides)))
    return load_study(file, overrides, plugins)


def _print_notes(lines: Sequence[str]) -> None:
    print_notes([f"defedavg: {line}" for line in lines])


@dataclass(frozen=True, slots=True)
class _Limits:
    """Where plans end: after a number of rounds, and after a simulated time if there is one."""

    rounds: int
    seconds: float | None

    @property
    def amount(self) -> float:
        """What progress is measured in: simulated seconds, or else rounds."""
        return self.rounds if self.seconds is None else self.seconds

    def text(self, amount: float) -> str:
        """Return a part of the amount for the user."""
        return f"{amount:.0f} rounds" if self.seconds is None else duration(amount)


def _limits(rounds: int | None, seconds: float | None, points: Sequence[SweepPoint]) -> _Limits:
    """Return the limit given, or else the rounds of the study."""
    if rounds is not None and seconds is not None:
        # Idle time and clients heard are shares of the simulated time, which the rounds would cut short.
        raise UserError("give --rounds or --seconds, not both")
    return _Limits(MAX_ROUNDS if rounds is None and seconds is not None else _rounds(rounds, points), seconds)


def _rounds(given: int | None, points: Sequence[SweepPoint]) -> int:
    """Return the rounds given, or else those of the study; if they are too many to plan without a request, say so."""
    if given is not None:
        if given > MAX_ROUNDS:
            raise UserError(f"--rounds is {given}; at most {MAX_ROUNDS:,} can be planned")
        return given
    most = max(point.settings.stop.max_rounds for point in points)
    if most > DEFAULT_ROUNDS:
        print_note(f"planning {DEFAULT_ROUNDS} of the {most:,} rounds of stop.max_rounds; --rounds N plans more")
    return min(most, DEFAULT_ROUNDS)


def _make_plans(
    study: Study, limits: _Limits, save: Path | None, *, keep: bool
) -> tuple[list[PlanStats], dict[str, Plan]]:
    """Plan every setting and seed; return their statistics and, to be drawn, the first plan of each setting."""
    if save:
        with writing(save):
            save.mkdir(parents=True, exist_ok=True)
    stats: list[PlanStats] = []
    kept: dict[str, Plan] = {}
    pending = list(itertools.product(study.points(), study.seeds))
    with _progress(len(pending), limits) as advance:
        for point, seed in pending:
            summary, plan = _make_plan(point, seed, limits, save, keep and point.label not in kept, advance)
            stats.append(summary)
            if plan is not None:
                kept[point.label] = plan
    return stats, kept


def _by_setting(stats: Sequence[PlanStats], seeds: int) -> list[Sequence[PlanStats]]:
    """Return the statistics of the seeds of every setting."""
    return [stats[i : i + seeds] for i in range(0, len(stats), seeds)]


def _make_plan(
    point: SweepPoint, seed: int, limits: _Limits, save: Path | None, keep: bool, advance: Advance
) -> tuple[PlanStats, Plan | None]:
    simulator = make_simulator(point.settings, seed)
    header, clients = simulator.header, point.settings.clients
    collector = PlanStatsCollector(
        header,
        simulator.fleet,
        vector_megabytes=clients.model_megabytes,
        server_vectors=server_vectors(point.settings),
        horizon_seconds=limits.seconds,
        timeout_seconds=simulator.server.setup.timeout_seconds,
        energy=energy_of(point.settings),
    )
    until = math.inf if limits.seconds is None else limits.seconds
    stream: Iterator[Record] = checked_for_use(header, records(simulator, limits.rounds, until))
    if save:
        stream = saved(save / (file_name(point.label, seed) + ".jsonl.gz"), header, stream)
    kept: list[Record] = []
    name, done = f"{point.label} seed {seed}", 0.0
    advance(name, 0)
    with without_gc():
        for record in stream:
            collector.add(record)
            if keep:
                kept.append(record)
            if isinstance(record, Round):
                reached = done + 1 if limits.seconds is None else record.time
                advance(name, reached - done)
                done = reached
    advance(name, limits.amount - done)  # a plan in which every client was lost ends before
    return collector.stats(), Plan(header, tuple(kept)) if keep else None


@contextmanager
def _progress(plans: int, limits: _Limits) -> Iterator[Advance]:
    """Show planned rounds or seconds: a bar on a terminal, a plain line every ten seconds elsewhere."""
    total = plans * limits.amount
    if not err.is_terminal:
        timer, done = LineTimer(), 0.0

        def print_sometimes(name: str, amount: float) -> None:
            nonlocal done
            done += amount
            if timer.due():
                print_note(f"planning {name}: {limits.text(done)} of {limits.text(total)}")

        yield print_sometimes
        return
    columns = (TextColumn("planning"), BarColumn(30), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}", markup=False), console=err, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda name, amount: bar.update(task, advance=amount, description=name)


def _draw(plans: dict[str, Plan], until: float | None, path: Path, first_number: int) -> None:
    from ..report.gantt import gantt
    from ..report.plots import save

    ends = [plan.rounds[min(GANTT_ROUNDS, len(plan.rounds)) - 1].time for plan in plans.values() if plan.rounds]
    if not ends:
        raise UserError("there is nothing to draw: every client was lost before the first round")
    with working("drawing the chart …"):
        save(gantt(plans, until=until or max(ends), first_number=first_number), path)
    print_note(f"chart: {path}")
