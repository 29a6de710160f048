"""The batched executor agrees with the reference, whatever shares a batch with what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from test_reference import settings
from torch import Tensor, nn

from defedavg.algorithms import ALGORITHMS
from defedavg.config.study import Settings
from defedavg.errors import UserError
from defedavg.experiments.simulation import Simulation, make_executor, make_plan, make_timeline
from defedavg.tasks import Task, make_task
from defedavg.training import BatchedRun, RunProgress, StoppingRule, Trainer, drive_batched

CLIENTS = 6
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(60, 1, 6, 6)), RANDOM.integers(0, 3, 60)
WORDS = RANDOM.integers(0, 7, size=(60, 4))


class Residual(nn.Module):
    """Something that is no chain of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.inner, self.leave = nn.Linear(36, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.enter(x.flatten(1)))
        out: Tensor = self.leave(hidden + torch.nn.functional.gelu(self.inner(hidden)))
        return out


class Attention(nn.Module):
    """A small Transformer block over four words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(7, 4), nn.LayerNorm(4)
        self.query, self.value, self.leave = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.words(x))
        weight = torch.softmax(self.query(hidden) @ hidden.transpose(-1, -2), dim=-1)
        out: Tensor = self.leave((hidden + weight @ self.value(hidden)).flatten(1))
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 3, bias=False)),
    "cnn": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    ),
    "strided": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.GELU(), nn.GroupNorm(2, 4), nn.Conv2d(4, 5, (2, 1), bias=False),
        nn.AvgPool2d((2, 3)), nn.Flatten(), nn.LayerNorm(5), nn.Linear(5, 3),
    ),
    "words": lambda: nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Flatten(), nn.Linear(16, 3)),
    "residual": Residual,
    "attention": Attention,
}  # fmt: skip


def task_of(model: str) -> Task:
    """A float64 task for six clients."""
    data = (WORDS if model in ("words", "attention") else X, Y)
    parts = [np.arange(i, 60, CLIENTS) for i in range(CLIENTS)]
    return make_task(model=lambda: MODELS[model]().double(), train=data, test=data, clients=parts, keep_dtype=True)


def how(algorithm: str, **training: Any) -> Settings:
    """Settings for six clients."""
    base = {"updates_per_round": 3, "local_steps": 4, "batch_size": 4, "global_lr": 0.5, "local_lr": 0.1}
    return settings(algorithm, clients={"num_clients": CLIENTS}, training={**base, **training})


def lane_of(chosen: Settings, task: Task, rounds: int, seed: int = 0) -> BatchedRun:
    """A run of so many rounds, measured at its ends only."""
    goal = StoppingRule(max_rounds=rounds, every_rounds=2**31)
    return BatchedRun(make_executor(chosen, seed, task), iter(make_timeline(chosen, seed)), goal, RunProgress())


def batched(lanes: list[BatchedRun], task: Task, width: int) -> list[Tensor]:
    """The last versions of runs that share batches."""
    trainer = Trainer(task, lanes[0].reference.module, width=width)
    for _ in drive_batched(lanes, trainer):
        pass
    return [lane.reference.versions[lane.newest] for lane in lanes]


def reference(chosen: Settings, task: Task, rounds: int, seed: int = 0) -> Tensor:
    """The same by the plain loop."""
    executor = make_executor(chosen, seed, task)
    for record in make_plan(chosen, seed, rounds).rounds:
        executor.apply(record)
    return executor.versions[rounds]


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
