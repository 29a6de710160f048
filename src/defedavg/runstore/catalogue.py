"""The runs that are kept: found in a folder, read without trusting them, compared, removed.

The law of this file: whatever lies in a folder, reading it never fails. What cannot be read is said in ``problem``, and
the rest is used. Nothing outside the folder is read or removed: links are never followed.
"""

from __future__ import annotations

import json
import math
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UserError, first_line
from ..fileio import writing

OURS = (
    "config.toml",
    "metrics.jsonl",
    "metrics.parquet",
    "summary.json",
    "plans",
    "weights",
    "checkpoints",
    "plots",
    "points.jsonl",
    "split.json",
    "report.html",
    "tensorboard",
    *("events.jsonl", "state", "server.log", "error.txt", "app", "app.txt", "flower"),  # of a deployment
)
SIGNS = ("config.toml", "summary.json")
"""A folder with one of them is a run, perhaps a damaged one; with both, it can be replaced or removed."""

DEPTH = 3
"""Folders of runs may lie in folders."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A folder of a run as it was found; ``entries`` are those of its summary that could be read."""

    name: str  # from where was looked, with slashes
    path: Path
    config: Mapping[str, Any]
    entries: tuple[Mapping[str, Any], ...]
    finished: bool
    tuned: bool
    problem: str | None
    changed: float  # seconds since 1970

    @property
    def status(self) -> str:
        """finished, unfinished or damaged."""
        return "damaged" if self.problem else "finished" if self.finished else "unfinished"

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The algorithms that it says it runs."""
        named = self.config.get("algorithms", ())
        return tuple(name for name in named if isinstance(name, str)) if isinstance(named, list) else ()

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting as ``table.key``, as the file has it: a list is swept."""
        flat: dict[str, Any] = {}
        for name, value in self.config.items():
            if isinstance(value, dict):
                flat.update({f"{name}.{key}": inner for key, inner in value.items()})
            else:
                flat[name] = value
        return flat

    def setting(self, key: str, entry: Mapping[str, Any]) -> Any:
        """A setting as one of its runs had it, by ``table.key`` or by the key alone; None if there is none."""
        swept, algorithm, settings = entry["swept"], entry["algorithm"], self.settings
        table, _, word = key.rpartition(".")
        for whole in (key,) if table else (name for name in (*swept, *settings) if name.rpartition(".")[2] == key):
            if whole in swept:
                return swept[whole]
        own = f"{algorithm}.{word}"
        if own in settings and (table in ("", "training", algorithm)):
            return settings[own]
        if key in settings:
            return settings[key]
        return next((value for name, value in settings.items() if not table and name.rpartition(".")[2] == key), None)

    def metrics(self) -> tuple[list[dict[str, Any]], int]:
        """The measurements, and how many lines could not be read."""
        found, bad = [], 0
        for line in _lines(self.path / "metrics.jsonl"):
            try:
                found.append(_measurement(json.loads(line)))
            except (ValueError, TypeError, RecursionError):
                bad += 1
        return found, bad


@dataclass(slots=True)
class _Reading:
    """What is wrong with a folder, first things first."""

    problems: list[str] = field(default_factory=list)

    def text(self, path: Path) -> str | None:
        """What a file says, or None with a problem noted."""
        if path.is_symlink():
            self.problems.append(f"{path.name} is a link")
            return None
        try:
            return path.read_text(encoding="utf-8")
        except FileNotFoundError:
            self.problems.append(f"{path.name} is missing")
        except (OSError, ValueError) as error:
            self.problems.append(f"{path.name} cannot be read: {first_line(error)}")
        return None

    def toml(self, path: Path) -> dict[str, Any]:
        text = self.text(path)
        try:
            return {} if text is None else tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            self.problems.append(f"{path.name} is no TOML: {first_line(error)}")
            return {}

    def json(self, path: Path) -> dict[str, Any]:
        text = self.text(path)
        try:
            found = {} if text is None else json.loads(text)
        except (ValueError, RecursionError) as error:
            self.problems.append(f"{path.name} is no JSON: {first_line(error)}")
            return {}
        if not isinstance(found, dict):
            self.problems.append(f"{path.name} is no object")
            return {}
        return found


def find(root: Path) -> list[Stored]:
    """Every run in a folder and the folders in it, by name."""
    if not root.is_dir():
        raise UserError(f"there is no folder {root}; give the one with the runs as --out")
    return sorted((read(path, root) for path in _folders(root, DEPTH)), key=lambda run: run.name)


def _folders(root: Path, depth: int) -> Iterator[Path]:
    try:
        inside = sorted(path for path in root.iterdir() if not path.is_symlink() and path.is_dir())
    except OSError:
        return  # one that may not be looked into holds nothing of ours
    for path in inside:
        if is_run(path):
            yield path
        elif depth > 1:
            yield from _folders(path, depth - 1)


def is_run(path: Path) -> bool:
    """Whether a folder is one that a run left, perhaps a damaged one."""
    try:
        return not path.is_symlink() and any((path / name).is_file() for name in SIGNS)
    except OSError:
        return False


def read(path: Path, root: Path) -> Stored:
    """One folder, as much of it as can be read."""
    reading = _Reading()
    config = reading.toml(path / "config.toml")
    summary = reading.json(path / "summary.json")
    listed = summary.get("runs", [])
    entries = []
    for number, entry in enumerate(listed if isinstance(listed, list) else [], start=1):
        if _is_entry(entry):
            entries.append(entry)
        else:
            reading.problems.append(f"run {number} of summary.json cannot be read")
    if summary and not isinstance(listed, list):
        reading.problems.append("summary.json lists no runs")
    problem = reading.problems[0] if reading.problems else None
    try:
        changed = max(((path / name).stat().st_mtime for name in SIGNS if (path / name).exists()), default=0.0)
    except OSError:
        changed = 0.0
    finished, tuned = summary.get("finished") is True, "best" in summary
    name = path.relative_to(root).as_posix()
    return Stored(name, path, config, tuple(entries), finished, tuned, problem, changed)


_NUMBERS = ("first_hit_seconds", "sustained_seconds", "best_accuracy", "final_accuracy", "rounds", "seconds")


def _is_entry(entry: Any) -> bool:
    """Whether an entry of a summary has what is shown of it, of the right kinds."""
    return (
        isinstance(entry, dict)
        and all(isinstance(entry.get(name), str) for name in ("algorithm", "label", "status"))
        and isinstance(entry.get("swept"), dict)
        and _is_whole(entry.get("seed"))
        and all(entry.get(name) is None or _is_number(entry.get(name)) for name in _NUMBERS)
    )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


WHOLE = ("seed", "round", "updates")
REAL = ("seconds", "accuracy", "loss", "train_loss", "staleness", "wall_seconds")


def _measurement(found: Any) -> dict[str, Any]:
    """A line of metrics.jsonl, checked; what was swept is kept apart."""
    if not isinstance(found, dict) or not isinstance(found.get("algorithm"), str):
        raise TypeError("no measurement")
    known = {"algorithm": found.pop("algorithm")}
    found.pop("label", None)  # it says again what was swept
    for name in WHOLE:
        if not _is_whole(found.get(name)):
            raise TypeError(name)
        known[name] = found.pop(name)
    for name in REAL:
        value = found.pop(name, None)
        if value is not None and not _is_number(value):
            raise TypeError(name)
        known[name] = None if value is None else float(value)
    return {**known, "swept": found}


def _lines(path: Path) -> Iterator[str]:
    """The lines of a file that is there and is no link; what is no text is given as it can be."""
    try:
        if not path.is_symlink():
            with path.open(encoding="utf-8", errors="replace") as file:
                yield from file
    except OSError:
        return


def locate(root: Path, name: str) -> Stored:
    """A run by its name, that is by its folder below the root; anything else is refused."""
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or any(part in ("..", ".") for part in parts):
        raise UserError(f"{name!r} is no name of a run; `defedavg runs list` shows them")
    path = root
    for part in parts:
        path = path / part
        if path.is_symlink():
            raise UserError(f"{path} is a link, and links are not followed; name the folder itself with --out")
    if not path.is_dir():
        raise UserError(f"there is no run {name!r} in {root}; `defedavg runs list` shows those that are there")
    if not is_run(path):
        raise UserError(f"{path} is not the folder of a run: it has neither {SIGNS[0]} nor {SIGNS[1]}")
    return read(path, root)


def remove(run: Stored) -> list[str]:
    """Remove what a run wrote, and its folder if nothing else is in it; gives the names of what stays."""
    with writing(run.path):
        for name in OURS:
            old = run.path / name
            if old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)  # a link in it is removed, not followed
            else:
                old.unlink(missing_ok=True)
        rest = sorted(path.name for path in run.path.iterdir())
        if not rest:
            run.path.rmdir()
    return rest
