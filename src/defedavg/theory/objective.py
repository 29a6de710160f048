"""F, its gradient and its curvature, as functions of one vector of parameters.

F is the mean of the clients' objectives F_i, each the mean loss over the client's own training samples; layers behave
as when a model is used, not trained, and buffers are as they were built.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call, grad, vmap

from ..rng import key
from ..tasks import LeastSquares, Task, seeded
from ..training.reference import sample_losses

Samples = NDArray[np.int64]
Norms = Callable[[Tensor], Tensor]
"""‖∇F‖² of versions, (V, parameters) to (V,)."""

AT_ONCE = 16  # versions whose full gradients are computed together


class Objective:
    """The mean loss of a task over any of its samples."""

    def __init__(self, task: Task, seed: int = 0) -> None:
        self.task = task
        self._module = seeded(task.model, key(seed, "init")).to(task.train.inputs.device).eval()
        whole = list(self._module.named_parameters())
        self._shapes = {name: p.shape for name, p in whole}
        self._sizes = [p.numel() for _, p in whole]
        self.start = torch.cat([p.detach().reshape(-1) for _, p in whole])
        self.moves = torch.cat([torch.full_like(p, float(p.requires_grad)).reshape(-1) for _, p in whole])

    def losses(self, weights: Tensor, samples: Samples) -> Tensor:
        """The loss of every sample; what follows the parameters in a version is not read."""
        train, chosen = self.task.train, torch.from_numpy(samples)
        parts = torch.split(weights[: len(self.start)], self._sizes)
        own = {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}
        return sample_losses(
            self.task, functional_call(self._module, own, (train.inputs[chosen],)), train.targets[chosen]
        )

    def value(self, weights: Tensor, samples: Samples) -> float:
        """The mean loss."""
        with torch.no_grad():
            return float(self.losses(weights, samples).double().mean())

    def gradient(self, weights: Tensor, samples: Samples) -> Tensor:
        """Its gradient, zero where parameters are frozen."""
        leaf = weights[: len(self.start)].detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.losses(leaf, samples).mean(), leaf)
        return slope * self.moves

    def curve(self, weights: Tensor, direction: Tensor, samples: Samples) -> Tensor:
        """The Hessian times a direction."""
        leaf = weights[: len(self.start)].detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.losses(leaf, samples).mean(), leaf, create_graph=True)
        if not slope.requires_grad:  # a loss that is linear in the parameters
            return torch.zeros_like(direction)
        (found,) = torch.autograd.grad(slope @ (direction * self.moves), leaf, materialize_grads=True)
        return found * self.moves


def exact_norms(problem: LeastSquares) -> Norms:
    """‖∇F‖² on least squares, in closed form."""
    curvature, optimum = torch.from_numpy(problem.curvature), torch.from_numpy(problem.optimum)
    return lambda versions: ((versions - optimum) * curvature).square().sum(1)


def full_norms(task: Task) -> Norms:
    """‖∇F‖² from all training samples of all clients."""
    objective = Objective(task)
    samples = np.concatenate(task.clients)
    equal = np.concatenate([np.full(len(own), 1 / (task.num_clients * len(own))) for own in task.clients])
    shares = torch.from_numpy(equal).to(objective.start)

    def whole(weights: Tensor) -> Tensor:
        return objective.losses(weights, samples) @ shares

    slopes = vmap(grad(whole), chunk_size=AT_ONCE)
    size = len(objective.start)
    return lambda versions: (slopes(versions[:, :size]) * objective.moves).square().sum(1)
