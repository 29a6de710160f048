"""Server optimisers on the pseudo-gradient, for any algorithm.

Reddi et al.: Adaptive Federated Optimization (ICLR 2021). The pseudo-gradient g is what a merge with learning rate one
would subtract from the newest version; the optimiser replaces it by a step s, and w[t+1] = w[t] − global_lr·s. A merge
that lowers its rate by ``rate_scale`` lowers that of the step; g does not change.

    momentum   m ← μ·m + g;  s = m                       nesterov   m ← μ·m + g;  s = g + μ·m
    adagrad    v ← v + g²                                adam       v ← β₂·v + (1 − β₂)·g²
    yogi       v ← v − (1 − β₂)·g²·sign(v − g²)          amsgrad    v as adam;  v̂ ← max(v̂, v)

The last four use m ← μ·m + (1 − μ)·g and s = m / (√v + ε), AMSGrad with v̂ in the place of v, without bias correction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ..algorithms.protocol import SERVER_OPTIMIZERS, StateVector
from .state_vectors import StateVectors

FIRST, SECOND, LARGEST = (StateVector(f"optimizer.{name}") for name in ("first", "second", "largest"))


@dataclass(frozen=True, slots=True)
class ServerOptimizer:
    """The optimiser of the server, and its constants."""

    name: str = "sgd"
    momentum: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-3

    @property
    def vectors(self) -> tuple[StateVector, ...]:
        """The state vectors that every merge assigns."""
        return (FIRST, SECOND, LARGEST)[: SERVER_OPTIMIZERS[self.name]]

    def step(self, gradient: Tensor, state: StateVectors) -> Tensor:
        """Return the step for a pseudo-gradient, and update the optimiser's state vectors."""
        if self.name == "sgd":
            return gradient
        first = state[FIRST]
        if self.name in ("momentum", "nesterov"):
            first = gradient if first is None else gradient.add(first, alpha=self.momentum)
            state[FIRST] = first
            return first if self.name == "momentum" else gradient.add(first, alpha=self.momentum)
        fresh = gradient * (1.0 - self.momentum)
        first = fresh if first is None else fresh.add_(first, alpha=self.momentum)
        state[FIRST] = first
        second = self._second(gradient, state[SECOND])
        state[SECOND] = second
        if self.name == "amsgrad":
            largest = state[LARGEST]
            second = second if largest is None else torch.maximum(largest, second)
            state[LARGEST] = second
        return first / (second.sqrt() + self.epsilon)

    def _second(self, gradient: Tensor, second: Tensor | None) -> Tensor:
        before = torch.zeros_like(gradient) if second is None else second
        if self.name == "adagrad":
            return before.addcmul(gradient, gradient)
        if self.name == "yogi":
            square = gradient.square()
            return before.addcmul(square, torch.sign(before - square), value=self.beta2 - 1.0)
        return (self.beta2 * before).addcmul_(gradient, gradient, value=1.0 - self.beta2)


SGD: Final = ServerOptimizer()
"""No optimiser: the merge itself."""
