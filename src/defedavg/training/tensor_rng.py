"""Keyed draws with PyTorch, on any device: the same bits as ``defedavg.rng`` gives with Python or NumPy."""

from __future__ import annotations

from torch import Tensor

from ..rng import FIRST, GOLDEN, SECOND


def signed(key: int) -> int:
    """A 64-bit key as the signed integer with the same bits: PyTorch computes with no other."""
    return key - (1 << 64) if key >= 1 << 63 else key


def _shifted(z: Tensor, bits: int) -> Tensor:
    """A shift to the right that fills up with zeros."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def extend_all(starts: Tensor, parts: Tensor) -> Tensor:
    """The keys that follow ``starts`` when one more part is mixed in, both int64 and broadcast together."""
    z = (starts ^ parts) + signed(GOLDEN)
    z = (z ^ _shifted(z, 30)) * signed(FIRST)
    z = (z ^ _shifted(z, 27)) * signed(SECOND)
    return z ^ _shifted(z, 31)


def below(keys: Tensor, limits: Tensor) -> Tensor:
    """Integers in [0, limit) from keys; limits are at most 2**31."""
    return (_shifted(keys, 32) * limits) >> 32


def uniform(keys: Tensor) -> Tensor:
    """Floats in [0, 1) from keys."""
    return _shifted(keys, 11).double() * 2.0**-53
