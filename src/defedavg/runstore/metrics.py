"""The lines of metrics.jsonl, checked: what is missing or damaged is skipped and counted."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import first_line
from ..fileio import read_regular
from ..jsonio import is_whole

WHOLE = ("round", "updates")
MAX_TEXT = 2000  # characters of one value
REAL = ("seconds", "accuracy", "loss", "train_loss", "staleness", "wall_seconds")


PER_POSITION = "token_accuracy"
"""The metric of tasks whose targets are tokens; their results have a perplexity."""

LARGEST_EXPONENT = 600.0  # a larger loss would overflow
LARGEST = 1e300  # a percentage of a larger number, or its sum over seeds, could overflow


def number(value: Any) -> float | None:
    """Return a number of at most ``LARGEST`` as a float, and None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        made = float(value)
    except OverflowError:
        return None
    return made if abs(made) <= LARGEST else None


@dataclass(frozen=True, slots=True)
class Measurement:
    """One evaluation of a run: ``values`` has all names of ``WHOLE`` and ``REAL``, None where a number is missing."""

    label: str
    algorithm: str
    seed: int
    swept: Mapping[str, Any]
    values: Mapping[str, float | None]
    metric: str = "accuracy"  # what ``accuracy`` is, where the task has a metric of its own


def text_of(value: Any) -> str:
    """Return any value as text, short enough for a page."""
    text = "" if value is None else str(value)
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def metric_of(record: Mapping[str, Any]) -> str:
    """Return the name of the metric of a line or an entry."""
    return text_of(record.get("metric")) or "accuracy"


def common_metric(metrics: Iterable[str]) -> str:
    """Return the name of a metric that all runs have; otherwise a name that fits any."""
    distinct = set(metrics) or {"accuracy"}
    return distinct.pop() if len(distinct) == 1 else "metric"


def metric_field(metric: str) -> dict[str, str]:
    """Return what a line or an entry says about its metric: nothing if it is the accuracy."""
    return {} if metric == "accuracy" else {"metric": metric}


def perplexity(metric: str, loss: float | None) -> float | None:
    """Return the exponential of the mean loss per token; None for a task whose targets are not tokens."""
    if metric != PER_POSITION or loss is None or not math.isfinite(loss):
        return None
    return math.exp(min(loss, LARGEST_EXPONENT))


def measurement(line: Mapping[str, Any]) -> Measurement | None:
    """Return the evaluation that a line describes; None if it does not say of which run and when."""
    seed, seconds = line.get("seed"), number(line.get("seconds"))
    if seconds is None or not all(is_whole(line.get(name)) for name in ("seed", *WHOLE)):
        return None
    if any(line[name] < 0 for name in WHOLE):
        return None
    assert isinstance(seed, int)
    values: dict[str, float | None] = {name: line[name] for name in WHOLE}
    values |= {name: number(line.get(name)) for name in REAL}
    algorithm = text_of(line.get("algorithm"))
    swept = {name: value for name, value in line.items() if "." in name}
    label = line.get("label")
    if not isinstance(label, str):  # written before lines had labels
        label = " ".join([algorithm, *(f"{name.split('.')[-1]}={value}" for name, value in swept.items())])
    return Measurement(text_of(label), algorithm, seed, swept, values, metric_of(line))


@dataclass(slots=True)
class Trail:
    """The evaluations of one run, in order; None where a value is not a number."""

    rounds: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)
    accuracy: list[float | None] = field(default_factory=list)
    loss: list[float | None] = field(default_factory=list)
    staleness: list[float | None] = field(default_factory=list)

    def add(self, line: Mapping[str, Any]) -> None:
        """Append an evaluation; skip one without round, time or number of updates."""
        when = [number(line.get(name)) for name in ("round", "seconds", "updates")]
        if None in when:
            return
        for column, value in zip((self.rounds, self.seconds, self.updates), when, strict=True):
            column.append(value)  # type: ignore[arg-type]
        for name in ("accuracy", "loss", "staleness"):
            getattr(self, name).append(number(line.get(name)))


@dataclass(slots=True)
class JsonLines:
    """The objects in a file of JSON lines. A last line without a line break is still being written."""

    objects: list[dict[str, Any]] = field(default_factory=list)
    damaged: int = 0
    incomplete: bool = False
    problem: str | None = None

    def notes(self, name: str) -> list[str]:
        """Return what a reader should know about the file."""
        if self.problem is not None:
            return [f"{name} cannot be read: {self.problem}"]
        return (
            [f"{name}: {self.damaged} damaged line{'s' if self.damaged > 1 else ''} left out"] if self.damaged else []
        )


def read_lines(path: Path) -> JsonLines:
    """Read a file of JSON lines; one that does not exist is empty."""
    found = JsonLines(problem="it is a link" if path.is_symlink() else None)
    try:
        data = b"" if found.problem else read_regular(path)
    except FileNotFoundError:
        return found
    except OSError as error:
        found.problem = first_line(error)
        return found
    *lines, rest = data.split(b"\n")
    found.incomplete = bool(rest)
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            found.objects.append(value)
        else:
            found.damaged += 1
    return found


def read_metrics(path: Path) -> tuple[list[Measurement], JsonLines]:
    """Return the evaluations in a file, and what is known about its lines."""
    lines = read_lines(path)
    measurements = [one for line in lines.objects if (one := measurement(line)) is not None]
    lines.damaged += len(lines.objects) - len(measurements)
    return measurements, lines


def missing_metrics(path: Path, entries: Iterable[Any], *, finished: bool) -> list[str]:
    """Return a note if the file does not exist although runs have ended; a deployment can stall without evaluation."""
    ended = finished or any(isinstance(entry, dict) and entry.get("status") != "stalled" for entry in entries)
    return [f"{path.name} is missing"] if ended and not (path.exists() or path.is_symlink()) else []
