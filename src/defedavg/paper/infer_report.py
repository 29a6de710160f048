"""What ``defedavg paper infer`` reports: scores of readings, cells that stay unexplained, errors of held-out cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Any, Final

from ..errors import counted
from .infer import HELD_OUT, MISSED, SEARCHED, TIMES, Candidate, Stage, error
from .paper_tables import markdown
from .published import BOUNDS, Cell
from .readings import READINGS

WITHIN: Final = 1.25
"""A time is explained if ours and the paper's differ by at most this factor."""

_SHOWN = 5  # combinations of a stage
KINDS = {"first_hit": "reached", "sustained": "sustained_reached"}


def alternatives(stage: Stage, candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """Return, for every value of the readings of a stage, the scores of the best combination that has it."""
    rows = []
    for name in stage.readings:
        for value in READINGS[name].values:
            # ``candidates`` are sorted, so the first that has the value is the best.
            best = next(each for each in candidates if getattr(each.readings, name) == value)
            worse = best.mean_score - candidates[0].mean_score
            rows.append({"reading": name, "value": value, **_scores(best), "worse": worse})
    return rows


def _scores(candidate: Candidate) -> dict[str, float]:
    return {kind: candidate.score(kind) for kind in TIMES}


def report(stages: Sequence[Stage], ranked: Sequence[Sequence[Candidate]]) -> dict[str, Any]:
    """Return the outcome of a search as data: the best readings, all scores, and the seconds of the searched cells."""
    last = ranked[-1][0]
    times: dict[Cell, Mapping[str, float | None]] = {}
    for candidates in ranked:  # a later stage has the times under more of the final readings
        times |= candidates[0].times
    return {
        "readings": asdict(last.readings),
        "stages": [
            {
                "title": stage.title,
                "cells": [cell.label for cell in stage.cells],
                "combinations": [
                    {**{name: getattr(each.readings, name) for name in _named(stages[: k + 1])}, **_scores(each)}
                    for each in candidates
                ],
                "alternatives": alternatives(stage, candidates),
            }
            for k, (stage, candidates) in enumerate(zip(stages, ranked, strict=False))
        ],
        "cells": [
            {**asdict(cell), "paper": cell.seconds, **seconds, "error": _largest_error(cell, seconds)}
            for cell, seconds in times.items()
        ],
    }


def _named(stages: Iterable[Stage]) -> list[str]:
    return [name for stage in stages for name in stage.readings]


def _largest_error(cell: Cell, times: Mapping[str, float | None]) -> float:
    return max(error(cell, times[kind]) for kind in TIMES)


def to_markdown(found: Mapping[str, Any]) -> str:
    """Return the report of a search as Markdown tables."""
    parts = [_readings(found["readings"])]
    for stage in found["stages"]:
        parts += [f"\nStage: {stage['title']}. Cells: {'; '.join(stage['cells'])}.\n\n", _alternatives(stage)]
        shown = stage["combinations"][:_SHOWN]
        names = [name for name in shown[0] if name not in TIMES]
        lines = ["| " + " | ".join([*(row[name] for name in names), _score_columns(row)]) + " |" for row in shown]
        parts += [
            f"\nThe best {len(shown)} of {counted(len(stage['combinations']), 'combination')}:\n\n",
            markdown(" | ".join([*names, *TIMES.values()]), lines),
        ]
    return "".join([*parts, "\n", _unexplained(found["cells"])])


def _score_columns(row: Mapping[str, Any]) -> str:
    return " | ".join(f"{row[kind]:.3f}" for kind in TIMES)


def _readings(readings: Mapping[str, str]) -> str:
    return markdown("reading | inferred", [f"| {name} | {value} |" for name, value in readings.items()])


def _alternatives(stage: Mapping[str, Any]) -> str:
    lines = [
        f"| {row['reading']} | {row['value']} | {_score_columns(row)} | {row['worse']:+.3f} |"
        for row in stage["alternatives"]
    ]
    columns = " | ".join(f"mean error, {name}" for name in TIMES.values())
    return markdown(f"reading | value | {columns} | worse than the best by", lines)


def _unexplained(cells: Sequence[Mapping[str, Any]]) -> str:
    missed = [row for row in cells if row["error"] > math.log(WITHIN)]
    if not missed:
        return f"Both times of all searched cells are within a factor of {WITHIN:g} of the paper.\n"
    lines = [
        f"| {row['setting']} | {row['dataset']} | {row['algorithm']} | {row['updates_per_round']} "
        f"| {_seconds(row['first_hit_seconds'])} | {_seconds(row['sustained_seconds'])} | {_paper(row)} |"
        for row in missed
    ]
    number = f"{len(missed)} of {counted(len(cells), 'searched cell')}"
    title = f"At least one time is not within a factor of {WITHIN:g} of the paper: {number}.\n\n"
    return title + markdown("setting | data | algorithm | n | first hit, s | sustained, s | paper, s", lines)


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _paper(row: Mapping[str, Any]) -> str:
    return f">{BOUNDS[row['dataset']]:.0f}" if row["paper"] is None else f"{row['paper']:g}"


def agreement(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Summarise the rows of Table 1: for all, searched and held-out cells, and for both kinds of time.

    A cell has a time if every seed has one; otherwise its error counts as ``MISSED``.
    """
    groups: dict[str, Callable[[Cell], bool]] = {
        "all": lambda _: True,
        "searched": SEARCHED.__contains__,
        "held out": HELD_OUT.__contains__,
    }
    return [
        _summary(title, kind, [row for row in rows if selects(cell_of(row))])
        for title, selects in groups.items()
        for kind in KINDS
    ]


def cell_of(row: Mapping[str, Any]) -> Cell:
    """Return the cell of a row of Table 1."""
    return Cell(row["dataset"], row["setting"], row["algorithm"], row["updates_per_round"])


def complete_time(row: Mapping[str, Any], kind: str) -> float | None:
    """Return the mean time of a row of Table 1, ``first_hit`` or ``sustained``; None if not every seed has one."""
    time: float | None = row[kind] if row[KINDS[kind]] == row["seeds"] else None
    return time


def unexplained(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows of Table 1 of which at least one time is not explained."""
    return [
        row for row in rows if max(error(cell_of(row), complete_time(row, kind)) for kind in KINDS) > math.log(WITHIN)
    ]


def _summary(title: str, kind: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    seconds = [complete_time(row, kind) for row in rows]
    errors = [error(cell_of(row), time) for row, time in zip(rows, seconds, strict=True)]
    return {
        "cells": title,
        "time": kind,
        "number": len(rows),
        "timed": sum(time is not None for time in seconds),
        "within": sum(each <= math.log(WITHIN) for each in errors),
        "median_error": median(errors) if errors else None,
        "mean_error": fmean(errors) if errors else None,
    }


def agreement_to_markdown(summary: Sequence[Mapping[str, Any]]) -> str:
    """Return the agreement with the paper as a Markdown table."""
    lines = [
        f"| {row['cells']} | {row['time'].replace('_', ' ')} | {row['number']} | {row['timed']} | {row['within']} "
        f"| {row['median_error']:.2f} | {row['mean_error']:.2f} |"
        for row in summary
        if row["number"]
    ]
    columns = f"with a time | within a factor of {WITHIN:g} | median error | mean error"
    return markdown(f"cells | time | number | {columns}", lines) + (
        f"\nThe error of a cell is |log(ours / paper)|; a missed target counts as a ratio of {MISSED:g}.\n"
    )
