"""The mini-batches of a job: a pure function of (seed, client, job), whatever else is computed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..rng import extend, extend_all, key, permutation


def batch_key(seed: int, client: int, index: int) -> int:
    """Return the key from which a job draws its mini-batches."""
    return extend(extend(key(seed, "batch"), client), index)


def positions(
    seed: int, client: int, index: int, *, steps: int, batch_size: int, size: int, sampling: str = "replacement"
) -> NDArray[np.int64]:
    """Return the positions of every step's mini-batch in the client's samples, (steps, batch_size).

    ``replacement`` draws every position independently; ``shuffle`` draws a new order of the samples for each epoch, and
    a mini-batch at the end of an epoch continues into the next one.
    """
    start = batch_key(seed, client, index)
    count = steps * batch_size
    if sampling == "replacement":
        keys = extend_all(start, np.arange(count))
        drawn = (((keys >> np.uint64(32)) * np.uint64(size)) >> np.uint64(32)).astype(np.int64)
    else:
        epochs = [permutation(extend(start, epoch), size) for epoch in range(-(-count // size))]
        drawn = np.concatenate([np.zeros(0, np.int64), *epochs])[:count]
    return drawn.reshape(steps, batch_size)
