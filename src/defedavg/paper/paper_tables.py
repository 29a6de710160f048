"""Tables 1 and 2 of the paper from stored results, with the published values."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, stdev
from typing import Any

from ..jsonio import about
from .published import BOUNDS, Cell, Rates
from .result_files import Result


def rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return one row per cell: means over seeds of the first hit and the sustained time, and the paper's seconds."""
    groups: dict[Cell, list[Result]] = {}
    for result in results:
        groups.setdefault(Cell(**result["piece"]["cell"]), []).append(result)
    return [_row(cell, seeds) for cell, seeds in groups.items()]


def _row(cell: Cell, seeds: Sequence[Result]) -> dict[str, Any]:
    first, sustained = _times(seeds, "first_hit_seconds"), _times(seeds, "sustained_seconds")
    global_lr, local_lr = seeds[0]["piece"]["rates"]
    return {
        **asdict(cell),
        "target": cell.target,
        "global_lr": global_lr,
        "local_lr": local_lr,
        "seeds": len(seeds),
        "reached": len(first),
        "first_hit": fmean(first) if first else None,
        "first_hit_sd": stdev(first) if len(first) > 1 else None,
        "sustained": fmean(sustained) if sustained else None,
        "sustained_sd": stdev(sustained) if len(sustained) > 1 else None,
        "sustained_reached": len(sustained),
        "paper": cell.seconds,
        "ratio": _ratio(first, len(seeds), cell.seconds),
        "sustained_ratio": _ratio(sustained, len(seeds), cell.seconds),
        "note": _note(seeds),
    }


def _times(results: Sequence[Result], name: str) -> list[float]:
    return [result[name] for result in results if result[name] is not None]


def _ratio(times: Sequence[float], runs: int, paper: float | None) -> float | None:
    """Return the ratio to the paper's seconds; None if a seed missed the target, which would bias the mean."""
    return fmean(times) / paper if times and paper and len(times) == runs else None


def _note(results: Sequence[Result]) -> str:
    """Describe the seeds that did not reach or did not hold the target; equal outcomes share one phrase."""
    phrases: dict[tuple[str, str], list[str]] = {}
    for result in results:
        best, by = f"{100 * (result['best_accuracy'] or 0):.1f}", f"by {result['seconds']:.0f} s (best"
        if result["diverged_at"] is not None:
            phrases.setdefault(("diverged at round", ""), []).append(f"{result['diverged_at']}")
        elif result["first_hit_seconds"] is None:
            phrases.setdefault((f"not reached {by}", " %)"), []).append(best)
        elif result["sustained_seconds"] is None:
            phrases.setdefault((f"reached, but not held {by}", " %)"), []).append(best)
    return "; ".join(f"{phrase} {', '.join(values)}{unit}" for (phrase, unit), values in phrases.items())


def to_csv(table: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as CSV."""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return out.getvalue()


def to_markdown(table: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows of Table 1 as a Markdown table."""
    lines = [
        "| setting | data | algorithm | n | η / η̄ | first hit, s | sustained, s | paper, s | ratios | note |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in table:
        first = _time(row["first_hit"], row["first_hit_sd"], row["reached"], row["seeds"])
        sustained = _time(row["sustained"], row["sustained_sd"], row["sustained_reached"], row["seeds"])
        paper = f">{BOUNDS[row['dataset']]:.0f}" if row["paper"] is None else f"{row['paper']:g}"
        rates = _pair(row["global_lr"], row["local_lr"])
        ratio = ", ".join("–" if r is None else f"{r:.2f}" for r in (row["ratio"], row["sustained_ratio"]))
        lines.append(
            f"| {row['setting']} | {row['dataset']} | {row['algorithm']} | {row['updates_per_round']} | {rates} "
            f"| {first} | {sustained} | {paper} | {ratio} | {row['note']} |"
        )
    return "\n".join(lines) + "\n"


def _time(mean: float | None, spread: float | None, reached: int, runs: int) -> str:
    if mean is None:
        return "–"
    return f"{mean:.4g}{'' if spread is None else f' ± {about(spread)}'} ({reached}/{runs})"


def rates_rows(tuned: Mapping[Cell, Rates]) -> list[dict[str, Any]]:
    """Return one row of Table 2 per cell: the tuned rates and the paper's."""
    return [
        {
            **asdict(cell),
            "global_lr": rates[0],
            "local_lr": rates[1],
            "paper_global_lr": cell.rates[0],
            "paper_local_lr": cell.rates[1],
            "same": rates == cell.rates,
        }
        for cell, rates in tuned.items()
    ]


def rates_to_markdown(table: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows of Table 2 as a Markdown table."""
    lines = [
        "| setting | data | algorithm | n | η / η̄, tuned | η / η̄, paper | same? |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in table:
        tuned, paper = _pair(row["global_lr"], row["local_lr"]), _pair(row["paper_global_lr"], row["paper_local_lr"])
        cell = f"| {row['setting']} | {row['dataset']} | {row['algorithm']} | {row['updates_per_round']} |"
        lines.append(f"{cell} {tuned} | {paper} | {'yes' if row['same'] else 'no'} |")
    return "\n".join(lines) + "\n"


def _pair(*rates: float | None) -> str:
    return " / ".join("–" if rate is None else f"{rate:g}" for rate in rates)
