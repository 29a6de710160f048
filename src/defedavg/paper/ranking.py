"""The order of the algorithms for every n, in these results and in the paper."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from .published import BOUNDS, Cell
from .result_files import Result

ResultsBySeed = Mapping[int, Result]


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The target was not held by the time at which a run was given up."""

    seconds: float

    def __str__(self) -> str:
        return f">{self.seconds:.0f}"


def ranking(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Rank the algorithms for every n by the median over seeds of the time from which the target is held.

    A seed that does not hold the target counts as infinite. ``first_in`` is the number of seeds in which the winner is
    the fastest; ``open`` lists algorithms that were given up before the winner's time and might have been faster.
    """
    groups: dict[Cell, dict[str, dict[int, Result]]] = {}
    for result in results:
        cell = Cell(**result["piece"]["cell"])
        groups.setdefault(replace(cell, algorithm=""), {}).setdefault(cell.algorithm, {})[result["seed"]] = result
    return [_rank(cell, algorithms) for cell, algorithms in groups.items() if len(algorithms) > 1]


def _rank(cell: Cell, algorithms: Mapping[str, ResultsBySeed]) -> dict[str, Any]:
    times = {name: {seed: _held_from(run) for seed, run in runs.items()} for name, runs in algorithms.items()}
    medians = {name: median(seconds.values()) for name, seconds in times.items()}
    paper = {name: replace(cell, algorithm=name).seconds or math.inf for name in algorithms}
    here, published = _sorted_by_value(medians), _sorted_by_value(paper)
    first = next(iter(here))
    failures = {name: _failure(runs.values()) for name, runs in algorithms.items() if math.isinf(medians[name])}
    return {
        "setting": cell.setting,
        "dataset": cell.dataset,
        "updates_per_round": cell.updates_per_round,
        "here": {**here, **failures},
        "paper": published,
        "first": None if first in failures else first,
        "paper_first": next(iter(published)),
        "first_in": _seeds_won(first, times),
        "seeds": len(times[first]),
        "open": [] if first in failures else _given_up_before(medians[first], failures),
    }


def _sorted_by_value(times: Mapping[str, float]) -> dict[str, Any]:
    return {name: times[name] for name in sorted(times, key=times.__getitem__)}


def _seeds_won(winner: str, times: Mapping[str, Mapping[int, float]]) -> int:
    """Return the number of seeds in which the winner was faster than every other algorithm that ran the seed."""
    others = [seconds for name, seconds in times.items() if name != winner]
    return sum(all(time < other.get(seed, math.inf) for other in others) for seed, time in times[winner].items())


def _given_up_before(seconds: float, failures: Mapping[str, GivenUp | str]) -> list[str]:
    return [name for name, end in failures.items() if isinstance(end, GivenUp) and end.seconds < seconds]


def _held_from(run: Result) -> float:
    return math.inf if run["sustained_seconds"] is None else float(run["sustained_seconds"])


def _failure(runs: Iterable[Result]) -> GivenUp | str:
    """Return how an algorithm with an infinite median failed in most of its seeds."""
    failed = [run for run in runs if run["sustained_seconds"] is None]
    given_up = [run["seconds"] for run in failed if run["diverged_at"] is None]
    return GivenUp(min(given_up)) if 2 * len(given_up) > len(failed) else "diverged"


def ranking_to_markdown(table: Sequence[Mapping[str, Any]]) -> str:
    """Return the ranking as a Markdown table."""
    lines = [
        "| setting | target held from, s (median over seeds) | in the paper, s | winner is fastest in "
        "| same winner in the paper? |",
        "|---|---|---|---|---|",
    ]
    for row in table:
        setting = f"{row['setting']}, {row['dataset']}, n = {row['updates_per_round']}"
        bound = f">{BOUNDS[row['dataset']]:.0f}"
        times, paper = _times(row["here"]), _times(row["paper"], bound)
        lines.append(f"| {setting} | {times} | {paper} | {_seeds(row)} | {_agreement(row)} |")
    return "\n".join(lines) + "\n"


def _times(row: Mapping[str, float | GivenUp | str], infinite: str = "") -> str:
    """Return algorithms and times; a non-breaking space keeps both on one line."""
    return ", ".join(f"{name}\N{NO-BREAK SPACE}{_time(end, infinite)}" for name, end in row.items())


def _time(end: float | GivenUp | str, infinite: str) -> str:
    if not isinstance(end, float):
        return str(end)
    return f"{end:.0f}" if math.isfinite(end) else infinite


def _seeds(row: Mapping[str, Any]) -> str:
    seeds = f"{row['first_in']} of {row['seeds']} seeds" if row["first"] else "–"
    return seeds + (f", unless {' or '.join(row['open'])} is faster" if row["open"] else "")


def _agreement(row: Mapping[str, Any]) -> str:
    if row["first"] is None:
        return "no algorithm holds it"
    return "yes" if row["first"] == row["paper_first"] else "no"
