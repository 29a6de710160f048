"""A run folder, read back for a page.

The law of this file: whatever lies in a folder came from outside. Every value is checked; what is missing or damaged
becomes a note for the reader, never a traceback; and a folder that is being written is read as far as it goes.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..algorithms import ALGORITHMS
from ..config import study as config
from ..config.study import Settings, Study, SweepPoint
from ..errors import UserError, first_line
from ..fileio import file_name

NUMBERS = (
    "target_accuracy", "first_hit_seconds", "sustained_seconds", "rounds", "seconds", "best_accuracy",
    "final_accuracy", "diverged_at", "updates_trained", "updates_started", "staleness_mean", "wall_seconds",
)  # fmt: skip
"""What an entry of a summary may say in numbers."""

MEASURED = ("round", "seconds", "accuracy", "loss", "train_loss", "staleness", "updates", "wall_seconds")
"""What a line of measurements says besides what it is of."""

DEEPEST = 4  # levels below a folder of runs at which runs are looked for
MOST_TEXT = 2000  # characters of one value


@dataclass(slots=True)
class Trail:
    """The measurements of one run, in order; None where something is no number."""

    rounds: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)
    accuracy: list[float | None] = field(default_factory=list)
    loss: list[float | None] = field(default_factory=list)
    staleness: list[float | None] = field(default_factory=list)

    def add(self, line: Mapping[str, Any]) -> None:
        """One more measurement; one that does not say when it was made is left out."""
        when = [number(line.get(name)) for name in ("round", "seconds", "updates")]
        if None in when:
            return
        for own, value in zip((self.rounds, self.seconds, self.updates), when, strict=True):
            own.append(value)  # type: ignore[arg-type]
        for name in ("accuracy", "loss", "staleness"):
            getattr(self, name).append(number(line.get(name)))


@dataclass(frozen=True, slots=True)
class Entry:
    """One run: a setting and a seed."""

    label: str
    algorithm: str
    seed: int
    status: str
    plan: str  # SHA-256, or empty
    numbers: Mapping[str, float | None]
    trail: Trail


@dataclass(frozen=True, slots=True)
class Split:
    """Samples of clients (rows) by classes."""

    title: str
    counts: list[list[int]]


@dataclass(frozen=True)
class Folder:
    """Everything that was found."""

    path: Path
    name: str
    searched: bool  # a search for rates, which keeps no plans
    finished: bool
    text: str  # of the configuration
    study: Study | None
    runs: tuple[Entry, ...]
    provenance: Mapping[str, str]
    split: Split | None
    best: tuple[str, ...]  # labels that a search chose
    notes: tuple[str, ...]

    def settings(self, label: str) -> Settings | None:
        """The settings of a label, if the configuration can still be read."""
        return self._settings.get(label)

    @cached_property
    def _settings(self) -> dict[str, Settings]:
        return {} if self.study is None else dict(_labels(self.study, self.runs))

    def plan_path(self, entry: Entry) -> Path | None:
        """Where the plan of a run lies, if it is there."""
        path = self.path / "plans" / (file_name(entry.label, entry.seed) + ".jsonl.gz")
        return path if path.is_file() else None


def is_run(path: Path) -> bool:
    """Whether a folder is that of a run."""
    return (path / "config.toml").is_file() and (path / "summary.json").is_file()


def find_runs(root: Path, depth: int = DEEPEST) -> Iterator[Path]:
    """The run folders in and below a folder, in the order of their names; links are not followed."""
    if is_run(root):
        yield root
        return
    try:
        below = sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:
        return
    for path in below if depth > 0 else ():
        yield from find_runs(path, depth - 1)


def read_folder(path: Path) -> Folder:
    """Read a run folder; one that cannot be read at all raises ``UserError``."""
    notes: list[str] = []
    summary = _summary(path, notes)
    text, study = _config(path, notes)
    trails = read_trails(path, notes)
    points = path / "points.jsonl"
    searched = points.is_file()
    found = list(_lines(points, notes)) if searched else _dicts(summary.get("runs"))
    entries = [entry for raw in found if (entry := _entry(raw, trails)) is not None]
    known = {(entry.label, entry.seed) for entry in entries}
    for (label, seed), (algorithm, trail) in trails.items():
        if (label, seed) not in known:  # still running, or broken off
            entries.append(Entry(label, algorithm, seed, "running", "", _so_far(trail), trail))
    made = summary.get("provenance")
    return Folder(
        path=path,
        name=_text(summary.get("name")) or path.name,
        searched=searched,
        finished=summary.get("finished") is True,
        text=text,
        study=study,
        runs=tuple(entries),
        provenance={_text(k): _text(v) for k, v in made.items()} if isinstance(made, dict) else {},
        split=_split(path, notes),
        best=tuple(_pair_label(raw) for raw in _dicts(summary.get("best"))),
        notes=tuple(notes),
    )


def of_records(name: str, records: Iterable[Mapping[str, Any]], provenance: Mapping[str, str] | None = None) -> Folder:
    """Results that lie in no run folder; the ``curve`` of a record is a list of measurements."""
    found = []
    for raw in records:
        trail = Trail()
        for line in _dicts(raw.get("curve")):
            trail.add(line)
        entry = _entry(raw, {})
        found += [] if entry is None else [replace(entry, trail=trail)]
    return Folder(Path(name), name, False, True, "", None, tuple(found), provenance or {}, None, (), ())


def _summary(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        found = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is no run: it has no summary.json; name a folder that `defedavg run` made") from None
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"summary.json cannot be read: {first_line(error)}")
        return {}
    if not isinstance(found, dict):
        notes.append("summary.json is not the summary of a run")
        return {}
    return found


def _config(path: Path, notes: list[str]) -> tuple[str, Study | None]:
    try:
        text = (path / "config.toml").read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        notes.append(f"config.toml cannot be read: {first_line(error)}")
        return "", None
    try:
        return text, config.study(tomllib.loads(text), folder=path)
    except (UserError, ValueError, RecursionError) as error:
        notes.append(f"what needs the configuration is left out: {first_line(error)}")
        return text, None


def _labels(study: Study, runs: Iterable[Entry]) -> Iterator[tuple[str, Settings]]:
    points: dict[str, SweepPoint] = {point.label: point for point in study.points()}
    for label in dict.fromkeys(entry.label for entry in runs):
        if label in points:
            yield label, points[label].settings
            continue
        base, *rates = label.split(" η")  # a search names its rates behind the setting
        if base in points:
            settings = points[base].settings
            given: dict[str, Any] = {}
            try:
                for rate in rates:
                    given["global_lr" if rate.startswith("=") else "local_lr"] = float(rate.split("=")[-1])
                yield label, replace(settings, training=replace(settings.training, **given))
            except (UserError, ValueError):
                continue


def flat(settings: Settings) -> dict[str, Any]:
    """Every setting by its dotted name, without the rates that the algorithm does not have."""
    found: dict[str, Any] = {"algorithm": settings.algorithm}
    for table in config.TABLES:
        found |= {f"{table}.{name}": value for name, value in asdict(getattr(settings, table)).items()}
    kind = ALGORITHMS[settings.algorithm]
    for name, has in (("global_lr", kind.uses_global_lr), ("local_lr", kind.uses_local_lr)):
        if not has:
            del found[f"training.{name}"]
    found |= {f"{settings.algorithm}.{name}": value for name, value in asdict(settings.algorithm_settings).items()}
    return found


def read_trails(path: Path, notes: list[str]) -> dict[tuple[str, int], tuple[str, Trail]]:
    """The measurements so far, by label and seed, with the algorithm."""
    found: dict[tuple[str, int], tuple[str, Trail]] = {}
    for line in _lines(path / "metrics.jsonl", notes):
        seed = line.get("seed")
        if type(seed) is int:
            found.setdefault((_label(line), seed), (_text(line.get("algorithm")), Trail()))[1].add(line)
    return {key: own for key, own in found.items() if own[1].rounds}


def _label(line: Mapping[str, Any]) -> str:
    """What a line of measurements is of; files of before did not say it in one word."""
    if isinstance(line.get("label"), str):
        return _text(line["label"])
    swept = [f"{name.split('.')[-1]}={value}" for name, value in line.items() if "." in name]
    return _text(" ".join([str(line.get("algorithm")), *swept]))


def _lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; a last line that is being written is left for later."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {first_line(error)}")
        return
    bad = 0
    for line in data.split(b"\n")[:-1]:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            yield found
        else:
            bad += 1
    if bad:
        notes.append(f"{path.name}: {bad} damaged line{'s' if bad > 1 else ''} left out")


def _entry(raw: Mapping[str, Any], trails: Mapping[tuple[str, int], tuple[str, Trail]]) -> Entry | None:
    seed = raw.get("seed")
    if type(seed) is not int:
        return None
    label, algorithm = _text(raw.get("label")), _text(raw.get("algorithm"))
    trail = trails[label, seed][1] if (label, seed) in trails else Trail()
    numbers = {name: number(raw.get(name)) for name in NUMBERS}
    return Entry(label, algorithm, seed, _text(raw.get("status")), _text(raw.get("plan_sha256")), numbers, trail)


def _so_far(trail: Trail) -> dict[str, float | None]:
    numbers: dict[str, float | None] = dict.fromkeys(NUMBERS)
    numbers["rounds"], numbers["seconds"] = trail.rounds[-1], trail.seconds[-1]
    numbers["final_accuracy"] = trail.accuracy[-1]
    numbers["best_accuracy"] = max((a for a in trail.accuracy if a is not None), default=None)
    return numbers


def _pair_label(raw: dict[str, Any]) -> str:
    rates = [f"{name}={raw[key]:g}" for name, key in (("η", "global_lr"), ("η̄", "local_lr")) if number(raw.get(key))]
    return " ".join([_text(raw.get("label")), *rates])


def _split(path: Path, notes: list[str]) -> Split | None:
    try:
        found = json.loads((path / "split.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"split.json cannot be read: {first_line(error)}")
        return None
    counts = found.get("counts") if isinstance(found, dict) else None
    rows = [row for row in counts if isinstance(row, list) and row] if isinstance(counts, list) else []
    whole = len(rows) == len(counts or ()) > 0 and all(type(value) is int for row in rows for value in row)
    if not whole or len({len(row) for row in rows}) != 1:
        notes.append("split.json is no table of clients by classes")
        return None
    return Split(_text(found.get("title")), rows)


def _dicts(found: Any) -> list[dict[str, Any]]:
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _text(value: Any) -> str:
    """Any value as text, short enough for a page."""
    text = "" if value is None else str(value)
    return text if len(text) <= MOST_TEXT else text[: MOST_TEXT - 1] + "…"


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        made = float(value)
    except OverflowError:
        return None
    return made if math.isfinite(made) else None
