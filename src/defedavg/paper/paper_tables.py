"""Tables 1 and 2 again, beside what the paper reports."""

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
    """One row per cell: means over seeds of first and sustained hits, and the paper's figure beside them."""
    groups: dict[Cell, list[Result]] = {}
    for one in results:
        groups.setdefault(Cell(**one["piece"]["cell"]), []).append(one)
    found = []
    for cell, own in groups.items():
        first, held = _times(own, "first_hit_seconds"), _times(own, "sustained_seconds")
        paper = cell.seconds
        found.append(
            {
                **asdict(cell),
                "target": cell.target,
                "global_lr": own[0]["piece"]["rates"][0],
                "local_lr": own[0]["piece"]["rates"][1],
                "seeds": len(own),
                "reached": len(first),
                "first_hit": fmean(first) if first else None,
                "first_hit_sd": stdev(first) if len(first) > 1 else None,
                "sustained": fmean(held) if held else None,
                "sustained_sd": stdev(held) if len(held) > 1 else None,
                "sustained_reached": len(held),
                "paper": paper,
                "ratio": _ratio(first, len(own), paper),
                "sustained_ratio": _ratio(held, len(own), paper),
                "note": _note(own),
            }
        )
    return found


def _times(own: Sequence[Result], name: str) -> list[float]:
    return [one[name] for one in own if one[name] is not None]


def _ratio(times: Sequence[float], runs: int, paper: float | None) -> float | None:
    """To the paper's figure; a mean over the lucky seeds alone would be no time to the target."""
    return fmean(times) / paper if times and paper and len(times) == runs else None


def _note(own: Sequence[Result]) -> str:
    """What happened where the target was not reached, or not held; never blank there. Like ends are said once."""
    ends: dict[tuple[str, str], list[str]] = {}
    for one in own:
        best, by = f"{100 * (one['best_accuracy'] or 0):.1f}", f"by {one['seconds']:.0f} s (best"
        if one["diverged_at"] is not None:
            ends.setdefault(("diverged at round", ""), []).append(f"{one['diverged_at']}")
        elif one["first_hit_seconds"] is None:
            ends.setdefault((f"not reached {by}", " %)"), []).append(best)
        elif one["sustained_seconds"] is None:
            ends.setdefault((f"reached, but not held {by}", " %)"), []).append(best)
    return "; ".join(f"{what} {', '.join(values)}{unit}" for (what, unit), values in ends.items())


def to_csv(table: Sequence[Mapping[str, Any]]) -> str:
    """The rows as CSV."""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return out.getvalue()


def to_markdown(table: Sequence[Mapping[str, Any]]) -> str:
    """The rows as Markdown, the paper's figures beside ours."""
    lines = [
        "| setting | data | algorithm | n | η / η̄ | first hit, s | sustained, s | paper, s | ratios | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in table:
        first = _time(row["first_hit"], row["first_hit_sd"], row["reached"], row["seeds"])
        held = _time(row["sustained"], row["sustained_sd"], row["sustained_reached"], row["seeds"])
        paper = f">{BOUNDS[row['dataset']]:.0f}" if row["paper"] is None else f"{row['paper']:g}"
        rates = _pair(row["global_lr"], row["local_lr"])
        ratio = ", ".join("–" if r is None else f"{r:.2f}" for r in (row["ratio"], row["sustained_ratio"]))
        lines.append(
            f"| {row['setting']} | {row['dataset']} | {row['algorithm']} | {row['updates_per_round']} | {rates} "
            f"| {first} | {held} | {paper} | {ratio} | {row['note']} |"
        )
    return "\n".join(lines) + "\n"


def _time(mean: float | None, spread: float | None, reached: int, runs: int) -> str:
    if mean is None:
        return "–"
    return f"{mean:.4g}{'' if spread is None else f' ± {about(spread)}'} ({reached}/{runs})"


def rates_rows(tuned: Mapping[Cell, Rates]) -> list[dict[str, Any]]:
    """Table 2: the best rates of every cell, ours and the paper's."""
    return [
        {
            **asdict(cell),
            "global_lr": own[0],
            "local_lr": own[1],
            "paper_global_lr": cell.rates[0],
            "paper_local_lr": cell.rates[1],
            "same": own == cell.rates,
        }
        for cell, own in tuned.items()
    ]


def rates_to_markdown(table: Sequence[Mapping[str, Any]]) -> str:
    """Table 2 as Markdown."""
    lines = ["| setting | data | algorithm | n | η / η̄ here | in the paper | |", "|---|---|---|---|---|---|---|"]
    for row in table:
        pairs = [_pair(row["global_lr"], row["local_lr"]), _pair(row["paper_global_lr"], row["paper_local_lr"])]
        cell = f"| {row['setting']} | {row['dataset']} | {row['algorithm']} | {row['updates_per_round']} |"
        lines.append(f"{cell} {pairs[0]} | {pairs[1]} | {'the same' if row['same'] else ''} |")
    return "\n".join(lines) + "\n"


def _pair(*rates: float | None) -> str:
    return " / ".join("–" if rate is None else f"{rate:g}" for rate in rates)
