"""``defedavg report`` and ``defedavg view``: runs as a page, and all of them as they go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UserError
from .options import Json, err, out, print_json

PAGE = "report.html"


def register(app: typer.Typer) -> None:
    """Add the commands to a command line."""
    app.command()(report)
    app.command()(view)


def close_with_page(paths: Sequence[Path], folder: Path, as_json: bool, title: str | None = None) -> None:
    """Write the page of runs into a folder and say in one line where it is."""
    from ..report.page import write

    _close(lambda to: write(paths, to, title), folder / PAGE, as_json)


def close_with_records(
    groups: Mapping[str, Iterable[Mapping[str, Any]]],
    to: Path,
    as_json: bool,
    title: str,
    provenance: Mapping[str, str] | None = None,
) -> None:
    """The same for results that are no run folders; see ``write_records``."""
    from ..report.page import write_records

    _close(lambda page: write_records(groups, page, title, provenance), to, as_json)


def _close(make: Callable[[Path], object], to: Path, as_json: bool) -> None:
    """What prevents a page is said, and no more: the runs are not lost by it."""
    try:
        make(to)
        line = f"open in a browser: {to}"
    except UserError as error:
        line = f"no page: {error}"
    (err if as_json else out).print(line, markup=False, soft_wrap=True)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folders, or folders that hold some.")],
    to: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.html", help="Where the page is written.")] = Path(
        PAGE
    ),
    title: Annotated[str | None, typer.Option(help="A heading; the names of the studies if not given.")] = None,
    as_json: Json = False,
) -> None:
    """Write a page of runs: one file with all its charts and data, which works offline and can be sent to others.

    Curves over time, rounds, updates and bytes, times to the target, staleness, participation, clients over time, the
    split of the data, settings that differ, and where everything came from.

    Examples: defedavg report runs/first; defedavg report runs/a runs/b -o both.html
    """
    from ..report.page import write

    if to.is_dir():
        raise UserError(f"{to} is a folder; name a file, such as {to / PAGE}")
    began = time.perf_counter()
    with err.status("reading runs …") if err.is_terminal else nullcontext():
        size = write(runs, to, title)
    spent = time.perf_counter() - began
    if as_json:
        print_json({"page": str(to), "bytes": size, "seconds": spent})
    else:
        out.print(f"open in a browser: {to} ({size / 1e6:.1f} MB, made in {spent:.1f} s)", markup=False)


def view(
    runs: Annotated[Path, typer.Argument(metavar="[RUNS_DIR]", help="The folder that holds runs.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8765,
    host: Annotated[
        str, typer.Option(help="The address to listen on. Anything but 127.0.0.1 lets others read the runs.")
    ] = "127.0.0.1",
) -> None:
    """Watch all runs in a browser, with live curves of those in progress; Ctrl-C ends it.

    The page is served to this machine only. It lists every run below RUNS_DIR, finds them by algorithm and setting,
    draws those that are ticked together, and links to the report of each.
    """
    from ..report.dashboard.http_server import serve
    from ..report.dashboard.run_index import RunIndex

    with serve(RunIndex(runs), host, port) as server:
        out.print(f"open in a browser: {server.address}   (Ctrl-C ends it)", markup=False, soft_wrap=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            out.print("stopped", markup=False)
