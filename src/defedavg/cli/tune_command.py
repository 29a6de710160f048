"""``defedavg tune``: find the learning rates that reach the target first."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from ..config.unused_settings import replaced
from ..errors import UserError
from ..report import tables
from ..runstore.reader import read_entry
from . import options as opt
from .data_command import DataDir
from .importing import importing
from .report_command import close_with_page

if TYPE_CHECKING:
    from ..config.study import Study
    from ..experiments.tuning_folder import TuningFolder


def _rates(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"{option} {text!r} is not a comma-separated list of numbers; write it like 0.01,0.1") from None


def _searched_study(file: Path, overrides: list[str] | None, plugin: list[Path] | None) -> Study:
    """Load the study, with a note for every rate that the search replaces."""
    study = opt.load_study(file, overrides, plugin)
    for table in ("training", *study.algorithms):
        reason = "tune tries --global-rates and --local-rates instead"
        opt.print_notes([f"defedavg: {line}" for line in replaced(study, table, reason, ("global_lr", "local_lr"))])
    return study


def tune(
    file: opt.StudyFile,
    overrides: opt.Set = None,
    global_rates: Annotated[str, Option(metavar="η,…", help="Learning rates of the server.")] = "0.1,1",
    local_rates: Annotated[
        str, Option(metavar="η̄,…", help="Learning rates of the clients.")
    ] = "0.001,0.005,0.01,0.05,0.1",
    keep_all: Annotated[bool, Option("--keep-all", help="Train every pair to its end; drop none early.")] = False,
    folder: opt.Out = Path("runs"),
    force: opt.Force = False,
    resume: opt.Resume = False,
    checkpoint_every: opt.CheckpointEvery = None,
    executor: opt.Executor = "batched",
    ray_address: opt.RayAddress = None,
    device: opt.Device = "auto",
    max_batch_jobs: opt.MaxBatchJobs = None,
    memory: opt.Memory = None,
    precision: opt.Precision = "auto",
    _data_dir: DataDir = None,
    plugin: opt.Plugin = None,
    tensorboard: opt.TensorBoard = False,
    as_json: opt.Json = False,
) -> None:
    """Find learning rates: train a grid of (η, η̄) × seeds for every algorithm and swept setting.

    All pairs share batches. At 1/8, 1/4 and 1/2 of the time limit, the worse half of the pairs is dropped; a pair that
    can no longer reach the target first is dropped earlier. The grid of an algorithm has only the rates that it uses.
    The results of every pair go to FOLDER/NAME-tune, and the study with the best rates of every algorithm to
    FOLDER/NAME-tune/tuned.toml; if the study sweeps tasks, fleets or targets, one for each to FOLDER/NAME-tune/tuned.
    The study needs `stop.target_accuracy`. Ctrl-C keeps everything evaluated so far; `--resume` continues.

    Example: `defedavg tune my.toml --set stop.target_accuracy=0.8 --local-rates 0.01,0.05,0.1`
    """
    study = _searched_study(file, overrides, plugin)
    rates = _rates("--global-rates", global_rates), _rates("--local-rates", local_rates)
    with opt.working("preparing …"):  # shown before PyTorch is loaded
        with importing():
            from ..experiments.compute import ComputeConfig
            from ..experiments.tune import RUNGS, Tuning, pairs_of
            from ..experiments.tuning_folder import TuningFolder
            from .progress_table import progress_and_logs

        pairs = pairs_of(study.points(), *rates)
        compute = ComputeConfig.choose(executor, device, max_batch_jobs, memory, precision, ray_address)
        results = folder / f"{study.name}-tune"
        tuning = Tuning(pairs, study.seeds, compute, () if keep_all else RUNGS)
        session = TuningFolder(
            tuning, study, results, force=force, resume=resume, checkpoint_interval=checkpoint_every,
            notify=opt.print_note,
        )  # fmt: skip
    opt.print_notes(tuning.sweep.notes)
    try:
        with progress_and_logs(study.name, len(pairs) * len(study.seeds), results, tensorboard) as watch:
            finished = session.run(watch)
    except KeyboardInterrupt:
        opt.exit_unchanged()
    opt.print_notes(tuning.sweep.notes)
    _print_results(session, study.name, results, as_json)
    opt.exit_if_stopped(finished, "continue with --resume")


def _print_results(session: TuningFolder, name: str, results: Path, as_json: bool) -> None:
    tuning = session.tuning
    if as_json:
        opt.print_json(tuning.records())
    else:
        entries = filter(None, map(read_entry, tuning.records()))
        opt.out.print(tables.tuning_table(name, entries, [pair.label for pair in tuning.best(compared_only=True)]))
        opt.print_line(f"\nevery pair: {results / 'points.jsonl'}")
    close_with_page([results], results, as_json)
    say = opt.print_note if as_json else opt.print_line
    for decision in session.decisions:
        for line in decision.lines():
            say(line)
        say(f"run it: defedavg run {shlex.quote(str(session.tuned_study(decision)))}")
