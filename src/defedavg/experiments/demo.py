"""The demo: six algorithms on 5,000 real digits, 100 clients, the paper's time model, in a quarter of a minute.

Algorithms for IID data run on an IID partition, algorithms for non-IID data on two classes per client. FedAvg and
FAVANO, which the paper compares in both settings, run in both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ..config.study import Study, study
from .run_events import Watch
from .study_run import StudyRun

COMMON: dict[str, Any] = {
    "task": {"data": "mnist5k", "model": "mlp"},
    "clients": {"num_clients": 100, "profile": "paper-fashionmnist"},
    "training": {"updates_per_round": 10, "local_steps": 50, "batch_size": 10},
}


def _study(name: str, split: str, target: float, rates: dict[str, dict[str, float]]) -> Study:
    return study(
        {
            "name": name,
            "algorithms": list(rates),
            **COMMON,
            "task": {**COMMON["task"], "split": split, "classes_per_client": 2},
            "stop": {"target_accuracy": target, "max_rounds": 10_000, "max_seconds": 15.0, "eval_every_seconds": 0.1},
            **rates,
        }
    )


# For each algorithm, the rates that reached the target first on seed 0: global of {0.1, 1}, local of {0.01, 0.05, 0.1};
# for AsySG with n clients at work, whose only rate scales single gradients, of {0.02, 0.05, 0.1, 0.2, 1} (0.1 and 0.2
# were equally fast).
RATES_IID: dict[str, dict[str, float]] = {
    "fedavg": {"global_lr": 1.0, "local_lr": 0.1},
    "favano": {"local_lr": 0.1},
    "asysg": {"concurrency": 10, "global_lr": 0.1},
    "defedavg-iid": {"global_lr": 0.1, "local_lr": 0.1},
}
RATES_NON_IID = {
    "fedavg": {"global_lr": 1.0, "local_lr": 0.1},
    "favano": {"local_lr": 0.1},
    "fedbuff": {"global_lr": 0.1, "local_lr": 0.1},
    "defedavg-niid": {"global_lr": 1.0, "local_lr": 0.05},
}

IID = "IID: every client has data of all classes"
NON_IID = "non-IID: every client has two classes"


def studies() -> dict[str, Study]:
    """Return the two halves of the demo, by title."""
    return {
        IID: _study("iid", "iid", 0.9, RATES_IID),
        NON_IID: _study("non-iid", "classes", 0.8, RATES_NON_IID),
    }


def run_demo(
    folder: Path, watching: Callable[[str, int], AbstractContextManager[Watch]], plots: bool = False
) -> tuple[bool, dict[str, list[dict[str, Any]]], Path | None]:
    """Run the demo; return whether it finished, its results by setting, and the path of the figure with ``plots``.

    ``watching(title, runs)`` is a context manager whose value receives the events of a sweep.
    """
    runs: dict[str, StudyRun] = {}
    finished = True
    for title, half in studies().items():
        runs[title] = StudyRun(half, folder / half.name, force=True)
        with watching(half.name, len(runs[title].points)) as watch:
            finished = runs[title].run(watch) and not runs[title].stop_requested
        if not finished:
            break
    figure = _draw(runs, folder / "accuracy.png") if plots else None
    return finished, {title: run.entries for title, run in runs.items()}, figure


def _draw(runs: Mapping[str, StudyRun], path: Path) -> Path:
    # Matplotlib is loaded when there is something to draw.
    from ..report.plots import accuracy_curves, save
    from ..report.run_curves import curve_of

    curves = {title: [*map(curve_of, run.run_folder().runs)] for title, run in runs.items()}
    targets = {title: run.points[0].settings.stop.target_accuracy for title, run in runs.items()}
    save(accuracy_curves(curves, target=targets), path)
    return path
