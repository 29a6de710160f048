"""``defedavg view``: show all runs in a browser while they train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from .options import Plugin, print_line, print_notes


def view(
    runs: Annotated[Path, Argument(metavar="[RUNS_DIR]", help="The folder that holds run folders.")] = Path("runs"),
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0: any free port.")] = 8765,
    host: Annotated[
        str, Option(help="Address to listen on; any other than 127.0.0.1 lets other machines read the runs.")
    ] = "127.0.0.1",
    _plugin: Plugin = None,
) -> None:
    """Show all runs in a browser, with live curves of those in progress, until Ctrl-C.

    The page lists every run below RUNS_DIR, filters them by algorithm and setting, draws the selected ones together,
    and links to the report of each. A deployment also shows its clients, updates per second, staleness, refused updates
    and a forecast of the time left. By default only this machine can open the page.

    Example: `defedavg view runs --port 0`
    """
    from ..report.dashboard.http_server import serve
    from ..report.dashboard.run_index import RunIndex

    index = RunIndex(runs)
    with serve(index, host, port) as server:
        print_notes([f"{name}: {note}" for name, notes in index.file_notes().items() for note in notes])
        print_line(f"open in a browser: {server.address}   (stop with Ctrl-C)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print_line("stopped")
