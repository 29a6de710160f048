"""``defedavg demo``: six algorithms on real digits, in a quarter of a minute."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Option

from ..report import tables
from .importing import importing
from .options import Json, Out, err, exit_if_stopped, exit_unchanged, out, print_json, print_line, working
from .report_command import close_with_page


def demo(
    folder: Out = Path("runs"),
    plots: Annotated[bool, Option("--plots", help="Also draw the curves as FOLDER/demo/accuracy.png.")] = False,
    as_json: Json = False,
) -> None:
    """Compare six algorithms on 5,000 real digits: a table and a page with curves, in a quarter of a minute.

    100 clients train with the paper's time model, on an IID and on a non-IID split. The results go to FOLDER/demo.

    Example: `defedavg demo`
    """
    with working("preparing …"), importing():  # shown before PyTorch is loaded
        from ..experiments.demo import run_demo
        from .progress_table import watching

    try:
        finished, entries, picture = run_demo(folder / "demo", partial(watching, err), plots)
    except KeyboardInterrupt:
        exit_unchanged()
    if as_json:
        print_json(entries)
    else:
        for title, runs in entries.items():
            out.print(tables.result_table(title, runs))
            out.print()
        if picture is not None:
            print_line(f"curves: {picture}")
    close_with_page([folder / "demo"], folder / "demo", as_json, "Six algorithms on 5,000 digits")
    exit_if_stopped(finished)
