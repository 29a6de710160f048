"""The local optimiser of one job, parameter by parameter: the formulas in their plainest form.

With g, the gradient of the mini-batch loss, and η̄, the local rate of the job:

    g ← g · min(1, clip_norm / ‖g‖)           ‖g‖ is the norm over all trainable parameters
    g ← g + correction + weight_decay · w + prox · (w − centre)          AdamW has no weight_decay here
    SGD     m ← momentum · m + g,  w ← w − η̄ · m          Nesterov: w ← w − η̄ · (g + momentum · m)
    Adam    m ← β₁·m + (1 − β₁)·g,  v ← β₂·v + (1 − β₂)·g²
            w ← w − η̄ · m / (1 − β₁ᵗ) / (√(v / (1 − β₂ᵗ)) + ε)
    AdamW   w ← w − η̄ · weight_decay · w, then as Adam

m, v and the step number t are zero at the start of every job. These are the formulas of torch.optim. A trainable
parameter that the loss does not depend on has the gradient zero, so weight decay and the proximal term apply to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .local_training import LocalTraining


class LocalOptimizer:
    """Updates the trainable parameters of one job in place; ``centre`` and ``correction`` have a part for each."""

    def __init__(
        self, training: LocalTraining, rate: float, parameters: Sequence[Tensor], centre: Sequence[Tensor],
        correction: Sequence[Tensor] | None = None,
    ) -> None:  # fmt: skip
        self._training, self._rate = training, rate
        self._parameters, self._centre, self._correction = parameters, centre, correction
        self._means: dict[int, Tensor] = {}
        self._squares: dict[int, Tensor] = {}
        self._steps = 0

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """Do one step; None is a gradient of zero."""
        training = self._training
        self._steps += 1
        found = [torch.zeros_like(p) if g is None else g for p, g in zip(self._parameters, gradients, strict=True)]
        for number, (w, g) in enumerate(zip(self._parameters, self._clipped(found), strict=True)):
            if self._correction is not None:
                g = g + self._correction[number]
            if training.weight_decay and training.optimizer != "adamw":
                g = g + training.weight_decay * w
            if training.prox:
                g = g + training.prox * (w - self._centre[number])
            if training.optimizer == "sgd":
                w.sub_(self._momentum(number, g), alpha=self._rate)
            else:
                if training.optimizer == "adamw":
                    w.mul_(1.0 - self._rate * training.weight_decay)
                w.sub_(self._adam(number, g), alpha=self._rate)

    def _clipped(self, gradients: list[Tensor]) -> list[Tensor]:
        limit = self._training.clip_norm
        if not limit:
            return gradients
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
        return gradients if norm <= limit else [g * (limit / norm) for g in gradients]

    def _momentum(self, number: int, g: Tensor) -> Tensor:
        momentum = self._training.momentum
        if not momentum:
            return g
        mean = self._means[number] = momentum * self._means[number] + g if number in self._means else g.clone()
        return g + momentum * mean if self._training.nesterov else mean

    def _adam(self, number: int, g: Tensor) -> Tensor:
        beta1, beta2 = self._training.beta1, self._training.beta2
        zero = torch.zeros_like(g)
        mean = self._means[number] = beta1 * self._means.get(number, zero) + (1.0 - beta1) * g
        square = self._squares[number] = beta2 * self._squares.get(number, zero) + (1.0 - beta2) * g * g
        root = (square / (1.0 - beta2**self._steps)).sqrt()
        return mean / (1.0 - beta1**self._steps) / (root + self._training.epsilon)
