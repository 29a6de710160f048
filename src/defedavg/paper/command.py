"""``defedavg paper``: the paper's experiments, one command each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..data_cli import DataDir
from ..errors import UserError, unknown
from ..terminal import Device, Json, Memory, Precision, Width, err, out, print_json
from .facts import COMPARED, DATASETS, SETTINGS, SIZES, Cell, cells
from .pieces import Choices, Piece

if TYPE_CHECKING:
    from ..sweep import Means
    from .store import Store

app = typer.Typer(help="Repeat the experiments of the DeFedAvg paper.", invoke_without_command=True)

Datasets = Annotated[
    list[str] | None, typer.Option("--dataset", help="fashionmnist or cifar10; both if not given. Repeatable.")
]
Settings = Annotated[list[str] | None, typer.Option("--setting", help="iid or non-iid; both if not given. Repeatable.")]
Sizes = Annotated[list[int] | None, typer.Option("--n", help="10, 20, 40 or 80; all if not given. Repeatable.")]
Algorithms = Annotated[
    list[str] | None, typer.Option("--algorithm", help="One that the paper compares; all if not given. Repeatable.")
]
Seeds = Annotated[int, typer.Option(help="Seeds 0, 1, … of each cell.")]
RatesOption = Annotated[
    str, typer.Option(metavar="paper|tuned", help="The paper's rates, or the best of its grid, found for each cell.")
]
MaxTime = Annotated[
    float | None, typer.Option(help="Simulated seconds after which a run is given up; see --beyond if not given.")
]
Beyond = Annotated[
    float,
    typer.Option(help="Give up at so many times the paper's seconds, a minute at least."),
]
MeasureSeconds = Annotated[float, typer.Option(help="Simulated seconds between measurements.")]
TrainSamples = Annotated[int, typer.Option(help="Samples on which the training loss is measured; 0: it is not.")]
Normalise = Annotated[str, typer.Option(help="Inputs: standard or unit.")]
Sampling = Annotated[str, typer.Option(help="Mini-batches: replacement or shuffle.")]
Folder = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where results are kept.")]

OUT = Path("results/paper")
_C = Choices()


def chosen(
    datasets: Sequence[str] | None,
    settings: Sequence[str] | None,
    sizes: Sequence[int] | None,
    algorithms: Sequence[str] | None = None,
) -> list[Cell]:
    """The cells of Table 1 that were asked for."""
    names = tuple(dict.fromkeys(name for own in COMPARED.values() for name in own))
    for what, given, known in (
        ("dataset", datasets, DATASETS),
        ("setting", settings, SETTINGS),
        ("n", sizes, SIZES),
        ("algorithm", algorithms, names),
    ):
        for value in given or ():
            if value not in known:
                raise unknown(what, str(value), [str(one) for one in known])
    return [
        cell
        for cell in cells()
        if cell.dataset in (datasets or DATASETS)
        and cell.setting in (settings or SETTINGS)
        and cell.updates_per_round in (sizes or SIZES)
        and cell.algorithm in (algorithms or names)
    ]


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
            "given_up_after": _C.limit(cell),
        }
        for cell in cells()
    ]
    if as_json:
        print_json(found)
        return
    rows = [[("–" if value is None else f"{value}") for value in row.values()] for row in found]
    out.print(tables.make("Table 1 of the paper", list(found[0]), rows))
    out.print("table1, table2: these cells. figure2 … figure5: their curves for n = 10, 20, 40, 80.")
    out.print("figure6: DeFedAvg over rounds for n = 5, 10, 20, 40, 80. figure7: for K = 20, 50, 100.")
    out.print("figure1: who trains when, three clients, n = 2.")


@app.command()
def table1(
    datasets: Datasets = None,
    settings: Settings = None,
    sizes: Sizes = None,
    algorithms: Algorithms = None,
    seeds: Seeds = 3,
    rates: RatesOption = "paper",
    max_time: MaxTime = None,
    beyond: Beyond = _C.beyond,
    measure_seconds: MeasureSeconds = _C.measure_seconds,
    train_samples: TrainSamples = _C.train_samples,
    normalise: Normalise = _C.normalise,
    sampling: Sampling = _C.sampling,
    folder: Folder = OUT,
    device: Device = "auto",
    width: Width = None,
    memory: Memory = None,
    precision: Precision = "auto",
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Seconds to the target accuracy: first hit and sustained (five measurements in a row), beside the paper's.

    Runs whose results are in the folder are not done again, so the table can be made in parts. Ctrl-C loses only the
    runs under way.
    """
    from ..sweep import Means
    from .tables import rows, to_csv, to_markdown

    choices = _choices(measure_seconds, normalise, sampling, train_samples, beyond, max_time)
    means = Means.choose("batched", device, width, memory, precision)
    wanted = chosen(datasets, settings, sizes, algorithms)
    pieces, store, finished = _pieces(wanted, rates, choices, folder, means)
    finished = finished and _run(store, pieces, _seeds(seeds), means, "table 1")
    found = rows(store.results(pieces, range(seeds)))
    if as_json:
        print_json(found)
    elif found:
        sys.stdout.write(to_markdown(found))
    if found:
        _write(store.folder, "table1", to_markdown(found), to_csv(found))
    _end(finished)


def _choices(*given: Any) -> Choices:
    made = Choices(*given)
    for word, value in (("--beyond", made.beyond), ("--max-time", made.max_seconds)):
        if value is not None and not value > 0:
            raise UserError(f"{word} is {value:g}; it must be above zero")
    return made


def _seeds(count: int) -> range:
    if count < 1:
        raise UserError(f"--seeds is {count}; it must be at least 1")
    return range(count)


def _pieces(
    wanted: Sequence[Cell], rates: str, choices: Choices, folder: Path, means: Means
) -> tuple[list[Piece], Store, bool]:
    """The cells with their rates, where they are kept, and whether all of them have rates."""
    from .store import Store

    paper = Store(folder / "table1", choices)
    if rates == "paper":
        return [Piece(cell, cell.rates) for cell in wanted], paper, True
    if rates != "tuned":
        raise unknown("rates", rates, ("paper", "tuned"))
    from ..live import watching
    from .provenance import note
    from .tuned import TunedRates

    store = Store(folder / "table1-tuned", choices)
    tuned = TunedRates(store, paper)
    left = [cell for cell in wanted if cell not in tuned.known(wanted)]
    finished = True
    if left:
        err.print(f"rates of {len(left)} cells to find", markup=False, soft_wrap=True)
        with watching(err, "rates", 10 * len(left)) as watch, note(store.folder, means):
            finished = tuned.find(left, means, watch)
    return [Piece(cell, own) for cell, own in tuned.known(wanted).items()], store, finished


def _run(store: Store, pieces: Sequence[Piece], seeds: Sequence[int], means: Means, title: str) -> bool:
    """Do what is missing; False if Ctrl-C ended it."""
    from ..live import watching
    from .provenance import note
    from .store import carry_out

    store.results(pieces, seeds)  # what is there must fit before hours are spent
    jobs = store.missing(pieces, seeds)
    if not jobs:
        return True
    there = len(pieces) * len(seeds) - len(jobs)
    err.print(f"{len(jobs)} runs to do, {there} are there", markup=False, soft_wrap=True)
    with watching(err, title, len(jobs)) as watch, note(store.folder, means):
        return carry_out(store, jobs, means, watch)


def _write(folder: Path, name: str, markdown: str, csv: str) -> None:
    from ..files import write_whole

    write_whole(folder / f"{name}.md", markdown.encode())
    write_whole(folder / f"{name}.csv", csv.encode())
    err.print(f"written: {folder / name}.md and .csv", markup=False, soft_wrap=True)


def _end(finished: bool) -> None:
    if not finished:
        err.print("stopped by Ctrl-C; finished runs are kept, the same command goes on", markup=False, soft_wrap=True)
        raise typer.Exit(130)
