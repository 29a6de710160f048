"""Stored results beside the published values: Tables 1 and 2, the ranking for every n, and records for the page."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median, stdev
from typing import Any

from ..errors import counted
from ..jsonio import about
from .published import BOUNDS, LOCAL_STEPS, Cell, Rates
from .result_files import Result
from .tuned_rates import SEED

ResultsBySeed = Mapping[int, Result]
PageGroups = dict[str, list[dict[str, Any]]]
"""Records by the title of their group, as ``report.page.write_records`` takes them."""


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
    lines = []
    for row in table:
        first = _time(row["first_hit"], row["first_hit_sd"], row["reached"], row["seeds"])
        sustained = _time(row["sustained"], row["sustained_sd"], row["sustained_reached"], row["seeds"])
        paper = f">{BOUNDS[row['dataset']]:.0f}" if row["paper"] is None else f"{row['paper']:g}"
        rates = rates_pair(row["global_lr"], row["local_lr"])
        ratio = ", ".join("–" if r is None else f"{r:.2f}" for r in (row["ratio"], row["sustained_ratio"]))
        lines.append(
            f"| {row['setting']} | {row['dataset']} | {row['algorithm']} | {row['updates_per_round']} | {rates} "
            f"| {first} | {sustained} | {paper} | {ratio} | {row['note']} |"
        )
    titles = "setting | data | algorithm | n | η / η̄ | first hit, s | sustained, s | paper, s | ratios | note"
    return markdown(titles, lines)


def markdown(titles: str, lines: Sequence[str]) -> str:
    """Return a Markdown table of lines with these column titles."""
    return "\n".join([f"| {titles} |", "|" + "---|" * len(titles.split(" | ")), *lines]) + "\n"


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
            "paper_global_lr": cell.stated_rates[0],
            "paper_local_lr": cell.stated_rates[1],
            "same": rates == cell.stated_rates,
        }
        for cell, rates in tuned.items()
    ]


def rates_to_markdown(table: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows of Table 2 as a Markdown table."""
    lines = []
    for row in table:
        tuned, paper = (
            rates_pair(row["global_lr"], row["local_lr"]),
            rates_pair(row["paper_global_lr"], row["paper_local_lr"]),
        )
        cell = f"| {row['setting']} | {row['dataset']} | {row['algorithm']} | {row['updates_per_round']} |"
        lines.append(f"{cell} {tuned} | {paper} | {'yes' if row['same'] else 'no'} |")
    return markdown("setting | data | algorithm | n | η / η̄, tuned | η / η̄, paper | same?", lines)


def rates_pair(*rates: float | None) -> str:
    """Return η / η̄ for a cell of a table; a dash stands for a rate that the algorithm does not have."""
    return " / ".join("–" if rate is None else f"{rate:g}" for rate in rates)


def stated_and_used(stated: Rates, used: Rates) -> str:
    """Return the rates that Table 2 states, and in brackets those that are used instead, if they differ."""
    return rates_pair(*stated) + (f" [{rates_pair(*used)}]" if used != stated else "")


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
    here, published = ({name: t[name] for name in sorted(t, key=t.__getitem__)} for t in (medians, paper))
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


def _seeds_won(winner: str, times: Mapping[str, Mapping[int, float]]) -> int:
    """Return the number of seeds in which the winner was faster than every other algorithm that ran the seed."""
    others = [seconds for name, seconds in times.items() if name != winner]
    return sum(all(time < other.get(seed, math.inf) for other in others) for seed, time in times[winner].items())


def _held_from(run: Result) -> float:
    return math.inf if run["sustained_seconds"] is None else float(run["sustained_seconds"])


def _given_up_before(seconds: float, failures: Mapping[str, GivenUp | str]) -> list[str]:
    return [name for name, end in failures.items() if isinstance(end, GivenUp) and end.seconds < seconds]


def _failure(runs: Iterable[Result]) -> GivenUp | str:
    """Return how an algorithm with an infinite median failed in most of its seeds."""
    failed = [run for run in runs if run["sustained_seconds"] is None]
    given_up = [run["seconds"] for run in failed if run["diverged_at"] is None]
    return GivenUp(min(given_up)) if 2 * len(given_up) > len(failed) else "diverged"


def ranking_to_markdown(table: Sequence[Mapping[str, Any]]) -> str:
    """Return the ranking as a Markdown table."""
    lines = []
    for row in table:
        setting = f"{row['setting']}, {row['dataset']}, n = {row['updates_per_round']}"
        bound = f">{BOUNDS[row['dataset']]:.0f}"
        times, paper = _listed(row["here"]), _listed(row["paper"], bound)
        seeds = f"{row['first_in']} of {counted(row['seeds'], 'seed')}" if row["first"] else "–"
        seeds += f", unless {' or '.join(row['open'])} is faster" if row["open"] else ""
        same = "yes" if row["first"] == row["paper_first"] else "no" if row["first"] else "no algorithm holds it"
        lines.append(f"| {setting} | {times} | {paper} | {seeds} | {same} |")
    columns = "target held from, s (median over seeds) | in the paper, s | winner is fastest in"
    return markdown(f"setting | {columns} | same winner in the paper?", lines)


def _listed(row: Mapping[str, float | GivenUp | str], infinite: str = "") -> str:
    """Return algorithms and times; a non-breaking space keeps both on one line."""
    times = {
        name: infinite if end == math.inf else f"{end:.0f}" if isinstance(end, float) else end
        for name, end in row.items()
    }
    return ", ".join(f"{name}\N{NO-BREAK SPACE}{time}" for name, time in times.items())


def run_records(results: Sequence[Result]) -> PageGroups:
    """Return the records of runs, grouped by data set and setting."""
    groups: PageGroups = {}
    for result in results:
        cell, steps = Cell(**result["piece"]["cell"]), result["piece"]["local_steps"]
        label = f"{cell.algorithm} n={cell.updates_per_round}" + (f" K={steps}" if steps != LOCAL_STEPS else "")
        columns = (result["curve"][name] for name in ("seconds", "rounds", "accuracy", "loss"))
        curve = [
            {"seconds": seconds, "round": t, "updates": t * cell.updates_per_round, "accuracy": accuracy, "loss": loss}
            for seconds, t, accuracy, loss in zip(*columns, strict=True)
        ]
        record = {**_record(result, cell, label), "curve": curve}
        groups.setdefault(f"{cell.dataset}, {cell.setting}", []).append(record)
    return groups


def tuning_records(points: Mapping[Cell, Sequence[Result]]) -> PageGroups:
    """Return the records of all pairs of rates, grouped by tuned cell."""
    return {
        cell.label: [{**_record(point, cell, _pair_label(point["rates"])), "seed": SEED} for point in of_cell]
        for cell, of_cell in points.items()
    }


def _pair_label(rates: Rates) -> str:
    return ", ".join(f"{name}={rate:g}" for name, rate in zip(("η", "η̄"), rates, strict=True) if rate is not None)


def _record(result: Result, cell: Cell, label: str) -> dict[str, Any]:
    return {**result, "label": label, "algorithm": cell.algorithm, "target_accuracy": cell.target}
