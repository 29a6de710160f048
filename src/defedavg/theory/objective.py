"""The objective F, its gradient and its Hessian-vector product, as functions of one parameter vector.

F is the mean of the clients' objectives F_i; F_i is the mean loss over the training samples of client i. The model is
in evaluation mode, and its buffers have their initial values.
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
"""Maps versions of shape (V, parameters) to their ‖∇F‖² of shape (V,)."""

CHUNK_VERSIONS = 16  # versions whose full gradients are computed together


class Objective:
    """The mean loss of a task over any of its samples."""

    def __init__(self, task: Task, seed: int = 0) -> None:
        self.task = task
        self._module = seeded(task.model, key(seed, "init")).to(task.train.inputs.device).eval()
        parameters = list(self._module.named_parameters())
        self._shapes = {name: p.shape for name, p in parameters}
        self._sizes = [p.numel() for _, p in parameters]
        self.initial = torch.cat([p.detach().reshape(-1) for _, p in parameters])
        self.trainable = torch.cat([torch.full_like(p, float(p.requires_grad)).reshape(-1) for _, p in parameters])

    def losses(self, weights: Tensor, samples: Samples) -> Tensor:
        """Return the loss of every sample; buffers, which follow the parameters in a version, are ignored."""
        train, chosen = self.task.train, torch.from_numpy(samples)
        parts = torch.split(weights[: len(self.initial)], self._sizes)
        values = {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}
        outputs = functional_call(self._module, values, (train.inputs[chosen],))
        return sample_losses(self.task, outputs, train.targets[chosen])

    def value(self, weights: Tensor, samples: Samples) -> float:
        """Return the mean loss."""
        with torch.no_grad():
            return float(self.losses(weights, samples).double().mean())

    def gradient(self, weights: Tensor, samples: Samples) -> Tensor:
        """Return the gradient of the mean loss; it is zero for frozen parameters."""
        leaf = weights[: len(self.initial)].detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.losses(leaf, samples).mean(), leaf)
        return gradient * self.trainable

    def hessian_product(self, weights: Tensor, direction: Tensor, samples: Samples) -> Tensor:
        """Return the product of the Hessian and a direction."""
        leaf = weights[: len(self.initial)].detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.losses(leaf, samples).mean(), leaf, create_graph=True)
        if not gradient.requires_grad:  # the loss is linear in the parameters
            return torch.zeros_like(direction)
        (product,) = torch.autograd.grad(gradient @ (direction * self.trainable), leaf, materialize_grads=True)
        return product * self.trainable


def exact_norms(problem: LeastSquares) -> Norms:
    """Return a function that computes ‖∇F‖² of a least-squares problem in closed form."""
    curvature, optimum = torch.from_numpy(problem.curvature), torch.from_numpy(problem.optimum)
    return lambda versions: ((versions - optimum) * curvature).square().sum(1)


def full_norms(task: Task) -> Norms:
    """Return a function that computes ‖∇F‖² from all training samples of all clients."""
    objective = Objective(task)
    samples = np.concatenate(task.clients)
    equal_clients = np.concatenate([np.full(len(part), 1 / (task.num_clients * len(part))) for part in task.clients])
    sample_weights = torch.from_numpy(equal_clients).to(objective.initial)

    def value(weights: Tensor) -> Tensor:
        return objective.losses(weights, samples) @ sample_weights

    gradients = vmap(grad(value), chunk_size=CHUNK_VERSIONS)
    size = len(objective.initial)
    return lambda versions: (gradients(versions[:, :size]) * objective.trainable).square().sum(1)
