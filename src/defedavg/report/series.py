"""Series: a setting with its seeds. How it is named, ranked, judged in a sentence, and drawn."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from ..jsonio import about
from ..runstore.reader import Entry, Folder, flat, number
from .plan_digest import Digest
from .plots import look, tint

MOST_SHADES = 3  # settings of an algorithm that are told apart by shades of its colour
WHEEL = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#8C6D31")
"""Okabe and Ito's colours without black and yellow, and two that are as safe."""

SYMBOLS = {
    "s": "square", "^": "triangle-up", "v": "triangle-down", "D": "diamond", "o": "circle", "X": "x", "P": "cross",
    "<": "triangle-left", ">": "triangle-right", "p": "pentagon", "h": "hexagon", "*": "star", "d": "diamond-tall",
}  # fmt: skip


@dataclass
class Series:
    """A setting of one folder, with its runs."""

    folder: Folder
    label: str
    runs: list[Entry]
    digests: dict[int, Digest] = field(default_factory=dict)  # by seed
    notes: list[str] = field(default_factory=list)

    @property
    def algorithm(self) -> str:
        """Whose setting it is."""
        return self.runs[0].algorithm

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting by its dotted name, or no more than the algorithm where the configuration cannot be read."""
        found = self.folder.settings(self.label)
        return {"algorithm": self.algorithm} if found is None else flat(found)

    @property
    def target(self) -> float | None:
        """The accuracy that it is timed to."""
        return next((t for run in self.runs if (t := run.numbers["target_accuracy"])), None) or number(
            self.settings.get("stop.target_accuracy")
        )

    def key(self) -> tuple[Any, ...]:
        """What must be equal for two series to be compared."""
        task = tuple((name, value) for name, value in self.settings.items() if name.startswith("task."))
        if not task:
            task = (("folder", str(self.folder.path)),)
        return (*task, self.target or 0.0)

    def rank(self) -> tuple[float, float, float]:
        """Less is better: seeds that missed the target, the mean time to it, and how inaccurate they were."""
        hits = known(self.runs, "first_hit_seconds")
        best = known(self.runs, "best_accuracy")
        return len(self.runs) - len(hits), fmean(hits) if hits else math.inf, -(fmean(best) if best else 0.0)


def known(runs: Iterable[Entry], name: str) -> list[float]:
    """A figure of those runs that have it."""
    return [value for run in runs if (value := run.numbers[name]) is not None]


def shorten(text: str, most: int = 60) -> str:
    """A name fit for a sentence."""
    return text if len(text) <= most else text[: most - 1] + "…"


def names_of(own: Sequence[Series]) -> list[str]:
    """Labels, with the study in front where two would be the same."""
    labels = [each.label for each in own]
    return [f"{each.folder.name}: {each.label}" if labels.count(each.label) > 1 else each.label for each in own]


def looks_of(own: Sequence[Series], order: Sequence[int]) -> list[dict[str, Any]]:
    """A colour for light and for dark, a dash and a symbol: an algorithm's own, as in every other figure.

    Where an algorithm has many settings their shades could not be told apart: then looks go by rank, so that those
    that are ticked at first differ as much as they can.
    """
    counts = Counter(each.algorithm for each in own)
    if max(counts.values()) > MOST_SHADES or (len(counts) == 1 and len(own) > 1):
        return [_ranked(order.index(i)) for i in range(len(own))]
    seen: Counter[str] = Counter()
    found = []
    for each in own:
        how = look(each.algorithm, seen[each.algorithm])
        seen[each.algorithm] += 1
        dash = how["linestyle"]
        pixels = "solid" if dash == "-" else ",".join(f"{2.2 * part:.3g}px" for part in dash[1])
        symbol = SYMBOLS[how["marker"]] + ("-open" if how["markerfacecolor"] == "white" else "")
        found.append(_look(how["color"], pixels, symbol))
    return found


def _ranked(place: int) -> dict[str, Any]:
    dash = ("solid", "9px,4px", "3px,3px", "10px,3px,3px,3px")[place // len(WHEEL) % 4]
    return _look(WHEEL[place % len(WHEEL)], dash, list(SYMBOLS.values())[place % len(SYMBOLS)])


def _look(colour: str, dash: str, symbol: str) -> dict[str, Any]:
    dark = "#e6e6e6" if colour == "#000000" else tint(colour, 0.3)
    return {"light": colour, "dark": dark, "dash": dash, "symbol": symbol}


def decided(best: Series, target: float | None) -> bool:
    """Whether the best of a group did anything that can be ranked."""
    return best.rank()[0] < len(best.runs) if target else bool(known(best.runs, "best_accuracy"))


def verdict(ranked: Sequence[tuple[str, Series]], target: float | None) -> str:
    """What came out, in a sentence or two."""
    name, best = ranked[0]
    if not decided(best, target):
        goal = f"{100 * target:g} %" if target else "any accuracy"
        return f"Nothing reached {goal} yet." if any(_running(s) for _, s in ranked) else f"Nothing reached {goal}."
    if not target:
        value = fmean(known(best.runs, "best_accuracy"))
        return f"{name} was the most accurate: {100 * value:.1f} %. No target accuracy was set, so nothing was timed."
    missed, seconds, _ = best.rank()
    count = "" if not missed else f" in {len(best.runs) - missed:g} of {len(best.runs)} seeds"
    said = f"{name} reached {100 * target:g} % first: after {seconds:.3g} simulated seconds{count}"
    hit = [(other, s.rank()) for other, s in ranked[1:] if s.rank()[0] < len(s.runs)]
    if hit and hit[0][1][0] == missed and seconds > 0:
        ratio = hit[0][1][1] / seconds
        said += f", {about(ratio)} times as fast as {hit[0][0]}" if ratio >= 1.05 else f", just ahead of {hit[0][0]}"
    late = [other for other, s in ranked[1:] if s.rank()[0] == len(s.runs) and not _running(s)]
    if late:
        shown = ", ".join(late[:3]) + (f" and {len(late) - 3} more" if len(late) > 3 else "")
        said += f". {shown} did not reach it"
    return f"{said}. {_caution(best, [s for _, s in ranked[1:] if s.rank()[0] < len(s.runs)])}".strip()


def _caution(best: Series, others: Sequence[Series]) -> str:
    """How far the ranking can be trusted."""
    if not others:
        return ""
    if min(len(best.runs), len(others[0].runs)) == 1:
        return "With one seed only, another might rank them otherwise."
    spreads = [stdev(hits) for s in (best, others[0]) if len(hits := known(s.runs, "first_hit_seconds")) > 1]
    if spreads and others[0].rank()[1] - best.rank()[1] < max(spreads):
        return "The lead over the second is smaller than the spread over seeds, so it may be chance."
    return ""


def _running(series: Series) -> bool:
    return not series.folder.finished and any(run.status == "running" for run in series.runs)
