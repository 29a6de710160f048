"""The reference executor against closed forms, plain SGD, and itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from defedavg.algorithms import ALGORITHMS
from defedavg.algorithms.protocol import Update
from defedavg.config.build import make_executor, make_plan
from defedavg.config.study import Settings
from defedavg.errors import UserError
from defedavg.experiments.simulation import Simulation
from defedavg.tasks import Task, cross_entropy, least_squares, make_task
from defedavg.training import (
    EvalResult,
    EvalSchedule,
    LocalTraining,
    PendingEval,
    Reference,
    RunProgress,
    Status,
    StoppingRule,
    positions,
)
from defedavg.training.local_training import TrainingJob, host_minibatches
from helpers.settings_tables import settings, small


def weights_after(task: Task, how: Settings, rounds: int, seed: int = 0) -> Tensor:
    """Return the version after ``rounds`` rounds."""
    executor = make_executor(how, seed, task)
    for record in make_plan(how, seed, rounds).rounds:
        executor.apply(record)
    return executor.versions[rounds]


def test_one_client_is_plain_sgd() -> None:
    problem = least_squares(1, dimension=3, samples_per_client=7, seed=3)
    how = settings("defedavg-iid", **small(1, 1, steps=4, batch_size=2))
    found = weights_after(problem.task, how, rounds=5, seed=11)
    weights = torch.ones(3, dtype=torch.float64)
    curvature = torch.from_numpy(problem.curvature)
    targets = problem.task.train.targets / torch.sqrt(curvature)
    for job in range(5):
        for batch in positions(11, 0, job, steps=4, batch_size=2, size=7):
            weights = weights - 0.1 * curvature * (weights - targets[torch.from_numpy(batch)].mean(0))
    torch.testing.assert_close(found, weights, rtol=1e-12, atol=0)


@pytest.mark.parametrize("other", ["defedavg-iid", "fedbuff"])
def test_equal_speeds_and_full_rounds_are_fedavg(other: str) -> None:
    problem = least_squares(5, heterogeneity=2.0)
    shape = small(5, 5, clients={"slowness": "equal"})
    fedavg = weights_after(problem.task, settings("fedavg", fedavg={"replacement": False}, **shape), 8)
    assert torch.equal(fedavg, weights_after(problem.task, settings(other, **shape), 8))


def test_one_local_step_is_asysg() -> None:
    problem = least_squares(6)
    one = weights_after(problem.task, settings("defedavg-iid", **small(6, 2, steps=1, global_lr=0.2, local_lr=1.0)), 30)
    asysg = weights_after(problem.task, settings("asysg", **small(6, 2, steps=9, global_lr=0.2, local_lr=0.7)), 30)
    assert torch.equal(one, asysg)


def test_merges_are_the_equations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The merge of every algorithm without state equals its equation, computed from the updates."""
    problem = least_squares(6, heterogeneity=1.0)
    for name in ("fedavg", "fedbuff", "favano", "asysg", "defedavg-iid", "defedavg-niid"):
        how = settings(name, **small(6, 3, steps=4, global_lr=0.5))
        executor = make_executor(how, 0, problem.task)
        past = {0: executor.versions[0].clone()}
        trained: dict[tuple[int, int], Tensor] = {}
        train = executor._train

        def remember(update: Any, train: Any = train, trained: Any = trained) -> Tensor:
            delta: Tensor = train(update)
            trained[update.client, update.index] = delta
            return delta

        monkeypatch.setattr(executor, "_train", remember)
        for record in make_plan(how, 0, 12).rounds:
            merge, version = record.merge, record.merge.version
            new = executor.apply(record)
            if name == "favano":
                models = [past[version - 1]]
                for update, weight in merge.updates:
                    alpha = -1 / (4 * weight)
                    delta = trained[update.client, update.index] / alpha if update.steps else 0.0
                    models.append(past[update.version] - delta)
                expected = sum(models) / len(models)
            else:
                rate = 0.5
                total = sum(w * trained[u.client, u.index] for u, w in merge.updates)
                expected = past[version - 1] + rate * total
                assert sum(w for _, w in merge.updates) == pytest.approx(-1.0)
            torch.testing.assert_close(new, torch.as_tensor(expected), rtol=1e-12, atol=1e-14)
            past[version] = new.clone()


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_only_merged_jobs_are_trained_and_versions_are_freed(name: str) -> None:
    problem = least_squares(20)
    how = settings(name, **small(20, 3))
    plan = make_plan(how, 0, 60)
    executor = make_executor(how, 0, problem.task)
    most = 0
    for record in plan.rounds:
        executor.apply(record)
        most = max(most, len(executor.versions))
    assert executor.updates_trained == sum(u.steps > 0 for r in plan.rounds for u, _ in r.merge.updates)
    assert most < 50


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_same_seed_same_numbers_bit_for_bit(name: str) -> None:
    how = settings(
        name,
        task={"model": "mlp", "split": "classes"},
        clients={"num_clients": 20},
        training={"updates_per_round": 3, "local_steps": 2},
        stop={"max_rounds": 4, "train_samples": 50},
    )
    runs = [Simulation(how, 5) for _ in range(2)]
    evaluations = [[(e.accuracy, e.loss, e.train_loss) for e in run] for run in runs]
    assert evaluations[0] == evaluations[1]
    assert torch.equal(runs[0].weights, runs[1].weights)
    assert runs[0].plan.hash() == runs[1].plan.hash()
    other = Simulation(how, 6)
    assert [(e.accuracy, e.loss, e.train_loss) for e in other] != evaluations[0]


def test_order_of_updates_in_a_merge_is_canonical() -> None:
    plan = make_plan(settings("defedavg-iid", **small(30, 10)), 0, 20)
    for record in plan.rounds:
        clients = [update.client for update, _ in record.merge.updates]
        assert clients == sorted(clients)


def test_evaluation_changes_no_run() -> None:
    base: dict[str, Any] = {**small(10, 3), "task": {"model": "softmax"}}
    often = Simulation(settings("fedbuff", **base, stop={"max_rounds": 6, "eval_every_rounds": 1}), 0)
    seldom = Simulation(settings("fedbuff", **base, stop={"max_rounds": 6, "eval_every_rounds": 6}), 0)
    assert len(list(often)) == 7
    assert len(list(seldom)) == 2
    assert torch.equal(often.weights, seldom.weights)


class Noisy(nn.Module):
    """Random layers, a buffer that training updates, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


def test_any_module_trains_and_does_not_change_the_global_generator() -> None:
    x = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    task = make_task(model=Noisy, train=(x, y), test=(x, y), clients=[np.arange(i, 40, 4) for i in range(4)])
    state = torch.random.get_rng_state()
    runs = [weights_after(task, settings("defedavg-niid", **small(4, 2, steps=5)), 4) for _ in range(2)]
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(runs[0], runs[1])
    state_after = make_executor(settings("fedavg", **small(4, 2)), 0, task).named(runs[0])
    assert not torch.equal(state_after["net.2.running_mean"], torch.zeros(6))
    assert torch.equal(state_after["frozen"], torch.ones(3))


def test_a_loss_that_is_not_per_sample_is_refused() -> None:
    x, y = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
    task = make_task(
        model=lambda: nn.Linear(2, 2),
        loss=lambda out, target: cross_entropy(out, target).mean(),
        train=(x, y),
        test=(x, y),
        clients=[np.arange(4)],
    )
    with pytest.raises(UserError, match="one value per sample"):
        weights_after(task, settings("fedavg", **small(1, 1)), 1)


def test_divergence_is_reported_with_its_round() -> None:
    problem = least_squares(4)
    how = settings("fedavg", **small(4, 2, steps=50, local_lr=1e6), stop={"max_rounds": 30})
    run = Simulation(how, 0, problem.task)
    list(run)
    assert run.progress.status == "diverged"
    assert run.progress.diverged_at is not None
    assert 1 <= run.progress.diverged_at <= 10
    assert run.progress.rounds == run.progress.diverged_at


def test_stops_at_target_at_rounds_and_at_seconds() -> None:
    base: dict[str, Any] = {"task": {"model": "mlp"}, "training": {"updates_per_round": 5, "local_steps": 30}}
    hit = Simulation(settings("fedavg", **base, stop={"max_rounds": 30, "target_accuracy": 0.7}), 0)
    found = list(hit)
    assert hit.progress.status == "target"
    assert hit.progress.first_hit_seconds == found[-1].seconds
    assert found[-1].accuracy is not None
    assert found[-1].accuracy >= 0.7
    assert all(e.accuracy is not None and e.accuracy < 0.7 for e in found[:-1])
    on = Simulation(
        settings("fedavg", **base, stop={"max_rounds": 9, "target_accuracy": 0.5, "stop_at_target": False}), 0
    )
    assert [e.round for e in on] == list(range(10))
    assert on.progress.status == "max_rounds"
    assert on.progress.first_hit_seconds is not None
    timed = Simulation(settings("fedavg", **base, stop={"max_seconds": 1.0}), 0)
    assert all(e.seconds <= 1.0 for e in timed)
    assert timed.progress.status == "max_seconds"


def test_positions_are_keyed_and_within_range() -> None:
    drawn = positions(1, 2, 3, steps=5, batch_size=4, size=7)
    assert drawn.shape == (5, 4)
    assert drawn.min() >= 0
    assert drawn.max() < 7
    assert np.array_equal(drawn[:3], positions(1, 2, 3, steps=3, batch_size=4, size=7))
    assert not np.array_equal(drawn, positions(1, 2, 4, steps=5, batch_size=4, size=7))
    shuffled = positions(1, 2, 3, steps=7, batch_size=4, size=14, sampling="shuffle").reshape(-1)
    assert sorted(shuffled[:14]) == list(range(14))
    assert sorted(shuffled[14:]) == list(range(14))
    assert not np.array_equal(shuffled[:14], shuffled[14:])
    big = positions(0, 0, 0, steps=1000, batch_size=10, size=5).reshape(-1)
    counts = np.bincount(big, minlength=5)
    assert ((counts - 2000) ** 2 / 2000).sum() < 25


@pytest.mark.parametrize("sampling", ["replacement", "shuffle"])
def test_the_minibatches_of_many_jobs_are_those_of_each(sampling: str) -> None:
    task = least_squares(3, samples_per_client=5).task
    training = [LocalTraining(seed, batch_size=2, sampling=sampling) for seed in (0, 7)]
    updates = [Update(client, index, 0, steps) for client, index, steps in ((0, 0, 4), (2, 1, 4), (1, 5, 3), (2, 9, 1))]
    jobs = [TrainingJob(training[update.index % 2], task, torch.zeros(8), update) for update in updates]
    found = host_minibatches(jobs, 4)
    assert found.shape == (4, 4, 2)
    for job, samples in zip(jobs, found, strict=True):
        own = job.local_training.samples(task, job.update)
        assert np.array_equal(samples[: job.update.steps], own)
        assert set(own.reshape(-1)) <= set(task.clients[job.update.client])


def test_a_model_without_parameters_is_refused() -> None:
    x = torch.zeros(2, 3)
    task = make_task(model=nn.Flatten, train=(x, x), test=(x, x), clients=[np.arange(2)], classes=None)
    with pytest.raises(UserError, match="no parameters"):
        Reference(task, LocalTraining(seed=0))


def test_counters_and_the_callers_module_do_not_change() -> None:
    """A buffer that counts batches is reset before each job."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=None))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    x, y = torch.randn(12, 4, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 3
    task = make_task(model=lambda: net, train=(x, y), test=(x, y), clients=[np.arange(12)])
    executor = Reference(task, LocalTraining(seed=0, batch_size=4))
    update = make_plan(settings("fedavg", **small(1, 1)), 0, 1).rounds[0].merge.updates[0][0]
    first = executor._train(update)
    assert torch.equal(first, executor._train(update))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize(
    ("model", "target", "classes", "words"),
    [
        (lambda: nn.Linear(4, 1), torch.zeros(6, dtype=torch.int64), 2, "cannot be trained|accuracy needs"),
        (lambda: nn.Linear(3, 2), torch.zeros(6, dtype=torch.int64), 2, "cannot be trained"),
        (lambda: nn.Linear(4, 2).double(), torch.zeros(6, dtype=torch.int64), 2, "cannot be trained"),
        (lambda: nn.Linear(4, 2).requires_grad_(False), torch.zeros(6, dtype=torch.int64), 2, "frozen"),
    ],
)
def test_a_model_that_does_not_fit_is_one_line(model: Any, target: Tensor, classes: int, words: str) -> None:
    x = torch.zeros(6, 4)
    target[0] = classes - 1
    task = make_task(model=model, train=(x, target), test=(x, target), clients=[np.arange(6)])
    with pytest.raises(UserError, match=words):
        Reference(task, LocalTraining(seed=0)).evaluate(torch.zeros(1), task.test)


def test_accuracy_is_refused_for_outputs_that_are_not_classes() -> None:
    x, y = torch.zeros(6, 4), torch.tensor([0, 1] * 3)
    task = make_task(
        model=lambda: nn.Linear(4, 1), loss=lambda out, target: (out[:, 0] - target) ** 2, train=(x, y), test=(x, y),
        clients=[np.arange(6)],
    )  # fmt: skip
    with pytest.raises(UserError, match="classes=None"):
        Reference(task, LocalTraining(seed=0))


def test_the_last_version_is_evaluated_whatever_ends_the_run() -> None:
    problem = least_squares(4)
    how = settings("fedavg", **small(4, 2), stop={"max_seconds": 3.0, "eval_every_seconds": 100.0})
    run = Simulation(how, 0, problem.task)
    found = list(run)
    assert run.progress.status == "max_seconds"
    assert found[-1].round == run.progress.rounds > 0
    assert run.plan.rounds[-1].merge.version == run.progress.rounds
    run.plan.check()


@pytest.mark.parametrize(
    ("accuracies", "hits", "first", "sustained", "ends"),
    [
        ([0.1, 0.9, 0.2, 0.9], 1, 1.0, None, 1),
        ([0.1, 0.9, 0.2, 0.9, 0.9, 0.9, 0.9, 0.9, 0.1], 5, 1.0, 3.0, 7),
        ([0.9, 0.9, 0.1, 0.9, 0.9], 3, 0.0, None, None),
        ([0.1, 0.9, 0.9, 0.9, 0.9, 0.9], 2, 1.0, None, 2),
    ],
)
def test_first_and_sustained_hits(
    accuracies: list[float], hits: int, first: float, sustained: float | None, ends: int | None
) -> None:
    """A sustained hit is five evaluations in a row at the target; its time is that of the first of them."""
    task = least_squares(2).task
    progress = RunProgress()
    schedule = EvalSchedule(task, StoppingRule(target_accuracy=0.8, consecutive_hits=hits), progress)
    for number, accuracy in enumerate(accuracies):
        pending = PendingEval(number, float(number), torch.zeros(1), True, 0.0, 0, None)
        schedule.record(pending, EvalResult(True, 0.5, accuracy))
        if progress.status is not Status.RUNNING:
            assert number == ends
            break
    else:
        assert ends is None
    assert progress.first_hit_seconds == first
    assert progress.sustained_seconds == sustained
