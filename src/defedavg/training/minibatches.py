"""Which samples a job sees: a pure function of (seed, client, job), whatever else runs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..rng import extend, extend_all, key, permutation


def batch_key(seed: int, client: int, index: int) -> int:
    """The key of all that a job draws from its client's samples."""
    return extend(extend(key(seed, "batch"), client), index)


def positions(
    seed: int, client: int, index: int, *, steps: int, batch_size: int, size: int, sampling: str = "replacement"
) -> NDArray[np.int64]:
    """For every step of a job, the positions in the client's own samples: shape (steps, batch_size).

    ``replacement`` draws every position on its own; ``shuffle`` goes through the samples in an order drawn anew for
    each pass, a batch running on into the next pass where a pass ends.
    """
    start = batch_key(seed, client, index)
    count = steps * batch_size
    if sampling == "replacement":
        keys = extend_all(start, np.arange(count))
        drawn = (((keys >> np.uint64(32)) * np.uint64(size)) >> np.uint64(32)).astype(np.int64)
    else:
        passes = [permutation(extend(start, turn), size) for turn in range(-(-count // size))]
        drawn = np.concatenate([np.zeros(0, np.int64), *passes])[:count]
    return drawn.reshape(steps, batch_size)
