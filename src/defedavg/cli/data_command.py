"""``defedavg data``: which data sets there are, where they were found, and getting those that are not here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from .options import Json, err, print_json

if TYPE_CHECKING:
    from ..tasks.datasets.download import ProgressCallback

app = typer.Typer(help="List data sets, and fetch those that are not here.", no_args_is_help=True)


def _use(folder: Path | None) -> Path | None:
    if folder is not None:
        from ..tasks import set_data_dir

        set_data_dir(folder)
    return folder


DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        metavar="FOLDER",
        callback=_use,
        help="Where data sets lie; else the environment's DEFEDAVG_DATA, else ~/.cache/defedavg.",
    ),
]
"""An option that needs no line in the command that has it: naming a folder is all there is to do."""


@app.command("list")
def list_(
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """List the data sets with their sizes as published, and where they were found."""
    from ..tasks.datasets.catalog import dataset_rows

    rows = dataset_rows()
    if as_json:
        print_json(rows)
        return
    table = Table("name", "image", "train", "test", "where", box=None, pad_edge=False)
    for row in rows:
        where = row["folder"] or (f"not here: {row['get']}" if row["get"] else "")
        table.add_row(row["name"], "×".join(map(str, row["image"])), f"{row['train']:,}", f"{row['test']:,}", where)
    table.add_row("hf:NAME", "", "", "", "Hugging Face, or a folder hf:/path: pip install 'defedavg[hub]'")
    Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 300).print(table)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="fashionmnist or cifar10.")],
    data_dir: DataDir = None,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Another mirror: a folder with the published files.")
    ] = None,
) -> None:
    """Fetch a data set: checked against its published checksum; a download that broke off is resumed."""
    from ..tasks import data_dir as chosen
    from ..tasks.datasets.download import fetch as get

    try:
        with _watching(err) as watch:
            folder = get(name, chosen(), url=url, watch=watch)
    except KeyboardInterrupt:
        err.print("stopped by Ctrl-C; run it again to go on from there", markup=False)
        raise typer.Exit(130) from None
    sys.stdout.write(f"{name}: {folder}\n")


@contextmanager
def _watching(console: Console) -> Iterator[ProgressCallback]:
    """A function to be told of what was received: a bar for every file on a terminal, nothing elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bars: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def watch(name: str, received: int, size: int) -> None:
            if name not in bars:
                bars[name] = progress.add_task(name, total=size)
            progress.update(bars[name], completed=received)

        yield watch
