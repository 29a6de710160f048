"""``defedavg paper readings``, ``infer``, ``scatter`` and others: readings of the paper, and how well they fit it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UserError, counted
from ..paper.published import SIZES, cells
from ..paper.readings import FIRST, READINGS, Readings
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
    print_line,
    print_note,
    require_file,
)
from .paper_command import (
    OUT,
    Algorithms,
    Datasets,
    Folder,
    ReadingsOption,
    Seeds,
    Settings,
    Show,
    Sizes,
    app,
    checked_seeds,
    save_figure,
    stopped,
)
from .plain_lines import LineTimer

if TYPE_CHECKING:
    from ..paper.implied_rounds import Progress
    from ..paper.infer import Candidate
    from ..paper.run_request import PaperRequest

__all__ = ["app"]

PAGE = Path("docs/reproduction.md")
_MISSING = "runs are missing; leave out --show to compute them"


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
    """Draw our seconds against the paper's, and print how well they agree.

    The first results and the present ones, as far as they are computed, are side by side.
    """
    from ..paper.comparison import compared_tables, to_markdown
    from ..paper.scatter import scatter as draw_scatter

    tables = compared_tables(folder)
    if not tables:
        print_note(f"there are no results in {folder}; `defedavg paper table1` computes them")
        return
    print_text(to_markdown(tables))
    save_figure(draw_scatter(tables), folder, "scatter", as_json=False)


@app.command("page")
def page(
    page: Annotated[Path, typer.Argument(metavar="FILE", help="A page in Markdown.")] = PAGE, folder: Folder = OUT
) -> None:
    """Write the marked tables of a page again, from the stored results: run it when results have been added.

    A marked table is between the lines `<!-- table: NAME -->` and `<!-- end of the table -->`; the names are table1,
    unexplained, ranking, agreement, search, scalings, further-readings, tuned-rates, tuned-ranking, first-ranking, and
    rounds and time-models, which are read from the files rounds.md and time-models.md of the folder. Write these files
    first, as in the example.

    Example: `defedavg paper timing > results/paper/time-models.md; defedavg paper page docs/reproduction.md`
    """
    from ..fileio import read_text, write_whole
    from ..paper.page_tables import page_tables
    from ..report.marked_tables import marked_names, with_tables

    if not page.exists():
        raise UserError(f"there is no page {page}; name one, as in `defedavg paper page FILE`")
    require_file(page, PAGE.name)
    old = read_text(page)
    names = marked_names(old)
    if not names:
        raise UserError(f"{page} has no marked table; `defedavg paper page --help` says how to mark one")
    made = page_tables(folder)
    for name in names:
        if name not in made:
            print_note(f"{name} keeps its content: its results are not stored in {folder}")
    changed = [name for name in names if name in made and with_tables(old, {name: made[name]}) != old]
    if changed:
        write_whole(page, with_tables(old, made).encode())
    print_line(f"{page}: {', '.join(changed) or 'no table'} changed")


@app.command("rounds")
def rounds(
    datasets: Datasets = None,
    settings: Settings = None,
    sizes: Sizes = None,
    algorithms: Algorithms = None,
    seeds: Seeds = 3,
    reading: ReadingsOption = None,
    as_json: Json = False,
) -> None:
    """Show how many rounds the seconds of Table 1 imply, from planned round times. Needs no data and trains nothing.

    All cells take about a minute.

    Cells that share data, algorithm and rates need about the same number of rounds. Where they do not, the time model
    is another one, or Table 2 states other rates than those that were used.
    """
    from ..paper.implied_rounds import rows, to_markdown
    from ..paper.run_request import select_cells

    readings = Readings.parse(reading or ())
    wanted = select_cells(datasets, settings, sizes or SIZES, algorithms)
    chosen = checked_seeds(seeds)
    with _planning() as progress:
        table = rows(wanted, readings, chosen, progress)
    if as_json:
        print_json(table)
    else:
        print_text(to_markdown(table))


@app.command("timing")
def timing(folder: Folder = OUT, seeds: Seeds = 3, as_json: Json = False) -> None:
    """Score other readings of the time model by the stored times of Table 1 and planned rounds. Trains nothing.

    A time to the target is multiplied by the ratio of the planned times of a round under both readings, as if a run
    needed as many rounds under each. FAVANO, whose rounds have a fixed length, is left out. All cells take about two
    minutes.
    """
    from ..paper.comparison import present_rows
    from ..paper.time_models import scores, to_markdown

    chosen = checked_seeds(seeds)
    with _planning() as progress:
        found = scores(present_rows(folder), chosen, progress)
    if as_json:
        print_json(found)
    if not found:
        print_note(f"there are no results in {folder}; `defedavg paper table1` computes them")
    elif not as_json:
        print_text(to_markdown(found))


@contextmanager
def _planning() -> Iterator[Progress]:
    """Show how many cells are planned: beside a spinner on a terminal, in a line every ten seconds elsewhere."""
    if err.is_terminal:
        with err.status("planning") as status:
            yield lambda done, number: status.update(f"planning: {done} of {counted(number, 'cell')}")
        return
    timer = LineTimer()

    def print_sometimes(done: int, number: int) -> None:
        if timer.due():
            print_note(f"planning: {done} of {counted(number, 'cell')}")

    yield print_sometimes


@app.command("infer")
def infer(
    stage: Annotated[
        int | None, typer.Option(min=1, help="Compute the runs of this stage alone, to compute stages side by side.")
    ] = None,
    reading: ReadingsOption = None,
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
    held-out cells are those of `paper table1`, as far as it has been computed with the best readings. A run whose
    result is stored is not computed again; Ctrl-C saves the runs in progress when their batch ends.

    With --stage, the readings of earlier stages are those of --reading, or the defaults, which are what the search
    found; those of later stages are as the search starts with them.
    """
    from ..experiments.compute import ComputeConfig
    from ..paper.infer import STAGES, Search
    from ..paper.run_request import PaperRequest
    from .progress_table import watching

    compute = ComputeConfig.choose(executor, device, max_batch_jobs, memory, precision, ray_address)
    request = PaperRequest(
        folder, tuple(cells()), range(3), compute=compute, show_only=show, notify=print_note,
        watching=partial(watching, err),
    )  # fmt: skip
    if stage is not None:
        if stage > len(STAGES):
            raise UserError(f"--stage is {stage}; the search has {len(STAGES)} stages")
        search = Search(request)
        complete = search.compute_stage(stage - 1, Readings.parse(reading or (), search.expected(stage - 1)))
        if show:
            print_note(f"stage {stage} is complete" if complete else _MISSING)
        elif not complete:
            stopped()
        return
    if reading:
        raise UserError("--reading is for --stage: the search itself chooses the readings; give both or neither")
    ranked, finished = Search(request).run()
    if ranked:
        _show_inferred(request, ranked, as_json)
    if not finished:
        if show:
            print_note(_MISSING)
            return
        stopped()


def _show_inferred(request: PaperRequest, ranked: Sequence[Sequence[Candidate]], as_json: bool) -> None:
    """Print and write the outcome of a search, and the errors of the held-out cells under the best readings."""
    from ..fileio import write_whole
    from ..paper.infer import STAGES
    from ..paper.infer_report import agreement, agreement_to_markdown, report, to_markdown
    from ..paper.paper_tables import rows

    found = report(STAGES, ranked)
    inferred = Readings(**found["readings"])
    runs, store, _ = replace(request, choices=replace(request.choices, readings=inferred)).table_runs()
    table = agreement(rows(store.matching(runs, request.seeds)))
    text = f"{to_markdown(found)}\n{agreement_to_markdown(table)}"
    if as_json:
        print_json({**found, "agreement": table})
    else:
        print_text(text)
    path = request.folder / "infer" / "infer"
    write_whole(path.with_suffix(".md"), text.encode())
    write_whole(path.with_suffix(".json"), (json.dumps(found, indent=1) + "\n").encode())
    print_note(f"written: {path}.md and .json")
    if differences := inferred.differences(Readings()):
        words = " ".join(f"--reading {shlex.quote(f'{name}={value}')}" for name, value in differences.items())
        print_note(f"the inferred readings differ from the defaults; to use them: {words}")
