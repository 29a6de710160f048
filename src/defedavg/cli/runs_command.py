"""``defedavg runs``: list, compare, export and remove what runs left behind."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from rich.progress import track

from ..errors import UserError, unknown
from ..fileio import writing
from ..report import tables
from ..runstore.catalogue import Stored, find, locate, remove
from .options import Json, Out, err, out, print_json

app = typer.Typer(help="List, filter, compare, export and remove runs.", no_args_is_help=True)

Names = Annotated[list[str], typer.Argument(metavar="NAME…", help="Runs, by their folders below --out.")]
Algorithm = Annotated[str | None, typer.Option(help="Only this algorithm.")]
Where = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="Only where a setting has this value, as local_steps=50. Repeatable."),
]
Status = Annotated[
    str | None,
    typer.Option(help="Only these: finished, unfinished, damaged, or how runs ended: target, diverged, max_rounds, …"),
]
Entry = Mapping[str, Any]
Group = tuple[Stored, str, list[Entry]]
"""A folder, one of its settings by label, and that setting's runs, one per seed; no runs where there are none yet."""


def _groups(runs: Sequence[Stored]) -> list[Group]:
    found: list[Group] = []
    for run in runs:
        labels: dict[str, list[Entry]] = {}
        for entry in run.entries:
            labels.setdefault(entry["label"], []).append(entry)
        if not labels:
            labels[", ".join(run.algorithms) + (" (tuning)" if run.tuned else "")] = []
        found += [(run, label, own) for label, own in labels.items()]
    return found


def _wanted(group: Group, algorithm: str | None, where: Sequence[tuple[str, str]], status: str | None) -> bool:
    run, _, entries = group
    if algorithm is not None and algorithm not in ({e["algorithm"] for e in entries} or run.algorithms):
        return False
    if status is not None and status != run.status and status not in {e["status"] for e in entries}:
        return False
    stand_in: list[Entry] = [{"algorithm": name, "swept": {}} for name in run.algorithms[:1]]
    return all(any(_equal(run.setting(key, e), raw) for e in entries or stand_in) for key, raw in where)


def _equal(value: Any, raw: str) -> bool:
    try:
        said = tomllib.loads(f"value = {raw}")["value"]
    except (ValueError, RecursionError):
        said = raw
    if isinstance(value, list) and not isinstance(said, list):
        return any(_equal(item, raw) for item in value)  # swept, and nothing has come of it yet
    return bool(value == said and isinstance(value, bool) == isinstance(said, bool)) or str(value) == raw


def _chosen(folder: Path, algorithm: str | None, where: list[str] | None, status: str | None) -> list[Group]:
    """What the options ask for; a filter that can match nothing at all is an error."""
    runs = find(folder)
    pairs = []
    for text in where or ():
        key, equals, raw = text.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--where {text!r} cannot be read; write it as key=value")
        pairs.append((key.strip(), raw.strip()))
    groups = _groups(runs)
    words = {name for run in runs for name in run.settings} | {
        name for _, _, own in groups for e in own for name in e["swept"]
    }
    words |= {name.rpartition(".")[2] for name in words}
    for key, _ in pairs:
        if runs and key not in words:
            raise unknown("setting", key, words)
    if algorithm is not None:
        from ..algorithms import ALGORITHMS

        if algorithm not in {*ALGORITHMS, *(name for run in runs for name in run.algorithms)}:
            raise unknown("algorithm", algorithm, ALGORITHMS)
    return [group for group in groups if _wanted(group, algorithm, pairs, status)]


def _mean(entries: Sequence[Entry], name: str) -> float | None:
    values = [entry[name] for entry in entries if entry.get(name) is not None]
    return fmean(values) if values else None


def _row(group: Group) -> dict[str, Any]:
    run, label, entries = group
    first: Entry = entries[0] if entries else {"algorithm": "", "swept": {}}
    task = [run.setting(f"task.{word}", first) for word in ("data", "model", "split")]
    seeds = run.config.get("seeds", [])
    best = [entry["best_accuracy"] for entry in entries if entry.get("best_accuracy") is not None]
    return {
        "name": run.name,
        "label": label,
        "algorithm": first["algorithm"] or None,
        "task": "/".join(str(word) for word in task) if all(task) else None,
        "seeds": len(entries) or (len(seeds) if isinstance(seeds, list) else 1),
        "status": run.status,
        "ended_by": sorted({entry["status"] for entry in entries}),
        "best_accuracy": max(best, default=None),
        "time_to_target": _mean(entries, "first_hit_seconds"),
        "hits": sum(entry.get("first_hit_seconds") is not None for entry in entries),
        "rounds": _mean(entries, "rounds"),
        "changed": datetime.fromtimestamp(run.changed).astimezone().isoformat(timespec="seconds"),
        "problem": run.problem,
    }


def _hits(row: Mapping[str, Any]) -> str:
    """The time to the target, and in how many seeds it was reached, if not in all."""
    some = f" ({row['hits']} of {row['seeds']})" if 0 < row["hits"] < row["seeds"] else ""
    return tables.seconds(row["time_to_target"]) + some


@app.command("list")
def list_(
    folder: Out = Path("runs"),
    algorithm: Algorithm = None,
    where: Where = None,
    status: Status = None,
    as_json: Json = False,
) -> None:
    """List runs, a line per folder and setting; damaged ones too, with what is wrong with them."""
    rows = [_row(group) for group in _chosen(folder, algorithm, where, status)]
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
            _hits(row),
            row["changed"][:16].replace("T", " "),
        )
        for row in rows
    ]
    columns = ("name", "algorithm", "task", "seeds", "status", "best", "time to target", "when")
    out.print(tables.make(f"{len(rows)} in {folder}", columns, cells))
    for name, problem in dict.fromkeys((row["name"], row["problem"]) for row in rows if row["problem"]):
        err.print(f"{name} is damaged: {problem}", markup=False, soft_wrap=True)


@app.command()
def compare(names: Names, folder: Out = Path("runs"), as_json: Json = False) -> None:
    """Show what runs were told differently, and what came of it, side by side."""
    if len(set(names)) < 2:
        raise UserError("give at least two different runs to compare")
    runs = [locate(folder, name) for name in dict.fromkeys(names)]
    settings = [run.settings for run in runs]
    keys = dict.fromkeys(key for own in settings for key in own if key != "name")
    told = {key: [own.get(key) for own in settings] for key in keys}
    differing = {key: values for key, values in told.items() if any(value != values[0] for value in values)}
    groups = [{label: _row((run, label, own)) for _, label, own in _groups([run])} for run in runs]
    labels = dict.fromkeys(label for own in groups for label in own)
    if as_json:
        results = {label: [own.get(label) for own in groups] for label in labels}
        print_json({"runs": [run.name for run in runs], "settings": differing, "results": results})
        return
    heads = [run.name for run in runs]
    cells = [(key, *("–" if value is None else str(value) for value in values)) for key, values in differing.items()]
    out.print(tables.make("settings that differ" if cells else "every setting is the same", ("", *heads), cells))
    out.print()
    lines = []
    for label in labels:
        rows = [own.get(label) for own in groups]
        lines.append((label, *("" for _ in rows)))
        lines.append(("  best accuracy", *(tables.share(row["best_accuracy"] if row else None) for row in rows)))
        lines.append(("  time to target", *("–" if row is None else _hits(row) for row in rows)))
        lines.append(
            ("  rounds", *("–" if not row or row["rounds"] is None else f"{row['rounds']:.0f}" for row in rows))
        )
        lines.append(("  ended by", *("–" if not row else ", ".join(row["ended_by"]) or row["status"] for row in rows)))
    out.print(tables.make("results", ("", *heads), lines))
    for run in runs:
        if run.problem:
            err.print(f"{run.name} is damaged: {run.problem}", markup=False, soft_wrap=True)


@app.command()
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE.parquet", help="Where to write; replaced if it is there.")],
    folder: Out = Path("runs"),
    algorithm: Algorithm = None,
    where: Where = None,
    status: Status = None,
    as_json: Json = False,
) -> None:
    """Write the metrics of all runs, or of those asked for, into one Parquet file for pandas, Polars or DuckDB."""
    from ..runstore.parquet import export as write

    groups = _chosen(folder, algorithm, where, status)
    runs = list({run.name: run for run, _, _ in groups}.values())
    labels = {(run.name, label) for run, label, _ in groups}
    if not runs:
        raise UserError(f"there is no such run in {folder}; `defedavg runs list` shows those that are there")
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    rows = unread = 0
    quiet = as_json or not err.is_terminal
    for run, count, bad in track(
        write(runs, file, labels), "exporting", total=len(runs), console=err, transient=True, disable=quiet
    ):
        rows, unread = rows + count, unread + bad
        if bad:
            err.print(f"{run.name}: {bad} line(s) of metrics.jsonl cannot be read and are left out", markup=False)
    if as_json:
        print_json({"file": str(file), "runs": len(runs), "rows": rows, "unread_lines": unread})
    else:
        out.print(f"{rows} measurements of {len(runs)} run(s): {file}", markup=False)


def asking() -> bool:
    """Whether somebody is there to be asked."""
    return sys.stdin.isatty()


@app.command("remove")
def remove_(
    names: Names,
    folder: Out = Path("runs"),
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Remove runs after asking; what else lies in their folders stays."""
    runs = [locate(folder, name) for name in dict.fromkeys(names)]  # all are there, or nothing is removed
    if not yes:
        if not asking():
            raise UserError("nobody can be asked here; give --yes to remove without asking")
        listed = ", ".join(str(run.path) for run in runs)
        if not typer.confirm(f"remove {listed}?", err=True):
            err.print("nothing was removed")
            raise typer.Exit(1)
    gone = []
    for run in runs:
        rest = remove(run)
        gone.append({"name": run.name, "kept": rest})
        if rest and not as_json:
            err.print(f"{run.path} stays, since it also holds {', '.join(rest[:5])}", markup=False, soft_wrap=True)
        if not as_json:
            out.print(f"removed: {run.path}", markup=False)
    if as_json:
        print_json(gone)
