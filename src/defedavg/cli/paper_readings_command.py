"""``defedavg paper readings``, ``infer`` and ``scatter``: readings of the paper, and how well they fit it."""

from __future__ import annotations

import json
import shlex
from functools import partial

from ..paper.published import cells
from ..paper.readings import FIRST, READINGS, Readings
from ..paper.run_grid import Choices
from .consoles import print_text
from .data_command import DataDir
from .options import (
    Device,
    Executor,
    Json,
    MaxBatchJobs,
    Memory,
    Precision,
    RayAddress,
    err,
    print_json,
    print_note,
)
from .paper_command import OUT, Folder, Show, app, save_figure, stopped

__all__ = ["app"]


@app.command("readings")
def readings_(as_json: Json = False) -> None:
    """List the readings of the paper: what it says, the values that are tried, and the default."""
    default, first = Readings(), FIRST
    listed = [
        {
            "reading": name,
            "default": getattr(default, name),
            "first": getattr(first, name),
            "values": list(reading.values),
            "paper": reading.text,
        }
        for name, reading in READINGS.items()
    ]
    if as_json:
        print_json(listed)
        return
    for row in listed:
        print_text(
            f"{row['reading']} = {' | '.join(row['values'])}   (default: {row['default']})\n    {row['paper']}\n"
        )


@app.command("scatter")
def scatter(folder: Folder = OUT) -> None:
    """Draw our seconds against the paper's: the first results, and the present ones as far as they are computed."""
    from ..paper.paper_tables import rows
    from ..paper.run_request import PaperRequest
    from ..paper.scatter import scatter as draw_scatter

    first = PaperRequest(
        folder / "first-reading", tuple(cells()), range(3), "stated", Choices(readings=FIRST), show_only=True
    )
    present = PaperRequest(folder, tuple(cells()), range(3), show_only=True)
    panels = {}
    for title, request in (("first readings", first), ("present readings", present)):
        runs, store, _ = request.table_runs()
        if table := rows(store.results(runs, request.seeds)):
            panels[f"{title}, {len(table)} of {len(runs)} cells"] = table
    if not panels:
        print_note("no results are stored yet")
        return
    save_figure(draw_scatter(panels), folder, "scatter", as_json=False)


@app.command("infer")
def infer(
    folder: Folder = OUT,
    executor: Executor = "batched",
    ray_address: RayAddress = None,
    device: Device = "auto",
    max_batch_jobs: MaxBatchJobs = None,
    memory: Memory = None,
    precision: Precision = "auto",
    _data_dir: DataDir = None,
    show: Show = False,
    as_json: Json = False,
) -> None:
    """Search the readings of the paper that reproduce its seconds, and test them on cells that the search leaves out.

    Prints the best readings, how much worse the others are, and the cells that stay unexplained. The errors of
    held-out cells are those of `paper table1`, as far as it has been computed. A run whose result is stored is not
    computed again; Ctrl-C loses only the runs that have not finished.
    """
    from ..experiments.compute import ComputeConfig
    from ..fileio import write_whole
    from ..paper.infer import STAGES, Search
    from ..paper.infer_report import agreement, agreement_to_markdown, report, to_markdown
    from ..paper.paper_tables import rows
    from ..paper.run_request import PaperRequest
    from .progress_table import watching

    compute = ComputeConfig.choose(executor, device, max_batch_jobs, memory, precision, ray_address)
    request = PaperRequest(
        folder, tuple(cells()), range(3), compute=compute, show_only=show, notify=print_note,
        watching=partial(watching, err),
    )  # fmt: skip
    ranked, finished = Search(request).run()
    if ranked:
        found = report(STAGES, ranked)
        runs, store, _ = request.table_runs()
        table = agreement(rows(store.results(runs, request.seeds)))
        text = f"{to_markdown(found)}\n{agreement_to_markdown(table)}"
        if as_json:
            print_json({**found, "agreement": table})
        else:
            print_text(text)
        path = folder / "infer" / "infer"
        write_whole(path.with_suffix(".md"), text.encode())
        write_whole(path.with_suffix(".json"), (json.dumps(found, indent=1) + "\n").encode())
        print_note(f"written: {path}.md and .json")
        inferred = Readings(**found["readings"])
        if differences := inferred.differences(Readings()):
            words = " ".join(f"--reading {shlex.quote(f'{name}={value}')}" for name, value in differences.items())
            print_note(f"the inferred readings differ from the defaults; to use them: {words}")
    if not finished:
        if show:
            print_note("runs are missing; leave out --show to compute them")
            return
        stopped()
