"""``defedavg traces``: traces of clients from files of other projects."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from ..errors import UserError, unknown
from ..fileio import write_whole
from .options import print_note

app = typer.Typer(help="Make traces of clients from files of other projects.", no_args_is_help=True)


@app.callback()
def _traces() -> None:
    pass


@app.command()
def convert(
    file: Annotated[Path, Argument(metavar="FILE", help="Availability: JSON, or CSV for flhetbench.")],
    kind: Annotated[str, Option("--format", metavar="NAME", help="fedscale or flhetbench.")],
    output: Annotated[Path, Option("--output", "-o", metavar="TRACE.csv", help="The trace to write.")],
    latency: Annotated[
        Path | None,
        Option(metavar="FILE.csv", help="Latencies in columns phone_model,resnet.", show_default="drawn as phones"),
    ] = None,
    links: Annotated[
        Path | None,
        Option(metavar="FILE.csv", help="Links in columns up_mbps,down_mbps.", show_default="drawn as phones"),
    ] = None,
    step_seconds: Annotated[float, Option(help="Median duration of a local step.")] = 0.172,
    seed: Annotated[int, Option(min=0, help="Seed of the draws.")] = 0,
) -> None:
    """Convert availability of other projects into a trace for `clients.trace`.

    fedscale: the client behaviour trace with active, inactive and finish_time, as JSON; a pickle is never read.
    flhetbench: ready_time and trace_end, lists of intervals, or FLASH's messages, as JSON; or CSV with the columns
    phone,day_offset,seconds,ready_from,ready_to. Latencies and links are assigned to clients by a draw.

    Example: `defedavg traces convert timers.json --format flhetbench -o trace.csv`
    """
    from ..planning.trace_conversion import READERS
    from ..planning.trace_conversion import convert as converted

    if kind not in READERS:
        raise unknown("format", kind, READERS)
    if not 1e-9 <= step_seconds <= 1e6:
        raise UserError(f"--step-seconds is {step_seconds}; give a number from 1e-9 to 1e6")
    found = converted(file, kind, latency=latency, links=links, step_seconds=step_seconds, seed=seed)
    write_whole(output, found.text.encode())
    for note in found.notes:
        print_note(note)
    print_note(f"{output}: {found.clients} clients, {found.intervals} intervals")
