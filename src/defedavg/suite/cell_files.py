"""Stored cells: one JSON file per cell, written whole, checked when it is read."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from ..algorithms import BUILT_IN
from ..errors import UserError
from ..fileio import read_regular, write_whole, writing
from ..jsonio import finite, is_whole
from ..plugins import plugin_hashes
from ..runstore.metrics import number
from .benchmark import FLEETS, SEEDS, SUITE_VERSION, TASKS, SuiteCell

FORMAT: Final = "defedavg-suite-cell"

RUN_NUMBERS: Final = (
    "seconds_to_target", "rounds", "seconds", "best_accuracy", "final_accuracy", "worst_decile_accuracy",
    "mean_client_accuracy", "staleness_mean", "uplink_bytes", "downlink_bytes", "updates_trained", "diverged_at",
)  # fmt: skip
"""The numbers of a reported run; one that is unknown is None."""
RATES: Final = ("global_lr", "local_lr")
MACHINE: Final = ("device", "processor", "precision", "torch", "numpy", "system")
"""Entries of the provenance on which the last digits of a run depend."""

StoredCell = Mapping[str, Any]
"""The content of a cell's file."""


@dataclass(frozen=True, slots=True)
class CellFiles:
    """The stored cells in a folder; ``plugins`` are the hashes of the plugin files of this session, by path."""

    folder: Path
    plugins: Mapping[str, str] = field(default_factory=dict)

    def path(self, cell: SuiteCell) -> Path:
        """Return the path of a cell's file."""
        return self.folder / cell.task.name / cell.fleet.name / f"{cell.algorithm}.json"

    def identity(self, cell: SuiteCell) -> dict[str, Any]:
        """Return what a stored cell must have to be this one."""
        code = {} if cell.algorithm in BUILT_IN else {"plugins": sorted(self.plugins.values())}
        return {
            "format": FORMAT,
            "suite_version": SUITE_VERSION,
            "task": cell.task.name,
            "fleet": cell.fleet.name,
            "algorithm": cell.algorithm,
            "settings_sha256": cell.settings_sha256,
            **code,
        }

    def has(self, cell: SuiteCell) -> bool:
        """Return whether the cell is stored, with the present settings; a damaged file raises ``UserError``."""
        path = self.path(cell)
        if not path.exists():
            return False
        stored = read_cell(path)
        return all(stored.get(name) == value for name, value in self.identity(cell).items())

    def save(self, cell: SuiteCell, result: Mapping[str, Any]) -> Path:
        """Write a cell's file; a reader sees the old one or the new one, never a part."""
        path = self.path(cell)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(finite({**self.identity(cell), **result}), indent=1, ensure_ascii=False, allow_nan=False)
        write_whole(path, (text + "\n").encode())
        return path


def read_cell(path: Path) -> StoredCell:
    """Return a stored cell after checking its fields; raise ``UserError`` if it is damaged."""
    try:
        found = json.loads(read_regular(path))
        problem = _problem(found)
    except (OSError, ValueError, RecursionError) as error:
        problem = str(error) or type(error).__name__
    if problem:
        raise UserError(f"{path} is not a result of the suite ({problem}); delete it to compute the cell again")
    return dict(found)


def _problem(found: Any) -> str:
    """Return what is wrong with the content of a file; empty if nothing is."""
    if not isinstance(found, dict) or found.get("format") != FORMAT or not is_whole(found.get("suite_version")):
        return "another format"
    words = ("task", "fleet", "algorithm", "settings_sha256", "command")
    kinds = {**dict.fromkeys(words, str), "rates": dict, "tuning": dict, "provenance": dict, "runs": list}
    for name, kind in {**kinds, "plugins": list}.items():
        if not isinstance({"plugins": [], **found}.get(name), kind):  # built-in algorithms have no plugins
            return f"no {name}"
    if not set(found["rates"]) <= set(RATES) or not _all_numbers(found["rates"].values()):
        return "bad rates"
    points = found["tuning"].get("points")
    if number(found.get("target")) is None or not isinstance(points, list):
        return "no target, or no points of the tuning"
    if not all(map(_is_run, [*found["runs"], *points])):
        return "bad runs"
    return "" if [run["seed"] for run in found["runs"]] == list(SEEDS) else "other seeds"


def _is_run(run: Any) -> bool:
    return (
        isinstance(run, dict)
        and is_whole(run.get("seed"))
        and isinstance(run.get("status"), str)
        and isinstance(run.get("plan_sha256"), str)
        and _all_numbers(value for name in RUN_NUMBERS if (value := run.get(name, "missing")) is not None)
    )


def _all_numbers(values: Iterable[Any]) -> bool:
    return all(number(value) is not None for value in values)


def stored_cells(folder: Path) -> tuple[list[StoredCell], list[str]]:
    """Return the cells of this version in a folder, in the order of the suite, and a line for each that is left out.

    Nothing is imported: cells of algorithms that this process does not know are listed after the built-in ones. A cell
    of a plugin file that has changed is left out.
    """
    found: list[StoredCell] = []
    notes: list[str] = []
    for path in sorted(folder.glob("*/*/*.json")):
        try:
            stored = read_cell(path)
        except UserError as error:
            notes.append(str(error))
            continue
        if not _is_current(stored):
            notes.append(f"{path} was made with other settings; `defedavg suite run` computes it again")
            continue
        names = plugin_names(stored)
        try:
            current = not names or _hashes_here(names) == stored.get("plugins")
        except UserError as error:
            line = "so it is not known whether its row is current; repeat the command in a folder where it can be read"
            notes.append(f"{path}: {error}, {line}")
            current = True
        if current:
            found.append(stored)
        else:
            notes.append(f"{path} is left out: {', '.join(names)} has changed; {_again(stored, folder)}")
    return sorted(found, key=_place), notes


def plugin_names(stored: StoredCell) -> list[str]:
    """Return the plugin files that the command of a cell names."""
    try:
        words = shlex.split(stored["command"])
    except ValueError:
        return []
    return [name for word, name in pairwise(words) if word == "--plugin"]


def _hashes_here(names: Sequence[str]) -> list[str]:
    """Return the sorted hashes of plugin files of the current folder; raise ``UserError`` if one cannot be read."""
    if not all(map(os.path.isfile, names)):
        raise UserError(f"{', '.join(names)} is not in this folder")
    return sorted(plugin_hashes(names).values())


def _again(stored: StoredCell, folder: Path) -> str:
    words = [word for name in plugin_names(stored) for word in ("--plugin", name)]
    words += [word for name in ("task", "fleet", "algorithm") for word in (f"--{name}", stored[name])]
    return f"`{shlex.join(['defedavg', 'suite', 'run', *words, '--out', str(folder)])}` computes it again"


def _is_current(stored: StoredCell) -> bool:
    if stored["task"] not in TASKS or stored["fleet"] not in FLEETS or stored["suite_version"] != SUITE_VERSION:
        return False
    cell = SuiteCell(TASKS[stored["task"]], FLEETS[stored["fleet"]], stored["algorithm"])
    return bool(stored["settings_sha256"] == cell.settings_sha256)


def _place(stored: StoredCell) -> tuple[int, int, int, str]:
    names: Sequence[str] = BUILT_IN
    place = list(names).index(stored["algorithm"]) if stored["algorithm"] in names else len(names)
    return list(TASKS).index(stored["task"]), list(FLEETS).index(stored["fleet"]), place, stored["algorithm"]


def differences(one: StoredCell, other: StoredCell) -> list[str]:
    """Return what differs between two results of the same cell: rates, and figures and plans of every run."""
    found = [] if one["rates"] == other["rates"] else [f"rates: {one['rates']} and {other['rates']}"]
    for run, again in zip(one["runs"], other["runs"], strict=True):
        found += [
            f"seed {run['seed']}, {name}: {run[name]} and {again[name]}"
            for name in (*RUN_NUMBERS, "status", "plan_sha256")
            if run[name] != again[name]
        ]
    return found


def machine_differences(one: StoredCell, other: StoredCell) -> str:
    """Return in words on which devices and with which versions two results were made; empty if they are the same."""
    origins = one["provenance"], other["provenance"]
    words = [[str(origin.get(name, "unknown")) for origin in origins] for name in MACHINE]
    return ", ".join(f"{name}: {a}, here {b}" for name, (a, b) in zip(MACHINE, words, strict=True) if a != b)
