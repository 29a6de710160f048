"""``defedavg report``: write runs as one HTML page; and the page with which other commands end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from ..errors import UserError
from ..runstore.reader import RunFolder
from .options import Json, Plugin, print_json, print_line, print_note, print_notes, print_written, require_file, working

PAGE = "report.html"
ENDINGS = (".html", ".htm", "")
"""Of the name of a page; a pipe or a device, such as /dev/stdout, has none."""
OTHER_FORMATS = (".png", ".pdf", ".svg", ".jpg", ".jpeg", ".md", ".txt", ".csv", ".json", ".tex")
"""Endings that a page does not keep; any other one, such as a date, is a part of its name."""


def close_with_page(runs: Sequence[Path | RunFolder], folder: Path, as_json: bool, title: str | None = None) -> None:
    """Write the page of some runs into a folder, and print where it is."""
    from ..report.page import write

    _close(lambda page: write(runs, page, title), folder / PAGE, as_json)


def close_with_records(
    groups: Mapping[str, Iterable[Mapping[str, Any]]],
    to: Path,
    as_json: bool,
    title: str,
    provenance: Mapping[str, str] | None = None,
) -> None:
    """Write the page of results that are not in run folders, and print where it is; see ``write_records``."""
    from ..report.page import write_records

    _close(lambda page: write_records(groups, page, title, provenance), to, as_json)


def _close(write_page: Callable[[Path], object], to: Path, as_json: bool) -> None:
    """Write a page; an error is only printed, since the results themselves are already saved."""
    try:
        with working("writing the report …"):
            write_page(to)
        line = f"open in a browser: {to}"
    except UserError as error:
        line = f"no page: {error}"
    (print_note if as_json else print_line)(line)


def draw_figures(folders: Iterable[RunFolder], formats: Sequence[str] | None = None) -> None:
    """Draw the static figures of runs into their folders, in all formats unless some are given; print where they are.

    Matplotlib is loaded only here: it and the figures take longer than the rest of a small study.
    """
    for folder in folders:
        with working("drawing figures …"):
            from ..report.run_curves import draw_run

            written = draw_run(folder) if formats is None else draw_run(folder, formats)
        print_note(f"figures: {written[0].parent}" if written else f"no figures: {folder.path} has no evaluation")


def report(
    runs: Annotated[list[Path], Argument(metavar="RUN…", help="Run folders, or folders that contain some.")],
    to: Annotated[Path, Option("--output", "-o", metavar="FILE.html", help="The page to write.")] = Path(PAGE),
    title: Annotated[str | None, Option(help="Heading of the page.", show_default="the names of the studies")] = None,
    png: Annotated[bool, Option("--png", help="Also draw figures into the folder of every run, as PNG.")] = False,
    pdf: Annotated[bool, Option("--pdf", help="Also draw figures into the folder of every run, as PDF.")] = False,
    _plugin: Plugin = None,
    as_json: Json = False,
) -> None:
    """Write runs as one HTML page with all charts and data; it works offline and can be sent to others.

    The page shows curves over time, rounds, updates and bytes, times to the target, staleness, participation, client
    activity, the split of the data, the settings that differ, and provenance. `--png` and `--pdf` draw accuracy and
    loss as figures for a paper, into the folder plots of every run.

    Example: `defedavg report runs/first runs/second -o both.html`
    """
    from ..report.page import gather, write

    require_file(to, PAGE)
    ending = to.suffix.lower()
    if ending not in ENDINGS:
        page = to.with_suffix(".html") if ending in OTHER_FORMATS else to.with_name(f"{to.name}.html")
        raise UserError(
            f"-o {to} does not name a page, which is HTML; write -o {page}, or leave -o out and add --png or --pdf to "
            "draw figures into the folder of every run"
        )
    start = time.perf_counter()
    with working("reading runs …"):
        folders = gather(runs)
        size = write(folders, to, title)
    for folder in folders:
        print_notes([f"{folder.path}: {note}" for note in folder.notes])
    spent = time.perf_counter() - start
    if as_json:
        print_json({"page": str(to), "bytes": size, "seconds": spent})
    else:
        print_written(f"open in a browser: {to} ({size / 1e6:.1f} MB, written in {spent:.1f} s)", to)
    formats = [ending for ending, wanted in ((".png", png), (".pdf", pdf)) if wanted]
    if formats:
        draw_figures(folders, formats)
