"""``defedavg paper``: the paper's experiments, one command each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..paper.published import FIGURE6_SIZES, SIZE_OF, cells
from ..paper.run_grid import Choices, Piece
from ..paper.run_request import PaperRequest, chosen, rates_or_refuse, seeds_or_refuse
from .data_command import DataDir
from .options import Device, Executor, Json, MaxBatchJobs, Memory, Precision, RayAddress, err, out, print_json

if TYPE_CHECKING:
    from ..paper.result_files import Result, ResultFiles

app = typer.Typer(
    help="Repeat the experiments of the DeFedAvg paper: its tables, its figures, at its full scale.",
    invoke_without_command=True,
)

Datasets = Annotated[
    list[str] | None, typer.Option("--dataset", help="fashionmnist or cifar10; both if not given. Repeatable.")
]
Settings = Annotated[list[str] | None, typer.Option("--setting", help="iid or non-iid; both if not given. Repeatable.")]
Sizes = Annotated[
    list[int] | None, typer.Option("--n", help="10, 20, 40 or 80 (figure6: also 5); all if not given. Repeatable.")
]
Algorithms = Annotated[
    list[str] | None, typer.Option("--algorithm", help="One that the paper compares; all if not given. Repeatable.")
]
Seeds = Annotated[int, typer.Option(help="Seeds 0, 1, … of each run.")]
RatesOption = Annotated[
    str, typer.Option(metavar="paper|tuned", help="The paper's rates, or the best of its grid, found for each cell.")
]
MaxTime = Annotated[
    float | None,
    typer.Option(help="Simulated seconds after which a run is given up; see --time-limit-factor if not given."),
]
TimeLimitFactor = Annotated[
    float, typer.Option(help="Give up at so many times the paper's seconds, a minute at least.")
]
MeasureSeconds = Annotated[float, typer.Option(help="Simulated seconds between measurements.")]
TrainSamples = Annotated[int, typer.Option(help="Samples on which the training loss is measured; 0: it is not.")]
Normalise = Annotated[str, typer.Option(help="Inputs: standard or unit.")]
Sampling = Annotated[str, typer.Option(help="Mini-batches: replacement or shuffle.")]
Show = Annotated[bool, typer.Option("--show", help="Do no runs: show what is there.")]
Folder = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where results are kept.")]

OUT = Path("results/paper")
_C = Choices()


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
    """List the presets: every cell of Table 1 with the paper's rates, target and seconds."""
    from ..report import tables

    found = [
        {
            "setting": cell.setting,
            "dataset": cell.dataset,
            "algorithm": cell.algorithm,
            "n": cell.updates_per_round,
            "target": cell.target,
            "global_lr": cell.rates[0],
            "local_lr": cell.rates[1],
            "paper_seconds": cell.seconds,
            "given_up_after": _C.limit(Piece(cell, cell.rates)),
        }
        for cell in cells()
    ]
    if as_json:
        print_json(found)
        return
    rows = [[("–" if value is None else f"{value}") for value in row.values()] for row in found]
    out.print(tables.make("Table 1 of the paper", list(found[0]), rows))
    out.print("table1, table2: these cells. figure2 … figure5: their curves for n = 10, 20, 40, 80.")
    out.print(
        f"figure6: DeFedAvg over rounds for n = {', '.join(map(str, FIGURE6_SIZES))}. figure7: for K = 20, 50, 100."
    )
    out.print("figure1: who trains when; three clients, n = 2.")


def _table1(request: PaperRequest) -> bool:
    from ..fileio import write_whole
    from ..paper.paper_tables import rows, to_csv, to_markdown
    from ..paper.ranking import ranking, ranking_to_markdown

    pieces, store, finished = request.cells_with_rates()
    finished = finished and request.carry_out(store, pieces, "table 1")
    results = store.results(pieces, request.seeds)
    _show(request, store.folder / "table1", rows(results), to_markdown, to_csv)
    if ranks := ranking(results):
        text = ranking_to_markdown(ranks)
        write_whole(store.folder / "ranking.md", text.encode())
        if not request.as_json:
            sys.stdout.write(f"\n{text}")
        err.print(f"written: {store.folder / 'ranking'}.md", markup=False, soft_wrap=True)
    _page(request, store, results, "table1", "Table 1")
    return finished


def _table2(request: PaperRequest) -> bool:
    from ..paper.paper_tables import rates_rows, rates_to_markdown, to_csv
    from ..paper.results_page import close_with_points

    tuned, finished = request.tuned()
    found = rates_rows(tuned)
    path = request.folder / "table1-tuned" / "table2"
    _show(request, path, found, rates_to_markdown, to_csv)
    if tuned:
        close_with_points(request.points(), path.with_suffix(".html"), request.as_json, "Table 2: every pair of rates")
    return finished


def _show(
    request: PaperRequest,
    path: Path,
    found: list[dict[str, Any]],
    to_markdown: Callable[[list[dict[str, Any]]], str],
    to_csv: Callable[[list[dict[str, Any]]], str],
) -> None:
    from ..fileio import write_whole

    if request.as_json:
        print_json(found)
    if not found:
        err.print("no result is there yet", markup=False)
        return
    if not request.as_json:
        sys.stdout.write(to_markdown(found))
    write_whole(path.with_suffix(".md"), to_markdown(found).encode())
    write_whole(path.with_suffix(".csv"), to_csv(found).encode())
    err.print(f"written: {path}.md and .csv", markup=False, soft_wrap=True)


def _figure(number: int) -> Callable[[PaperRequest], bool]:
    def draw(request: PaperRequest) -> bool:
        if number in SIZE_OF:
            pieces, store, finished = request.cells_with_rates(SIZE_OF[number])
        else:
            pieces, store, finished = request.defedavg(number)
        finished = finished and request.carry_out(store, pieces, f"figure {number}")
        results = store.results(pieces, request.seeds)
        if not results:
            err.print("no result is there yet", markup=False)
            return finished
        from ..paper.figures import curves

        kind = "-tuned" if request.rates == "tuned" else ""
        for figure, name in zip(curves(results, number), ("accuracy", "loss"), strict=True):
            _draw(request, figure, f"figure{number}{kind}-{name}")
        _page(request, store, results, f"figure{number}", f"Figure {number}")
        return finished

    return draw


def _page(request: PaperRequest, store: ResultFiles, results: Sequence[Result], name: str, title: str) -> None:
    """Every command that does runs ends with their page."""
    from ..paper.results_page import close_with_results

    if results:
        rates = "the paper's rates" if request.rates == "paper" else "tuned rates"
        close_with_results(results, store.folder / f"{name}.html", request.as_json, f"{title} at {rates}")


def _draw(request: PaperRequest, figure: Any, name: str) -> None:
    from ..fileio import writing
    from ..report.plots import save

    place = request.folder / "figures" / name
    with writing(place.parent):
        place.parent.mkdir(parents=True, exist_ok=True)
    for written in save(figure, place):
        (out if request.as_json is False else err).print(f"drawn: {written}", markup=False, soft_wrap=True)


@app.command("figure1")
def figure1(
    seed: Annotated[int, typer.Option(help="Of the clients' speeds and the draws.")] = 0, folder: Folder = OUT
) -> None:
    """Draw who trains when: three clients, n = 2, under FedAvg, DeFedAvg-nIID and DeFedAvg-IID. Needs no data."""
    from ..paper.figures import figure1 as make

    _draw(PaperRequest(folder=folder), make(seed), "figure1")


def _register(name: str, help_: str, action: Callable[[PaperRequest], bool]) -> None:
    """A command with the options that all experiments have."""

    def command(
        datasets: Datasets = None,
        settings: Settings = None,
        sizes: Sizes = None,
        algorithms: Algorithms = None,
        seeds: Seeds = 3,
        rates: RatesOption = "paper",
        max_time: MaxTime = None,
        time_limit_factor: TimeLimitFactor = _C.time_limit_factor,
        measure_seconds: MeasureSeconds = _C.measure_seconds,
        train_samples: TrainSamples = _C.train_samples,
        normalise: Normalise = _C.normalise,
        sampling: Sampling = _C.sampling,
        folder: Folder = OUT,
        executor: Executor = "batched",
        ray_address: RayAddress = None,
        device: Device = "auto",
        max_batch_jobs: MaxBatchJobs = None,
        memory: Memory = None,
        precision: Precision = "auto",
        data_dir: DataDir = None,
        show: Show = False,
        as_json: Json = False,
    ) -> None:
        from ..experiments.compute import ComputeConfig

        request = PaperRequest(
            cells=tuple(chosen(datasets, settings, sizes, algorithms)),
            seeds=seeds_or_refuse(seeds),
            rates=rates_or_refuse(rates),
            choices=Choices.checked(measure_seconds, normalise, sampling, train_samples, time_limit_factor, max_time),
            folder=folder,
            means=ComputeConfig.choose(executor, device, max_batch_jobs, memory, precision, ray_address),
            show=show,
            as_json=as_json,
        )
        if not action(request):
            err.print("stopped by Ctrl-C; finished runs are kept, the same command goes on", markup=False)
            raise typer.Exit(130)

    app.command(name, help=help_)(command)


_PARTS = (
    "Runs whose results are in the folder are not done again, so it can be made in parts. "
    "Ctrl-C loses only the runs under way."
)
_register(
    "table1",
    "Seconds to the target accuracy: first hit and sustained (five measurements in a row), beside the paper's.\n\n"
    + _PARTS,
    _table1,
)
_register("table2", "The best rates of the paper's grid for each cell, beside the paper's.\n\n" + _PARTS, _table2)
for _number, _n in SIZE_OF.items():
    _register(
        f"figure{_number}",
        f"Test accuracy and training loss over simulated seconds, n = {_n}: the runs of Table 1.\n\n" + _PARTS,
        _figure(_number),
    )
_register("figure6", "DeFedAvg over rounds for n = 5, 10, 20, 40, 80.\n\n" + _PARTS, _figure(6))
_register("figure7", "DeFedAvg over rounds for K = 20, 50, 100 and n = 10.\n\n" + _PARTS, _figure(7))
