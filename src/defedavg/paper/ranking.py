"""Who comes first for every n, here and in the paper."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from .published import BOUNDS, Cell
from .result_files import Result


@dataclass(frozen=True, slots=True)
class Until:
    """The target was not held until then, when a run was given up."""

    seconds: float

    def __str__(self) -> str:
        return f">{self.seconds:.0f}"


def ranking(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Who comes first for every n: by the median over seeds of the time from which the target is held.

    A seed that does not hold it counts as endless. ``first_in``: in how many seeds the first was first of those run;
    ``open``: those that were given up before the first's time, who might have been sooner still.
    """
    groups: dict[Cell, dict[str, dict[int, Result]]] = {}
    for one in results:
        cell = Cell(**one["piece"]["cell"])
        groups.setdefault(replace(cell, algorithm=""), {}).setdefault(cell.algorithm, {})[one["seed"]] = one
    found = []
    for cell, own in groups.items():
        if len(own) < 2:
            continue
        times = {name: {seed: _held(one) for seed, one in runs.items()} for name, runs in own.items()}
        medians = {name: median(seconds.values()) for name, seconds in times.items()}
        paper = {name: replace(cell, algorithm=name).seconds or math.inf for name in own}
        first, paper_first = (min(seconds, key=seconds.__getitem__) for seconds in (medians, paper))
        ends = {name: _end(runs.values()) for name, runs in own.items() if math.isinf(medians[name])}
        soonest = 0.0 if first in ends else medians[first]
        rivals = [seconds for name, seconds in times.items() if name != first]
        ahead = [seed for seed, time in times[first].items() if all(time < r.get(seed, math.inf) for r in rivals)]
        found.append(
            {
                "setting": cell.setting,
                "dataset": cell.dataset,
                "updates_per_round": cell.updates_per_round,
                "here": {name: ends.get(name, medians[name]) for name in sorted(medians, key=medians.__getitem__)},
                "paper": {name: paper[name] for name in sorted(paper, key=paper.__getitem__)},
                "first": None if first in ends else first,
                "paper_first": paper_first,
                "first_in": len(ahead),
                "seeds": len(times[first]),
                "open": [name for name, end in ends.items() if isinstance(end, Until) and end.seconds < soonest],
            }
        )
    return found


def _held(one: Result) -> float:
    return math.inf if one["sustained_seconds"] is None else float(one["sustained_seconds"])


def _end(runs: Iterable[Result]) -> Until | str:
    """What became of an algorithm whose median is endless."""
    left = [one for one in runs if one["sustained_seconds"] is None]
    given_up = [one["seconds"] for one in left if one["diverged_at"] is None]
    return Until(min(given_up)) if 2 * len(given_up) > len(left) else "diverged"


def ranking_to_markdown(table: Sequence[Mapping[str, Any]]) -> str:
    """Who comes first, as Markdown."""
    lines = [
        "| setting | held from, s (median of seeds) | in the paper, s | first in | so in the paper? |",
        "|---|---|---|---|---|",
    ]
    for row in table:
        here = ", ".join(
            f"{name}\N{NO-BREAK SPACE}{f'{end:.0f}' if isinstance(end, float) else end}"
            for name, end in row["here"].items()
        )
        bound = f">{BOUNDS[row['dataset']]:.0f}"
        paper = ", ".join(
            f"{name}\N{NO-BREAK SPACE}{f'{s:.0f}' if math.isfinite(s) else bound}" for name, s in row["paper"].items()
        )
        ahead = f"{row['first_in']} of {row['seeds']} seeds" if row["first"] else "–"
        unless = f", unless {' or '.join(row['open'])} is" if row["open"] else ""
        same = "nobody holds it" if row["first"] is None else "yes" if row["first"] == row["paper_first"] else "no"
        cell = f"| {row['setting']}, {row['dataset']}, n = {row['updates_per_round']} |"
        lines.append(f"{cell} {here} | {paper} | {ahead}{unless} | {same} |")
    return "\n".join(lines) + "\n"
