"""The paper's results as a page: what can be compared stands together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cli.report_command import close_with_records
from .history import last
from .published import LOCAL_STEPS, Cell, Rates
from .result_files import Result
from .tuned_rates import SEED


def close_with_results(results: Sequence[Result], to: Path, as_json: bool, title: str) -> None:
    """Write the page of some runs and say where it is."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        cell, steps = Cell(**result["piece"]["cell"]), result["piece"]["local_steps"]
        label = f"{cell.algorithm} n={cell.updates_per_round}" + (f" K={steps}" if steps != LOCAL_STEPS else "")
        curve = list(_measured(result["curve"], cell.updates_per_round))
        own = {**_record(result, cell, label), "curve": curve}
        groups.setdefault(f"{cell.dataset}, {cell.setting}", []).append(own)
    close_with_records(groups, to, as_json, title, last(to.parent))


def close_with_points(points: Mapping[Cell, Sequence[Result]], to: Path, as_json: bool, title: str) -> None:
    """The same for the pairs of rates of cells that were tuned."""
    groups = {
        cell.label: [{**_record(point, cell, _pair(point["rates"])), "seed": SEED} for point in own]
        for cell, own in points.items()
    }
    close_with_records(groups, to, as_json, title, last(to.parent))


def _pair(rates: Rates) -> str:
    return ", ".join(f"{name}={rate:g}" for name, rate in zip(("η", "η̄"), rates, strict=True) if rate is not None)


def _record(result: Result, cell: Cell, label: str) -> dict[str, Any]:
    return {**result, "label": label, "algorithm": cell.algorithm, "target_accuracy": cell.target}


def _measured(curve: dict[str, Any], per_round: int) -> Iterable[dict[str, Any]]:
    names = ("seconds", "rounds", "accuracy", "loss")
    for seconds, rounds, accuracy, loss in zip(*(curve[name] for name in names), strict=True):
        yield {
            "seconds": seconds,
            "round": rounds,
            "updates": rounds * per_round,
            "accuracy": accuracy,
            "loss": loss,
        }
