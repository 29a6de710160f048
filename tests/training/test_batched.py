"""The batched executor agrees with the reference, whatever shares a batch with what."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor, nn

from defedavg.algorithms import ALGORITHMS
from defedavg.errors import UserError
from defedavg.experiments.simulation import Simulation
from defedavg.tasks import make_task
from defedavg.training import Trainer, drive_batched
from helpers.settings_tables import settings
from helpers.small_runs import MODELS, batched, how, lane_of, reference, task_of


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
@pytest.mark.parametrize("model", list(MODELS))
def test_fifty_merges_agree_with_the_reference(model: str, algorithm: str) -> None:
    task, chosen = task_of(model), how(algorithm)
    truth = reference(chosen, task, 50)
    (found,) = batched([lane_of(chosen, task, 50)], task, 64)
    assert float((found - truth).norm() / truth.norm()) < 1e-10


@examples(max_examples=15)
@given(
    runs=st.lists(
        st.tuples(
            st.sampled_from(list(ALGORITHMS)), st.integers(0, 3), st.sampled_from([0.02, 0.1]), st.integers(1, 5)
        ),
        min_size=1,
        max_size=4,
    ),
    width=st.integers(1, 40),
)
def test_no_mixture_of_runs_and_no_width_changes_a_result(runs: list[tuple[str, int, float, int]], width: int) -> None:
    task = task_of("cnn")
    chosen = [(how(name, local_lr=rate, local_steps=steps), seed) for name, seed, rate, steps in runs]
    together = batched([lane_of(s, task, 8, seed) for s, seed in chosen], task, width)
    for (s, seed), found in zip(chosen, together, strict=True):
        (alone,) = batched([lane_of(s, task, 8, seed)], task, 64)
        assert torch.equal(found, alone)
        truth = reference(s, task, 8, seed)
        assert float((found - truth).norm() / truth.norm()) < 1e-12


def test_the_look_ahead_fills_batches() -> None:
    """N = 100, n = 10: one run of DeFedAvg-IID gives batches of at least 35 jobs on average."""
    chosen = settings("defedavg-iid", training={"local_steps": 50})
    data = (np.zeros((100, 2), np.float32), np.arange(100) % 2)
    task = make_task(model=lambda: nn.Linear(2, 2), train=data, test=data, clients=[np.array([i]) for i in range(100)])
    sizes = []
    lane = lane_of(chosen, task, 200)
    trainer = Trainer(task, lane.reference.module, width=128)

    def pretend(jobs: list[Any]) -> list[Tensor]:
        sizes.append(len(jobs))
        return [torch.zeros_like(job.start) for job in jobs]

    trainer.train = pretend  # type: ignore[method-assign,assignment]
    for _ in drive_batched([lane], trainer):
        pass
    assert sum(sizes) == 2000
    assert np.mean(sizes) >= 35
    assert len(lane.reference.versions) < 60
    assert not lane.deltas


def test_a_run_ends_as_the_reference_ends_it() -> None:
    base: dict[str, Any] = {"task": {"model": "softmax"}, "clients": {"num_clients": 20}}
    training = {"updates_per_round": 4, "local_steps": 5}
    for stop in ({"target_accuracy": 0.6}, {"max_seconds": 1.5}, {"max_rounds": 7}):
        chosen = settings("defedavg-niid", **base, training=training, stop=stop)
        plain, fast = Simulation(chosen, 0), Simulation(chosen, 0)
        truth = list(plain)
        lane = fast.lane()
        found = [e for _, e in drive_batched([lane], Trainer(fast.task, fast.executor.module, width=16)) if e]
        assert [(e.round, e.seconds, e.accuracy) for e in found] == [(e.round, e.seconds, e.accuracy) for e in truth]
        assert fast.progress.status == plain.progress.status
        assert fast.plan.hash() == plain.plan.hash()


def test_a_batch_has_room_for_at_least_one_job() -> None:
    task = task_of("mlp")
    with pytest.raises(UserError, match="width"):
        batched([lane_of(how("fedavg"), task, 1)], task, 0)
