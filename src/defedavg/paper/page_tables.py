"""The tables of the page that reports the reproduction, from the stored results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from ..errors import UserError
from ..fileio import read_text
from .comparison import SEEDS, compared_tables
from .comparison import to_markdown as agreement_to_markdown
from .infer import Search
from .infer_report import unexplained
from .paper_tables import markdown, ranking, ranking_to_markdown, rates_rows, rates_to_markdown, rows, to_markdown
from .published import BOUNDS, Cell, cells
from .readings import FIRST, READINGS, Readings
from .result_files import Result, ResultFiles
from .run_grid import Choices, PaperRun
from .run_request import PaperRequest, select_cells

TUNED_SIZES: Final = (10, 40)
BEFORE: Final = replace(Readings(), favano_alpha="steps", favano_send="merge", fedbuff_clients="any")
"""The present readings without those of FAVANO and FedBuff that were found last."""

_PLANNED: Final = {"rounds": "rounds.md", "time-models": "time-models.md"}
"""Tables that take minutes to plan, and the files into which their commands are redirected."""


def page_tables(folder: Path) -> dict[str, str]:
    """Return the tables in Markdown by name; those whose results are not stored are left out."""
    made = dict(_of_table1(folder)) | dict(_of_tuned_rates(folder))
    if tables := compared_tables(folder):
        made["agreement"] = agreement_to_markdown(tables)
    for name, file in _PLANNED.items():
        if (folder / file).exists():
            made[name] = read_text(folder / file)
    if (folder / "infer" / "infer.json").exists():
        made["search"] = _search_scores(folder / "infer" / "infer.json")
    if scaled := _scalings(folder):
        made["scalings"] = scaled
    if lines := [_before_and_now(*pair) for pair in before_and_now(folder)]:
        made["further-readings"] = markdown(
            "setting | data | algorithm | n | paper | without | ratio | with | ratio", lines
        )
    return made


def _of_table1(folder: Path) -> Iterator[tuple[str, str]]:
    runs, store, _ = PaperRequest(folder, tuple(cells()), SEEDS, show_only=True).table_runs()
    if results := store.results(runs, SEEDS):
        yield "table1", to_markdown(table := rows(results))
        yield "unexplained", to_markdown(unexplained(table))
        yield "ranking", ranking_to_markdown(ranking(results))
    first = Choices(readings=FIRST)
    request = PaperRequest(folder / "first-reading", _tuned_cells(), SEEDS, "tuned", first, show_only=True)
    if results := _tuned_results(request):
        yield "first-ranking", ranking_to_markdown(ranking(results))


def _of_tuned_rates(folder: Path) -> Iterator[tuple[str, str]]:
    request = PaperRequest(folder, _tuned_cells(), SEEDS, "tuned", show_only=True)
    if tuned := request.tuned_rates()[0]:
        yield "tuned-rates", rates_to_markdown(rates_rows(tuned))
    if results := _tuned_results(request):
        yield "tuned-ranking", ranking_to_markdown(ranking(results))


def _tuned_cells() -> tuple[Cell, ...]:
    return tuple(select_cells(None, None, TUNED_SIZES))


def _tuned_results(request: PaperRequest) -> list[Result]:
    """Return the stored results at tuned rates; unlike ``table_runs`` it copies none from the paper's rates."""
    runs = [PaperRun(cell, rates) for cell, rates in request.tuned_rates()[0].items()]
    return ResultFiles(request.folder / f"table1{request.suffix}", request.choices).results(runs, request.seeds)


def _search_scores(path: Path) -> str:
    """Return the scores of every value of every reading, from the stored outcome of the search."""
    try:
        lines = [
            f"| {row['reading']} | {row['value']} | {row['first_hit_seconds']:.3f} | {row['sustained_seconds']:.3f} "
            f"| {row['worse']:+.3f} |"
            for stage in json.loads(read_text(path))["stages"]
            for row in stage["alternatives"]
        ]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path} is not the outcome of a search; `defedavg paper infer --show` writes it") from None
    title = "reading | value | mean error, first hit | mean error, sustained | worse than the best by"
    return markdown(title, lines)


def _scalings(folder: Path) -> str:
    """Return the first hits of the search on FashionMNIST, n = 10, by the scaling of inputs; all else is in the row."""
    groups = [
        ("iid", "fedavg", "", {}),
        ("iid", "defedavg-iid", "upload = background", {}),
        ("iid", "defedavg-iid", "upload = blocking", {"upload": "blocking"}),
        ("iid", "defedavg-iid", "background, uniform speeds", {"slowness": "inverse-uniform(1, 5)"}),
        *(
            ("non-iid", name, f"split = {split}", {"split": split})
            for name in ("fedavg", "defedavg-niid")
            for split in ("classes", "random-classes", "sampled-classes")
        ),
    ]
    search = Search(PaperRequest(folder=folder, show_only=True))
    base = replace(Readings(), upload="background", slowness="uniform(1, 5)", sampling="replacement")
    scalings, lines = READINGS["normalise"].values, []
    for setting, algorithm, title, changes in groups:
        cell = Cell("fashionmnist", setting, algorithm, 10)
        stores = [search.store(replace(base, normalise=scaling, **changes), cell) for scaling in scalings]
        found = [result for store in stores for result in store.results([PaperRun(cell, cell.rates)], [0])]
        if len(found) < len(scalings):
            return ""
        seconds = " | ".join(_seconds(result["first_hit_seconds"]) for result in found)
        lines.append(f"| {setting} | {algorithm} | {title} | {seconds} | {_published(cell)} |")
    return markdown(f"setting | algorithm | readings | {' | '.join(scalings)} | paper", lines)


def before_and_now(folder: Path) -> list[tuple[Cell, float | None, float | None]]:
    """Return the first hits of FAVANO and FedBuff on seed 0, without and with their last readings."""
    stores = [
        ResultFiles(folder / "before-further-readings", Choices(readings=BEFORE)),
        ResultFiles(folder / "table1", Choices()),
    ]
    pairs = []
    for cell in cells():
        if cell.algorithm in ("favano", "fedbuff"):
            found = [result for store in stores for result in store.results([PaperRun(cell, cell.rates)], [0])]
            if len(found) == len(stores):
                pairs.append((cell, found[0]["first_hit_seconds"], found[1]["first_hit_seconds"]))
    return pairs


def _before_and_now(cell: Cell, *times: float | None) -> str:
    shown = [f"{cell.setting} | {cell.dataset} | {cell.algorithm} | {cell.updates_per_round}"]
    shown.append(_published(cell))
    for seconds in times:
        shown.append(_seconds(seconds))
        shown.append("–" if seconds is None or cell.seconds is None else f"{seconds / cell.seconds:.2f}")
    return f"| {' | '.join(shown)} |"


def _seconds(found: float | None) -> str:
    return "not reached" if found is None else f"{found:.1f}"


def _published(cell: Cell) -> str:
    return f">{BOUNDS[cell.dataset]:.0f}" if cell.seconds is None else f"{cell.seconds:g}"
