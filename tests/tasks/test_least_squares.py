"""Least squares: everything that is known of it, against autograd and averages over all samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call, jacrev

from defedavg.tasks import LeastSquares, Scale, least_squares
from helpers.user_errors import line_of


@pytest.fixture(scope="module")
def problem() -> LeastSquares:
    return least_squares(6, dimension=4, samples_per_client=9, noise=0.7, heterogeneity=1.3, seed=5)


def losses(problem: LeastSquares, w: Tensor, client: int) -> Tensor:
    """The loss of every sample of a client, through the model and loss of the task."""
    task = problem.task
    samples = torch.from_numpy(task.clients[client])
    outputs = functional_call(task.model(), {"weight": w}, (task.train.inputs[samples],))
    return task.loss(outputs, task.train.targets[samples])


def objective(problem: LeastSquares, w: Tensor) -> Tensor:
    return torch.stack([losses(problem, w, i).mean() for i in range(problem.task.num_clients)]).mean()


def sample_gradients(problem: LeastSquares, w: Tensor, client: int) -> Tensor:
    gradients: Tensor = jacrev(lambda v: losses(problem, v, client))(w)
    return gradients


POINT = torch.tensor([0.3, -2.0, 1.1, 4.0], dtype=torch.float64)


def test_value_gradient_and_minimum_agree_with_autograd(problem: LeastSquares) -> None:
    for w in (POINT, torch.zeros(4, dtype=torch.float64)):
        assert problem.value(w.numpy()) == pytest.approx(objective(problem, w).item(), rel=1e-12)
        gradient = jacrev(lambda v: objective(problem, v))(w)
        np.testing.assert_allclose(problem.gradient(w.numpy()), gradient.numpy(), rtol=1e-12)
    optimum = torch.from_numpy(problem.optimum)
    assert float(jacrev(lambda v: objective(problem, v))(optimum).norm()) < 1e-12
    assert problem.minimum == pytest.approx(objective(problem, optimum).item(), rel=1e-12)
    assert np.linalg.norm(problem.gradient(problem.optimum)) < 1e-12


def test_smoothness_is_the_largest_eigenvalue_of_the_hessian(problem: LeastSquares) -> None:
    curvature = jacrev(jacrev(lambda w: objective(problem, w)))(POINT)
    np.testing.assert_allclose(curvature.numpy(), np.diag(problem.curvature), atol=1e-12)
    assert problem.smoothness == pytest.approx(float(torch.linalg.eigvalsh(curvature).max()), rel=1e-12)
    assert problem.curvature.tolist() == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize("w", [POINT, torch.ones(4, dtype=torch.float64)])
def test_noise_and_heterogeneity_by_averaging_over_all_samples(problem: LeastSquares, w: Tensor) -> None:
    gradients = [sample_gradients(problem, w, i) for i in range(6)]
    means = torch.stack([g.mean(0) for g in gradients])
    noise = max(float((g - g.mean(0)).square().sum(1).mean()) for g in gradients)
    assert problem.gradient_noise(1) == pytest.approx(noise, rel=1e-12)
    distance = float((means - means.mean(0)).square().sum(1).max())
    assert problem.heterogeneity == pytest.approx(distance, rel=1e-12)
    # All 81 mini-batches of two drawn with replacement.
    pairs = [(g[:, None] + g[None, :]) / 2 - g.mean(0) for g in gradients]
    assert problem.gradient_noise(2) == pytest.approx(max(float(p.square().sum(2).mean()) for p in pairs), rel=1e-12)


def test_the_samples_have_the_asked_spread() -> None:
    wide = least_squares(200, dimension=8, samples_per_client=200, noise=0.5, heterogeneity=3.0, curvature=(1.0, 1.0))
    assert wide.client_variances.mean() == pytest.approx(0.25, rel=0.02)
    assert wide.client_means.std() == pytest.approx(3.0, rel=0.1)
    alike = least_squares(5, noise=0.0)
    assert (alike.heterogeneity, alike.gradient_noise(1), alike.minimum) == (0.0, 0.0, 0.0)


def test_centres_and_start_are_as_given() -> None:
    exact = least_squares(2, dimension=2, noise=0.0, centres=[[1.0, 2.0], [3.0, -2.0]], start=[5.0, 6.0])
    assert exact.optimum.tolist() == [2.0, 0.0]
    assert exact.client_means.tolist() == [[1.0, 2.0], [3.0, -2.0]]
    assert exact.task.model().get_parameter("weight").tolist() == [5.0, 6.0]
    assert least_squares(1, dimension=3).task.model().get_parameter("weight").tolist() == [1.0] * 3
    assert Scale(3).weight.tolist() == [0.0] * 3
    assert exact.task.model().get_parameter("weight").dtype == torch.float64


def test_the_data_of_a_client_depend_on_the_seed_and_not_on_the_other_clients() -> None:
    few, many, other = least_squares(2, seed=4), least_squares(9, seed=4), least_squares(2, seed=5)
    assert torch.equal(few.task.train.targets, many.task.train.targets[:40])
    assert not torch.equal(few.task.train.targets, other.task.train.targets)
    assert few.task.test is few.task.train
    assert (few.task.classes, few.task.train.inputs.dtype) == (None, torch.float64)
    assert len(np.unique(few.task.train.targets.numpy())) == 2 * 20 * 8


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"num_clients": 0}, "num_clients is 0; use at least 1"),
        ({"dimension": 0}, "dimension is 0"),
        ({"samples_per_client": 0}, "samples_per_client is 0"),
        ({"noise": -1.0}, "noise is -1.0; use 0 or more"),
        ({"heterogeneity": float("nan")}, "heterogeneity is nan"),
        ({"curvature": (2.0, 1.0)}, "curvature is (2.0, 1.0); give 0 < low <= high"),
        ({"curvature": (0.0, 1.0)}, "curvature is (0.0, 1.0)"),
        ({"centres": [[1.0]]}, "centres have shape (1, 1); give one row of 8 numbers per client"),
        ({"start": [1.0, 2.0]}, "start has shape (2,); give one number, or 8"),
    ],
)
def test_least_squares_errors(options: dict[str, Any], line: str) -> None:
    assert line_of(lambda: least_squares(**{"num_clients": 3} | options)).startswith(line)
