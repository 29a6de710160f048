"""Small searches for learning rates, and what the folder of a resumed one must be equal to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from defedavg.config import study as config
from defedavg.experiments.checkpointing import CheckpointDir
from defedavg.experiments.compute import ComputeConfig
from defedavg.experiments.tune import RUNGS, Tuning, pairs_of
from defedavg.experiments.tuning_folder import TuningFolder
from helpers.interrupted_studies import InterruptionError, contents, ignore, interrupt_after, lines

BASE: dict[str, Any] = {
    "seeds": [0, 1],
    "task": {"model": "softmax"},
    "clients": {"num_clients": 20},
    "training": {"updates_per_round": 4, "local_steps": 5},
    "stop": {"target_accuracy": 0.8, "max_rounds": 40, "eval_every_rounds": 2},
}

SMALL_BATCHES = ComputeConfig(max_batch_jobs=4)
"""With them a search has many checkpoints."""

Rates = tuple[float, ...]


def study(**more: Any) -> config.Study:
    return config.study({"algorithms": ["defedavg-iid"], **BASE, **more})


def small(**more: Any) -> config.Study:
    """Return a study that is searched in less than a second."""
    stop = {"target_accuracy": 0.8, "max_rounds": 16, "eval_every_rounds": 2}
    training = {"updates_per_round": 4, "local_steps": 2}
    return study(**{"algorithms": ["fedbuff"], "seeds": [0], "training": training, "stop": stop, **more})


def two_settings() -> config.Study:
    return small(algorithms=["fedavg", "fedbuff"], seeds=[0, 1])


def search_in(
    folder: Path,
    chosen: config.Study,
    rates: tuple[Rates, Rates] = ((1.0,), (0.001, 0.05, 0.1)),
    rungs: Rates = RUNGS,
    compute: ComputeConfig = SMALL_BATCHES,
    **options: Any,
) -> TuningFolder:
    """Return a search in a folder; ``options`` are those of its session."""
    return TuningFolder(
        Tuning(pairs_of(chosen.points(), *rates), chosen.seeds, compute, rungs), chosen, folder, **options
    )


def finished_search(folder: Path, chosen: config.Study, **options: Any) -> Path:
    """Search in one session."""
    assert search_in(folder, chosen, **options).run(ignore)
    return folder


def interrupted_search(folder: Path, chosen: config.Study, after: int, **options: Any) -> list[dict[str, Any]]:
    """Search until an event, with a checkpoint after every batch; return where the runs stood at the last one."""
    with pytest.raises(InterruptionError):
        search_in(folder, chosen, checkpoint_interval=0.0, **options).run(interrupt_after(after))
    newest = CheckpointDir(folder / "checkpoints").newest()
    assert newest is not None
    runs: list[dict[str, Any]] = newest[0]["search"]["runs"]
    return runs


def results(folder: Path) -> dict[str, Any]:
    """Return everything that a search found, without origin and real times."""
    summary = json.loads((folder / "summary.json").read_text())
    del summary["provenance"]
    tuned = contents(folder, "tuned") | {name.name: name.read_bytes() for name in folder.glob("tuned.toml")}
    return {
        "summary": summary,
        "points": (folder / "points.jsonl").read_text(),
        "tuned": tuned,
        "metrics": lines(folder),
    }
