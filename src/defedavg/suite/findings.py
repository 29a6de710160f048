"""The tables of the page of findings, from stored cells and the stored studies of ``benchmarks/findings.py``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

from ..errors import UserError
from ..fileio import read_regular
from ..report.marked_tables import markdown_table
from ..report.seed_figures import over_seeds
from .cell_files import StoredCell
from .leaderboard import Board, boards, leaders, leaders_text

STUDIES: Final = ("slow-clients", "best-n")
CLOSE: Final = 1.1
"""The time of an n over that of the fastest n, up to which the two count as equally good."""

Found = Mapping[str, Any]


def tables(cells: Sequence[StoredCell], studies: Mapping[str, Found]) -> dict[str, str]:
    """Return the tables in Markdown by name: two of the suite, and one of each study that is stored."""
    found = boards(cells)
    made = {"order": order(found), "tuning": tuning(found)}
    for name, write in _WRITERS.items():
        if name in studies:
            try:
                made[name] = write(studies[name])
            except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                raise UserError(
                    f"{name}.json is not a study of the findings ({type(error).__name__}: {error})"
                ) from None
    return made


def read_studies(folder: Path) -> dict[str, Found]:
    """Return the studies that are stored in a folder, by name."""
    found: dict[str, Found] = {}
    for name in STUDIES:
        path = folder / f"{name}.json"
        if path.exists():
            try:
                found[name] = dict(json.loads(read_regular(path)))
            except (OSError, ValueError, TypeError, RecursionError) as error:
                raise UserError(f"{path} is not a study of the findings: {error}") from None
    return found


def _signed(figure: str) -> str:
    """Return a figure with a minus sign in place of the hyphen."""
    return figure.replace("-", "−")


# Who wins where, and what flips.


def order(found: Sequence[Board]) -> str:
    """Return who is fastest on each fleet of a task, and whether the order on the paper's fleet is that on phones."""
    rows = []
    for task in dict.fromkeys(board.task.name for board in found):
        own = {board.fleet.name: board for board in found if board.task.name == task}
        fastest = [_first(own[fleet]) if fleet in own else "–" for fleet in ("equal", "paper", "phones")]
        rows.append((task, *fastest, *_flip(own.get("paper"), own.get("phones"))))
    head = (
        "task",
        "fastest, equal",
        "fastest, paper",
        "fastest, phones",
        "the paper's first on phones",
        "ρ of the orders",
    )
    return markdown_table(head, rows)


def _first(board: Board) -> str:
    return leaders_text(board) or f"none holds {board.target}"


def _flip(paper: Board | None, phones: Board | None) -> tuple[str, str]:
    """Return the places on phones of those that are first on the paper's fleet, and the correlation of the orders."""
    if paper is None or phones is None:
        return "–", "–"
    on_phones = [cell["algorithm"] for cell in phones.cells]
    first = [cell["algorithm"] for cell in leaders(paper) or paper.cells[:1]]
    places = [on_phones.index(name) + 1 for name in first if name in on_phones]
    ends = str(min(places)) if len(places) == 1 else f"{min(places)} to {max(places)}" if places else ""
    correlation = rank_correlation([cell["algorithm"] for cell in paper.cells], on_phones)
    order = "–" if correlation is None else _signed(f"{correlation:.2f}")
    return f"{ends} of {len(on_phones)}" if ends else "–", order


def rank_correlation(one: Sequence[str], other: Sequence[str]) -> float | None:
    """Return Spearman's correlation of two orders of the same names; None with fewer than three names in both."""
    common = [name for name in one if name in other]
    count = len(common)
    if count < 3:
        return None
    places = {name: place for place, name in enumerate(name for name in other if name in common)}
    squares = sum((place - places[name]) ** 2 for place, name in enumerate(common))
    return 1 - 6 * squares / (count * (count**2 - 1))


# What tuning is worth against choosing the algorithm.


def tuning(found: Sequence[Board]) -> str:
    """Return what the wrong rates cost within an algorithm, and what the wrong algorithm costs at its best rates."""
    rows = []
    for board in found:
        figures = tuning_figures(board)
        rows.append((
            board.task.name, board.fleet.name,
            f"{figures['pairs_missed']} of {figures['pairs']}", _factor(figures["pair_factor"]),
            f"{figures['algorithms_missed']} of {figures['algorithms']}", _factor(figures["algorithm_factor"]),
        ))  # fmt: skip
    head = ("task", "fleet", "pairs that miss", "factor of the others", "algorithms that miss", "factor of the others")
    return markdown_table(head, rows)


def tuning_figures(board: Board) -> dict[str, Any]:
    """Return misses and median factors on the tuning seed.

    A pair of rates is compared with the best pair of its algorithm, and an algorithm at its best pair with the fastest.
    A factor is the median over those that hold the target and are not the best themselves; None if there is none.
    """
    times = [[point["seconds_to_target"] for point in cell["tuning"]["points"]] for cell in board.cells]
    held = [sorted(value for value in own if value is not None) for own in times]
    best = sorted(own[0] for own in held if own)
    algorithm_factors = [value / best[0] for value in best[1:]]
    return {
        "pairs": sum(map(len, times)),
        "pairs_missed": sum(map(len, times)) - sum(map(len, held)),
        "pair_factor": _median(value / own[0] for own in held for value in own[1:]),
        "algorithms": len(board.cells),
        "algorithms_missed": len(board.cells) - len(best),
        "algorithm_factor": _median(algorithm_factors),
    }


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return median(known) if known else None


def _factor(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


# Slow clients.


def slow_clients(study: Found) -> str:
    """Return how often slow clients are heard, and how much worse their model is, by algorithm and kind of data."""
    found = {(row["data"], row["algorithm"]): slow_figures(row) for row in study["rows"]}
    kinds, names = (list(dict.fromkeys(key[place] for key in found)) for place in (0, 1))
    rows = []
    for name in names:
        own = [found[kind, name] for kind in kinds]
        heard = f"{100 * fmean(each['slow_updates'] for each in own):.0f} %"
        rows.append((name, heard, *chain.from_iterable(map(_slow_texts, own))))
    figures = ("gap (points)", "seeds below", "worst client (%)")
    head = ("algorithm", "updates of the slow half", *(f"{kind}: {figure}" for kind in kinds for figure in figures))
    return markdown_table(head, rows)


def _slow_texts(figures: Found) -> tuple[str, str, str]:
    gap, worst = (over_seeds(figures["runs"], name, 100.0).text() for name in ("gap", "worst_accuracy"))
    return _signed(gap), f"{figures['slower_worse']} of {len(figures['runs'])}", worst


def slow_figures(row: Found) -> dict[str, Any]:
    """Return the figures of one algorithm: runs with the gap between the halves, and in how many it is below zero."""
    runs = [{**run, "gap": run["slow_accuracy"] - run["fast_accuracy"]} for run in row["runs"]]
    return {
        "runs": runs,
        "slow_updates": fmean(run["slow_updates"] for run in runs),
        "slower_worse": sum(run["gap"] < 0 for run in runs),
    }


# The n of the theory.


def best_n(study: Found) -> str:
    """Return the theory's n and the fastest n of every case, what the theory's n costs, and what n is worth at all."""
    rows = []
    for case in study["cases"]:
        found = n_figures(case)
        figures = (found[name] for name in ("factor", "planned_gain", "gain", "growth"))
        place = (case["algorithm"], case["split"], case["fleet"], _whole(found["theory"]), _whole(found["best"]))
        rows.append((*place, *map(_factor, figures)))
    head = (
        "algorithm", "split", "fleet", "n of the theory", "fastest n", "its time / the fastest",
        "slowest n / fastest n, planned", "the same, measured", "updates, largest n / smallest n",
    )  # fmt: skip
    return markdown_table(head, rows)


def n_figures(case: Found) -> dict[str, Any]:
    """Return the theory's n, the fastest n, the factor between their times, and three figures about all n.

    The fastest n has the least mean time among those that hold the target with every seed; the theory's n has the least
    planned time. Of equal ones it is the smallest. The gains are the longest mean time over the shortest. The growth
    compares the updates to the target of the largest n with those of the smallest: the theory says that they are equal.
    """
    held = {row["n"]: fmean(row["seconds"]) for row in case["n"] if None not in row["seconds"]}
    updates = {row["n"]: row["n"] * fmean(row["rounds"]) for row in case["n"] if row["n"] in held}
    plans = {row["n"]: fmean(row["planned_seconds"]) for row in case["n"] if row["planned_seconds"] is not None}
    best, theory = _least(held), _least(plans)
    return {
        "theory": theory,
        "best": best,
        "factor": held[theory] / held[best] if best is not None and theory in held else None,
        "planned_gain": _gain(plans),
        "gain": _gain(held),
        "growth": updates[max(held)] / updates[min(held)] if len(held) > 1 else None,
    }


def _least(seconds: Mapping[int, float]) -> int | None:
    """Return the n with the least time, the smallest of equal ones; times are equal if only their rounding differs."""
    return min(seconds, key=lambda n: (round(seconds[n], 9), n)) if seconds else None


def _gain(seconds: Mapping[int, float]) -> float | None:
    return max(seconds.values()) / min(seconds.values()) if len(seconds) > 1 else None


def n_summary(study: Found) -> dict[str, Any]:
    """Return in how many cases the theory's n is the fastest, close to it, or known at all, and the median factor."""
    found = [n_figures(case) for case in study["cases"]]
    known = [each for each in found if each["theory"] is not None and each["best"] is not None]
    factors = [each["factor"] for each in known if each["factor"] is not None]
    return {
        "cases": len(known),
        "best": sum(each["theory"] == each["best"] for each in known),
        "close": sum(factor <= CLOSE for factor in factors),
        "missed": sum(each["factor"] is None for each in known),
        "median_factor": _median(factors),
        "largest_factor": max(factors, default=None),
    }


def _whole(value: int | None) -> str:
    return "–" if value is None else str(value)


_WRITERS: Final[Mapping[str, Callable[[Found], str]]] = {"slow-clients": slow_clients, "best-n": best_n}
