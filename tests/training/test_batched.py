"""The batched executor agrees with the reference, whichever jobs share a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor, nn

from defedavg.algorithms import ALGORITHMS
from defedavg.config.build import make_plan
from defedavg.errors import UserError
from defedavg.experiments.simulation import Simulation
from defedavg.planning.ready_jobs import ReadyJobs
from defedavg.tasks import Task, make_task
from defedavg.training import BatchedRun, Trainer, run_batched
from helpers.settings_tables import settings
from helpers.small_runs import MODELS, batched_run, final_versions, how, reference, task_of
from helpers.strategies import variants


@pytest.mark.no_cover
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
@pytest.mark.parametrize("model", list(MODELS))
def test_fifty_merges_agree_with_the_reference(model: str, algorithm: str) -> None:
    task, chosen = task_of(model), how(algorithm)
    expected = reference(chosen, task, 50)
    (found,) = final_versions([batched_run(chosen, task, 50)], task, 64)
    assert float((found - expected).norm() / expected.norm()) < 1e-10


CHOICES = [
    pytest.param(name, own, id=f"{name}-{i}")
    for name, kind in ALGORITHMS.items()
    for i, own in enumerate(variants(kind))
    if own != kind.settings_type()
]


@pytest.mark.parametrize(("algorithm", "own"), CHOICES)
def test_fifty_merges_of_every_choice_agree_with_the_reference(algorithm: str, own: Any) -> None:
    task, chosen = task_of("mlp"), dataclasses.replace(how(algorithm), algorithm_settings=own)
    expected = reference(chosen, task, 50)
    (found,) = final_versions([batched_run(chosen, task, 50)], task, 64)
    assert float((found - expected).norm() / expected.norm()) < 1e-10


@examples(max_examples=15)
@given(
    runs=st.lists(
        st.tuples(
            st.sampled_from(list(ALGORITHMS)), st.integers(0, 3), st.sampled_from([0.02, 0.1]), st.integers(1, 5)
        ),
        min_size=1,
        max_size=4,
    ),
    max_batch_jobs=st.integers(1, 40),
)
def test_results_do_not_depend_on_the_runs_or_the_size_of_a_batch(
    runs: list[tuple[str, int, float, int]], max_batch_jobs: int
) -> None:
    task = task_of("cnn")
    chosen = [(how(name, local_lr=rate, local_steps=steps), seed) for name, seed, rate, steps in runs]
    together = final_versions([batched_run(s, task, 8, seed) for s, seed in chosen], task, max_batch_jobs)
    for (s, seed), found in zip(chosen, together, strict=True):
        (alone,) = final_versions([batched_run(s, task, 8, seed)], task, 64)
        assert torch.equal(found, alone)
        expected = reference(s, task, 8, seed)
        assert float((found - expected).norm() / expected.norm()) < 1e-12


def hundred_clients() -> Task:
    data = (np.zeros((100, 2), np.float32), np.arange(100) % 2)
    return make_task(model=lambda: nn.Linear(2, 2), train=data, test=data, clients=[np.array([i]) for i in range(100)])


def batch_sizes(runs: list[BatchedRun], max_batch_jobs: int) -> list[int]:
    """Return the numbers of jobs in the batches of runs; nothing is trained."""
    first, sizes = runs[0].reference, list[int]()
    trainer = Trainer(first.task, first.module, max_batch_jobs=max_batch_jobs)

    def pretend(jobs: list[Any]) -> list[Tensor]:
        sizes.append(len(jobs))
        return [torch.zeros_like(job.start) for job in jobs]

    trainer.train = pretend  # type: ignore[method-assign,assignment]
    for _ in run_batched(runs, trainer):
        pass
    return [size for size in sizes if size]


def test_the_look_ahead_fills_batches() -> None:
    """With N = 100 and n = 10, one run of DeFedAvg-IID fills batches with at least 35 jobs on average."""
    run = batched_run(settings("defedavg-iid", training={"local_steps": 50}), hundred_clients(), 200)
    sizes = batch_sizes([run], 128)
    assert sum(sizes) == 2000
    assert np.mean(sizes) >= 35
    assert len(run.reference.versions) < 60
    assert not run.deltas


@pytest.mark.parametrize("runs", [2, 3, 4])
def test_runs_that_start_together_fill_all_batches_but_the_last(runs: int) -> None:
    """If one run were started after the other, the last one would be alone at the end, with few jobs ready."""
    chosen, task = settings("defedavg-iid", training={"local_steps": 50}), hundred_clients()
    sizes = batch_sizes([batched_run(chosen, task, 100, seed) for seed in range(runs)], 96)
    assert sum(sizes) == 1000 * runs
    assert len(sizes) == -(-1000 * runs // 96)


@pytest.mark.parametrize(
    ("algorithm", "n"),
    [("defedavg-iid", 10), ("defedavg-iid", 1), ("defedavg-niid", 10), ("fedbuff", 10), ("fedavg", 10)],
)
def test_one_run_trains_as_many_jobs_at_once_as_its_plan_allows(algorithm: str, n: int) -> None:
    rounds = 600 // n
    chosen = settings(algorithm, training={"local_steps": 50, "updates_per_round": n})
    sizes = batch_sizes([batched_run(chosen, hundred_clients(), rounds)], 1000)
    ready = ReadyJobs()
    for record in make_plan(chosen, 0, rounds).rounds:
        ready.add(record)
    assert sum(sizes) == ready.jobs
    assert len(sizes) == ready.batches
    assert np.mean(sizes) == ready.mean


def test_a_run_ends_as_the_reference_ends_it() -> None:
    base: dict[str, Any] = {"task": {"model": "softmax"}, "clients": {"num_clients": 20}}
    training = {"updates_per_round": 4, "local_steps": 5}
    for stop in ({"target_accuracy": 0.6}, {"max_seconds": 1.5}, {"max_rounds": 7}):
        chosen = settings("defedavg-niid", **base, training=training, stop=stop)
        plain, fast = Simulation(chosen, 0), Simulation(chosen, 0)
        expected = list(plain)
        trainer = Trainer(fast.task, fast.executor.module, max_batch_jobs=16)
        found = [e for _, e in run_batched([fast.batched_run()], trainer) if e]
        assert [(e.round, e.seconds, e.accuracy) for e in found] == [(e.round, e.seconds, e.accuracy) for e in expected]
        assert fast.progress.status == plain.progress.status
        assert fast.plan.hash() == plain.plan.hash()


def test_a_batch_of_no_jobs_is_refused() -> None:
    task = task_of("mlp")
    with pytest.raises(UserError, match="max_batch_jobs is 0"):
        final_versions([batched_run(how("fedavg"), task, 1)], task, 0)


class Failing(Trainer):
    """A trainer of a device that fails with an error, and after that with every call."""

    error: BaseException = RuntimeError("the first error")

    def train(self, jobs: Any) -> list[Tensor]:
        raise self.error


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException | None = None) -> tuple[Trainer, BatchedRun]:
    def synchronize() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    task = task_of("mlp")
    run = batched_run(how("fedavg"), task, 3)
    trainer = Trainer(task, run.reference.module) if error is None else Failing(task, run.reference.module)
    monkeypatch.setattr(Failing, "error", error)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr("defedavg.training.batched._start_evaluation", lambda *_: list)
    trainer.asynchronous = True
    return trainer, run


@pytest.mark.parametrize(
    "error", [UserError("too little memory"), RuntimeError("the first error"), KeyboardInterrupt()]
)
def test_an_error_is_not_replaced_by_that_of_waiting_for_the_device(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    trainer, run = failing(monkeypatch, error)
    with pytest.raises(type(error)) as found:
        list(run_batched([run], trainer))
    assert found.value is error


def test_a_device_that_fails_at_last_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = failing(monkeypatch)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        list(run_batched([], trainer))


def test_closing_waits_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    task, waits = task_of("mlp"), list[None]()
    run = batched_run(how("fedavg"), task, 3)
    trainer = Trainer(task, run.reference.module)
    evaluations = run_batched([run], trainer)
    next(evaluations)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(None))
    trainer.asynchronous = True
    assert isinstance(evaluations, Generator)
    evaluations.close()
    assert len(waits) == 1
