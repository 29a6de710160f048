"""Partitions that are drawn client by client when they are needed, for any number of clients.

The samples of a client are a pure function of (labels, seed, client, options), independent of earlier requests. There
may be more clients than samples, so clients may share samples; no client has a sample twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from .. import rng as keyed
from ..errors import UserError
from .split_options import check_classes_per_client, check_samples_per_client

Labels = NDArray[np.integer[Any]]
Indices = NDArray[np.int64]

CACHE_SIZE = 4096  # clients whose samples are kept in memory, since a client trains more than once


class LazyPartition(Sequence[Indices]):
    """The samples of ``num_clients`` clients, each drawn by ``draw(client)`` when it is needed."""

    def __init__(self, num_clients: int, draw: Callable[[int], Indices]) -> None:
        self._num_clients = num_clients
        self._draw = draw
        self._cache: dict[int, Indices] = {}

    def __len__(self) -> int:
        return self._num_clients

    @overload
    def __getitem__(self, client: int) -> Indices: ...

    @overload
    def __getitem__(self, client: slice) -> tuple[Indices, ...]: ...

    def __getitem__(self, client: int | slice) -> Indices | tuple[Indices, ...]:
        if isinstance(client, slice):
            return tuple(self[i] for i in range(*client.indices(self._num_clients)))
        number = client + self._num_clients if client < 0 else client
        if not 0 <= number < self._num_clients:
            raise IndexError(client)
        samples = self._cache.get(number)
        if samples is None:
            if len(self._cache) >= CACHE_SIZE:
                del self._cache[next(iter(self._cache))]
            samples = self._cache[number] = self._draw(number)
        return samples

    def __iter__(self) -> Iterator[Indices]:
        return (self._draw(client) for client in range(self._num_clients))


Clients = tuple[Indices, ...] | LazyPartition
"""For every client, the indices of its training samples; a ``LazyPartition`` draws them when they are needed."""


def distinct(k: int, total: int, count: int) -> Indices:
    """Return ``count`` distinct numbers below ``total`` by key, sorted; all of them if there are not more."""
    if 2 * count >= total:
        return np.sort(keyed.permutation(k, total)[:count]).astype(np.int64)
    tries = count
    while True:  # take the first distinct numbers of one unlimited sequence
        tries *= 2
        keys = keyed.extend_all(k, np.arange(tries))
        values = ((keys >> np.uint64(32)) * np.uint64(total)) >> np.uint64(32)
        found, first = np.unique(values, return_index=True)
        if len(found) >= count:
            return np.sort(values[np.sort(first)[:count]]).astype(np.int64)


def check_labels(labels: Labels, num_clients: int) -> None:
    """Refuse labels that are not one per sample, and a partition without clients."""
    if labels.ndim != 1:
        raise UserError(f"labels have shape {labels.shape}; pass one label per sample")
    if num_clients < 1:
        raise UserError(f"the number of clients is {num_clients}; use at least 1")


def _check(labels: Labels, num_clients: int, samples_per_client: int) -> None:
    check_labels(labels, num_clients)
    check_samples_per_client(samples_per_client)
    if samples_per_client > len(labels):
        raise UserError(f"samples_per_client is {samples_per_client}; give 1 to {len(labels)}, the number of samples")


def sampled(labels: Labels, num_clients: int, seed: int, samples_per_client: int = 100) -> LazyPartition:
    """Give every client ``samples_per_client`` samples of the whole set, drawn when they are needed."""
    _check(labels, num_clients, samples_per_client)
    draw = partial(_of_all_classes, keyed.key(seed, "split.sampled"), len(labels), samples_per_client)
    return LazyPartition(num_clients, draw)


def class_draw(seed: int) -> int:
    """Return the key that, extended by a client, draws its classes: one for all partitions with random classes."""
    return keyed.key(seed, "split.sampled-classes")


def random_class_positions(client_key: int, classes: int, count: int) -> list[int]:
    """Return ``count`` distinct numbers below ``classes`` by the key of a client, in random order."""
    return [int(position) for position in keyed.permutation(client_key, classes)[:count]]


def _of_all_classes(k: int, total: int, count: int, client: int) -> Indices:
    return distinct(keyed.extend(k, client), total, count)


def sampled_classes(
    labels: Labels, num_clients: int, seed: int, samples_per_client: int = 100, classes_per_client: int = 2
) -> LazyPartition:
    """Give every client samples of ``classes_per_client`` random classes, drawn when they are needed.

    The classes are those of ``random_classes`` with the same seed. Each gives the same number of samples, up to one; a
    class with fewer gives all that it has.
    """
    _check(labels, num_clients, samples_per_client)
    check_classes_per_client(classes_per_client)
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    most = min(len(members), samples_per_client)
    if classes_per_client > most:
        found = f"classes_per_client is {classes_per_client}"
        raise UserError(f"{found}; give 1 to {most} with these data and samples_per_client")
    draw = partial(_of_few_classes, class_draw(seed), members, classes_per_client, samples_per_client)
    return LazyPartition(num_clients, draw)


def _of_few_classes(k: int, members: list[NDArray[np.intp]], classes: int, samples: int, client: int) -> Indices:
    client_key = keyed.extend(k, client)
    parts = []
    for position, label in enumerate(random_class_positions(client_key, len(members), classes)):
        count = samples // classes + (position < samples % classes)  # the same of each where the class has enough
        size = len(members[label])
        parts.append(members[label][distinct(keyed.extend(client_key, ~label), size, min(count, size))])
    return np.sort(np.concatenate(parts)).astype(np.int64)
