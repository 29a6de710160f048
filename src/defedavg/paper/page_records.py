"""Records of the paper's results for the report page, grouped so that comparable runs share a chart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .published import LOCAL_STEPS, Cell, Rates
from .result_files import Result
from .tuned_rates import SEED

PageGroups = dict[str, list[dict[str, Any]]]
"""Records by the title of their group, as ``report.page.write_records`` takes them."""


def run_records(results: Sequence[Result]) -> PageGroups:
    """Return the records of runs, grouped by data set and setting."""
    groups: PageGroups = {}
    for result in results:
        cell, steps = Cell(**result["piece"]["cell"]), result["piece"]["local_steps"]
        label = f"{cell.algorithm} n={cell.updates_per_round}" + (f" K={steps}" if steps != LOCAL_STEPS else "")
        curve = list(_evaluations(result["curve"], cell.updates_per_round))
        groups.setdefault(f"{cell.dataset}, {cell.setting}", []).append(
            {**_record(result, cell, label), "curve": curve}
        )
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


def _evaluations(curve: dict[str, Any], updates_per_round: int) -> Iterable[dict[str, Any]]:
    names = ("seconds", "rounds", "accuracy", "loss")
    for seconds, rounds, accuracy, loss in zip(*(curve[name] for name in names), strict=True):
        yield {
            "seconds": seconds,
            "round": rounds,
            "updates": rounds * updates_per_round,
            "accuracy": accuracy,
            "loss": loss,
        }
