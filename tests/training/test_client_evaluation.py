"""Scores of one version per client, against a plain loop over clients, and in both executors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from defedavg import simulate
from defedavg.tasks import Task, hold_out, make_task, squared_error
from defedavg.training import LocalTraining, Reference
from defedavg.training.client_evaluation import evaluate_clients, segment_means

RANDOM = np.random.default_rng(5)
SIZES = (3, 40, 1, 17, 900, 260)  # more samples than one step of an evaluation
SPLITS = np.split(RANDOM.permutation(sum(SIZES)), np.cumsum(SIZES)[:-1])
X, Y = RANDOM.normal(size=(sum(SIZES), 4)), RANDOM.integers(0, 3, sum(SIZES))


def worst_logit(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a metric that is no mean over samples."""
    return outputs.gather(1, targets[:, None]).min()


def task_of(**more: object) -> Task:
    parts = {"model": lambda: nn.Linear(4, 3).double(), "train": (X, Y), "test": (X, Y), "keep_dtype": True, **more}
    return hold_out(make_task(clients=SPLITS, **parts), 0.6, 1)  # type: ignore[arg-type]


def executor_of(task: Task) -> Reference:
    return Reference(task, LocalTraining(0, batch_size=2, global_lr=1.0, local_lr=0.1))


def test_means_of_segments() -> None:
    found = segment_means(np.array([1.0, 3.0, 5.0]), np.array([0, 2, 1, 0]))
    np.testing.assert_array_equal(found, [np.nan, 2.0, 5.0, np.nan])


@pytest.mark.parametrize("metric", [None, worst_logit])
def test_scores_are_those_of_a_loop_over_clients(metric: object) -> None:
    task = task_of(metric=metric)
    executor = executor_of(task)
    version = executor.versions[0]
    scores = evaluate_clients(executor, version)
    assert scores is not None
    assert scores.accuracy is not None
    assert task.client_tests is not None
    for i, samples in enumerate(task.client_tests.samples):
        assert scores.samples[i] == len(samples)
        if not len(samples):
            assert np.isnan(scores.loss[i])
            assert np.isnan(scores.accuracy[i])
            continue
        loss, accuracy = executor.evaluate(version, task.train[torch.from_numpy(samples)])
        assert scores.loss[i] == pytest.approx(loss, rel=1e-12)
        assert scores.accuracy[i] == pytest.approx(accuracy, rel=1e-12)
    assert (scores.samples == 0).tolist() == [size == 1 for size in SIZES]


def test_a_task_without_classes_has_losses_alone() -> None:
    targets = X[:, :3]
    task = task_of(train=(X, targets), test=(X, targets), loss=squared_error)
    executor = executor_of(task)
    scores = evaluate_clients(executor, executor.versions[0])
    assert scores is not None
    assert scores.accuracy is None
    assert np.isfinite(scores.loss[scores.samples > 0]).all()


def test_no_scores_without_samples_and_of_weights_that_are_not_finite() -> None:
    task = task_of()
    executor = executor_of(task)
    assert evaluate_clients(executor, executor.versions[0] * float("nan")) is None
    plain = make_task(model=nn.Linear(4, 3).double(), train=(X, Y), test=(X, Y), clients=SPLITS, keep_dtype=True)
    assert evaluate_clients(executor_of(plain), executor.versions[0]) is None


def test_reference_and_batched_executor_agree_and_never_train_on_held_out_samples() -> None:
    settings = {
        "task.client_test_share": 0.3, "training.updates_per_round": 3, "training.local_steps": 4,
        "training.batch_size": 4, "stop.max_rounds": 6, "stop.eval_every_rounds": 6,
    }  # fmt: skip
    task = make_task(model=nn.Linear(4, 3).double(), train=(X, Y), test=(X, Y), clients=SPLITS, keep_dtype=True)
    one, other = (simulate("fedbuff", task=task, settings=settings, executor=name) for name in ("reference", "batched"))
    assert one.client_scores is not None
    assert other.client_scores is not None
    np.testing.assert_allclose(one.client_scores.loss, other.client_scores.loss, rtol=1e-10)
    np.testing.assert_array_equal(one.client_scores.accuracy, other.client_scores.accuracy)
    held = np.concatenate(one.client_scores.tests.samples)
    ruined = X.copy()
    ruined[held] = 1e6
    changed = make_task(model=task.model, train=(ruined, Y), test=(X, Y), clients=SPLITS, keep_dtype=True)
    assert torch.equal(simulate("fedbuff", task=changed, settings=settings).weights, other.weights)
