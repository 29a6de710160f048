"""Users: data sets whose clients come with the data, and the partition that gives every user a client.

A data set with users has an id for every training sample: a writer, an aircraft, a role of a play. It may have one for
every test sample too, of the same users or of others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .. import rng as keyed
from ..errors import UserError
from .lazy_partition import Labels, check_labels
from .split_options import check_min_samples_per_client

TEST_PART: Final = 5
"""One of so many samples of a user is for testing, in data sets without a test set of their own."""

Ids = NDArray[Any]
"""One id per sample: whole numbers or text."""


@dataclass(frozen=True, slots=True, eq=False)
class Users:
    """The users of a data set: the id of every training sample, and of every test sample where those are known."""

    train: Ids
    test: Ids | None = None


def check_ids(ids: Ids, samples: int, what: str) -> Ids:
    """Return the ids of users; refuse those that are not one whole number or one text per sample."""
    if ids.shape != (samples,):
        raise UserError(f"{what} has ids of users of shape {ids.shape} for {samples} samples; give one id per sample")
    if ids.dtype.kind not in "iuU":
        raise UserError(f"{what} has ids of users of type {ids.dtype}; give whole numbers or text")
    return ids


def indices_by_group(groups: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
    """Return the sorted indices of the samples of every group, from the number 0, 1, … of every sample's group."""
    order = np.argsort(groups, kind="stable").astype(np.int64)
    return tuple(np.split(order, np.cumsum(np.bincount(groups))[:-1]))


def held_out(users: Ids, data: str) -> NDArray[np.bool_]:
    """Return which samples are for testing: a fifth of every user's, up to rounding, drawn by a key of the data set.

    The draw depends on the name of the data set and on nothing else, so every study has the same test set.
    """
    _, groups, counts = np.unique(users, return_inverse=True, return_counts=True)
    ranks = random_ranks(groups, keyed.extend_all(keyed.key(0, "held-out." + data), np.arange(len(users))))
    return np.asarray(ranks < ((counts + TEST_PART // 2) // TEST_PART)[groups])


def random_ranks(groups: NDArray[np.integer[Any]], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the rank 0, 1, … of every sample among those of its group, in the order of their keys."""
    order, counts = np.lexsort((keys, groups)), np.bincount(groups)
    ranks = np.empty(len(groups), np.int64)
    ranks[order] = np.arange(len(groups)) - np.repeat(np.cumsum(counts) - counts, counts)
    return ranks


def count_users(users: Ids, min_samples_per_client: int) -> int:
    """Return how many users have at least that many training samples; refuse a minimum that no user has."""
    return len(_eligible(np.unique(users, return_counts=True)[1], min_samples_per_client))


def _eligible(counts: NDArray[np.int64], least: int) -> NDArray[np.intp]:
    check_min_samples_per_client(least)
    chosen = np.flatnonzero(counts >= least)
    if not len(chosen):
        most = int(counts.max(initial=0))
        raise UserError(
            f"min_samples_per_client is {least}, but no user has more than {most} training samples; lower it"
        )
    return chosen


def natural(
    labels: Labels, num_clients: int, seed: int, users: Ids, min_samples_per_client: int = 1
) -> tuple[NDArray[np.int64], ...]:
    """Give the samples of every user to one client, in sorted order of the ids; fewer clients are users drawn by key.

    With the same seed, the users of fewer clients are among those of more clients.
    """
    check_labels(labels, num_clients)
    check_ids(users, len(labels), "the data set")
    _, groups, counts = np.unique(users, return_inverse=True, return_counts=True)
    chosen = _eligible(counts, min_samples_per_client)
    if num_clients > len(chosen):
        least = min_samples_per_client
        which = "users" if least == 1 else f"users with at least {least} training samples"
        raise UserError(
            f"clients.num_clients is {num_clients}, but the data set has {len(chosen)} {which}; "
            f"set it to at most {len(chosen)}, or leave it out to use all of them"
        )
    drawn = keyed.permutation(keyed.key(seed, "split.natural"), len(chosen))[:num_clients]
    parts = indices_by_group(groups.astype(np.int64))
    return tuple(parts[user] for user in np.sort(chosen[drawn]))
