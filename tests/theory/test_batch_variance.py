"""σ² of a mini-batch: the formula agrees with all orders of the samples, and with the mini-batches that jobs draw."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from torch import Tensor, nn

from defedavg import make_task
from defedavg.theory import estimates
from defedavg.theory.estimates import EstimateOptions, Objective, batch_variance, estimate
from defedavg.training.local_training import positions

VALUES = np.array([3.0, -1.0, 0.5, 7.0])


def exact(size: int, b: int, step: int) -> float:
    """Return the variance of one mini-batch's mean over all orders of all epochs that it touches."""
    values = VALUES[:size]
    first, last = step * b // size, ((step + 1) * b - 1) // size
    orders = list(itertools.permutations(range(size)))
    means = []
    for epochs in itertools.product(orders, repeat=last - first + 1):
        drawn = [sample for epoch in epochs for sample in epoch][step * b - first * size :][:b]
        means.append(values[drawn].mean())
    return float(np.var(means))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("b", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_shuffle_agrees_with_all_orders(size: int, b: int, steps: int) -> None:
    if size == 4 and b == 5:
        pytest.skip("three epochs of 24 orders; the smaller sizes have every case")
    options = EstimateOptions(batch_size=b, sampling="shuffle", local_steps=steps)
    expected = np.mean([exact(size, b, step) for step in range(steps)])
    assert batch_variance(size, options) * VALUES[:size].var() == pytest.approx(expected, abs=1e-12)


def test_one_batch_of_an_epoch_has_the_finite_population_correction() -> None:
    for size, b in ((100, 10), (7, 7), (600, 1)):
        found = batch_variance(size, EstimateOptions(batch_size=b, sampling="shuffle"))
        assert found == pytest.approx((1 / b) * (size - b) / (size - 1))
        assert batch_variance(size, EstimateOptions(batch_size=b)) == 1 / b


@pytest.mark.parametrize("sampling", ["replacement", "shuffle"])
def test_the_mini_batches_of_jobs_have_this_variance(sampling: str) -> None:
    values, steps, b, jobs = np.arange(6.0) ** 2, 5, 4, 4000
    options = EstimateOptions(batch_size=b, sampling=sampling, local_steps=steps)
    drawn = [
        values[positions(0, 0, job, steps=steps, batch_size=b, size=6, sampling=sampling)].mean(axis=1)
        for job in range(jobs)
    ]
    found = np.mean((np.array(drawn) - values.mean()) ** 2)
    # The relative standard error of a variance over 20,000 batches is about 1.5 %.
    assert found == pytest.approx(batch_variance(6, options) * values.var(), rel=0.06)


def test_the_estimate_uses_the_sampling_of_the_study() -> None:
    rng = np.random.Generator(np.random.Philox(key=1))
    x, y = rng.normal(size=(24, 3)).astype("float32"), rng.integers(0, 2, 24)
    task = make_task(model=lambda: nn.Linear(3, 2), train=(x, y), test=(x, y), clients=np.split(np.arange(24), 3))
    plain, shuffled, whole = (
        estimate(task, EstimateOptions(batch_size=b, sampling=sampling, points=1))
        for b, sampling in ((4, "replacement"), (4, "shuffle"), (8, "shuffle"))
    )
    assert shuffled.noise == pytest.approx(plain.noise * 4 / 7)
    assert whole.noise == 0.0  # one mini-batch holds all samples
    assert shuffled.gradient == plain.gradient
    assert "without replacement" in shuffled.note
    assert "without replacement" not in plain.note


class _ReadsValues(nn.Sequential):
    """A model whose Python code reads values, which ``torch.func`` cannot map over samples."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return out * (2.0 if float(x.detach().sum()) > 0 else 1.0)


@pytest.mark.parametrize("kind", [nn.Sequential, _ReadsValues])
@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_the_gradients_of_single_samples_are_those_computed_one_by_one(
    kind: type[nn.Sequential], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    inputs, targets = random.normal(size=(7, 4)), np.arange(7) % 3
    frozen = nn.Linear(4, 5).requires_grad_(False)
    task = make_task(
        model=lambda: kind(frozen, nn.Tanh(), nn.Linear(5, 3)).double(),
        train=(inputs, targets), test=(inputs, targets), clients=[np.arange(7)], keep_dtype=True,
    )  # fmt: skip
    objective, samples = Objective(task), task.clients[0]
    monkeypatch.setattr(estimates, "CHUNK_VALUES", at_once * len(objective.initial))
    mean = objective.gradient(objective.initial, samples).double()
    each = [objective.gradient(objective.initial, samples[j : j + 1]) for j in range(7)]
    found = objective.squared_deviations(objective.initial, samples, mean)
    assert found == pytest.approx([float((gradient - mean).square().sum()) for gradient in each], rel=1e-10)
    assert min(found) > 0
