"""Shares that are drawn by key when they are asked for, so that a million clients cost no more than those that train.

The law of this file: a client's share is a pure function of (labels, seed, client, options), whoever asked before.
There may be more clients than samples, so a sample may lie with several; within a share no sample comes twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from .. import rng as keyed
from ..errors import UserError

Labels = NDArray[np.integer[Any]]
Share = NDArray[np.int64]

KEPT = 4096
"""Shares that are remembered, since a client trains more than once."""


class Drawn(Sequence[Share]):
    """The shares of ``num_clients`` clients, each made by ``make(client)`` when it is asked for."""

    def __init__(self, num_clients: int, make: Callable[[int], Share]) -> None:
        self._number = num_clients
        self._make = make
        self._kept: dict[int, Share] = {}

    def __len__(self) -> int:
        return self._number

    @overload
    def __getitem__(self, client: int) -> Share: ...

    @overload
    def __getitem__(self, client: slice) -> tuple[Share, ...]: ...

    def __getitem__(self, client: int | slice) -> Share | tuple[Share, ...]:
        if isinstance(client, slice):
            return tuple(self[i] for i in range(*client.indices(self._number)))
        place = client + self._number if client < 0 else client
        if not 0 <= place < self._number:
            raise IndexError(client)
        found = self._kept.get(place)
        if found is None:
            if len(self._kept) >= KEPT:
                del self._kept[next(iter(self._kept))]
            found = self._kept[place] = self._make(place)
        return found

    def __iter__(self) -> Iterator[Share]:
        return (self._make(client) for client in range(self._number))


def some(k: int, total: int, count: int) -> Share:
    """``count`` different numbers below ``total`` by key, sorted; all of them if there are not more."""
    if 2 * count >= total:
        return np.sort(keyed.permutation(k, total)[:count]).astype(np.int64)
    tries = count
    while True:  # the first so many different ones of one endless sequence
        tries *= 2
        keys = keyed.extend_all(k, np.arange(tries))
        values = ((keys >> np.uint64(32)) * np.uint64(total)) >> np.uint64(32)
        found, first = np.unique(values, return_index=True)
        if len(found) >= count:
            return np.sort(values[np.sort(first)[:count]]).astype(np.int64)


def _check(labels: Labels, num_clients: int, samples_per_client: int) -> None:
    if num_clients < 1:
        raise UserError(f"the number of clients is {num_clients}; use at least 1")
    if labels.ndim != 1:
        raise UserError(f"labels have shape {labels.shape}; pass one label per sample")
    if not 1 <= samples_per_client <= len(labels):
        raise UserError(f"samples_per_client is {samples_per_client}; give 1 to {len(labels)}, as many as there are")


class _Alike:
    """Samples of all classes."""

    def __init__(self, seed: int, total: int, count: int) -> None:
        self._key = keyed.key(seed, "split.sampled")
        self._total, self._count = total, count

    def __call__(self, client: int) -> Share:
        return some(keyed.extend(self._key, client), self._total, self._count)


class _Classes:
    """Samples of a few classes, the same number of each as far as it goes."""

    def __init__(self, seed: int, members: list[NDArray[np.intp]], classes: int, count: int) -> None:
        self._key = keyed.key(seed, "split.sampled-classes")
        self._members, self._classes, self._count = members, classes, count

    def __call__(self, client: int) -> Share:
        own = keyed.extend(self._key, client)
        parts = []
        for turn, label in enumerate(keyed.permutation(own, len(self._members))[: self._classes].tolist()):
            members = self._members[label]
            count = self._count // self._classes + (turn < self._count % self._classes)
            parts.append(members[some(keyed.extend(own, ~label), len(members), min(count, len(members)))])
        return np.sort(np.concatenate(parts)).astype(np.int64)


def sampled(labels: Labels, num_clients: int, seed: int, samples_per_client: int = 100) -> Drawn:
    """``samples_per_client`` samples of the whole set for every client, drawn when they are needed."""
    _check(labels, num_clients, samples_per_client)
    return Drawn(num_clients, _Alike(seed, len(labels), samples_per_client))


def sampled_classes(
    labels: Labels, num_clients: int, seed: int, samples_per_client: int = 100, classes_per_client: int = 2
) -> Drawn:
    """The same from ``classes_per_client`` classes of the client's own, with fewer samples where a class has fewer."""
    _check(labels, num_clients, samples_per_client)
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    most = min(len(members), samples_per_client)
    if not 1 <= classes_per_client <= most:
        raise UserError(f"classes_per_client is {classes_per_client}; give 1 to {most} with these data and shares")
    return Drawn(num_clients, _Classes(seed, members, classes_per_client, samples_per_client))
