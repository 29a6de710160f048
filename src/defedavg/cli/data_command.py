"""``defedavg data``: list the data sets, and download those that are missing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from typer import Argument, Option

from .consoles import SafeConsole
from .options import Json, err, print_json, print_line, print_note
from .stop_signals import stopped_by, stopped_code

app = typer.Typer(help="List the data sets, and download those that are missing.", no_args_is_help=True)


def _set_data_dir(folder: Path | None) -> Path | None:
    if folder is not None:
        from ..tasks import set_data_dir

        set_data_dir(folder)
    return folder


# Its callback sets the folder, so a command only declares the option.
DataDir = Annotated[
    Path | None,
    Option(
        "--data-dir",
        metavar="FOLDER",
        callback=_set_data_dir,
        help="The folder that holds data sets.",
        show_default="DEFEDAVG_DATA, else ~/.cache/defedavg",
    ),
]


@app.command("list")
def list_(_data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the data sets with their published sizes and their folders on this machine.

    Example: `defedavg data list`
    """
    from ..tasks.datasets.builtin_datasets import dataset_rows

    rows = dataset_rows()
    if as_json:
        print_json(rows)
        return
    table = Table("name", "input", "train", "test", "where", box=None, pad_edge=False)
    for row in rows:
        where = row["folder"] or (f"missing; run: {row['get']}" if row["get"] else "")
        table.add_row(row["name"], "×".join(map(str, row["image"])), f"{row['train']:,}", f"{row['test']:,}", where)
    table.add_row("hf:NAME", "", "", "", "Hugging Face, or a folder hf:/path; needs: pip install 'defedavg[hub]'")
    table.add_row("leaf:/folder", "", "", "", "JSON files of LEAF, in train and test")
    SafeConsole(width_of_files=300).print(table)


@app.command()
def fetch(
    name: Annotated[str, Argument(metavar="NAME", help="fashionmnist, cifar10, mnist-writers or shakespeare-roles.")],
    _data_dir: DataDir = None,
    url: Annotated[
        str | None,
        Option(
            metavar="URL", help="A mirror: a folder with the published files.", show_default="known mirrors, in turn"
        ),
    ] = None,
) -> None:
    """Download a data set, and verify its published checksum.

    The same command resumes a download that was interrupted.

    Example: `defedavg data fetch fashionmnist`
    """
    from ..tasks import data_dir
    from ..tasks.datasets.download import fetch as download

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bars: dict[str, TaskID] = {}
    try:
        with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:

            def watch(file: str, received: int, size: int) -> None:
                if file not in bars:
                    bars[file] = progress.add_task(file, total=size)
                progress.update(bars[file], completed=received)

            folder = download(name, data_dir(), url=url, watch=watch)
    except KeyboardInterrupt:
        print_note(f"{stopped_by()}; the same command resumes the download")
        raise typer.Exit(stopped_code()) from None
    print_line(f"{name}: {folder}")
