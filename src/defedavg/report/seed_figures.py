"""Figures over seeds: one definition for every table, page and text.

A figure has one value per seed. Over seeds it is the mean ± the sample standard deviation (n − 1); one seed has none.
The best accuracy of a seed is the highest of all its evaluations. The time to the target is the mean over the seeds
that reached it, and their number is always stated where some did not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, TypeAlias

from ..runstore.metrics import number
from ..runstore.reader import RunEntry

Record: TypeAlias = Mapping[str, Any]
"""The numbers and the status of one run; a number is None where it is unknown."""

REACHED, MISSED = "reached", "missed"
STOPPED = ("diverged", "dropped", "stalled", "interrupted", "running")
"""Why a seed ended, or has not ended, before its limits and without a hit."""

_MAX_DECIMALS = 6


@dataclass(frozen=True, slots=True)
class SeedFigure:
    """A figure over the seeds that have it."""

    count: int
    mean: float | None
    sd: float | None  # None with fewer than two seeds

    def text(self, alone: str = ".4g") -> str:
        """Return mean ± deviation with two digits of the deviation; ``alone`` is the format of a mean without one."""
        if self.mean is None:
            return "–"
        if self.sd is None:
            return format(self.mean, alone)
        if not self.sd:
            return f"{self.mean:{alone}} ± 0"
        decimals = max(0, 1 - math.floor(math.log10(self.sd)))
        if decimals > _MAX_DECIMALS:
            return f"{self.mean:.7g} ± {self.sd:.2g}"
        return f"{self.mean:.{decimals}f} ± {self.sd:.{decimals}f}"


def values(records: Iterable[Record], name: str) -> list[float]:
    """Return a number of every record that has it."""
    return [value for record in records if (value := number(record[name])) is not None]


def over_seeds(records: Iterable[Record], name: str, factor: float = 1.0) -> SeedFigure:
    """Return a figure over the records that have it, in units of ``1 / factor``."""
    known = [factor * value for value in values(records, name)]
    return SeedFigure(len(known), fmean(known) if known else None, stdev(known) if len(known) > 1 else None)


def mean(records: Iterable[Record], name: str) -> float | None:
    """Return the mean over the records that have the number, or None if none has."""
    return over_seeds(records, name).mean


def spread(records: Iterable[Record], name: str) -> float | None:
    """Return the standard deviation over the records that have the number, or None if fewer than two have."""
    return over_seeds(records, name).sd


def record_of(entry: RunEntry) -> dict[str, Any]:
    """Return what tables need of a stored run, with the round in which it reached the target."""
    hit, target, rounds = entry.numbers["first_hit_seconds"], entry.numbers["target_accuracy"], None
    if hit is not None:
        trail = entry.trail
        moments = zip(trail.rounds, trail.seconds, trail.accuracy, strict=True)
        rounds = next((round_ for round_, at, a in moments if at >= hit and (a or 0.0) >= (target or 0.0)), None)
    return {**entry.numbers, "status": entry.status, "metric": entry.metric, "rounds_to_target": rounds}


def outcome(record: Record) -> str:
    """Return how one seed ended, in one word; every seed has exactly one."""
    if record["first_hit_seconds"] is not None:
        return REACHED
    if record["diverged_at"] is not None:
        return "diverged"
    status = str(record["status"])
    return status if status in STOPPED else MISSED


def outcomes(records: Iterable[Record]) -> dict[str, int]:
    """Return the number of seeds of every outcome; they sum to the number of seeds."""
    return dict(Counter(map(outcome, records)))


def of_seeds(count: int, total: int) -> str:
    """Return "3 of 5 seeds"."""
    return f"{count} of {total} seed{'s' if total != 1 else ''}"


def over_seeds_caption(metric: str = "accuracy") -> str:
    """Return what the figures of a table are."""
    return f"Mean ± sample standard deviation over seeds. best {metric}: the highest of each seed."


def accuracy_text(records: Iterable[Record], name: str = "best_accuracy", metric: str = "accuracy") -> str:
    """Return an accuracy over seeds as a percentage, or a metric of the task's own as it is."""
    if metric != "accuracy":
        return over_seeds(records, name).text()
    figure = over_seeds(records, name, 100.0)
    return "–" if figure.mean is None else f"{figure.text('.1f')} %"


def time_to_target(records: Sequence[Record]) -> str:
    """Return the time to the target over the seeds that reached it, and how many did where some did not."""
    hits = outcomes(records).get(REACHED, 0)
    parts = [f"{over_seeds(records, 'first_hit_seconds').text()} s"] if hits else []
    if hits < len(records) and any(record["target_accuracy"] for record in records):
        parts.append(of_seeds(hits, len(records)))
    return ", ".join([*parts, *_reasons(records)]) or "–"


def _reasons(records: Sequence[Record]) -> list[str]:
    """Return how many seeds ended early and why, and how many diverged after they had reached the target."""
    counts = outcomes(records)
    reasons = {word: f"{counts[word]} {word}" for word in STOPPED if word in counts}
    rounds = {f"{r['diverged_at']:.0f}": None for r in records if outcome(r) == "diverged" and r["diverged_at"]}
    if rounds:
        reasons["diverged"] += f" at round {', '.join(rounds)}"
    later = sum(r["diverged_at"] is not None for r in records if outcome(r) == REACHED)
    return [*reasons.values(), *([f"{later} of them diverged later"] if later else [])]
