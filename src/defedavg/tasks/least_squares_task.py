"""A synthetic task whose objective and constants have closed forms, to compare measurements with theory.

Sample j has a target z_j in R^d and the loss 1/2 sum_k D_k (w_k - z_jk)^2, so its gradient is D (w - z_j): the noise of
a gradient and the distance between clients do not depend on w. With client means m_i, clients weighted equally:

    grad F_i(w) = D (w - m_i),    F(w) = F* + 1/2 sum_k D_k (w_k - w*_k)^2,    w* = mean of m_i,    L = max D.

As a network: output x * w with input x = sqrt(D), target sqrt(D) z_j, and half the squared error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from .. import rng as keyed
from ..errors import UserError
from .losses import squared_error
from .samples import Data
from .task import Task

Array = NDArray[np.float64]


class Scale(nn.Module):
    """The model x -> x * weight, with one float64 weight per coordinate, initialised to ``start``."""

    def __init__(self, dimension: int, start: ArrayLike = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(np.full(dimension, start, np.float64)))

    def forward(self, x: Tensor) -> Tensor:
        """Scale every coordinate."""
        return x * self.weight


@dataclass(frozen=True, slots=True, eq=False)
class LeastSquares:
    """The task, and the constants of its objective F, the average of the clients' objectives F_i."""

    task: Task
    curvature: Array
    client_means: Array
    client_variances: Array

    @property
    def optimum(self) -> Array:
        """The minimiser w* of F."""
        return np.asarray(self.client_means.mean(axis=0))

    @property
    def minimum(self) -> float:
        """The minimum F* of F."""
        spread = self.client_variances + (self.client_means - self.optimum) ** 2
        return float(0.5 * (spread @ self.curvature).mean())

    @property
    def smoothness(self) -> float:
        """L, the Lipschitz constant of the gradient of F and of every F_i."""
        return float(self.curvature.max())

    @property
    def heterogeneity(self) -> float:
        """nu^2, the largest squared distance of a client's gradient from the gradient of F."""
        return float(((self.client_means - self.optimum) ** 2 @ self.curvature**2).max())

    def gradient_noise(self, batch_size: int) -> float:
        """Return sigma^2, the largest variance of a client's gradient, for mini-batches drawn with replacement."""
        return float((self.client_variances @ self.curvature**2).max() / batch_size)

    def value(self, w: ArrayLike) -> float:
        """Return F(w)."""
        return self.minimum + float(0.5 * self.curvature @ (np.asarray(w) - self.optimum) ** 2)

    def gradient(self, w: ArrayLike) -> Array:
        """Return the gradient of F at w."""
        return np.asarray(self.curvature * (np.asarray(w) - self.optimum))


def least_squares(
    num_clients: int,
    *,
    dimension: int = 8,
    samples_per_client: int = 20,
    noise: float = 1.0,
    heterogeneity: float = 0.0,
    curvature: tuple[float, float] = (0.5, 2.0),
    seed: int = 0,
    start: float | Sequence[float] = 1.0,
    centres: ArrayLike | None = None,
) -> LeastSquares:
    """Return a task whose samples are c_i + noise * normal, c_i = heterogeneity * normal or the rows of ``centres``."""
    counts = {"num_clients": num_clients, "dimension": dimension, "samples_per_client": samples_per_client}
    for name, count in counts.items():
        if count < 1:
            raise UserError(f"{name} is {count}; use at least 1")
    for name, scale in (("noise", noise), ("heterogeneity", heterogeneity)):
        if not scale >= 0:
            raise UserError(f"{name} is {scale}; use 0 or more")
    low, high = curvature
    if not 0 < low <= high:
        raise UserError(f"curvature is ({low}, {high}); give 0 < low <= high")
    # Keys are (client, sample, coordinate), so adding clients does not change the data of the others.
    clients, coordinates = np.arange(num_clients)[:, None], np.arange(dimension)
    if centres is None:
        keys = keyed.extend_all(keyed.extend_all(keyed.key(seed, "least_squares.centre"), clients), coordinates)
        means = heterogeneity * keyed.normal_all(keys)
    else:
        means = np.asarray(centres, np.float64)
    if means.shape != (num_clients, dimension):
        raise UserError(f"centres have shape {means.shape}; give one row of {dimension} numbers per client")
    if np.shape(start) not in ((), (dimension,)):
        raise UserError(f"start has shape {np.shape(start)}; give one number, or {dimension}")
    samples = np.arange(samples_per_client)[:, None]
    keys = keyed.extend_all(keyed.key(seed, "least_squares.sample"), clients[:, :, None])
    keys = keyed.extend_all(keyed.extend_all(keys, samples), coordinates)
    z = means[:, None, :] + noise * keyed.normal_all(keys)
    d = np.linspace(low, high, dimension)
    targets = (np.sqrt(d) * z).reshape(-1, dimension)
    data = Data(torch.from_numpy(np.tile(np.sqrt(d), (len(targets), 1))), torch.from_numpy(targets))
    parts = tuple(np.arange(len(targets), dtype=np.int64).reshape(num_clients, samples_per_client))
    task = Task("least_squares", partial(Scale, dimension, start), squared_error, data, data, parts, None)
    return LeastSquares(task, d, z.mean(axis=1), z.var(axis=1))
