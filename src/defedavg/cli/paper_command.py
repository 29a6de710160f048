"""``defedavg paper``: the paper's experiments, one command per table and figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ..errors import UserError, unknown
from ..paper.published import BOUNDS, FIGURE6_SIZES, LIMITS, SIZE_OF, SIZES, Cell, cells, figure_cells
from ..paper.readings import Readings
from ..paper.run_grid import SHORTEST_LIMIT, Choices, PaperRun
from .consoles import print_text
from .data_command import DataDir
from .options import (
    CommandWithOldNames,
    Device,
    Executor,
    Json,
    MaxBatchJobs,
    Memory,
    Precision,
    RayAddress,
    err,
    out,
    print_json,
    print_line,
    print_note,
)
from .stop_signals import stopped_by, stopped_code

if TYPE_CHECKING:
    from ..paper.result_files import Result, ResultFiles
    from ..paper.run_request import PaperRequest

app = typer.Typer(
    help="Repeat the experiments of the DeFedAvg paper at full scale: its tables and its figures.",
    invoke_without_command=True,
)

Datasets = Annotated[
    list[str] | None, typer.Option("--dataset", help="fashionmnist or cifar10; default: both. Repeatable.")
]
Settings = Annotated[list[str] | None, typer.Option("--setting", help="iid or non-iid; default: both. Repeatable.")]
Sizes = Annotated[
    list[int] | None,
    typer.Option("--n", help="Updates per round: 10, 20, 40 or 80; default: all. Repeatable."),
]
Figure6Sizes = Annotated[
    list[int] | None,
    typer.Option("--n", help="Updates per round: 5, 10, 20, 40 or 80; default: all. Repeatable."),
]
Algorithms = Annotated[
    list[str] | None,
    typer.Option("--algorithm", help="An algorithm that the paper compares; default: all. Repeatable."),
]
Seeds = Annotated[int, typer.Option(help="Number of seeds of each run: 0, 1, …")]
RatesOption = Annotated[
    str,
    typer.Option(
        metavar="paper|stated|tuned",
        help="The paper's rates (corrected where Table 2 contradicts Table 1), the rates that Table 2 states, or rates "
        "tuned on its grid for each cell.",
    ),
]
MaxTime = Annotated[
    float | None,
    typer.Option(help="Time limit of every run in simulated seconds; default: see --time-limit-factor."),
]
TimeLimitFactor = Annotated[
    float,
    typer.Option(
        help="Time limit of a run as a multiple of the paper's seconds; at least those of its FedAvg and "
        f"{SHORTEST_LIMIT:.0f} s, at most {LIMITS['fashionmnist']['iid']:.0f} s on FashionMNIST, "
        f"{LIMITS['cifar10']['iid']:.0f} s on IID and {LIMITS['cifar10']['non-iid']:.0f} s on non-IID CIFAR-10."
    ),
]
MeasureSeconds = Annotated[float, typer.Option(help="Simulated seconds between evaluations.")]
TrainSamples = Annotated[int, typer.Option(help="Samples on which the training loss is evaluated; 0: none.")]
ReadingsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--reading",
        metavar="NAME=VALUE",
        help="A reading of the paper other than the default, such as upload=blocking; first: all readings of the "
        "first results. `defedavg paper readings` lists them. Repeatable.",
    ),
]
Show = Annotated[bool, typer.Option("--show", help="Compute no runs; show the stored results.")]
Folder = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="The folder of the results.")]

OUT = Path("results/paper")
_DEFAULTS = Choices()
RATES = ("paper", "stated", "tuned")
_RATES_TITLE = {"paper": "the paper's rates", "stated": "the rates of Table 2", "tuned": "tuned rates"}


@app.callback()
def _paper(
    context: typer.Context, presets: Annotated[bool, typer.Option("--list", help="List the presets.")] = False
) -> None:
    if presets:
        list_(as_json=False)
        raise typer.Exit
    if context.invoked_subcommand is None:
        out.print(context.get_help(), markup=False)


@app.command("list")
def list_(as_json: Json = False) -> None:
    """List the presets: every cell of Table 1 with its target, its rates and the paper's seconds.

    Where Table 2 contradicts Table 1, the rates that are used instead are in brackets.
    """
    from ..report import tables

    if as_json:
        print_json([_preset(cell) for cell in cells()])
        return
    columns = [
        "setting",
        "data",
        "algorithm",
        "n",
        "target",
        "η / η̄ of Table 2 [used]",
        "paper, s",
        "given up after, s",
    ]
    out.print(tables.make("The cells of Table 1", columns, [_preset_row(cell) for cell in cells()]))
    out.print("[used]: rates that are used because Table 2 contradicts Table 1 in this cell.")
    out.print("table1, table2: all cells. figure2 … figure5: curves of the cells with n = 10, 20, 40, 80.")
    out.print(
        f"figure6: DeFedAvg against rounds for n = {', '.join(map(str, FIGURE6_SIZES))}. figure7: for K = 20, 50, 100."
    )
    out.print("figure1: the activity of three clients over time, n = 2.")


def _preset(cell: Cell) -> dict[str, Any]:
    """Return a cell for programs; ``global_lr`` and ``local_lr`` are the rates that are used."""
    return {
        "setting": cell.setting,
        "dataset": cell.dataset,
        "algorithm": cell.algorithm,
        "n": cell.updates_per_round,
        "target": cell.target,
        "global_lr": cell.rates[0],
        "local_lr": cell.rates[1],
        "stated_global_lr": cell.stated_rates[0],
        "stated_local_lr": cell.stated_rates[1],
        "paper_seconds": cell.seconds,
        "given_up_after": round(_DEFAULTS.limit(PaperRun(cell, cell.rates)), 3),
    }


def _preset_row(cell: Cell) -> list[str]:
    from ..paper.paper_tables import stated_and_used

    return [
        cell.setting,
        cell.dataset,
        cell.algorithm,
        f"{cell.updates_per_round}",
        f"{cell.target:g}",
        stated_and_used(cell.stated_rates, cell.rates),
        f">{BOUNDS[cell.dataset]:g}" if cell.seconds is None else f"{cell.seconds:g}",
        f"{_DEFAULTS.limit(PaperRun(cell, cell.rates)):.1f}",
    ]


def _table1(request: PaperRequest, as_json: bool) -> bool:
    from ..fileio import write_whole
    from ..paper.paper_tables import ranking, ranking_to_markdown, rows, to_markdown

    (runs, store, finished), title = request.table_runs(), "Table 1"
    finished = finished and request.compute_missing(store, runs, title.lower())
    results = store.results(runs, request.seeds)
    whole = set(request.cells) >= set(cells())
    _write_table(store.folder / "table1" if whole else None, as_json, rows(results), to_markdown)
    if ranks := ranking(results):
        text = ranking_to_markdown(ranks)
        if not as_json:
            print_text(f"\n{text}")
        if whole:
            write_whole(store.folder / "ranking.md", text.encode())
            print_note(f"written: {store.folder / 'ranking'}.md")
    if results and not whole:
        print_note(f"{store.folder / 'table1'}.md keeps its content: only `paper table1` without a selection writes it")
    _write_page(request, store, results, as_json, title)
    return finished


def _table2(request: PaperRequest, as_json: bool) -> bool:
    from ..paper.paper_tables import rates_rows, rates_to_markdown, tuning_records
    from ..paper.result_files import last_session
    from .report_command import close_with_records

    tuned, finished = request.tuned_rates()
    path = request.folder / "table1-tuned" / "table2"
    _write_table(path, as_json, rates_rows(tuned), rates_to_markdown)
    if tuned:
        groups, page = tuning_records(request.tuning_points()), path.with_suffix(".html")
        close_with_records(groups, page, as_json, "Table 2: every pair of rates", last_session(path.parent))
    return finished


def _write_table(
    path: Path | None, as_json: bool, rows: list[dict[str, Any]], to_markdown: Callable[[list[dict[str, Any]]], str]
) -> None:
    from ..fileio import write_whole
    from ..paper.paper_tables import to_csv

    if as_json:
        print_json(rows)
    if not rows:
        print_note("no results are stored yet")
        return
    if not as_json:
        print_text(to_markdown(rows))
    if path is None:
        return
    write_whole(path.with_suffix(".md"), to_markdown(rows).encode())
    write_whole(path.with_suffix(".csv"), to_csv(rows).encode())
    print_note(f"written: {path}.md and .csv")


def _figure(number: int, request: PaperRequest, as_json: bool) -> bool:
    in_table1 = number in SIZE_OF
    runs, store, finished = request.table_runs(SIZE_OF[number]) if in_table1 else request.defedavg_runs(number)
    finished = finished and request.compute_missing(store, runs, f"figure {number}")
    results = store.results(runs, request.seeds)
    if not results:
        print_note("no results are stored yet")
        return finished
    from ..paper.figures import curves

    whole = set(request.cells) >= set(figure_cells(number))
    title = f"figure{number}{request.suffix}"
    for figure, name in zip(curves(results, number), ("accuracy", "loss"), strict=True):
        save_figure(figure, request.folder, f"{title}{'' if whole else '-part'}-{name}", as_json)
    if not whole:
        print_note(f"{title} keeps its content: only `paper figure{number}` without a selection draws it")
    _write_page(request, store, results, as_json, f"Figure {number}")
    return finished


def _write_page(
    request: PaperRequest, store: ResultFiles, results: Sequence[Result], as_json: bool, title: str
) -> None:
    from ..paper.paper_tables import run_records
    from ..paper.result_files import last_session
    from .report_command import close_with_records

    if results:
        heading = f"{title} at {_RATES_TITLE[request.rates]}"
        page = store.folder / f"{title.lower().replace(' ', '')}.html"
        close_with_records(run_records(results), page, as_json, heading, last_session(store.folder))


def save_figure(figure: Any, folder: Path, name: str, as_json: bool) -> None:
    """Write a figure into the folder of figures, and print where."""
    from ..fileio import writing
    from ..report.plots import save

    path = folder / "figures" / name
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    for written in save(figure, path):
        (print_note if as_json else print_line)(f"drawn: {written}")


@app.command("figure1")
def figure1(
    seed: Annotated[int, typer.Option(help="Seed of the clients' speeds and of the sampling.")] = 0,
    folder: Folder = OUT,
) -> None:
    """Draw the activity of three clients under FedAvg, DeFedAvg-nIID and DeFedAvg-IID, n = 2. Needs no data."""
    from ..paper.figures import figure1 as draw_figure1

    save_figure(draw_figure1(seed), folder, "figure1", as_json=False)


def checked_seeds(number: int) -> range:
    """Return the seeds of a command; raise a UserError if there are none."""
    if number < 1:
        raise UserError(f"--seeds is {number}; it must be at least 1")
    return range(number)


def stopped() -> NoReturn:
    """Tell the user that Ctrl-C or another signal stopped the command, and exit."""
    print_note(f"{stopped_by()}; the results of finished runs are stored, run the command again to continue")
    raise typer.Exit(stopped_code())


def _register(
    name: str, help_: str, action: Callable[[PaperRequest, bool], bool], known_sizes: Sequence[int] = SIZES
) -> None:
    """Add a command with the options that all experiments share; ``known_sizes`` are the values of its ``--n``."""

    def command(
        datasets: Datasets = None,
        settings: Settings = None,
        sizes: Sizes = None,
        algorithms: Algorithms = None,
        seeds: Seeds = 3,
        rates: RatesOption = "paper",
        max_time: MaxTime = None,
        time_limit_factor: TimeLimitFactor = _DEFAULTS.time_limit_factor,
        measure_seconds: MeasureSeconds = _DEFAULTS.measure_seconds,
        train_samples: TrainSamples = _DEFAULTS.train_samples,
        reading: ReadingsOption = None,
        folder: Folder = OUT,
        executor: Executor = "batched",
        ray_address: RayAddress = None,
        device: Device = "auto",
        max_batch_jobs: MaxBatchJobs = None,
        memory: Memory = None,
        precision: Precision = "auto",
        _data_dir: DataDir = None,
        show: Show = False,
        as_json: Json = False,
    ) -> None:
        from ..experiments.compute import ComputeConfig
        from ..paper.run_request import PaperRequest, select_cells
        from .progress_table import watching

        selected = select_cells(datasets, settings, sizes, algorithms, known_sizes)
        if rates not in RATES:
            raise unknown("rates", rates, RATES)
        readings = Readings.parse(reading or ())
        request = PaperRequest(
            cells=tuple(selected),
            seeds=checked_seeds(seeds),
            rates=rates,
            choices=Choices.checked(measure_seconds, train_samples, time_limit_factor, max_time, readings),
            folder=folder,
            compute=ComputeConfig.choose(executor, device, max_batch_jobs, memory, precision, ray_address),
            show_only=show,
            notify=print_note,
            watching=partial(watching, err),
        )
        if not action(request, as_json):
            stopped()

    # Typer reads the help of an option from the annotation, and only here the values of --n are known.
    command.__annotations__["sizes"] = Figure6Sizes if known_sizes is FIGURE6_SIZES else Sizes
    app.command(name, cls=CommandWithOldNames, help=help_)(command)


_RESUME = (
    "A run whose result is stored is not computed again, so the work can be split over several sessions. "
    "Ctrl-C saves the runs in progress when their batch ends; a kill loses a minute or less of most runs."
)
_register(
    "table1",
    "Seconds to the target accuracy: first hit and sustained (five evaluations in a row), with the paper's values.\n\n"
    + _RESUME,
    _table1,
)
_register("table2", "The best rates of the paper's grid for each cell, with the paper's choice.\n\n" + _RESUME, _table2)
for _number, _n in SIZE_OF.items():
    _register(
        f"figure{_number}",
        f"Test accuracy and training loss against simulated seconds, n = {_n}: the runs of Table 1.\n\n" + _RESUME,
        partial(_figure, _number),
    )
_register(
    "figure6",
    "DeFedAvg against rounds for n = 5, 10, 20, 40, 80.\n\n" + _RESUME,
    partial(_figure, 6),
    FIGURE6_SIZES,
)
_register("figure7", "DeFedAvg against rounds for K = 20, 50, 100 and n = 10.\n\n" + _RESUME, partial(_figure, 7))
