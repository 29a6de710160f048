"""``defedavg runs``: list, compare, export and remove stored runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.progress import track
from rich.table import Table

from ..errors import UserError
from ..fileio import writing
from ..report import tables
from ..runstore.reader import RunEntry, RunFolder, locate_run
from ..runstore.writer import remove_run
from .options import Json, Out, err, out, print_json, print_line, print_note
from .run_filters import RunGroup, group_runs, select_groups

app = typer.Typer(help="List, filter, compare, export and remove runs.", no_args_is_help=True)

Names = Annotated[list[str], typer.Argument(metavar="NAME…", help="Runs, named by their folders below --out.")]
Algorithm = Annotated[str | None, typer.Option(help="Only runs of this algorithm.")]
Where = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="Only runs with this value of a setting, as local_steps=50. Repeatable."),
]
Status = Annotated[
    str | None,
    typer.Option(help="Only finished, unfinished or damaged runs, or how they ended: target, diverged, max_rounds, …"),
]
ResultRow = Mapping[str, Any]


def _values(entries: Sequence[RunEntry], name: str) -> list[float]:
    return [value for entry in entries if (value := entry.numbers[name]) is not None]


def _mean(entries: Sequence[RunEntry], name: str) -> float | None:
    values = _values(entries, name)
    return fmean(values) if values else None


def _row(group: RunGroup) -> dict[str, Any]:
    run, entries = group.run, group.entries
    algorithm, swept = (entries[0].algorithm, entries[0].swept) if entries else ("", {})
    task = [run.setting(f"task.{key}", algorithm, swept) for key in ("data", "model", "split")]
    seeds = run.config.get("seeds", [])
    return {
        "name": run.name,
        "label": group.label,
        "algorithm": algorithm or None,
        "task": "/".join(map(str, task)) if all(task) else None,
        "seeds": len(entries) or (len(seeds) if isinstance(seeds, list) else 1),
        "status": run.status,
        "ended_by": sorted({entry.status for entry in entries}),
        "best_accuracy": max(_values(entries, "best_accuracy"), default=None),
        "time_to_target": _mean(entries, "first_hit_seconds"),
        "hits": len(_values(entries, "first_hit_seconds")),
        "rounds": _mean(entries, "rounds"),
        "changed": datetime.fromtimestamp(run.changed).astimezone().isoformat(timespec="seconds"),
        "problem": run.problem,
    }


def _time_to_target(row: ResultRow) -> str:
    """Format the mean time to the target; add how many seeds reached it, if not all did."""
    some = f" ({row['hits']} of {row['seeds']})" if 0 < row["hits"] < row["seeds"] else ""
    return tables.seconds(row["time_to_target"]) + some


def _print_damage(problems: Mapping[str, str | None]) -> None:
    for name, problem in problems.items():
        if problem:
            print_note(f"{name} is damaged: {problem}")


@app.command("list")
def list_(
    folder: Out = Path("runs"),
    algorithm: Algorithm = None,
    where: Where = None,
    status: Status = None,
    as_json: Json = False,
) -> None:
    """List runs, one line per run folder and setting; damaged runs are listed with their problem.

    Example: `defedavg runs list --algorithm fedavg --where local_steps=50`
    """
    rows = [_row(group) for group in select_groups(folder, algorithm, where, status)]
    if as_json:
        print_json(rows)
        return
    cells = [
        (
            row["name"],
            row["label"],
            row["task"] or "–",
            str(row["seeds"]),
            ", ".join([row["status"], *(word for word in row["ended_by"] if word in ("diverged", "stalled"))]),
            tables.share(row["best_accuracy"]),
            _time_to_target(row),
            row["changed"][:16].replace("T", " "),
        )
        for row in rows
    ]
    columns = ("name", "algorithm", "task", "seeds", "status", "best", "time to target", "when")
    out.print(tables.make(f"{len(rows)} in {folder}", columns, cells))
    _print_damage({row["name"]: row["problem"] for row in rows})


@app.command()
def compare(names: Names, folder: Out = Path("runs"), as_json: Json = False) -> None:
    """Compare runs side by side: the settings that differ, and the results.

    Example: `defedavg runs compare first second`
    """
    if len(set(names)) < 2:
        raise UserError("give at least two different runs to compare")
    runs = [locate_run(folder, name) for name in dict.fromkeys(names)]
    settings, results = _differing_settings(runs), _results_by_label(runs)
    if as_json:
        print_json({"runs": [run.name for run in runs], "settings": settings, "results": results})
        return
    columns = ("", *(run.name for run in runs))
    cells = [(key, *("–" if value is None else str(value) for value in values)) for key, values in settings.items()]
    out.print(tables.make("settings that differ" if cells else "all settings are equal", columns, cells))
    out.print()
    out.print(_results_table(columns, results))
    _print_damage({run.name: run.problem for run in runs})


def _differing_settings(runs: Sequence[RunFolder]) -> dict[str, list[Any]]:
    """Return the settings that are not equal in all runs, each with one value per run."""
    settings = [run.flat_config for run in runs]
    keys = dict.fromkeys(key for one in settings for key in one if key != "name")
    values = {key: [one.get(key) for one in settings] for key in keys}
    return {key: several for key, several in values.items() if any(value != several[0] for value in several)}


def _results_by_label(runs: Sequence[RunFolder]) -> dict[str, list[ResultRow | None]]:
    """Return the results of every setting, one per run; None where a run does not have the setting."""
    rows = [{group.label: _row(group) for group in group_runs([run])} for run in runs]
    labels = dict.fromkeys(label for one in rows for label in one)
    return {label: [one.get(label) for one in rows] for label in labels}


RESULT_LINES = ("best accuracy", "time to target", "rounds", "ended by")


def _result_cells(row: ResultRow | None) -> tuple[str, ...]:
    """Return the cells of one run, in the order of ``RESULT_LINES``."""
    if row is None:
        return ("–",) * len(RESULT_LINES)
    rounds = "–" if row["rounds"] is None else f"{row['rounds']:.0f}"
    return tables.share(row["best_accuracy"]), _time_to_target(row), rounds, ", ".join(row["ended_by"]) or row["status"]


def _results_table(columns: Sequence[str], results: Mapping[str, Sequence[ResultRow | None]]) -> Table:
    lines: list[tuple[str, ...]] = []
    for label, rows in results.items():
        lines.append((label, *("" for _ in rows)))
        by_line = zip(*map(_result_cells, rows), strict=True)
        lines += [(f"  {name}", *cells) for name, cells in zip(RESULT_LINES, by_line, strict=True)]
    return tables.make("results", columns, lines)


@app.command()
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE.parquet", help="The file to write; replaced if it exists.")],
    folder: Out = Path("runs"),
    algorithm: Algorithm = None,
    where: Where = None,
    status: Status = None,
    as_json: Json = False,
) -> None:
    """Write the metrics of all runs, or of those selected, to one Parquet file for pandas, Polars or DuckDB.

    Example: `defedavg runs export all.parquet --status finished`
    """
    from ..runstore.export import export as write

    groups = select_groups(folder, algorithm, where, status)
    runs = list({group.run.name: group.run for group in groups}.values())
    labels = {(group.run.name, group.label) for group in groups}
    if not runs:
        raise UserError(f"there is no such run in {folder}; `defedavg runs list` lists all runs")
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    rows = unread = 0
    quiet = as_json or not err.is_terminal
    for run, count, bad in track(
        write(runs, file, labels), "exporting", total=len(runs), console=err, transient=True, disable=quiet
    ):
        rows, unread = rows + count, unread + bad
        if bad:
            print_note(f"{run.name}: {bad} line(s) of metrics.jsonl are not valid and were skipped")
    if as_json:
        print_json({"file": str(file), "runs": len(runs), "rows": rows, "unread_lines": unread})
    else:
        print_line(f"{rows} evaluations of {len(runs)} run(s): {file}")


def asking() -> bool:
    """Return whether a user can answer a question: standard input is a terminal."""
    return sys.stdin.isatty()


@app.command("remove")
def remove_(
    names: Names,
    folder: Out = Path("runs"),
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: Json = False,
) -> None:
    """Remove runs, after confirmation; other files in their folders are kept.

    Example: `defedavg runs remove first second --yes`
    """
    runs = [
        locate_run(folder, name) for name in dict.fromkeys(names)
    ]  # an unknown name raises before anything is removed
    if not yes:
        _confirm(runs)
    removed = []
    for run in runs:
        kept = remove_run(run.path)
        removed.append({"name": run.name, "kept": kept})
        if not as_json:
            if kept:
                print_note(f"{run.path} is kept, since it also holds {', '.join(kept[:5])}")
            print_line(f"removed: {run.path}")
    if as_json:
        print_json(removed)


def _confirm(runs: Sequence[RunFolder]) -> None:
    """Ask whether to remove the runs; exit with code 1 unless the answer is yes."""
    if not asking():
        raise UserError("standard input is not a terminal, so confirmation is not possible; use --yes")
    if not typer.confirm(f"remove {', '.join(str(run.path) for run in runs)}?", err=True):
        print_note("nothing was removed")
        raise typer.Exit(1)
