"""Local optimisers, schedules, clipping and the proximal term: against plain oracles, and equal in both executors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from defedavg.algorithms.protocol import Update
from defedavg.config.build import make_executor, make_plan
from defedavg.planning.records import Round
from defedavg.tasks import Task, make_task
from defedavg.training import LocalTraining, Reference, Trainer, TrainingJob, run_batched
from defedavg.training.memory import VECTORS
from defedavg.training.stacked_optimizer import LocalMethod, StackedOptimizer
from helpers.local_options import OPTIONS
from helpers.modules import named
from helpers.small_runs import CLIENTS, batched_run, final_versions, how, reference, task_of

Floats = NDArray[np.float64]

SAMPLES, VALUES, MERGES = 8, 5, 60
SOURCE = np.random.default_rng(1)
INPUTS, TARGETS = SOURCE.normal(size=(CLIENTS, SAMPLES, VALUES)), SOURCE.normal(size=(CLIENTS, SAMPLES))
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "step(10, 0.7)": lambda x: math.prod([0.7] * int(x // 10)),
    "step(7, 0.9)": lambda x: math.prod([0.9] * int(x // 7)),
    "cosine(40)": lambda x: math.cos(math.pi * x / 80) ** 2 if x < 40 else 0.0,
    "cosine(300)": lambda x: math.cos(math.pi * x / 600) ** 2,
    "cosine(20)": lambda x: math.cos(math.pi * x / 40) ** 2 if x < 20 else 0.0,
    "cosine(100)": lambda x: math.cos(math.pi * x / 200) ** 2 if x < 100 else 0.0,
    "inverse-sqrt(0.5)": lambda x: (1 + 2 * x) ** -0.5,
    "inverse-sqrt(10)": lambda x: (1 + x / 10) ** -0.5,
}


def least_squares() -> Task:
    """Return linear regression in float64; a step uses all samples of its client."""
    data = INPUTS.reshape(-1, VALUES), TARGETS.reshape(-1, 1)
    return make_task(
        model=lambda: nn.Linear(VALUES, 1).double(), train=data, test=data, classes=None, keep_dtype=True,
        loss=lambda outputs, targets: 0.5 * (outputs - targets).square().sum(1),
        clients=[np.arange(i * SAMPLES, (i + 1) * SAMPLES) for i in range(CLIENTS)],
    )  # fmt: skip


# The oracle: full gradients of linear regression, with the formulas of the papers, in NumPy.


def oracle_job(w: Floats, client: int, steps: int, rate: float, o: Mapping[str, Any]) -> Floats:
    start, m, v = w, np.zeros_like(w), np.zeros_like(w)
    for t in range(1, steps + 1):
        x = np.c_[INPUTS[client], np.ones(SAMPLES)]
        g = x.T @ (x @ w - TARGETS[client]) / SAMPLES
        if o.get("clip_norm"):
            g = g * min(1.0, o["clip_norm"] / np.sqrt(np.sum(g * g)))
        decay = o.get("weight_decay", 0.0)
        decoupled = o.get("optimizer") == "adamw"
        g = g + o.get("prox", 0.0) * (w - start) + (0.0 if decoupled else decay) * w
        if o.get("optimizer", "sgd") == "sgd":
            momentum = o.get("momentum", 0.0)
            m = g if t == 1 else momentum * m + g
            w = w - rate * (g + momentum * m if o.get("nesterov") else m)
        else:
            b1, b2 = o.get("beta1", 0.9), o.get("beta2", 0.999)
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
            if decoupled:
                w = w - rate * decay * w
            w = w - rate * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + o.get("epsilon", 1e-8))
    return start - w


def oracle(rounds: Sequence[Round], first: Floats, o: Mapping[str, Any]) -> Floats:
    versions, made = {0: first}, {0: 0.0}

    def rate(name: str, version: int) -> float:
        x = made[version] if o.get("schedule_by") == "seconds" else version
        return float(o[f"{name}_lr"]) * SCHEDULES[o.get(f"{name}_schedule", "constant")](x)

    for record in rounds:
        merge = record.merge
        new: Floats = np.sum([a * versions[v] for v, a in merge.past], axis=0)
        for u, b in merge.updates:
            delta = oracle_job(versions[u.version], u.client, u.steps, rate("local", u.version), o)
            new = new + rate("global", merge.version - 1) * b * delta
        versions[merge.version], made[merge.version] = new, record.time
    return versions[len(rounds)]


@pytest.mark.parametrize("option", [name for name, given in OPTIONS.items() if "augment" not in given])
@pytest.mark.parametrize("algorithm", ["fedavg", "defedavg-iid"])
def test_an_option_equals_its_oracle(option: str, algorithm: str) -> None:
    """Sixty merges of four local steps; ``together`` has every option that ``augment`` does not need."""
    task = least_squares()
    given = {"sampling": "shuffle", "batch_size": SAMPLES, "global_lr": 0.5, "local_lr": 0.05, **OPTIONS[option]}
    chosen = how(algorithm, **given)
    first = make_executor(chosen, 0, task).versions[0].numpy().copy()
    expected = oracle(make_plan(chosen, 0, MERGES).rounds, first, given)
    assert np.abs(expected - first).max() > 1e-2
    for found in (reference(chosen, task, MERGES), *final_versions([batched_run(chosen, task, MERGES)], task, 64)):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-10, atol=1e-10)


def test_together_equals_its_oracle() -> None:
    given = {**OPTIONS["together"], "augment": "none", "local_lr": 0.01, "global_lr": 0.5}
    task = least_squares()
    chosen = how("fedbuff", sampling="shuffle", batch_size=SAMPLES, **given)
    first = make_executor(chosen, 0, task).versions[0].numpy().copy()
    expected = oracle(make_plan(chosen, 0, MERGES).rounds, first, given)
    np.testing.assert_allclose(reference(chosen, task, MERGES).numpy(), expected, rtol=1e-10, atol=1e-10)


# The reference against torch.optim.

TORCH: dict[str, tuple[dict[str, Any], Callable[..., torch.optim.Optimizer]]] = {
    "plain": ({}, torch.optim.SGD),
    "momentum": ({"momentum": 0.9}, partial(torch.optim.SGD, momentum=0.9)),
    "nesterov": ({"momentum": 0.8, "nesterov": True}, partial(torch.optim.SGD, momentum=0.8, nesterov=True)),
    "decay": ({"momentum": 0.5, "weight_decay": 0.1}, partial(torch.optim.SGD, momentum=0.5, weight_decay=0.1)),
    "adam": ({"optimizer": "adam", "beta2": 0.99}, partial(torch.optim.Adam, betas=(0.9, 0.99))),
    "adam with decay": (
        {"optimizer": "adam", "weight_decay": 0.1, "epsilon": 1e-4},
        partial(torch.optim.Adam, weight_decay=0.1, eps=1e-4),
    ),
    "adamw": (
        {"optimizer": "adamw", "weight_decay": 0.3, "beta1": 0.8},
        partial(torch.optim.AdamW, weight_decay=0.3, betas=(0.8, 0.999)),
    ),
}


@pytest.mark.parametrize("option", list(TORCH))
def test_sixty_steps_equal_those_of_torch(option: str) -> None:
    given, make = TORCH[option]
    task, update = task_of("cnn"), Update(2, 0, 0, 60)
    training = LocalTraining(3, batch_size=4, local_lr=0.02, **given)
    executor = Reference(task, training)
    start = executor.versions[0]
    found, _ = executor.train(update, start)
    module = task.model()
    nn.utils.vector_to_parameters(start.clone(), module.parameters())
    optimizer = make(module.parameters(), lr=0.02)
    for samples in training.samples(task, update):
        optimizer.zero_grad()
        data = task.train[torch.from_numpy(samples)]
        torch.autograd.backward(task.loss(module(data.inputs), data.targets).mean())
        optimizer.step()
    end = nn.utils.parameters_to_vector(module.parameters()).detach()
    torch.testing.assert_close(start - found, end, rtol=1e-10, atol=1e-12)


# Both executors.


@cache
def without_options(model: str) -> Tensor:
    """Return the version after fifty merges of plain SGD."""
    return reference(how("fedbuff"), task_of(model), 50)


@pytest.mark.no_cover
@pytest.mark.parametrize("option", list(OPTIONS))
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_fifty_merges_agree_and_do_not_depend_on_the_batch(model: str, option: str) -> None:
    task, chosen = task_of(model), how("fedbuff", **OPTIONS[option])
    expected = reference(chosen, task, 50)
    (found,) = final_versions([batched_run(chosen, task, 50)], task, 64)
    assert float((found - expected).norm() / expected.norm()) < 1e-10
    assert not torch.equal(expected, without_options(model))
    widths = {size: final_versions([batched_run(chosen, task, 12)], task, size)[0] for size in (1, 3, 64)}
    assert all(torch.equal(one, widths[64]) for one in widths.values())


@pytest.mark.parametrize("option", ["adam", "nesterov", "clipped", "together"])
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_single_precision_agrees_within_the_documented_tolerance(model: str, option: str) -> None:
    """1e-5 relative to the distance from initialisation after ten merges, bit-identical in every batch."""
    double = task_of(model)
    data = double.train.inputs.float().numpy(), double.train.targets.numpy()
    parts = list(double.clients)
    task = make_task(model=lambda: double.model().float(), train=data, test=data, clients=parts)
    chosen = how("defedavg-iid", local_steps=7, **{"local_lr": 0.01, **OPTIONS[option]})
    expected = reference(chosen, task, 10)
    found = {size: final_versions([batched_run(chosen, task, 10)], task, size)[0] for size in (1, 5, 64)}
    start = make_executor(chosen, 0, task).versions[0]
    assert float((found[64] - expected).norm() / (expected - start).norm()) < 1e-5
    assert all(torch.equal(one, found[64]) for one in found.values())


def test_runs_with_different_options_share_a_trainer() -> None:
    task = task_of("cnn")
    more: list[dict[str, Any]] = [
        {"momentum": 0.5},
        {"momentum": 0.9, "local_steps": 7},
        {},
        {"optimizer": "adam"},
        {"prox": 0.1},
    ]
    chosen = [how(("fedavg", "defedavg-iid")[i % 2], local_lr=0.02, **given) for i, given in enumerate(more)]
    together = final_versions([batched_run(one, task, 10) for one in chosen], task, 64)
    for one, found in zip(chosen, together, strict=True):
        (alone,) = final_versions([batched_run(one, task, 10)], task, 64)
        assert torch.equal(found, alone)


@pytest.mark.parametrize(
    "model", ["frozen", "running statistics", "normalised twice", "dropout", "residual with dropout", "transformer"]
)
@pytest.mark.parametrize("option", ["adam to rate zero", "together"])
def test_other_models_agree(model: str, option: str) -> None:
    # The gradient of a bias before a normalisation is zero, up to rounding, which a small epsilon would amplify.
    given = {**OPTIONS[option], "augment": "none", "epsilon": 1e-3, "local_lr": 0.02}
    task, chosen = named(model), how("defedavg-iid", **given)
    expected = reference(chosen, task, 30)
    (found,) = final_versions([batched_run(chosen, task, 30)], task, 64)
    assert float((found - expected).norm() / expected.norm()) < 1e-10


def test_a_rate_of_zero_keeps_the_weights_and_updates_the_statistics() -> None:
    """From version 2 on the rate is zero; plain SGD does not skip the jobs, because their statistics are merged."""
    task = named("running statistics")
    chosen = how("fedavg", local_schedule="cosine(2)")
    executor = make_executor(chosen, 0, task)
    first = executor.layout.first_statistic
    rounds = make_plan(chosen, 0, 8).rounds
    versions = [executor.apply(record).clone() for record in rounds]
    assert torch.equal(versions[2][:first], versions[7][:first])
    assert not torch.equal(versions[2][first:], versions[3][first:])
    (found,) = final_versions([batched_run(chosen, task, 8)], task, 64)
    torch.testing.assert_close(found, versions[7], rtol=1e-10, atol=1e-12)


# Limits and jobs with vectors of their own.


@pytest.mark.parametrize("nothing", [{"prox": 0.0}, {"momentum": 0.0, "nesterov": True}, {"clip_norm": 1e20}])
def test_an_option_of_no_effect_changes_no_bit(nothing: dict[str, Any]) -> None:
    task = task_of("cnn")
    plain = reference(how("defedavg-iid"), task, 20)
    assert torch.equal(reference(how("defedavg-iid", **nothing), task, 20), plain)
    (expected,) = final_versions([batched_run(how("defedavg-iid"), task, 20)], task, 64)
    (found,) = final_versions([batched_run(how("defedavg-iid", **nothing), task, 20)], task, 64)
    if "clip_norm" in nothing:  # uses gradients: the same values, rounded at other places
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    else:
        assert torch.equal(found, expected)


def jobs_with_vectors(task: Task, training: LocalTraining, count: int) -> list[TrainingJob]:
    source = torch.Generator().manual_seed(5)
    start = Reference(task, training).versions[0]
    near, correction = (torch.randn(start.shape, generator=source, dtype=start.dtype) for _ in range(2))
    updates = [Update(i % CLIENTS, i, 0, 3 + i % 4) for i in range(count)]
    jobs = [TrainingJob(training, task, start, update, 0.02 + 0.01 * update.index) for update in updates]
    return [
        replace(job, centre=start + near if i % 2 else None, correction=correction * i if i % 3 else None)
        for i, job in enumerate(jobs)
    ]


def one_by_one(executor: Reference, job: TrainingJob) -> Tensor:
    return executor.train(job.update, job.start, rate=job.rate, centre=job.centre, correction=job.correction)[0]


@pytest.mark.parametrize("more", [{}, {"prox": 0.3}, {"prox": 0.3, "momentum": 0.5, "clip_norm": 0.1}])
@pytest.mark.parametrize("model", ["mlp", "cnn", "attention"])
def test_jobs_with_a_centre_and_a_correction_agree(model: str, more: dict[str, Any]) -> None:
    task, training = task_of(model), LocalTraining(0, batch_size=4, **more)
    executor, jobs = Reference(task, training), jobs_with_vectors(task, training, 8)
    found = Trainer(task, executor.module, batch_size=4).train(jobs)
    for job, delta in zip(jobs, found, strict=True):
        torch.testing.assert_close(delta, one_by_one(executor, job), rtol=1e-10, atol=1e-12)
        (alone,) = Trainer(task, executor.module, batch_size=4).train([job])
        assert torch.equal(delta, alone)


def test_a_correction_is_added_after_clipping() -> None:
    """With one step of rate 1, the update is the clipped gradient plus the correction."""
    task, training = least_squares(), LocalTraining(0, SAMPLES, sampling="shuffle", clip_norm=0.1)
    executor, update = Reference(task, training), Update(1, 0, 0, 1)
    start, correction = executor.versions[0], torch.arange(VALUES + 1.0, dtype=torch.float64)
    x = np.c_[INPUTS[1], np.ones(SAMPLES)]
    g = x.T @ (x @ start.numpy() - TARGETS[1]) / SAMPLES
    expected = correction.numpy() + g * 0.1 / np.linalg.norm(g)
    found, _ = executor.train(update, start, rate=1.0, correction=correction)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


def test_an_unused_parameter_decays() -> None:
    """Its gradient is zero in both executors, whether a layer updates itself or autograd yields its gradient."""

    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare, self.norm = nn.Linear(36, 3), nn.Linear(2, 2), nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(x.flatten(1))
            return out

    double = task_of("mlp")
    task = replace(double, model=lambda: Spare().double())
    chosen = how("fedavg", weight_decay=0.5)
    expected = reference(chosen, task, 10)
    (found,) = final_versions([batched_run(chosen, task, 10)], task, 64)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    start = make_executor(chosen, 0, task).versions[0]
    assert bool((expected[-8:-4].abs() < 0.9 * start[-8:-4].abs()).all())


def test_state_is_part_of_the_memory_limit() -> None:
    """Adam needs its gradients, two means and four temporary vectors more than plain SGD."""
    assert LocalMethod.of(LocalTraining(0)).vectors == 0
    assert LocalMethod.of(LocalTraining(0, optimizer="adam")).vectors == 7
    assert LocalMethod.of(LocalTraining(0, momentum=0.9, prox=0.1)).vectors == 7
    data = (np.zeros((20, 1000), np.float32), np.arange(20) % 2)
    task = make_task(model=lambda: nn.Linear(1000, 500), train=data, test=data, clients=[np.arange(20)], classes=500)
    module, memory = Reference(task, LocalTraining(0)).module, 128 << 20
    plain = Trainer(task, module, memory=memory)
    adam = Trainer(task, module, memory=memory, local_training=LocalTraining(0, optimizer="adam"))
    size = 4 * 500 * 1001
    assert plain.max_batch_jobs * VECTORS * size > memory // 4
    assert adam.max_batch_jobs < plain.max_batch_jobs
    limits = adam._limits_of(LocalMethod.of(LocalTraining(0, optimizer="adam")))
    assert limits.concurrent_jobs * (VECTORS + 7) * size < memory


@pytest.mark.parametrize(
    ("options", "fused"),
    [({}, True), ({"local_schedule": "inverse-sqrt(10)"}, True), ({"momentum": 0.9}, False), ({"prox": 0.1}, False)],
    ids=lambda value: str(value),
)
def test_only_plain_sgd_takes_the_fused_path(
    options: dict[str, Any], fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = batched_run(how("fedbuff", **options), task_of("mlp"), 3)
    trainer = Trainer(run.reference.task, run.reference.module)  # compares both paths with the module
    steps: list[int] = []
    step = StackedOptimizer.step

    def counted(self: StackedOptimizer, *args: Any) -> None:
        steps.append(1)
        step(self, *args)

    monkeypatch.setattr(StackedOptimizer, "step", counted)
    for _ in run_batched([run], trainer):
        pass
    assert (not steps) == fused
