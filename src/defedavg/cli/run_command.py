"""``defedavg run``: train a study into its run folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..config.doubtful_settings import doubtful_settings
from ..config.timeout_lines import timeout_lines
from ..report import tables
from . import options as opt
from .data_command import DataDir
from .importing import importing
from .report_command import close_with_page, draw_figures

if TYPE_CHECKING:
    from ..experiments.study_run import StudyRun


def run(
    file: opt.StudyFile,
    overrides: opt.Set = None,
    seconds: opt.Seconds = None,
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
    plots: opt.Plots = False,
    as_json: opt.Json = False,
) -> None:
    """Train every algorithm × swept setting × seed of a study, and write a report.

    The results go to FOLDER/NAME, where NAME is the study's: the configuration, every evaluation, plans, final
    weights and report.html. Ctrl-C keeps everything evaluated so far; `--resume` continues.

    Example: `defedavg run my.toml --set 'training.local_lr=[0.01, 0.1]'`
    """
    study = opt.load_study(file, overrides, plugin, opt.horizon(seconds))
    target = folder / study.name
    with opt.working("preparing …"):  # shown before PyTorch is loaded
        with importing():
            from ..experiments.compute import ComputeConfig
            from ..experiments.study_run import StudyRun
            from .progress_table import progress_and_logs

        compute = ComputeConfig.choose(executor, device, max_batch_jobs, memory, precision, ray_address)
        session = StudyRun(
            study, target, force=force, compute=compute, resume=resume, checkpoint_interval=checkpoint_every,
            notify=opt.print_note,
        )  # fmt: skip
    lines = [*doubtful_settings(study), *timeout_lines(study)]
    opt.print_notes([*(f"defedavg: {line}" for line in lines), *session.notes])
    shown = len(session.notes)
    runs = len(session.points) * len(study.seeds)
    try:
        with progress_and_logs(study.name, runs, session.folder, tensorboard) as watch:
            finished = session.run(watch)
    except KeyboardInterrupt:
        opt.exit_unchanged()
    opt.print_notes(session.notes[shown:])
    _close(session, plots, as_json)
    opt.exit_if_stopped(finished, "continue with --resume")


def _close(session: StudyRun, plots: bool, as_json: bool) -> None:
    """Print the results, then write what can be made from them at any time: Parquet, the page and, if wanted, figures.

    What a run needs to be resumed or read is already on disk.
    """
    if as_json:
        opt.print_json(session.entries)
    else:
        opt.out.print(*tables.result_tables(session.study.name, session.entries), sep="\n\n")
        opt.print_line(f"\nresults: {session.folder}")
    results = session.run_folder()
    with opt.working("writing the tables …"):
        from ..runstore.export import write_parquets

        write_parquets(session.folder)
    close_with_page([results], session.folder, as_json)
    if plots:
        draw_figures([results])
