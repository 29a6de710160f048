"""The paper's figures from stored results: curves of Table 1, DeFedAvg for several n and K, and client activity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from matplotlib.figure import Figure

from ..config import study as config
from ..config.build import make_simulator
from ..planning.plan import Plan
from ..report.gantt import gantt
from ..report.plots import Curve, accuracy_curves, loss_curves
from .published import COMPARED, DATASETS, SETTINGS, SIZE_OF, Cell
from .result_files import Result

NAMES = {"fashionmnist": "FashionMNIST", "cifar10": "CIFAR-10", "iid": "IID", "non-iid": "non-IID"}

_TITLES = {"fedavg": "FedAvg", "defedavg-niid": "DeFedAvg-nIID", "defedavg-iid": "DeFedAvg-IID"}
_MERGES = 4  # rounds of FedAvg that Figure 1 shows


def figure1(seed: int = 0) -> Figure:
    """Draw the activity of three clients under FedAvg, DeFedAvg-nIID and DeFedAvg-IID with n = 2."""
    plans = {}
    for name, title in _TITLES.items():
        tables: dict[str, Any] = {
            "algorithms": [name],
            "clients": {"num_clients": 3, "slowness": "uniform(1, 5)"},
            "training": {"updates_per_round": 2},
        }
        (point,) = config.study(tables).points()
        plans[title] = Plan.collect(make_simulator(point.settings, seed), 10 * _MERGES)
    return gantt(plans, until=plans["FedAvg"].rounds[_MERGES - 1].time)


def curves(results: Sequence[Result], figure: int) -> tuple[Figure, Figure]:
    """Draw test accuracy and training loss of runs: against seconds for figures 2 to 5, against rounds for 6 and 7."""
    panels: dict[str, list[Curve]] = {}
    targets: dict[str, float] = {}
    for result in sorted(results, key=_paper_order):
        cell = Cell(**result["piece"]["cell"])
        title = f"{NAMES[cell.dataset]}, {NAMES[cell.setting]}"
        panels.setdefault(title, []).append(_curve(result, cell, figure))
        targets[title] = cell.target
    against: Literal["seconds", "rounds"] = "seconds" if figure in SIZE_OF else "rounds"
    return (
        accuracy_curves(panels, target=targets if figure in SIZE_OF else None, against=against, columns=2),
        loss_curves(panels, against=against, name="training loss", columns=2),
    )


def _paper_order(result: Result) -> tuple[int, ...]:
    """Return the sort key that gives panels and curves the paper's order."""
    cell = Cell(**result["piece"]["cell"])
    panel = SETTINGS.index(cell.setting), DATASETS.index(cell.dataset)
    algorithm = COMPARED[cell.setting].index(cell.algorithm)
    return (*panel, algorithm, cell.updates_per_round, result["piece"]["local_steps"])


def _curve(result: Result, cell: Cell, figure: int) -> Curve:
    curve, label = result["curve"], cell.algorithm
    if figure == 6:
        label = f"n = {cell.updates_per_round}"
    elif figure == 7:
        label = f"K = {result['piece']['local_steps']}"
    known = [i for i, loss in enumerate(curve["train_loss"]) if loss is not None]
    return Curve(
        algorithm=cell.algorithm if figure in SIZE_OF else "",
        label=label,
        seconds=tuple(curve["seconds"][i] for i in known),
        rounds=tuple(curve["rounds"][i] for i in known),
        accuracy=tuple(math.nan if curve["accuracy"][i] is None else curve["accuracy"][i] for i in known),
        loss=tuple(curve["train_loss"][i] for i in known),
    )
