"""Keyed draws with PyTorch, on any device: bit-identical to those of ``defedavg.rng`` with Python or NumPy."""

from __future__ import annotations

import torch
from torch import Tensor

from ..rng import FIRST, GOLDEN, SECOND


def signed(key: int) -> int:
    """Return a 64-bit key as the signed integer with the same bits: PyTorch has no unsigned 64-bit arithmetic."""
    return key - (1 << 64) if key >= 1 << 63 else key


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Shift to the right and fill with zeros."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def extend_all(starts: Tensor, parts: Tensor) -> Tensor:
    """Return the keys that extend ``starts`` by one more part each; both are int64 and broadcast together."""
    z = (starts ^ parts) + signed(GOLDEN)
    z = (z ^ _shift_right(z, 30)) * signed(FIRST)
    z = (z ^ _shift_right(z, 27)) * signed(SECOND)
    return z ^ _shift_right(z, 31)


def below(keys: Tensor, limits: Tensor) -> Tensor:
    """Draw integers in [0, limit) from keys; limits are at most 2**31."""
    return (_shift_right(keys, 32) * limits) >> 32


def shuffled(starts: Tensor, sizes: Tensor, widest: int, epochs: int, count: int) -> Tensor:
    """Return the first ``count`` positions of repeated shuffled passes over ``range(size)``, (J, count).

    ``starts`` and ``sizes`` are (J, 1); ``widest`` is the largest size, and ``epochs`` passes suffice for the smallest.
    """
    numbers = torch.arange(widest, device=starts.device)
    passes = extend_all(starts, torch.arange(epochs, device=starts.device)).unsqueeze(-1)
    # Unsigned numbers have the order of signed ones with the first bit flipped. Positions beyond a size come last.
    flipped = extend_all(passes, numbers) ^ -(1 << 63)
    order = torch.where(numbers < sizes.unsqueeze(-1), flipped, (1 << 63) - 1).argsort(dim=-1, stable=True)
    elements = torch.arange(count, device=starts.device)
    return order.flatten(1).gather(1, elements // sizes * widest + elements % sizes)


def uniform(keys: Tensor) -> Tensor:
    """Draw floats in [0, 1) from keys."""
    return _shift_right(keys, 11).double() * 2.0**-53
