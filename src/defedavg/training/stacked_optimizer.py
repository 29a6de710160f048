"""The local optimiser of many clients: the formulas of ``local_optimizers.py`` over parameters (C, …).

Every operation on parameters rounds once: multiplication, addition, division, square root. PyTorch computes the last
elements of a tensor with other instructions than the rest, so an operation that rounds twice would give a client
results that depend on its position in the batch. What a client needs per step is computed in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .local_training import LocalTraining, TrainingJob

RATE, BETA1, BETA2, ONE_MINUS_BETA1, ONE_MINUS_BETA2, EPSILON, DECAY, PROX, CLIP = range(9)

Parts = Mapping[str, Tensor]
"""Name of a trainable parameter -> a tensor (C, …), in the order of the stacked layers."""


@dataclass(frozen=True, slots=True)
class LocalMethod:
    """What the jobs of a batch have in common: which terms they have; the numbers in them may differ.

    A ``fused`` method is plain SGD, whose update is part of the backward pass. A job whose rate is zero is not fused,
    because the kernels do not compute such a client, and its running statistics would stay behind. Updates of a job
    with a ``single_step`` are not deferred.
    """

    optimizer: str = "sgd"
    momentum: bool = False
    nesterov: bool = False
    weight_decay: bool = False
    prox: bool = False
    clip: bool = False
    correction: bool = False
    zero_rate: bool = False
    augment: str = "none"
    single_step: bool = False

    @classmethod
    def of(cls, training: LocalTraining) -> LocalMethod:
        """Return the method of a run's jobs without a correction."""
        momentum = training.optimizer == "sgd" and training.momentum != 0
        return cls(
            training.optimizer, momentum, momentum and training.nesterov, training.weight_decay != 0,
            training.prox != 0, training.clip_norm != 0, augment=training.augment,
        )  # fmt: skip

    @property
    def fused(self) -> bool:
        """Whether the fused update of plain SGD computes it."""
        return self == LocalMethod(augment=self.augment, single_step=self.single_step)

    @property
    def state_vectors(self) -> int:
        """The number of vectors like the parameters that are updated from step to step."""
        return 2 if self.optimizer != "sgd" else int(self.momentum)

    @property
    def vectors(self) -> int:
        """The number of vectors that a job needs more than one of plain SGD: gradients, four temporary ones, state."""
        return 0 if self.fused else 5 + self.state_vectors + int(self.prox) + int(self.correction)


def numbers_of(job: TrainingJob) -> list[float]:
    """Return the numbers of a job, in the order of the columns."""
    training = job.local_training
    first = training.momentum if training.optimizer == "sgd" else training.beta1
    betas = (first, training.beta2, 1.0 - first, 1.0 - training.beta2)
    return [job.local_rate, *betas, training.epsilon, training.weight_decay, training.prox, training.clip_norm]


class StackedOptimizer:
    """The state of the optimisers of C clients, in buffers that are allocated once."""

    def __init__(self, method: LocalMethod, like: Parts) -> None:
        self.method = method
        first = next(iter(like.values()))
        self._dtype = first.dtype
        self._numbers = torch.zeros((len(first), CLIP + 1), dtype=torch.float64, device=first.device)
        self._powers = torch.ones((len(first), 2), dtype=torch.float64, device=first.device)
        self.gradients = {name: torch.zeros_like(part) for name, part in like.items()}
        empty: dict[str, Tensor] = {}
        self._means = {name: torch.zeros_like(part) for name, part in like.items()} if method.state_vectors else empty
        squared = method.optimizer != "sgd"
        self._squares = {name: torch.zeros_like(part) for name, part in like.items()} if squared else empty
        self._centre = {name: torch.zeros_like(part) for name, part in like.items()} if method.prox else empty
        self._correction = {name: torch.zeros_like(part) for name, part in like.items()} if method.correction else empty

    def start(self, numbers: Tensor, centre: Parts, correction: Parts) -> None:
        """Reset the state for new jobs, at most C: their numbers, and vectors where the method uses them."""
        count = len(numbers)
        self._numbers[:count].copy_(numbers)
        self._powers.fill_(1.0)
        for part in (*self._means.values(), *self._squares.values()):
            part.zero_()
        for buffers, given in ((self._centre, centre), (self._correction, correction)):
            for name, buffer in buffers.items():
                buffer[:count].copy_(given[name])

    @torch.no_grad()
    def step(self, weights: Parts, active: Tensor | None = None) -> None:
        """Update the weights of the first clients by ``gradients``, which are overwritten, if they are ``active``."""
        count = len(next(iter(weights.values())))
        numbers = self._numbers[:count]
        rates = numbers.to(self._dtype)
        clip = self._clip_factors(count) if self.method.clip else None
        shrink = (1.0 - numbers[:, RATE] * numbers[:, DECAY]).to(self._dtype)
        scales = self._adam_scales(count) if self.method.optimizer != "sgd" else None
        for name, g in self.gradients.items():
            g, w = g[:count], weights[name]
            shape = (count, *(1,) * (w.ndim - 1))
            if clip is not None:
                g.mul_(clip.view(shape))
            if self._correction:
                g.add_(self._correction[name][:count])
            if self.method.weight_decay and self.method.optimizer != "adamw":
                g.add_(w * rates[:, DECAY].view(shape))
            if self._centre:
                g.add_((w - self._centre[name][:count]).mul_(rates[:, PROX].view(shape)))
            if scales is None:
                change = self._momentum(name, g, rates, shape) * rates[:, RATE].view(shape)
            else:
                change = self._adam(name, g, rates, shape, *scales)
            kept = w * shrink.view(shape) if self.method.optimizer == "adamw" else w
            if active is not None:
                w.copy_(torch.where(active.view(shape), kept - change, w))
            elif kept is w:
                w.sub_(change)
            else:
                torch.sub(kept, change, out=w)

    def _clip_factors(self, count: int) -> Tensor:
        squares = torch.zeros(count, dtype=torch.float64, device=self._numbers.device)
        for g in self.gradients.values():
            squares += squared_norms(g[:count])
        return (self._numbers[:count, CLIP] / squares.sqrt()).clamp(max=1.0).to(self._dtype)

    def _adam_scales(self, count: int) -> tuple[Tensor, Tensor]:
        """Return η̄ / (1 − β₁ᵗ) and √(1 − β₂ᵗ); powers by multiplication, which rounds alike everywhere."""
        numbers, powers = self._numbers[:count], self._powers[:count]
        powers.mul_(numbers[:, BETA1 : BETA2 + 1])
        step_sizes = numbers[:, RATE] / (1.0 - powers[:, 0])
        return step_sizes.to(self._dtype), (1.0 - powers[:, 1]).sqrt().to(self._dtype)

    def _momentum(self, name: str, g: Tensor, rates: Tensor, shape: tuple[int, ...]) -> Tensor:
        if not self.method.momentum:
            return g
        momentum = rates[:, BETA1].view(shape)
        mean = self._means[name][: len(g)].mul_(momentum).add_(g)
        return g.add_(mean * momentum) if self.method.nesterov else mean

    def _adam(
        self, name: str, g: Tensor, rates: Tensor, shape: tuple[int, ...], step_sizes: Tensor, roots: Tensor
    ) -> Tensor:
        column = [rates[:, number].view(shape) for number in range(CLIP)]
        mean = self._means[name][: len(g)].mul_(column[BETA1]).add_(g * column[ONE_MINUS_BETA1])
        squared = (g * g).mul_(column[ONE_MINUS_BETA2])
        square = self._squares[name][: len(g)].mul_(column[BETA2]).add_(squared)
        divisor = square.sqrt().div_(roots.view(shape)).add_(column[EPSILON])
        return (mean * step_sizes.view(shape)).div_(divisor)


def squared_norms(parts: Tensor) -> Tensor:
    """Return ‖part‖² of every client in float64, (C,); on the CPU it does not depend on the other clients."""
    flat = parts.flatten(1).double()
    return (flat * flat).sum(1)
