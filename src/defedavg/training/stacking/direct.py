"""A training step of a chain of layers without autograd: the layers' own backward passes, called in reverse order.

On a CPU, the autograd functions of a small model take more time than its products; on a CUDA device, they add kernels.
What does not change from step to step, such as the tensors of every layer, is looked up once for a group of jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..kernels.plain import Gradient
from .layer_registry import Passes, StackedLayer, StackedPass

OutputGradient = Callable[[Tensor], Tensor]
"""Outputs (C·B, …) -> the gradient of the loss with respect to them."""


def is_direct(layers: Sequence[StackedLayer]) -> bool:
    """Return whether ``DirectStep`` computes a chain of these layers."""
    return all(layer.passes is not None for layer in layers) and any(layer.self_updating for layer in layers)


class DirectStep:
    """A step of a chain for clients with these weights and rates, which it updates in place.

    No layer before the first one with parameters has a backward pass, and that one computes no gradient of its inputs.
    """

    def __init__(self, layers: Sequence[StackedLayer], context: StackedPass) -> None:
        self._first = next(number for number, layer in enumerate(layers) if layer.self_updating)
        assert context.rates is not None
        all_train = context.rates.device.type == "cpu" and bool(context.rates.all())  # a device would have to wait
        context = replace(context, all_train=all_train)
        self._passes = [layer.passes(context) for layer in layers if layer.passes is not None]

    @torch.no_grad()
    def __call__(self, inputs: Tensor, output_gradient: OutputGradient) -> Tensor:
        """Do one step and return the outputs; ``inputs`` are (C·B, …)."""
        values, saved = forward_pass(self._passes, inputs)
        backward_pass(self._passes, output_gradient(values), saved, self._first, needs_x=False)
        return values


def forward_pass(passes: Sequence[Passes], x: Tensor) -> tuple[Tensor, list[Any]]:
    """Return the outputs of a sequence of layers, and what their backward passes need."""
    saved = []
    for forward, _ in passes:
        x, kept = forward(x)
        saved.append(kept)
    return x, saved


def backward_pass(passes: Sequence[Passes], grad: Tensor, saved: list[Any], first: int, needs_x: bool) -> Gradient:
    """Update the layers from the last to number ``first``, and return the gradient of its inputs if it is needed."""
    gradient: Gradient = grad
    for number in range(len(passes) - 1, first - 1, -1):
        assert gradient is not None
        gradient = passes[number][1](gradient, saved.pop(), needs_x or number > first)
    return gradient
