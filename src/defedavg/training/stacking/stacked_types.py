"""The types of stacking: a pass over the model, a stacked layer, and a stacked model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.plain import scaled

CHANNELS_LAST = (0, 1, 3, 4, 2)
CHANNELS_FIRST = (0, 1, 4, 2, 3)
"""Permutations of stacked convolution weights: from (C, O, I, kh, kw) to (C, O, kh, kw, I), and the inverse."""


class StackingError(Exception):
    """The module can only be trained one client at a time; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class StackedPass:
    """The context of one forward pass: with ``rates`` it is part of an SGD step, without them an evaluation."""

    weights: Mapping[str, Tensor]  # name -> the parameter of every client, (C, …)
    rates: Tensor | None = None  # learning rates, (C,)
    keys: Tensor | None = None  # (C,): random layers draw from them
    anchor: Tensor | None = None  # a leaf that needs a gradient, so that the backward pass visits every layer

    @property
    def clients(self) -> int:
        """The number of clients, C."""
        return len(next(iter(self.weights.values())))

    @property
    def training(self) -> bool:
        """Whether the pass is part of an SGD step."""
        return self.rates is not None


@dataclass(frozen=True, slots=True)
class StackedLayer:
    """A layer for many clients.

    ``run(context, x)`` computes the layer; ``self_updating`` names the parameters whose SGD update is fused into its
    backward pass; ``channels_last`` those that it expects as (C, O, kh, kw, I). ``absorbs`` counts the layers that
    follow in the sequence and that ``run`` computes, too.
    """

    run: Callable[..., Any]  # attention has three inputs and two outputs
    self_updating: tuple[str, ...] = ()
    channels_last: tuple[str, ...] = ()
    absorbs: int = 0


@dataclass(frozen=True, slots=True)
class StackedModel:
    """A model for many clients; the sets of names are those of all its layers."""

    run: Callable[[StackedPass, Tensor], Tensor]
    self_updating: frozenset[str] = frozenset()
    channels_last: frozenset[str] = frozenset()

    @classmethod
    def of(cls, run: Callable[[StackedPass, Tensor], Tensor], layers: Iterable[StackedLayer]) -> StackedModel:
        """Return the model that computes ``run`` with these layers."""
        layers = list(layers)
        return cls(
            run,
            frozenset(name for layer in layers for name in layer.self_updating),
            frozenset(name for layer in layers for name in layer.channels_last),
        )

    def sgd_step(
        self,
        weights: Mapping[str, Tensor],
        trainable: Iterable[str],
        rates: Tensor,
        keys: Tensor,
        inputs: Tensor,
        loss: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Do one SGD step for every client in place, and return the outputs: (C, …) weights, (C,) rates and keys."""
        anchor = rates.new_zeros((), requires_grad=True)
        leaves = {name: weights[name].detach().requires_grad_() for name in trainable if name not in self.self_updating}
        context = StackedPass({**weights, **leaves} if leaves else weights, rates, keys, anchor)
        outputs = self.run(context, inputs)
        gradients = torch.autograd.grad(loss(outputs), [*leaves.values(), anchor], allow_unused=True)
        with torch.no_grad():
            for name, gradient in zip(leaves, gradients, strict=False):
                if gradient is not None:
                    weights[name].sub_(scaled(gradient, rates.view(-1, *(1,) * (gradient.ndim - 1))))
        return outputs
