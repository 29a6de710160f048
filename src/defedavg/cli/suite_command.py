"""``defedavg suite``: the fixed benchmark of all algorithms."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from ..durations import duration
from ..errors import UserError, counted
from ..suite.benchmark import FLEETS, TASKS, SuiteCell, select_cells
from . import options as opt
from .data_command import DataDir
from .importing import importing
from .plain_lines import LineTimer
from .stop_signals import stopped_by, stopped_code

if TYPE_CHECKING:
    from ..experiments.compute import ComputeConfig
    from ..suite.cell_files import StoredCell
    from ..suite.suite_estimate import CellWork
    from ..suite.suite_run import SuiteRequest
    from .suite_progress import SuiteProgress

OUT, WORK, PAGE = Path("results/suite"), Path("runs/suite"), Path("docs/leaderboard.md")
STUDIES, FINDINGS = Path("results/findings"), Path("docs/findings.md")


app = typer.Typer(
    help="A fixed benchmark: every algorithm × tasks × fleets, each cell tuned with the same number of runs.\n\n"
    "A cell is one algorithm on one task and one fleet. Its rates are chosen on a seed that is not reported; three "
    "other seeds are. `suite --quick` computes a part that needs no download, in minutes; `suite run` computes any "
    "part, and skips cells that are stored; `suite show` prints the tables.",
    invoke_without_command=True,
)

Tasks = Annotated[list[str] | None, Option("--task", help=f"{', '.join(TASKS)}; default: all. Repeatable.")]
Fleets = Annotated[list[str] | None, Option("--fleet", help=f"{', '.join(FLEETS)}; default: all. Repeatable.")]
Algorithms = Annotated[
    list[str] | None,
    Option("--algorithm", help="An algorithm, also one of a plugin; default: all that are registered. Repeatable."),
]
Folder = Annotated[Path, Option("--out", metavar="FOLDER", help="The folder of the results, one file per cell.")]
Work = Annotated[Path, Option("--work", metavar="FOLDER", help="Checkpoints of cells that are not finished.")]
Studies = Annotated[
    Path, Option("--studies", metavar="FOLDER", help="The folder of the studies of slow clients and of the best n.")
]
QUICK = [task.name for task in TASKS.values() if task.quick]
Quick = Annotated[bool, Option("--quick", help=f"Compute the part that needs no download: {', '.join(QUICK)}.")]
Speed = Annotated[
    float | None,
    Option(
        "--updates-per-second",
        metavar="SPEED",
        help="Estimate for a machine with this speed on the selected tasks, instead of measuring this one.",
    ),
]


@app.callback()
def _suite(
    context: typer.Context,
    quick: Quick = False,
    folder: Folder = OUT,
    work: Work = WORK,
    device: opt.Device = "auto",
) -> None:
    if context.invoked_subcommand is not None:
        if quick or (folder, work, device) != (OUT, WORK, "auto"):
            raise UserError("options before the command are for `defedavg suite --quick`; write them after the command")
        return
    if not quick:
        opt.out.print(context.get_help(), markup=False)
        return
    opt.print_note(f"the quick part: {'; '.join(TASKS[name].summary for name in QUICK)}; all algorithms, all fleets")
    run(tasks=QUICK, folder=folder, work=work, device=device)


@app.command()
def run(
    tasks: Tasks = None,
    fleets: Fleets = None,
    algorithms: Algorithms = None,
    plugin: opt.Plugin = None,
    folder: Folder = OUT,
    work: Work = WORK,
    executor: opt.Executor = "batched",
    ray_address: opt.RayAddress = None,
    device: opt.Device = "auto",
    max_batch_jobs: opt.MaxBatchJobs = None,
    memory: opt.Memory = None,
    precision: opt.Precision = "auto",
    checkpoint_every: opt.CheckpointEvery = None,
    _data_dir: DataDir = None,
    estimate_first: Annotated[
        bool, Option("--estimate/--no-estimate", help="Measure the speed first, and say how long it will take.")
    ] = True,
) -> None:
    """Compute cells that have no stored result: tune the rates, then run the reported seeds.

    Cells of a data set that is missing are left out, with the command that fetches it. Ctrl-C saves the
    runs in progress when their batch ends: the same command continues.

    Example: `defedavg suite run --task flights --fleet phones --algorithm fedbuff --algorithm fedavg`
    """
    cells = select_cells(tasks, fleets, algorithms)
    with opt.working("preparing …"):  # shown before PyTorch is loaded
        with importing():
            from ..experiments.compute import ComputeConfig

        compute = ComputeConfig.choose(executor, device, max_batch_jobs, memory, precision, ray_address)
        request, progress = _request(cells, folder, work, compute, plugin, checkpoint_every)
    batches = request.batches()
    missing = [cell for batch in batches for cell in batch.cells if not request.files.has(cell)]
    _print_counts(cells, missing, request)
    if not missing:
        return
    seconds = None
    if estimate_first:
        planned, speeds = _planned(missing, request.paths), _measured(missing, request)
        _print_estimate(planned, speeds)
        seconds = {item.cell: item.updates / speeds[item.cell] for item in planned}
    progress.expect(batches, seconds)
    if not request.run(batches):
        opt.print_note(f"{stopped_by()}; the same command continues from the last checkpoint")
        raise typer.Exit(stopped_code())
    opt.print_line(f"results: {folder}; `defedavg suite show` prints the tables")


def _request(
    cells: Sequence[SuiteCell],
    folder: Path,
    work: Path,
    compute: ComputeConfig,
    plugins: Sequence[Path] | None,
    checkpoint_every: float | None = None,
) -> tuple[SuiteRequest, SuiteProgress]:
    """Return the request for cells, and what shows its progress."""
    from ..plugins import plugin_hashes
    from ..suite.cell_files import CellFiles
    from ..suite.suite_run import SuiteRequest
    from .suite_progress import SuiteProgress

    files = CellFiles(folder, plugin_hashes(path.resolve() for path in plugins or ()))
    progress = SuiteProgress(opt.err)
    request = SuiteRequest(
        tuple(cells), files, work, compute, opt.print_note, progress.watching, tuple(plugins or ()), checkpoint_every
    )
    return request, progress


def _print_counts(cells: Sequence[SuiteCell], missing: Sequence[SuiteCell], request: SuiteRequest) -> None:
    stored = sum(map(request.files.has, cells))
    opt.print_note(f"cells to compute: {len(missing)}; already stored: {stored}")


def _planned(cells: Sequence[SuiteCell], plugins: Sequence[str]) -> list[CellWork]:
    """Plan the cells; print a line every ten seconds."""
    from ..suite.suite_estimate import planned

    timer, done = LineTimer(), 0

    def watch(cell: SuiteCell) -> None:
        nonlocal done
        if timer.due():
            opt.print_note(f"planning {cell.label}: {done} of {counted(len(cells), 'cell')}")
        done += 1

    with opt.working(f"planning {counted(len(cells), 'cell')} …"):
        return planned(cells, plugins, watch)


def _measured(cells: Sequence[SuiteCell], request: SuiteRequest) -> dict[SuiteCell, float]:
    """Return the updates per second of every cell: those of the first cell with the same task and kind of rounds."""
    from ..suite.benchmark import batches
    from ..suite.suite_estimate import measured_speed

    speeds: dict[tuple[str, int, int], float] = {}
    found: dict[SuiteCell, float] = {}
    for batch in batches(cells):
        key = batch[0].task.name, batch[0].max_rounds, batch[0].steps_per_job
        if key not in speeds:
            with opt.working(f"measuring the speed: {batch[0].label} …"):
                speeds[key] = measured_speed(batch[0], request.compute, request.paths)
            opt.print_note(f"speed of {batch[0].label}: {speeds[key]:.3g} updates/s")
        found |= dict.fromkeys(batch, speeds[key])
    return found


def _print_estimate(work: Sequence[CellWork], speeds: Mapping[SuiteCell, float] | float) -> None:
    """Print the updates and the real time of the cells by task and fleet, at most."""
    rows: dict[tuple[str, str], list[float]] = {}
    for item in work:
        seconds = item.equivalent / speeds if isinstance(speeds, float) else item.updates / speeds[item.cell]
        row = rows.setdefault((item.cell.task.name, item.cell.fleet.name), [0, 0, 0.0])
        rows[item.cell.task.name, item.cell.fleet.name] = [row[0] + 1, row[1] + item.updates, row[2] + seconds]
    for (task, fleet), (cells, updates, seconds) in rows.items():
        opt.print_note(
            f"{task}, {fleet}: {counted(int(cells), 'cell')}, at most {updates:,.0f} updates, {duration(seconds)}"
        )
    total = sum(row[2] for row in rows.values())
    updates = sum(item.updates for item in work)
    opt.print_note(
        f"{counted(len(work), 'cell')}, at most {updates:,} updates: at most {duration(total)}, less where targets are "
        "reached"
    )


@app.command()
def estimate(
    tasks: Tasks = None,
    fleets: Fleets = None,
    algorithms: Algorithms = None,
    plugin: opt.Plugin = None,
    folder: Folder = OUT,
    device: opt.Device = "auto",
    speed: Speed = None,
    _data_dir: DataDir = None,
) -> None:
    """Say how long the cells without a stored result will take, at most: updates of their plans / updates per second.

    Plans are made without training. The speed is measured with the first rounds of real cells, or given.

    Example: `defedavg suite estimate --task fashionmnist-iid --updates-per-second 3300`
    """
    from ..experiments.compute import ComputeConfig

    cells = select_cells(tasks, fleets, algorithms)
    if speed is not None and not speed > 0:
        raise UserError(f"--updates-per-second is {speed:g}; it must be above zero")
    request, _ = _request(cells, folder, WORK, ComputeConfig.choose("batched", device), plugin)
    missing = request.missing() if speed is None else [cell for cell in cells if not request.files.has(cell)]
    _print_counts(cells, missing, request)
    if missing:
        _print_estimate(_planned(missing, request.paths), _measured(missing, request) if speed is None else speed)


@app.command()
def show(tasks: Tasks = None, fleets: Fleets = None, folder: Folder = OUT, as_json: opt.Json = False) -> None:
    """Print the stored results, a table per task and fleet, the fastest algorithm first.

    Example: `defedavg suite show --task digits-pairs`
    """
    from ..report import tables
    from ..suite.leaderboard import COLUMNS, boards, leaders, leaders_text, row

    wanted = {(cell.task.name, cell.fleet.name) for cell in select_cells(tasks, fleets, ["fedavg"])}
    cells = [cell for cell in _stored(folder) if (cell["task"], cell["fleet"]) in wanted]
    if as_json:
        opt.print_json(cells)
        return
    for board in boards(cells):
        opt.out.print(tables.make(board.title, COLUMNS, list(map(row, board.cells))))
        if len(leaders(board)) > 1:
            opt.out.print(f"first place: {leaders_text(board)}", markup=False, soft_wrap=True)
        opt.out.print()
    if not cells:
        opt.print_note(f"there are no such results in {folder}; {_first_command(tasks, fleets, folder)}")


def _first_command(tasks: Sequence[str] | None, fleets: Sequence[str] | None, folder: Path) -> str:
    """Return how to compute results of tasks and fleets: the quick part only where it has one of these tasks."""
    out = [] if folder == OUT else ["--out", str(folder)]
    if set(tasks or QUICK) & set(QUICK):
        return f"`{shlex.join(['defedavg', 'suite', '--quick', *out])}` computes the first ones"
    words = [word for name in tasks or () for word in ("--task", name)]
    words += [word for name in fleets or () for word in ("--fleet", name)]
    return f"`{shlex.join(['defedavg', 'suite', 'run', *words, *out])}` computes them"


def _stored(folder: Path) -> list[StoredCell]:
    from ..suite.cell_files import stored_cells

    cells, notes = stored_cells(folder)
    opt.print_notes(notes)
    return cells


def _required(folder: Path) -> list[StoredCell]:
    """Return the stored cells; refuse a folder without any: its name may have an error."""
    cells = _stored(folder)
    if not cells:
        remedy = "" if folder == OUT else "correct --out; "
        raise UserError(f"there are no results in {folder}; {remedy}{_first_command(None, None, folder)}")
    return cells


@app.command()
def page(
    folder: Folder = OUT,
    to: Annotated[
        Path | None,
        Option(
            "--output",
            "-o",
            metavar="FILE",
            help=f"The page to write, in Markdown; default: {PAGE} where it exists, else {PAGE.name}.",
        ),
    ] = None,
    studies: Studies = STUDIES,
    findings_page: Annotated[
        Path | None,
        Option(
            "--findings",
            metavar="FILE",
            help=f"A page whose marked tables are written again; default: {FINDINGS}, if nothing else is named.",
        ),
    ] = None,
) -> None:
    """Write the leaderboard of the documentation, and the tables of the findings, from the stored results.

    Example: `defedavg suite page --out my-results -o my-leaderboard.md`
    """
    from ..fileio import read_text, write_whole
    from ..report.marked_tables import with_tables
    from ..suite.findings import read_studies, tables
    from ..suite.leaderboard import page as page_text

    if to is None:
        to = PAGE if PAGE.exists() else Path(PAGE.name)
    elif not to.absolute().parent.is_dir():
        raise UserError(f"the folder {to.parent} of --output does not exist; create it, or give another --output")
    opt.require_file(to, PAGE.name)
    cells = _required(folder)
    write_whole(to, page_text(cells).encode())
    opt.print_written(f"{counted(len(cells), 'cell')}: {to}", to)
    if findings_page is None and (folder, to, studies) == (OUT, PAGE, STUDIES) and FINDINGS.exists():
        findings_page = FINDINGS
    if findings_page is not None:
        text = with_tables(read_text(findings_page), tables(cells, read_studies(studies)))
        write_whole(findings_page, text.encode())
        opt.print_written(f"tables: {findings_page}", findings_page)


@app.command()
def findings(folder: Folder = OUT, studies: Studies = STUDIES) -> None:
    """Print what the stored results say: who wins where, what flips on phones, what tuning, speed and n are worth.

    Example: `defedavg suite findings`
    """
    from ..suite.findings import read_studies, tables

    for name, table in tables(_required(folder), read_studies(studies)).items():
        opt.out.print(f"{name}\n\n{table}", markup=False, soft_wrap=True)


@app.command()
def check(
    tasks: Tasks = None,
    fleets: Fleets = None,
    algorithms: Algorithms = None,
    plugin: opt.Plugin = None,
    folder: Folder = OUT,
    device: opt.Device = "auto",
    _data_dir: DataDir = None,
) -> None:
    """Compute stored cells again, and compare every figure and plan with the stored one.

    Numbers are equal on the same kind of machine; plans are equal everywhere. The exit code is 1 if something differs.

    Example: `defedavg suite check --task digits-pairs --fleet equal --algorithm fedavg`
    """
    from ..experiments.compute import ComputeConfig
    from ..suite.cell_files import CellFiles, differences, machine_differences, read_cell

    cells, compute = select_cells(tasks, fleets, algorithms), ComputeConfig.choose("batched", device)
    old = _request(cells, folder, WORK, compute, plugin)[0].files
    stored = [cell for cell in cells if old.has(cell)]
    if not stored:
        raise UserError(f"no such cell is stored in {folder}; `defedavg suite run` computes it")
    same = True
    with tempfile.TemporaryDirectory() as scratch:
        request, progress = _request(stored, Path(scratch) / "results", Path(scratch) / "work", compute, plugin)
        batches = request.batches()
        progress.expect(batches)
        if not request.run(batches):
            opt.print_note(stopped_by())
            raise typer.Exit(stopped_code())
        new = CellFiles(Path(scratch) / "results")
        for cell in stored:
            one, other = read_cell(old.path(cell)), read_cell(new.path(cell))
            found = differences(one, other)
            same = same and not found
            opt.print_line(f"{cell.label}: {'; '.join(found) or 'every figure and every plan is the same'}")
            if found and (made := machine_differences(one, other)):
                opt.print_note(f"{cell.label} was made on another machine ({made}): accuracies and times can differ")
    if not same:
        raise typer.Exit(1)
