"""Series: a setting with its seeds. How the report names, ranks, compares and draws them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..jsonio import about
from ..runstore.metrics import number
from ..runstore.reader import RunEntry, RunFolder, flat_settings
from .plan_digest import Digest
from .plots import look, tint
from .tables import mean, score, spread, values

MAX_SHADES = 3  # settings of one algorithm that shades of its colour can tell apart
# Okabe and Ito's colours without black and yellow, and two more that colour-blind readers can distinguish.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#8C6D31")
# Plotly's names of matplotlib's markers.
SYMBOLS = {
    "s": "square", "^": "triangle-up", "v": "triangle-down", "D": "diamond", "o": "circle", "X": "x", "P": "cross",
    "<": "triangle-left", ">": "triangle-right", "p": "pentagon", "h": "hexagon", "*": "star", "d": "diamond-tall",
}  # fmt: skip


class Series:
    """A setting of one folder, with its runs."""

    def __init__(self, folder: RunFolder, label: str, runs: Sequence[RunEntry]) -> None:
        self.folder, self.label, self.runs = folder, label, runs
        self.digests: dict[int, Digest] = {}  # by seed
        self.notes: list[str] = []
        self.algorithm, self.metric = runs[0].algorithm, runs[0].metric
        settings = folder.settings(label)  # None where the configuration cannot be read
        self.settings = {"algorithm": self.algorithm} if settings is None else flat_settings(settings)
        self.numbers = [run.numbers for run in runs]
        target = next((t for numbers in self.numbers if (t := numbers["target_accuracy"])), None)
        self.target = target or number(self.settings.get("stop.target_accuracy"))
        self.hits = len(values(self.numbers, "first_hit_seconds"))
        self.misses = len(runs) - self.hits
        seconds = mean(self.numbers, "first_hit_seconds")  # of the seeds that reached the target
        self.seconds_to_target = math.inf if seconds is None else seconds
        self.running = not folder.finished and any(run.status == "running" for run in runs)

    def key(self) -> tuple[Any, ...]:
        """Return the values that must be equal for two series to be compared: the task, the target and the metric."""
        task = [(name, value) for name, value in self.settings.items() if name.startswith("task.")]
        return (*(task or [("folder", str(self.folder.path))]), self.target or 0.0, self.metric)

    def rank(self) -> tuple[float, float, float]:
        """Return a sort key, lower is better: seeds that missed the target, mean time to it, negative metric."""
        best = mean(self.numbers, "best_accuracy")
        return self.misses, self.seconds_to_target, math.inf if best is None else -best

    def goal(self) -> str:
        """Return the target as text."""
        target = self.target or 0.0
        return f"{100 * target:g} %" if self.metric == "accuracy" else f"a {self.metric} of {target:g}"


def shorten(text: str, limit: int = 60) -> str:
    """Shorten a name so that it fits into a sentence."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def names_of(group: Sequence[Series]) -> list[str]:
    """Return the labels, with the study's name in front where two labels are equal."""
    labels = [series.label for series in group]
    return [f"{s.folder.name}: {s.label}" if labels.count(s.label) > 1 else s.label for s in group]


def looks_of(group: Sequence[Series], order: Sequence[int]) -> list[dict[str, Any]]:
    """Return the colours (light and dark theme), dash and symbol of every series, as in every other figure."""
    # Shades of one colour cannot distinguish many settings: then styles follow the rank, so the first differ most.
    counts = Counter(series.algorithm for series in group)
    if max(counts.values()) > MAX_SHADES or (len(counts) == 1 and len(group) > 1):
        return [_look_by_rank(order.index(i)) for i in range(len(group))]
    seen: Counter[str] = Counter()
    looks = []
    for series in group:
        style = look(series.algorithm, seen[series.algorithm])
        seen[series.algorithm] += 1
        dash = style["linestyle"]
        pixels = "solid" if dash == "-" else ",".join(f"{2.2 * part:.3g}px" for part in dash[1])
        symbol = SYMBOLS[style["marker"]] + ("-open" if style["markerfacecolor"] == "white" else "")
        looks.append(_look(style["color"], pixels, symbol))
    return looks


def _look_by_rank(rank: int) -> dict[str, Any]:
    dash = ("solid", "9px,4px", "3px,3px", "10px,3px,3px,3px")[rank // len(COLOURS) % 4]
    return _look(COLOURS[rank % len(COLOURS)], dash, list(SYMBOLS.values())[rank % len(SYMBOLS)])


def _look(colour: str, dash: str, symbol: str) -> dict[str, Any]:
    dark = "#e6e6e6" if colour == "#000000" else tint(colour, 0.3)
    return {"light": colour, "dark": dark, "dash": dash, "symbol": symbol}


def has_result(best: Series, target: float | None) -> bool:
    """Return whether the best series of a group reached the target, or was evaluated where no target is set."""
    return best.hits > 0 if target else mean(best.numbers, "best_accuracy") is not None


def conclusion(ranked: Sequence[tuple[str, Series]], target: float | None) -> str:
    """Return the result of a group, in a sentence or two."""
    name, best = ranked[0]
    if not has_result(best, target):
        running = any(series.running for _, series in ranked)
        return f"No run reached {best.goal() if target else f'any {best.metric}'}{' yet' if running else ''}."
    if not target:
        value = score(mean(best.numbers, "best_accuracy"), best.metric)
        most = "was the most accurate" if best.metric == "accuracy" else f"had the best {best.metric}"
        return f"{name} {most}: {value}. No target {best.metric} was set, so times are not compared."
    return _comparison(name, best, ranked[1:])


def _comparison(name: str, best: Series, others: Sequence[tuple[str, Series]]) -> str:
    reached = [(other, series) for other, series in others if series.hits]
    missed = [other for other, series in others if not series.hits and not series.running]
    seeds = f" in {best.hits} of {len(best.runs)} seeds" if best.misses else ""
    sentence = f"{name} reached {best.goal()} first: after {best.seconds_to_target:.3g} simulated seconds{seeds}"
    if reached:
        sentence += _lead(best, *reached[0])
    if missed:
        more = f" and {len(missed) - 3} more" if len(missed) > 3 else ""
        sentence += f". {', '.join(missed[:3])}{more} did not reach it"
    return f"{sentence}. {_caveat(best, reached[0][1]) if reached else ''}".strip()


def _lead(best: Series, name: str, second: Series) -> str:
    """Return how much faster the best was than the second, if as many seeds of both reached the target."""
    if second.misses != best.misses or best.seconds_to_target <= 0:
        return ""
    ratio = second.seconds_to_target / best.seconds_to_target
    return f", {about(ratio)} times as fast as {name}" if ratio >= 1.05 else f", just ahead of {name}"


def _caveat(best: Series, second: Series) -> str:
    """Return why the ranking may be chance, if it may."""
    if min(len(best.runs), len(second.runs)) == 1:
        return "This is one seed only; other seeds may rank differently."
    deviations = [spread(series.numbers, "first_hit_seconds") for series in (best, second)]
    lead = second.seconds_to_target - best.seconds_to_target
    if any(deviation is not None and lead < deviation for deviation in deviations):
        return "The lead over the second is smaller than the spread over seeds, so it may be chance."
    return ""
