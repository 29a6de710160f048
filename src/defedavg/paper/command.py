"""``defedavg paper``: the paper's experiments, one command each."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from ..data_cli import DataDir
from ..errors import UserError, unknown
from ..terminal import Device, Json, Memory, Precision, Width, err, out, print_json
from .facts import DATASETS, SEEDS, SETTINGS, SIZES, Cell, cells

app = typer.Typer(help="Repeat the experiments of the DeFedAvg paper.", no_args_is_help=True)

Datasets = Annotated[
    list[str] | None, typer.Option("--dataset", help="fashionmnist or cifar10; both if not given. Repeatable.")
]
Settings = Annotated[list[str] | None, typer.Option("--setting", help="iid or non-iid; both if not given. Repeatable.")]
Sizes = Annotated[list[int] | None, typer.Option("--n", help="10, 20, 40 or 80; all if not given. Repeatable.")]


def chosen(datasets: Sequence[str] | None, settings: Sequence[str] | None, sizes: Sequence[int] | None) -> list[Cell]:
    """The cells of Table 1 that were asked for."""
    for what, given, known in (("dataset", datasets, DATASETS), ("setting", settings, SETTINGS), ("n", sizes, SIZES)):
        for value in given or ():
            if value not in known:
                raise unknown(what, str(value), [str(one) for one in known])
    return [
        cell
        for cell in cells()
        if cell.dataset in (datasets or DATASETS)
        and cell.setting in (settings or SETTINGS)
        and cell.updates_per_round in (sizes or SIZES)
    ]


@app.command("list")
def list_(as_json: Json = False) -> None:
    """List the cells of Table 1: the paper's rates, target and seconds."""
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
        }
        for cell in cells()
    ]
    if as_json:
        print_json(found)
        return
    rows = [[("–" if value is None else str(value)) for value in row.values()] for row in found]
    out.print(tables.make("Table 1 of the paper", list(found[0]), rows))


@app.command()
def table1(
    datasets: Datasets = None,
    settings: Settings = None,
    sizes: Sizes = None,
    seeds: Annotated[int, typer.Option(help="Seeds 0, 1, … of each cell.")] = len(SEEDS),
    max_time: Annotated[
        float | None, typer.Option(help="Simulated seconds after which a run is given up; 900 to 2,500 if not given.")
    ] = None,
    measure_seconds: Annotated[float, typer.Option(help="Simulated seconds between measurements.")] = 0.25,
    normalise: Annotated[str, typer.Option(help="Inputs: standard or unit.")] = "standard",
    sampling: Annotated[str, typer.Option(help="Mini-batches: replacement or shuffle.")] = "replacement",
    folder: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where results are kept.")] = Path(
        "results/paper/table1"
    ),
    device: Device = "auto",
    width: Width = None,
    memory: Memory = None,
    precision: Precision = "auto",
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Seconds to the target accuracy, at the paper's rates: first hit and sustained (five measurements in a row).

    Runs whose results are in the folder are not done again, so the table can be made in parts. Ctrl-C loses only the
    runs under way.
    """
    from ..live import watching
    from ..sweep import Means
    from .table1 import Choices, Table1, rows, to_csv, to_markdown

    if seeds < 1:
        raise UserError(f"--seeds is {seeds}; it must be at least 1")
    wanted, numbers = chosen(datasets, settings, sizes), range(seeds)
    means = Means.choose("batched", device, width, memory, precision)
    table = Table1(folder, Choices(measure_seconds, normalise, sampling, max_time), means)
    rates = {cell: cell.rates for cell in wanted}
    table.results(wanted, numbers, rates)  # what is there must fit before hours are spent
    runs = table.missing(wanted, numbers)
    finished = True
    if runs:
        err.print(f"{len(runs)} runs to do, {len(wanted) * seeds - len(runs)} are there", markup=False, soft_wrap=True)
        with watching(err, "table 1", len(runs)) as watch:
            finished = table.carry_out(runs, rates, watch)
        _note_provenance(folder, means)
    found = rows(table.results(wanted, numbers, rates))
    if as_json:
        print_json(found)
    elif found:
        sys.stdout.write(to_markdown(found))
    if found:
        from ..files import write_whole

        write_whole(folder / "table1.md", to_markdown(found).encode())
        write_whole(folder / "table1.csv", to_csv(found).encode())
        err.print(f"written: {folder / 'table1.md'} and .csv", markup=False, soft_wrap=True)
    if not finished:
        err.print("stopped by Ctrl-C; finished runs are kept, the same command goes on", markup=False, soft_wrap=True)
        raise typer.Exit(130)


def _note_provenance(folder: Path, means: Any) -> None:
    """One line for every time that runs were done: when, with what, by which command."""
    import torch

    from .. import __version__
    from ..files import writing

    line = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["defedavg", *sys.argv[1:]],
        "version": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if means.device == "cuda" else platform.machine(),
        "precision": means.precision,
    }
    path = folder / "provenance.jsonl"
    with writing(path), path.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(line) + "\n")
