"""Small runs in the place of the paper's."""

from __future__ import annotations

from typing import Any

from defedavg.config import study as config
from defedavg.experiments.run_events import Event
from defedavg.paper.result_files import ResultFiles, StoredRun
from defedavg.paper.run_grid import Choices, PaperRun
from defedavg.paper.run_request import select_cells


def small_settings(choices: Choices, run: PaperRun) -> config.Settings:
    """Return the settings of a small run that replaces one of the paper's."""
    global_lr, local_lr = run.rates
    training: dict[str, Any] = {"updates_per_round": 4, "local_steps": 5}
    training |= {} if global_lr is None else {"global_lr": global_lr}
    training |= {} if local_lr is None else {"local_lr": local_lr}
    ends = (
        {"max_seconds": 1.0, "max_rounds": 1000} if run.rounds is None else {"max_rounds": 12, "stop_at_target": False}
    )
    tables: dict[str, Any] = {
        "algorithms": [run.cell.algorithm],
        "task": {"model": "softmax"},
        "clients": {"num_clients": 20},
        "training": training,
        "stop": {"target_accuracy": 0.7, "consecutive_hits": 5, "train_samples": 20, **ends},
    }
    return config.study(tables).points()[0].settings


def quiet(_event: Event) -> None:
    """Ignore an event."""


def small_runs(*algorithms: str) -> list[PaperRun]:
    return [PaperRun(cell, cell.rates) for cell in select_cells(["fashionmnist"], ["iid"], [10], algorithms or None)]


def stored(store: ResultFiles, runs: list[tuple[PaperRun, int]]) -> list[tuple[StoredRun, int]]:
    return [(StoredRun(store, run), seed) for run, seed in runs]
