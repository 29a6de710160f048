"""Dropout with keyed masks: the same on every device, alone or stacked, whatever shares a batch.

A mask is a function of the job, of the step, of the number of the layer among those of its model that drop, and of the
place of an element in the batch. A layer that is used twice in one pass drops the same places twice.
"""

from __future__ import annotations

from math import prod
from typing import Final

import torch
from torch import Tensor, nn

from ..tensor_rng import extend_all, uniform
from .layers import StackedLayer


class Draws:
    """Where keyed layers of one model find the key of the step that is being run."""

    def __init__(self) -> None:
        self.key: Tensor | None = None  # a scalar
        self.used = False  # whether the model has such layers


def factors(keys: Tensor | None, number: int, p: float, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What layer ``number`` multiplies with, 0 or 1/(1 − p), for clients with these keys, one behind the other."""
    if keys is None:
        raise ValueError("dropout needs the key of every client's step")
    own = extend_all(keys, torch.full_like(keys, number)).unsqueeze(-1)
    places = torch.arange(prod(shape) // keys.numel(), device=keys.device)
    kept = (uniform(extend_all(own, places)) >= p).to(dtype)
    return (kept / (1.0 - p) if p < 1.0 else kept).reshape(shape)


class KeyedDropout(nn.modules.dropout._DropoutNd):
    """Dropout of single elements."""

    number: int
    draws: Draws

    def forward(self, x: Tensor) -> Tensor:
        """The samples of one client; elements are dropped while the module trains."""
        return self.dropped(x, self.draws.key) if self.training else x

    def dropped(self, x: Tensor, keys: Tensor | None) -> Tensor:
        """The samples of the clients with these keys, with elements dropped."""
        if self.p == 0:
            return x
        drawn = self.drawn(x.ndim)
        shape = (*x.shape[:drawn], *(1,) * (x.ndim - drawn))
        found = factors(keys, self.number, self.p, shape, x.dtype)
        return x.mul_(found) if self.inplace else x * found

    def drawn(self, rank: int) -> int:
        """How many dimensions of the samples have draws of their own."""
        return rank


class KeyedDropout1d(KeyedDropout):
    """Dropout of whole channels; as in PyTorch, the first of two dimensions is taken for the channels."""

    def drawn(self, rank: int) -> int:
        """How many dimensions of the samples have draws of their own."""
        return 1 if rank == 2 else 2


class KeyedDropout2d(KeyedDropout):
    """Dropout of whole channels."""

    def drawn(self, rank: int) -> int:
        """How many dimensions of the samples have draws of their own."""
        return 2


KEYED: Final[dict[type[nn.Module], type[KeyedDropout]]] = {
    nn.Dropout: KeyedDropout,
    nn.Dropout1d: KeyedDropout1d,
    nn.Dropout2d: KeyedDropout2d,
}


def dropout(module: KeyedDropout) -> StackedLayer:
    """Dropout for many clients."""
    return StackedLayer(lambda step, x: x if step.rates is None else module.dropped(x, step.keys))
