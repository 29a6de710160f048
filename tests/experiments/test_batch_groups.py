"""Which runs of a sweep share batches."""

from __future__ import annotations

from typing import Any

from defedavg.config import study as config
from defedavg.experiments.compute import ComputeConfig
from defedavg.experiments.run_events import RunSpec
from defedavg.experiments.sweep import Sweep


def group_of(algorithm: str, seed: int = 0, **task: Any) -> Any:
    tables = {"algorithms": [algorithm], "task": {"model": "softmax", **task}}
    (point,) = config.study(tables).points()
    return Sweep(ComputeConfig()).group_of(RunSpec("run", point.settings, seed))


def test_runs_share_batches_across_algorithms_seeds_and_splits() -> None:
    assert group_of("fedavg") == group_of("defedavg-niid", seed=1) == group_of("fedbuff", split="classes")


def test_one_step_jobs_and_other_data_have_batches_of_their_own() -> None:
    assert group_of("asysg") == group_of("asysg", seed=1) != group_of("fedavg")
    assert group_of("fedavg", normalise="unit") != group_of("fedavg")
    assert group_of("fedavg", test_share=0.2) != group_of("fedavg")
