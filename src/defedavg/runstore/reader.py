"""Reads run folders, complete, unfinished or damaged.

Everything in a folder is untrusted: each value is checked, what is missing or damaged becomes a note for the reader,
nothing outside the folder is read (links are not followed), and nothing named in a folder is imported or executed.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..algorithms import ALGORITHMS
from ..config.renamed_settings import current_label
from ..config.settings import Settings, own_defaults
from ..config.study import Study, stored_study
from ..errors import UserError, first_line
from ..fileio import read_regular
from ..jsonio import is_whole
from .client_results import Row, read_client_rows
from .layout import MARKERS, PREVIOUS, RunFiles, find_run_folders, is_being_replaced, is_run
from .metrics import (
    JsonLines,
    Measurement,
    Trail,
    metric_of,
    missing_metrics,
    number,
    perplexity,
    read_lines,
    read_metrics,
    text_of,
)
from .summary import NUMBERS, label_with_rates

RATES = ("global_lr", "local_lr")


@dataclass(frozen=True, slots=True)
class RunEntry:
    """One run: a setting and a seed. ``rates`` are the learning rates that a search gave it."""

    label: str
    algorithm: str
    seed: int
    status: str
    plan: str = ""  # SHA-256
    swept: Mapping[str, Any] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    numbers: Mapping[str, float | None] = field(default_factory=lambda: dict.fromkeys(NUMBERS))
    trail: Trail = field(default_factory=Trail)
    metric: str = "accuracy"


@dataclass(frozen=True, slots=True)
class PartitionCounts:
    """Samples of clients (rows) by class (columns)."""

    title: str
    counts: list[list[int]]


@dataclass(frozen=True, slots=True)
class RunsInMemory:
    """What a process knows of the runs that it has just computed, so that nothing is read again."""

    study: Study | None
    runs: tuple[RunEntry, ...]
    partition: PartitionCounts | None = None


@dataclass(frozen=True)
class RunFolder:
    """What a run folder says. ``name`` is its path below the searched folder, ``title`` the name of its study."""

    path: Path
    name: str
    title: str
    config: Mapping[str, Any]
    text: str  # of the configuration
    entries: tuple[RunEntry, ...]
    finished: bool
    tuned: bool  # a search for learning rates, which keeps no plans
    best: tuple[str, ...]  # labels that a search chose
    provenance: Mapping[str, str]
    problems: tuple[str, ...]
    changed: float | None  # seconds since 1970; None if it has no file of a run
    memory: RunsInMemory | None = None

    @property
    def clock(self) -> str:
        """Whose seconds the results have: measured by a deployment, or simulated."""
        return "seconds of the deployment" if self.provenance.get("executor") == "deployment" else "simulated seconds"

    @property
    def problem(self) -> str | None:
        """What is wrong with the folder, the first thing first."""
        return self.problems[0] if self.problems else None

    @property
    def status(self) -> str:
        """One of finished, unfinished and damaged."""
        return "damaged" if self.problems else "finished" if self.finished else "unfinished"

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The algorithms that the configuration names."""
        named = self.config.get("algorithms", ())
        return tuple(name for name in named if isinstance(name, str)) if isinstance(named, list) else ()

    @cached_property
    def flat_config(self) -> dict[str, Any]:
        """Every setting as ``table.key``, as the file has it: a list is swept."""
        flat: dict[str, Any] = {}
        for name, value in self.config.items():
            if isinstance(value, dict):
                flat.update({f"{name}.{key}": inner for key, inner in value.items()})
            else:
                flat[name] = value
        return flat

    def setting(self, key: str, algorithm: str, swept: Mapping[str, Any]) -> Any:
        """Return a setting as one run had it, by ``table.key`` or by the key alone; None if there is none."""
        flat = self.flat_config
        table, _, word = key.rpartition(".")
        names = (key,) if table else [name for name in (*swept, *flat) if name.rpartition(".")[2] == word]
        for name in names:
            if name in swept:
                return swept[name]
        if f"{algorithm}.{word}" in flat and table in ("", "training", algorithm):
            return flat[f"{algorithm}.{word}"]
        default = own_defaults(algorithm).get(word) if table in ("", algorithm) else None
        return next((flat[name] for name in names if name in flat), default)

    @property
    def study(self) -> Study | None:
        """The study, if the configuration can be read by this version."""
        return self._study[0]

    @cached_property
    def _study(self) -> tuple[Study | None, list[str]]:
        if self.memory is not None:
            return self.memory.study, []
        problem = "config.toml has no settings"
        try:
            if self.config:
                return stored_study(self.config, folder=self.path), []
        except UserError as error:
            problem = first_line(error)
        return None, [f"charts that need the configuration are left out: {problem}"]

    def metrics(self) -> tuple[list[Measurement], JsonLines]:
        """Return the evaluations so far, and what is known about the lines of the file."""
        return read_metrics(RunFiles(self.path).metrics)

    @property
    def runs(self) -> tuple[RunEntry, ...]:
        """All runs with their evaluations, those in progress included."""
        return self._runs[0]

    @cached_property
    def _runs(self) -> tuple[tuple[RunEntry, ...], list[str]]:
        if self.memory is not None:
            return self.memory.runs, []
        measurements, lines = self.metrics()
        trails: dict[tuple[str, int], tuple[Measurement, Trail]] = {}
        for one in measurements:
            trails.setdefault((one.label, one.seed), (one, Trail()))[1].add(one.values)
        known = {(entry.label, entry.seed) for entry in self.entries}
        entries = [
            replace(entry, trail=trails[entry.label, entry.seed][1]) if (entry.label, entry.seed) in trails else entry
            for entry in self.entries
        ]
        for key, (one, trail) in trails.items():
            if key not in known:  # in progress, or interrupted
                found = RunEntry(one.label, one.algorithm, one.seed, "running", metric=one.metric)
                entries.append(replace(found, numbers=_so_far(trail, one.metric), trail=trail))
        return tuple(entries), lines.notes(RunFiles(self.path).metrics.name)

    @property
    def partition(self) -> PartitionCounts | None:
        """Samples of clients by class, if the task has classes."""
        return self._partition[0]

    @cached_property
    def _partition(self) -> tuple[PartitionCounts | None, list[str]]:
        return (
            (self.memory.partition, []) if self.memory is not None else _read_partition(RunFiles(self.path).partition)
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Everything that a reader of the report should know about the files."""
        return (*self.problems, *self._study[1], *self.file_notes, *self._partition[1])

    @property
    def file_notes(self) -> tuple[str, ...]:
        """How many evaluations cannot be read, and whether the folder also holds a run that is being replaced."""
        kept = (
            [f"an older run is kept in {PREVIOUS}, until this one has results"] if is_being_replaced(self.path) else []
        )
        return (*self._runs[1], *kept)

    @cached_property
    def _settings(self) -> dict[str, Settings]:
        if self.study is None:
            return {}
        all_points = self.study.points()
        points = {(p.settings.algorithm, json.dumps(dict(p.swept))): p.settings for p in all_points}
        labels = {point.label: point.settings for point in all_points}
        found = {}
        for entry in self.runs:
            settings = labels.get(current_label(entry.label)) or points.get(
                (entry.algorithm, json.dumps(dict(entry.swept)))
            )
            if settings is not None:
                rates: dict[str, Any] = {name: value for name, value in entry.rates.items() if value > 0}
                found[entry.label] = replace(settings, training=replace(settings.training, **rates))
        return found

    def settings(self, label: str) -> Settings | None:
        """Return the settings of a label, if the configuration can be read."""
        return self._settings.get(label)

    def plan_path(self, entry: RunEntry) -> Path | None:
        """Return the path of a run's plan, if it exists."""
        path = RunFiles(self.path).plan(entry.label, entry.seed)
        return path if path.is_file() else None

    def client_rows(self, entry: RunEntry) -> tuple[list[Row], list[str]]:
        """Return what the clients of a run did and get, and notes about its file; no rows if there is no file."""
        return read_client_rows(RunFiles(self.path).clients(entry.label, entry.seed))


def read_run(path: Path, root: Path | None = None) -> RunFolder:
    """Read a run folder as far as possible."""
    problems: list[str] = []
    files = RunFiles(path)
    text = _text_of(files.config, problems)
    config = _toml(files.config.name, text, problems)
    summary = _json(files.summary, problems)
    tuned = files.rate_points.is_file()
    points = read_lines(files.rate_points)
    problems += points.notes(files.rate_points.name)
    listed = points.objects if tuned else summary.get("runs", [])
    if not isinstance(listed, list):
        problems.append("summary.json has no list of runs")
        listed = []
    entries = []
    for position, raw in enumerate(listed, start=1):
        entry = read_entry(raw)
        if entry is None:
            problems.append(f"run {position} of {(files.rate_points if tuned else files.summary).name} cannot be read")
        else:
            entries.append(entry)
    finished = summary.get("finished") is True
    problems += missing_metrics(files.metrics, listed, finished=finished)
    origin = summary.get("provenance")
    return RunFolder(
        path=path,
        name=path.name if root is None else path.relative_to(root).as_posix(),
        title=text_of(summary.get("name")) or path.name,
        config=config,
        text=text or "",
        entries=tuple(entries),
        finished=finished,
        tuned=tuned or "best" in summary,
        best=tuple(map(_best_label, _dicts(summary.get("best")))),
        provenance={text_of(k): text_of(v) for k, v in origin.items()} if isinstance(origin, dict) else {},
        problems=tuple(problems),
        changed=_changed(path),
    )


def find_runs(root: Path) -> list[RunFolder]:
    """Read every run folder below a folder, by name."""
    if not root.is_dir():
        raise UserError(f"there is no folder {root}; give the folder of the runs as --out")
    return [read_run(path, root) for path in find_run_folders(root) if path != root]


def locate_run(root: Path, name: str) -> RunFolder:
    """Read the run folder of that name below ``root``; refuse a path that leads elsewhere."""
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or any(part in ("..", ".") for part in parts):
        raise UserError(f"{name!r} is not the name of a run; `defedavg runs list` shows all names")
    path = root
    for part in parts:
        path = path / part
        if path.is_symlink():
            raise UserError(f"{path} is a link, and links are not followed; give the folder itself with --out")
    if not path.is_dir():
        raise UserError(f"there is no run {name!r} in {root}; `defedavg runs list` shows all names")
    if not is_run(path):
        raise UserError(f"{path} is not a run folder: it has neither {MARKERS[0]} nor {MARKERS[1]}")
    return read_run(path, root)


def flat_settings(settings: Settings) -> dict[str, Any]:
    """Return every setting by its dotted name, without learning rates that the algorithm does not have."""
    kind = ALGORITHMS[settings.algorithm]
    unused = {"training.global_lr": not settings.uses_global_lr, "training.local_lr": not kind.uses_local_lr}
    flat = {name: value for name, value in settings.flat().items() if not unused.get(name)}
    return {"algorithm": settings.algorithm, **flat}


def read_entry(raw: Any) -> RunEntry | None:
    """Return an entry of a summary; None if it is not of a run. A number that is not one is left out."""
    if not isinstance(raw, dict) or not is_whole(raw.get("seed")):
        return None
    label, algorithm, status, plan = (text_of(raw.get(n)) for n in ("label", "algorithm", "status", "plan_sha256"))
    swept = raw.get("swept")
    rates = {name: rate for name in RATES if (rate := number(raw.get(name))) is not None}
    numbers = {name: number(raw.get(name)) for name in NUMBERS}
    if "hit_seconds" in raw:  # of a search: the time that ranks its pairs, which only a run that held the target has
        numbers["first_hit_seconds"] = number(raw["hit_seconds"])
    swept = swept if isinstance(swept, dict) else {}
    return RunEntry(label, algorithm, raw["seed"], status, plan, swept, rates, numbers, metric=metric_of(raw))


def _so_far(trail: Trail, metric: str) -> dict[str, float | None]:
    numbers: dict[str, float | None] = dict.fromkeys(NUMBERS)
    numbers["rounds"], numbers["seconds"] = trail.rounds[-1], trail.seconds[-1]
    numbers["final_accuracy"] = trail.accuracy[-1]
    numbers["final_perplexity"] = perplexity(metric, trail.loss[-1])
    numbers["best_accuracy"] = max((a for a in trail.accuracy if a is not None), default=None)
    return numbers


def _best_label(raw: dict[str, Any]) -> str:
    return label_with_rates(text_of(raw.get("label")), number(raw.get("global_lr")), number(raw.get("local_lr")))


def _text_of(path: Path, problems: list[str]) -> str | None:
    if path.is_symlink():
        problems.append(f"{path.name} is a link")
        return None
    try:
        return read_regular(path).decode()
    except FileNotFoundError:
        problems.append(f"{path.name} is missing")
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} cannot be read: {first_line(error)}")
    return None


def _toml(name: str, text: str | None, problems: list[str]) -> dict[str, Any]:
    try:
        return {} if text is None else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        problems.append(f"{name} is not valid TOML: {first_line(error)}")
        return {}


def _json(path: Path, problems: list[str]) -> dict[str, Any]:
    text = _text_of(path, problems)
    try:
        value = {} if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        problems.append(f"{path.name} is not valid JSON: {first_line(error)}")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name} is not a JSON object")
        return {}
    return value


def _read_partition(path: Path) -> tuple[PartitionCounts | None, list[str]]:
    if not path.exists():
        return None, []
    notes: list[str] = []
    found = _json(path, notes)
    if notes:
        return None, notes
    counts = found.get("counts")
    rows = [row for row in counts if _is_row(row)] if isinstance(counts, list) else []
    if not rows or len(rows) != len(counts or ()) or len({len(row) for row in rows}) != 1:
        return None, [f"{path.name} is not a table of clients by classes"]
    return PartitionCounts(text_of(found.get("title")), rows), []


def _is_row(row: Any) -> bool:
    return isinstance(row, list) and bool(row) and all(type(value) is int for value in row)


def _changed(path: Path) -> float | None:
    try:
        return max(((path / name).stat().st_mtime for name in MARKERS if (path / name).exists()), default=None)
    except OSError:
        return None


def _dicts(found: Any) -> list[dict[str, Any]]:
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
