"""Dropout with keyed masks: bit-identical on every device, alone or stacked, in every batch.

A mask is a function of the job, the step, the number of the layer among the random layers of its model, and the
position of an element in the batch. A layer that is used twice in one pass uses the same mask twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Final

import torch
from torch import Tensor, nn

from ..tensor_rng import extend_all, uniform
from .layer_registry import LayerSite, StackedLayer, stacked_layer


@dataclass(eq=False)
class Draws:
    """The key of the current step, shared by the keyed layers of one model."""

    key: Tensor | None = None  # a scalar
    used: bool = False  # whether the model has keyed layers


def factors(keys: Tensor | None, number: int, p: float, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the factors of layer ``number``, 0 or 1/(1 − p), for the adjacent samples of clients with these keys."""
    if keys is None:
        raise ValueError("dropout needs the key of every client's step")
    layer_keys = extend_all(keys, torch.full_like(keys, number)).unsqueeze(-1)
    elements = torch.arange(prod(shape) // keys.numel(), device=keys.device)
    kept = (uniform(extend_all(layer_keys, elements)) >= p).to(dtype)
    return (kept / (1.0 - p) if p < 1.0 else kept).reshape(shape)


class KeyedDropout(nn.modules.dropout._DropoutNd):
    """Dropout of single elements or of whole channels."""

    number: int
    draws: Draws
    drawn_dimensions: Callable[[int], int]

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements of one client's samples in training mode."""
        return self.drop(x, self.draws.key) if self.training else x

    def drop(self, x: Tensor, keys: Tensor | None) -> Tensor:
        """Drop elements of the samples of the clients with these keys."""
        if self.p == 0:
            return x
        drawn = self.drawn_dimensions(x.ndim)
        shape = (*x.shape[:drawn], *(1,) * (x.ndim - drawn))
        mask = factors(keys, self.number, self.p, shape, x.dtype)
        return x.mul_(mask) if self.inplace else x * mask


DRAWN_DIMENSIONS: Final[dict[type[nn.Module], Callable[[int], int]]] = {
    nn.Dropout: lambda rank: rank,
    nn.Dropout1d: lambda rank: 1 if rank == 2 else 2,  # as in PyTorch, the first of two dimensions has the channels
    nn.Dropout2d: lambda _: 2,
}
"""Class -> rank of the input -> the number of leading dimensions whose entries have independent draws."""


@stacked_layer(KeyedDropout)
def dropout(module: KeyedDropout, _: LayerSite) -> StackedLayer:
    """Stack a keyed dropout layer."""
    return StackedLayer(lambda context, x: module.drop(x, context.keys) if context.training else x)
