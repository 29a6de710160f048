"""The command line: thin, because every command is a call that can be made from Python as well.

Tables go to standard output, progress and errors to standard error. What a user can mend ends in one line and exit
code 2; Ctrl-C ends in exit code 130 with everything measured so far kept.
"""

from __future__ import annotations

import json
import os
import re
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from .. import __version__
from ..config import study as config
from ..config.build import build_task
from ..errors import UserError
from ..report import tables
from .data_command import DataDir
from .data_command import app as data_app
from .deploy_command import app as deploy_app
from .deploy_command import replay
from .options import (
    Device,
    Every,
    Executor,
    Force,
    Json,
    MaxBatchJobs,
    Memory,
    Out,
    Precision,
    RayAddress,
    Resume,
    Set,
    TensorBoard,
    err,
    out,
    print_json,
)
from .paper_command import app as paper_app
from .plan_command import plan as plan_command
from .report_command import close_with_page
from .report_command import register as register_pages
from .runs_command import app as runs_app
from .theory_command import app as theory_app

app = typer.Typer(
    name="defedavg",
    help="Asynchronous federated learning: plan a fleet, compare algorithms, trust the numbers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="rich",
)

app.add_typer(theory_app, name="theory")

Config = Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The study to run; see `defedavg settings`.")]


def _version(show: bool) -> None:
    if show:
        out.print(__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    pass


@app.command()
def algorithms(as_json: Json = False) -> None:
    """List the algorithms, a line each, with their settings."""
    rows = tables.algorithm_rows()
    if as_json:
        print_json(rows)
        return
    for row in rows:
        out.print(f"[bold]{row['name']}[/bold]  {escape(row['summary'])}")
        out.print(f"    {escape(row['equation'])}   [dim]{row['citation']}; rates: {', '.join(row['rates'])}[/dim]")
        for name, setting in row["settings"].items():
            value = json.dumps(setting["default"])
            out.print(f"    {row['name']}.{name} = {value}   [dim]{escape(setting['help'])}[/dim]")
    out.print("\nSet them in a table of the algorithm's name, which also takes any key of \\[training].")


@app.command()
def settings(as_json: Json = False) -> None:
    """Show every setting with its default, as a file that can be edited and run."""
    rows = tables.setting_rows()
    if as_json:
        print_json(rows)
        return
    out.print('name = "first"\nalgorithms = ["fedavg", "defedavg-niid"]\nseeds = [0, 1, 2]', markup=False)
    for table, keys in rows.items():
        out.print(f"\n[{table}]", markup=False)
        for name, setting in keys.items():
            # What the profile gives is shown, but left to the profile.
            value = ("# " if setting["by_profile"] else "") + f"{name} = {setting['toml']}"
            out.print(f"{value:<34} # {setting['help']}", markup=False)


# Data sets: the commands of ``defedavg data``.
app.add_typer(data_app, name="data")
app.add_typer(paper_app, name="paper")
app.add_typer(runs_app, name="runs")
register_pages(app)  # report, view
app.add_typer(deploy_app, name="deploy")
app.command()(replay)


app.command()(plan_command)


@app.command()
def split(
    file: Config,
    overrides: Set = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw clients × classes.")] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Show which client holds which samples (first algorithm and seed of the study)."""
    from ..tasks import LazyPartition, class_counts

    study = config.load(file, tuple(overrides or ()))
    settings = study.points()[0].settings
    task = build_task(settings, study.seeds[0])
    labels, classes = task.train.targets.numpy(), task.classes or 0
    shares = (
        task.clients[:1_000] if isinstance(task.clients, LazyPartition) else task.clients
    )  # nobody reads a million lines
    counts = class_counts(shares, labels, classes)
    if plot:
        from ..report.plots import save as save_figure
        from ..report.plots import split_map

        save_figure(split_map(counts, task.name), plot)
        err.print(f"drawn: {plot}", markup=False)
    if as_json:
        print_json([{"client": i, "samples": own.tolist()} for i, own in enumerate(shares)])
        return
    rows = [(str(i), str(len(own)), *map(str, counts[i])) for i, own in enumerate(shares)]
    out.print(tables.make(task.name, ("client", "samples", *map(str, range(classes))), rows))


@app.command()
def run(
    file: Config,
    overrides: Set = None,
    folder: Out = Path("runs"),
    force: Force = False,
    resume: Resume = False,
    checkpoint_every: Every = None,
    executor: Executor = "batched",
    ray_address: RayAddress = None,
    device: Device = "auto",
    max_batch_jobs: MaxBatchJobs = None,
    memory: Memory = None,
    precision: Precision = "auto",
    data_dir: DataDir = None,
    tensorboard: TensorBoard = False,
    as_json: Json = False,
) -> None:
    """Train: every algorithm × swept setting × seed of a study, into runs/NAME/."""
    from ..experiments.study_run import StudyRun
    from ..experiments.sweep import ComputeConfig
    from ..runstore import tensorboard as boards
    from ..runstore.parquet import write_beside
    from .progress_table import watching

    study = config.load(file, tuple(overrides or ()))
    if tensorboard:
        boards.check()
    means = ComputeConfig.choose(executor, device, max_batch_jobs, memory, precision, ray_address)
    place = folder / study.name
    job = StudyRun(study, place, force=force, means=means, resume=resume, every=checkpoint_every)
    for note in job.notes:
        err.print(note, markup=False, soft_wrap=True)
    job.notes.clear()
    with (
        watching(err, study.name, len(job.points) * len(study.seeds)) as watch,
        boards.logging(job.folder, watch, tensorboard) as told,
    ):
        finished = job.carry_out(told)
    for note in job.notes:
        err.print(note, markup=False, soft_wrap=True)
    job.draw()
    write_beside(job.folder)
    if as_json:
        print_json(job.entries)
    else:
        out.print(tables.result_table(study.name, job.entries))
        out.print(f"\nresults: {job.folder}", markup=False)
    close_with_page([job.folder], job.folder, as_json)
    if not finished:
        err.print("stopped by Ctrl-C; everything measured so far is kept, and --resume goes on", markup=False)
        raise typer.Exit(130)


def _rates(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"{name} {text!r} are no numbers; write them as 0.01,0.1") from None


@app.command()
def tune(
    file: Config,
    overrides: Set = None,
    global_rates: Annotated[str, typer.Option(metavar="η,…", help="Rates of the server.")] = "0.1,1",
    local_rates: Annotated[
        str, typer.Option(metavar="η̄,…", help="Rates of the clients.")
    ] = "0.001,0.005,0.01,0.05,0.1",
    keep_all: Annotated[bool, typer.Option("--keep-all", help="Run every pair to its end.")] = False,
    folder: Out = Path("runs"),
    force: Force = False,
    executor: Executor = "batched",
    ray_address: RayAddress = None,
    device: Device = "auto",
    max_batch_jobs: MaxBatchJobs = None,
    memory: Memory = None,
    precision: Precision = "auto",
    data_dir: DataDir = None,
    tensorboard: TensorBoard = False,
    as_json: Json = False,
) -> None:
    """Find rates: a grid of (η, η̄) × seeds for every algorithm and swept setting, into runs/NAME-tune/.

    All pairs train in shared batches. At 1/8, 1/4 and 1/2 of the time the worse half is dropped, and whoever can no
    longer be the soonest already before; every point is kept in points.jsonl. Rates that an algorithm does not have
    are left out of its grid.
    """
    from ..experiments.study_run import open_folder
    from ..experiments.sweep import ComputeConfig
    from ..experiments.tune import RUNGS, Tuning, pairs_of
    from ..runstore import tensorboard as boards
    from .progress_table import watching

    study = config.load(file, tuple(overrides or ()))
    pairs = pairs_of(study.points(), _rates("--global-rates", global_rates), _rates("--local-rates", local_rates))
    means = ComputeConfig.choose(executor, device, max_batch_jobs, memory, precision, ray_address)
    tuning = Tuning(pairs, study.seeds, means, () if keep_all else RUNGS)
    place = folder / f"{study.name}-tune"
    if tensorboard:
        boards.check()
    open_folder(place, force)
    tuning.save(place, study, finished=False)
    with (
        watching(err, study.name, len(pairs) * len(study.seeds)) as watch,
        boards.logging(place, watch, tensorboard) as told,
    ):
        finished = tuning.carry_out(told, place / "metrics.jsonl")
    tuning.save(place, study, finished)
    for note in tuning.sweep.notes:
        err.print(note, markup=False, soft_wrap=True)
    if as_json:
        print_json(tuning.records())
    else:
        out.print(tables.tuning_table(study.name, tuning.records(), [pair.label for pair in tuning.best()]))
        out.print(f"\nevery point: {place / 'points.jsonl'}", markup=False)
    close_with_page([place], place, as_json)
    if not finished:
        err.print("stopped by Ctrl-C; everything measured so far is kept", markup=False)
        raise typer.Exit(130)


@app.command()
def bench(
    model: Annotated[str, typer.Option(help="cnn, mlp, softmax, resnet or transformer.")] = "cnn",
    image: Annotated[str, typer.Option(metavar="C,H,W", help="The shape of the random images.")] = "1,28,28",
    runs: Annotated[int, typer.Option(help="Seeds that share batches.")] = 3,
    updates: Annotated[int, typer.Option(help="Updates of the batched executor in each turn.")] = 300,
    reference_updates: Annotated[int, typer.Option(help="Updates of the plain loop in each turn.")] = 20,
    repeats: Annotated[int, typer.Option(help="Turns; medians are reported.")] = 3,
    eval_every_rounds: Annotated[int, typer.Option(help="Measure every so many rounds.")] = 10,
    device: Device = "auto",
    max_batch_jobs: MaxBatchJobs = None,
    memory: Memory = None,
    precision: Precision = "auto",
    as_json: Json = False,
) -> None:
    """Measure this machine: updates per second of the plain loop and of the batched executor, side by side.

    Real runs of DeFedAvg-IID (N = 100, n = 10, K = 50, batch 10) on random images: no data are needed.
    """
    from ..experiments.bench import Load
    from ..experiments.bench import bench as measure
    from ..experiments.sweep import ComputeConfig

    if not re.fullmatch(r"[1-9][0-9]*(,[1-9][0-9]*)*", image):
        raise UserError(f"--image {image!r} is no shape; write it as 1,28,28")
    shape = tuple(int(side) for side in image.split(","))
    load = Load(model, shape, runs, updates, reference_updates, repeats, eval_every_rounds)
    means = ComputeConfig.choose("batched", device, max_batch_jobs, memory, precision)
    found = measure(load, means, lambda line: err.print(line, markup=False, soft_wrap=True))
    if as_json:
        print_json(found)
    else:
        out.print(tables.bench_table(found))


@app.command()
def demo(folder: Out = Path("runs"), as_json: Json = False) -> None:
    """Six algorithms on 5,000 real digits, 100 clients, the paper's time model: a table and curves in half a minute."""
    from ..experiments.demo import carry_out

    finished, entries, picture = carry_out(folder / "demo", err)
    if as_json:
        print_json(entries)
    else:
        for setting, own in entries.items():
            out.print(tables.result_table(setting, own))
            out.print()
        out.print(f"curves: {picture}.png and .pdf", markup=False)
    close_with_page([folder / "demo"], folder / "demo", as_json, "Six algorithms on 5,000 digits")
    if not finished:
        raise typer.Exit(130)


def main() -> None:
    """Run the command line; what the user can mend is one line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no Greek still gets its table
    try:
        app()
    except UserError as error:
        err.print(f"defedavg: {error}", style="red" if err.is_terminal else None, markup=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        err.print("stopped by Ctrl-C", markup=False)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing more to say to a closed pipe
        sys.exit(1)
