"""Keyed randomness: a draw is a pure function of its key and of nothing that ran before it.

A key is a 64-bit integer mixed from (seed, purpose, part, part, ...), for example ``key(7, "batch", client, job)``.
Scalars, NumPy arrays and torch tensors yield the same keys, so order, batching, devices and machines cannot change a
result.

The mixer is the finalizer of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
"""

from __future__ import annotations

import math
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB

Keys = NDArray[np.uint64]


@lru_cache(maxsize=256)
def _purpose(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def extend(start: int, part: int) -> int:
    """Return the key that results from mixing one more part into ``start``."""
    z = ((start ^ (part & MASK)) + GOLDEN) & MASK
    z = ((z ^ (z >> 30)) * FIRST) & MASK
    z = ((z ^ (z >> 27)) * SECOND) & MASK
    return z ^ (z >> 31)


def key(seed: int, purpose: str, *parts: int) -> int:
    """Return the 64-bit key of a draw."""
    z = extend(extend(0, seed), _purpose(purpose))
    for part in parts:
        z = extend(z, part)
    return z


def extend_all(start: int | Keys, parts: NDArray[np.integer] | Keys) -> Keys:
    """Apply ``extend`` to arrays of starts, of parts, or of both (broadcast together)."""
    left = np.atleast_1d(np.asarray(start, dtype=np.uint64))
    z = (left ^ np.asarray(parts).astype(np.uint64)) + np.uint64(GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(SECOND)
    return z ^ (z >> np.uint64(31))


def uniform(k: int) -> float:
    """Return a float in [0, 1) from a key."""
    return (k >> 11) * 2.0**-53


def uniform_all(keys: Keys) -> NDArray[np.float64]:
    """Return ``uniform`` of every key."""
    return (keys >> np.uint64(11)).astype(np.float64) * 2.0**-53


def below(k: int, limit: int) -> int:
    """Return an integer in [0, limit) from a key; ``limit`` is at most 2**31."""
    return ((k >> 32) * limit) >> 32


def below_all(keys: Keys, limits: np.uint64 | Keys) -> NDArray[np.int64]:
    """Return ``below`` of every key; keys and limits broadcast together."""
    return (((keys >> np.uint64(32)) * limits) >> np.uint64(32)).astype(np.int64)


def normal(k: int) -> float:
    """Return a standard normal deviate from a key (Box and Muller)."""
    u, v = uniform(extend(k, 0)), uniform(extend(k, 1))
    return math.sqrt(-2.0 * math.log(1.0 - u)) * math.cos(2.0 * math.pi * v)


def normal_all(keys: Keys) -> NDArray[np.float64]:
    """Return ``normal`` of every key."""
    u = uniform_all(extend_all(keys, np.zeros(1, np.uint64)))
    v = uniform_all(extend_all(keys, np.ones(1, np.uint64)))
    return np.asarray(np.sqrt(-2.0 * np.log1p(-u)) * np.cos(2.0 * np.pi * v))


def portable(value: float) -> float:
    """Round to 30 significant bits: the last bits of exp, log or cos depend on the processor and on versions."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(mantissa * 2.0**30), exponent - 30)


def portable_all(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ``portable`` of every value."""
    mantissas, exponents = np.frexp(values)
    return np.asarray(np.ldexp(np.rint(mantissas * 2.0**30), exponents - 30))


def permutation(k: int, size: int) -> NDArray[np.intp]:
    """Return a uniform permutation of ``range(size)`` from a key."""
    return np.argsort(extend_all(k, np.arange(size)), kind="stable")


def generator(k: int) -> np.random.Generator:
    """Return a NumPy generator seeded with a key, for distributions without a short formula."""
    return np.random.Generator(np.random.Philox(key=k))
