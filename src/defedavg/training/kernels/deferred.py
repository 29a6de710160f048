"""SGD updates of large fully connected layers, added to the weights once in several steps.

With few samples per step, such a layer takes the time in which its weights are read and written, not that of its
products. The update of a step is a product of few rows, rate · gradᵀ·x, so a step can keep these rows instead of
writing the weights. Products then use the weights W of the last addition and the pending rows:

    x·Wᵀ − rate · (x·Xᵀ)·G        grad·W − rate · (grad·Gᵀ)·X

X and G have the rows of all pending steps. For the products, W is stored as 16-bit floating-point numbers, each row
divided by a power of two: these have as many digits as TF32, to which the products round their operands anyway.
The sums of a job do not depend on the other jobs of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

STORED = torch.float16
"""The type of the weights for products."""

PENDING_ROWS = 64
"""The rows of all pending steps, at most: the tile of one product."""

LEAST_WEIGHTS = 1 << 18
"""A layer with fewer weights than this adds its updates at every step."""


def pending_steps(size: int) -> int:
    """Return for how many steps with mini-batches of this size updates are kept; 1: not at all."""
    return max(1, PENDING_ROWS // size)


@dataclass(frozen=True, slots=True)
class DeferredUpdates:
    """The pending updates of one layer for C clients, and its weights as they were before them."""

    weight: Tensor  # (C, O, I), 16 bits: the weights divided by the scales of their rows
    scales: Tensor  # (C, O)
    inputs: Tensor  # X, (C, PENDING_ROWS, I)
    gradients: Tensor  # G, (C, PENDING_ROWS, O)
    step: Tensor  # (1,): the number of the present step, on the device
    period: int  # the number of steps from one addition to the next

    @classmethod
    def of(cls, weight: Tensor, size: int, step: Tensor) -> DeferredUpdates:
        """Return buffers for weights (C, O, I) and mini-batches of this size; ``add_updates`` fills them."""
        clients, outs, ins = weight.shape
        inputs, gradients = (weight.new_empty((clients, PENDING_ROWS, width)) for width in (ins, outs))
        half = torch.empty_like(weight, dtype=STORED)
        return cls(half, weight.new_empty((clients, outs)), inputs, gradients, step, pending_steps(size))

    def part(self, clients: slice) -> DeferredUpdates:
        """Return the buffers of some of the clients."""
        names = ("weight", "scales", "inputs", "gradients")
        return replace(self, **{name: getattr(self, name)[clients] for name in names})


def deferred_bytes(shapes: Iterable[torch.Size]) -> int:
    """Return the bytes of the buffers of one client for layers with weights of these shapes, (O, I)."""
    return sum(2 * outs * ins + 4 * outs + 4 * PENDING_ROWS * (outs + ins) for outs, ins in shapes)
