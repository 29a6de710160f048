"""``defedavg runs``: list, compare, tabulate, export and remove stored runs."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.progress import track
from rich.table import Table
from typer import Argument, Option

from ..algorithms import ALGORITHMS
from ..config.settings import setting_names
from ..config.value_checks import check_setting_value, value_of_text
from ..errors import UserError, counted, printable, unknown
from ..fileio import write_whole, writing
from ..report import tables
from ..report.seed_figures import accuracy_text, mean, over_seeds, over_seeds_caption, record_of, time_to_target
from ..runstore.metrics import common_metric
from ..runstore.reader import RunEntry, RunFolder, find_runs, locate_run
from ..runstore.writer import remove_runs
from .options import Json, Out, err, out, print_json, print_line, print_note, print_notes, print_written

app = typer.Typer(help="List, filter, compare, tabulate, export and remove runs.", no_args_is_help=True)

Names = Annotated[list[str], Argument(metavar="NAME…", help="Runs, named by their folders below --out.")]
Algorithm = Annotated[str | None, Option(help="Only runs of this algorithm.")]
Columns = Annotated[str | None, Option(metavar="NAME,…", help="Only these figures, by their names in --json.")]
Where = Annotated[
    list[str] | None,
    Option(metavar="KEY=VALUE", help="Only runs with this value of a setting, as local_steps=50. Repeatable."),
]
Status = Annotated[
    str | None,
    Option(help="Only finished, unfinished or damaged runs, or how they ended: target, diverged, max_rounds, …"),
]
ResultRow = Mapping[str, Any]


def _endings() -> frozenset[str]:
    """Return how the runs of a study end."""
    from ..training.stopping import Status as RunStatus  # loads PyTorch, for which no other command waits

    return frozenset(RunStatus) - {RunStatus.RUNNING, RunStatus.DROPPED}


class RunGroup(NamedTuple):
    """One setting of a run folder with its entries, one per seed; none while the folder has no results."""

    run: RunFolder
    label: str
    entries: Sequence[RunEntry]


def _groups(runs: Iterable[RunFolder]) -> list[RunGroup]:
    groups = []
    for run in runs:
        # The pairs of rates of a search are not settings of their own: its folder is one line.
        entries = {} if run.tuned else tables.grouped(run.entries, lambda entry: entry.label)
        if not entries:
            entries[", ".join(run.algorithms) + (" (tuning)" if run.tuned else "")] = []
        groups += [RunGroup(run, *each) for each in entries.items()]
    return groups


def _select(folder: Path, algorithm: str | None, where: Sequence[str] | None, status: str | None) -> list[RunGroup]:
    """Return the groups in a folder that pass the filters; a filter that no run can pass is an error."""
    runs = find_runs(folder)
    groups = _groups(runs)
    wanted = [_parse_where(text) for text in where or ()]
    if runs:
        names = _setting_names(groups)
        for key, text in wanted:
            if key not in names:
                raise unknown("setting", key, names, listed_by="defedavg settings")
            check_setting_value(key, value_of_text(text))
    known = {*ALGORITHMS, *itertools.chain.from_iterable(run.algorithms for run in runs)}
    if algorithm is not None and algorithm not in known:
        raise unknown("algorithm", algorithm, ALGORITHMS)
    _check_status(status, runs)
    return [group for group in groups if _matches(group, algorithm, wanted, status)]


def _check_status(status: str | None, runs: Iterable[RunFolder]) -> None:
    found = {entry.status for run in runs for entry in run.entries}
    if status is not None and status not in (ways := {"finished", "unfinished", "damaged", *_endings(), *found}):
        raise unknown("status", status, ways)


def _setting_names(groups: Iterable[RunGroup]) -> set[str]:
    """Return the names of all settings, with and without their tables."""
    settings = [each for run, _, entries in groups for each in (run.flat_config, *(entry.swept for entry in entries))]
    names = {name for table in settings for name in table} | setting_names()
    return names | {name.rpartition(".")[2] for name in names}


def _parse_where(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--where {text!r} is not a filter; write it like key=value")
    return key.strip(), value.strip()


def _matches(group: RunGroup, algorithm: str | None, where: Sequence[tuple[str, str]], status: str | None) -> bool:
    run, entries = group.run, group.entries
    if algorithm is not None and algorithm not in ({entry.algorithm for entry in entries} or run.algorithms):
        return False
    if status is not None and status not in {run.status, *(entry.status for entry in entries)}:
        return False
    runs: list[tuple[str, Mapping[str, Any]]] = [(entry.algorithm, entry.swept) for entry in entries]
    runs = runs or [(name, {}) for name in run.algorithms[:1]]
    return all(any(_equal(run.setting(key, *one), text) for one in runs) for key, text in where)


def _equal(value: Any, text: str) -> bool:
    wanted = value_of_text(text)
    if isinstance(value, list) and not isinstance(wanted, list):
        return any(_equal(item, text) for item in value)  # a swept setting of a folder without results
    return bool(value == wanted and isinstance(value, bool) == isinstance(wanted, bool)) or str(value) == text


def _row(group: RunGroup) -> dict[str, Any]:
    run, entries = group.run, group.entries
    algorithm, swept = (entries[0].algorithm, entries[0].swept) if entries else ("", {})
    task = [run.setting(f"task.{key}", algorithm, swept) for key in ("data", "model", "split")]
    seeds = run.config.get("seeds", [])
    records = [record_of(entry) for entry in entries]
    metric = common_metric(entry.metric for entry in entries)
    best, time = (over_seeds(records, name) for name in ("best_accuracy", "first_hit_seconds"))
    return {
        "name": run.name,
        "label": group.label,
        "algorithm": algorithm or None,
        "task": "/".join(map(str, task)) if all(task) else None,
        "seeds": len(entries) or (len(seeds) if isinstance(seeds, list) else 1),
        "status": run.status,
        "ended_by": sorted({entry.status for entry in entries}),
        "metric": metric,
        "best_accuracy": best.mean,
        "best_accuracy_sd": best.sd,
        "best_accuracy_text": accuracy_text(records, metric=metric),
        "time_to_target": time.mean,
        "time_to_target_sd": time.sd,
        "time_to_target_text": time_to_target(records),
        "hits": time.count,
        "rounds": mean(records, "rounds"),
        "changed": run.changed and datetime.fromtimestamp(run.changed).astimezone().isoformat(timespec="seconds"),
        "problem": run.problem,
    }


def _print_damage(problems: Mapping[str, str | None]) -> None:
    for name, problem in problems.items():
        if problem:
            print_note(f"{name} is damaged: {problem}")


def _print_file_notes(runs: Iterable[RunFolder]) -> None:
    """Print which files of the runs are not complete, one line each."""
    for run in {run.name: run for run in runs}.values():
        print_notes([f"{run.name}: {note}" for note in run.file_notes])


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
    groups = _select(folder, algorithm, where, status)
    rows = [_row(group) for group in groups]
    _print_file_notes(group.run for group in groups)
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
            row["best_accuracy_text"],
            row["time_to_target_text"],
            (row["changed"] or "–")[:16].replace("T", " "),
        )
        for row in rows
    ]
    metric = common_metric(row["metric"] for row in rows)
    columns = ("name", "algorithm", "task", "seeds", "status", f"best {metric}", "time to target", "when")
    out.print(tables.make(f"{len(rows)} in {folder}", columns, cells, over_seeds_caption(metric)))
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
    _print_file_notes(runs)
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
    rows = [{group.label: _row(group) for group in (_pairs(run) or _groups([run]))} for run in runs]
    labels = dict.fromkeys(label for one in rows for label in one)
    return {label: [one.get(label) for one in rows] for label in labels}


def _pairs(run: RunFolder) -> list[RunGroup]:
    """Return a group for every pair of rates of a search; none for a run, or while the search has no results."""
    pairs = tables.grouped(run.entries if run.tuned else (), lambda entry: entry.label)
    return [RunGroup(run, label, entries) for label, entries in pairs.items()]


def _results_table(columns: Sequence[str], results: Mapping[str, Sequence[ResultRow | None]]) -> Table:
    lines: list[tuple[str, ...]] = []
    metric = common_metric(row["metric"] for rows in results.values() for row in rows if row is not None)
    for label, rows in results.items():
        names = (f"best {metric}", "time to target", "rounds", "ended by")
        lines.append((label, *("" for _ in rows)))
        cells = [("–",) * len(names) if row is None else _result_cells(row) for row in rows]
        lines += [(f"  {name}", *line) for name, *line in zip(names, *cells, strict=True)]
    return tables.make("results", columns, lines, over_seeds_caption(metric))


def _result_cells(row: ResultRow) -> tuple[str, ...]:
    rounds = "–" if row["rounds"] is None else f"{row['rounds']:.0f}"
    ended_by = ", ".join(row["ended_by"]) or row["status"]
    return row["best_accuracy_text"], row["time_to_target_text"], rounds, ended_by


@app.command()
def table(
    names: Names,
    latex: Annotated[bool, Option("--latex", help="Print LaTeX with the rules of booktabs.")] = False,
    markdown: Annotated[bool, Option("--markdown", help="Print Markdown.")] = False,
    as_csv: Annotated[bool, Option("--csv", help="Print CSV: mean, sd and n of every figure.")] = False,
    to: Annotated[
        Path | None, Option("--output", "-o", metavar="FILE", help="Write to a file: .tex, .md or .csv.")
    ] = None,
    columns: Columns = None,
    folder: Out = Path("runs"),
    as_json: Json = False,
) -> None:
    """Print every figure of runs as mean ± sample standard deviation over seeds, for a paper.

    Times and rounds to the target are means over the seeds that reached it; "reached" counts them. `--latex` and
    `--markdown` omit a column that has no figure in any row; `--csv` and `--json` keep it.

    Example: `defedavg runs table first --columns time_to_target_s,best_accuracy_percent --latex -o first.tex`
    """
    from ..report import figure_table

    chosen = _table_format({"latex": latex, "markdown": markdown, "csv": as_csv, "json": as_json}, to)
    runs = [locate_run(folder, name) for name in dict.fromkeys(names)]
    rows = figure_table.figure_rows(runs)
    if not rows:
        raise UserError(f"{', '.join(run.name for run in runs)}: no run has a result yet, so there is no table")
    rows = rows if columns is None else figure_table.with_columns(rows, columns.replace(" ", "").split(","))
    for run in runs:
        if run.status == "unfinished":
            print_note(f"{run.name} is unfinished: the figures are those so far")
    _print_damage({run.name: run.problem for run in runs})
    if chosen is None:
        for each in figure_table.terminal_tables(rows):
            out.print(each)
            out.print()
        return
    text = figure_table.FORMATS[chosen](rows)
    if to is None:
        sys.stdout.write(text)
    else:
        write_whole(to, text.encode())
        print_note(f"written: {to}")


def _table_format(options: Mapping[str, bool], to: Path | None) -> str | None:
    """Return the format that an option or the ending of a file names; None: a table for the terminal."""
    from ..report.figure_table import ENDINGS

    given = [name for name, wanted in options.items() if wanted]
    if len(given) > 1:
        raise UserError("give one of --latex, --markdown, --csv and --json")
    if given or to is None:
        return given[0] if given else None
    if to.suffix.lower() not in ENDINGS:
        raise UserError(f"{to} has no ending .tex, .md or .csv; use one of them, or give a format like --latex")
    return ENDINGS[to.suffix.lower()]


@app.command()
def export(
    file: Annotated[
        Path, Argument(metavar="FILE", help="The file to write: .parquet, .csv or .json; replaced if it exists.")
    ],
    folder: Out = Path("runs"),
    algorithm: Algorithm = None,
    where: Where = None,
    status: Status = None,
    clients: Annotated[
        bool, Option("--clients", help="Write a row per client of every run instead of a row per evaluation.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the metrics of all runs, or of those selected, to one table: Parquet, CSV or JSON, by the file's ending.

    Example: `defedavg runs export all.parquet --status finished`
    """
    from ..runstore.export import check_format
    from ..runstore.export import export as write

    check_format(file)
    groups = _select(folder, algorithm, where, status)
    runs = list({group.run.name: group.run for group in groups}.values())
    # Without a filter, settings that have evaluations and no result yet are exported too.
    labels = {(group.run.name, group.label) for group in groups} if algorithm or where or status else None
    if not runs:
        raise UserError(f"there is no such run in {folder}; `defedavg runs list` lists all runs")
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    rows = unread = 0
    quiet = as_json or not err.is_terminal
    parts = write(runs, file, labels, clients=clients)
    for run, count, bad in track(parts, "exporting", total=len(runs), console=err, transient=True, disable=quiet):
        rows, unread = rows + count, unread + bad
        if bad:
            what = f"{counted(bad, 'file')} of clients" if clients else f"{counted(bad, 'line')} of metrics.jsonl"
            print_note(f"{run.name}: skipped {what} that cannot be read")
    if as_json:
        print_json({"file": str(file), "runs": len(runs), "rows": rows, "unread_lines": unread})
    else:
        what = counted(rows, "client" if clients else "evaluation")
        print_written(f"{what} of {counted(len(runs), 'run')}: {file}", file)


def asking() -> bool:
    """Return whether a user can answer a question: standard input is a terminal."""
    return sys.stdin.isatty()


@app.command("remove")
def remove_(
    names: Names,
    folder: Out = Path("runs"),
    yes: Annotated[bool, Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: Json = False,
) -> None:
    """Remove runs, after confirmation; other files in their folders are kept.

    Example: `defedavg runs remove first second --yes`
    """
    runs = [locate_run(folder, name) for name in dict.fromkeys(names)]  # raises before anything is removed
    if not yes and not asking():
        raise UserError("standard input is not a terminal, so confirmation is not possible; use --yes")
    if not yes and not typer.confirm(printable(f"remove {', '.join(str(run.path) for run in runs)}?"), err=True):
        print_note("nothing was removed")
        raise typer.Exit(1)
    removed = []
    for run, kept in zip(runs, remove_runs([run.path for run in runs]), strict=True):
        removed.append({"name": run.name, "kept": kept})
        if not as_json:
            if kept:
                print_note(f"{run.path} is kept, since it also holds {', '.join(kept[:5])}")
            print_line(f"removed: {run.path}")
    if as_json:
        print_json(removed)
