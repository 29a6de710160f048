"""Partitions: which client holds which training samples.

A partition is a pure function of (labels, number of clients, seed) and of the task settings that it declares as
parameters (see ``OPTIONS``); one that declares ``users`` receives the id of every sample's user. It gives each sample
to at most one client (except the sampled ones), leaves no client empty, and returns sorted indices. One from outside
the package is registered by an entry point of the group ``defedavg.partitions`` or by calling ``register_partition`` in
a plugin file. ``task.split`` names a partition.

iid         equal parts of a shuffled set.
classes     exactly c classes per client (as in the pathological split), each class held by nearly as many clients.
random-classes
            exactly c classes per client, drawn uniformly and independently of the other clients, so classes have
            different numbers of holders; a class is divided evenly among its holders.
grouped-classes
            clients form groups of nearly equal size, and every group has c classes to itself, in the order of the
            labels (the pathological split of PFLlib); a class is divided evenly among its holders.
dirichlet   each class divided in proportions ~ Dir(alpha) (Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data
            Distribution for Federated Visual Classification, 2019).
shards      the set sorted by label, cut into equal shards, s random shards per client (McMahan et al.:
            Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017).
sampled, sampled-classes
            a fixed number of samples each, of all classes or of c random ones, drawn when they are needed; clients may
            share samples, so any number of clients is possible (``lazy_partition.py``).
natural     the samples of one user of the data set; fewer clients than users are drawn (``users.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .. import rng as keyed
from ..errors import UserError, unknown
from ..registry import Registry
from .lazy_partition import (
    Clients,
    Labels,
    check_labels,
    class_draw,
    random_class_positions,
    sampled,
    sampled_classes,
)
from .split_options import OPTION_CHECKS, check_alpha, check_classes_per_client, check_shards_per_client
from .users import Ids, natural

MAX_DRAWS: Final = 100


def iid(labels: Labels, num_clients: int, seed: int) -> Clients:
    """Give every client a part of the shuffled set; sizes differ by at most one, and all samples are used."""
    _check(labels, num_clients)
    return _sorted(np.array_split(keyed.permutation(keyed.key(seed, "split.iid"), len(labels)), num_clients))


def by_classes(labels: Labels, num_clients: int, seed: int, classes_per_client: int = 2) -> Clients:
    """Give every client exactly ``classes_per_client`` classes; divide a class evenly among its clients."""
    classes = _checked_classes(labels, num_clients, classes_per_client)
    assigned = _assign_classes(len(classes), num_clients, classes_per_client, seed)
    return _shared_by_holders(labels, classes, assigned, keyed.key(seed, "split.classes"))


def random_classes(labels: Labels, num_clients: int, seed: int, classes_per_client: int = 2) -> Clients:
    """Let every client draw ``classes_per_client`` classes by its own key; divide a class evenly among its clients."""
    classes = _checked_classes(labels, num_clients, classes_per_client)
    k = class_draw(seed)
    clients = range(num_clients)
    assigned = [random_class_positions(keyed.extend(k, i), len(classes), classes_per_client) for i in clients]
    return _shared_by_holders(labels, classes, assigned, keyed.key(seed, "split.random-classes"))


def grouped_classes(labels: Labels, num_clients: int, seed: int, classes_per_client: int = 2) -> Clients:
    """Give consecutive clients the same ``classes_per_client`` consecutive classes; divide a class evenly among them.

    If the number of classes is not a multiple of ``classes_per_client``, the last group continues with the first class.
    """
    classes = _checked_classes(labels, num_clients, classes_per_client)
    groups = math.ceil(len(classes) / classes_per_client)
    first = [i * groups // num_clients * classes_per_client for i in range(num_clients)]
    assigned = [[(start + k) % len(classes) for k in range(classes_per_client)] for start in first]
    return _shared_by_holders(labels, classes, assigned, keyed.key(seed, "split.grouped-classes"))


def _checked_classes(labels: Labels, num_clients: int, classes_per_client: int) -> Labels:
    """Return the classes of the set; refuse a number of them per client that is not possible."""
    _check(labels, num_clients)
    classes = np.unique(labels)
    check_classes_per_client(classes_per_client)
    if classes_per_client > len(classes):
        raise UserError(f"classes_per_client is {classes_per_client}, but the data has {len(classes)}; ask for fewer")
    return classes


def _shared_by_holders(labels: Labels, classes: Labels, assigned: list[list[int]], k: int) -> Clients:
    """Divide every class evenly among the clients to which it is assigned, in an order shuffled by key."""
    holders_of: list[list[int]] = [[] for _ in classes]
    for i, client_classes in enumerate(assigned):
        for c in client_classes:
            holders_of[c].append(i)
    parts: list[list[NDArray[np.intp]]] = [[] for _ in assigned]
    for c, (label, holders) in enumerate(zip(classes, holders_of, strict=True)):
        members = np.flatnonzero(labels == label)
        if len(members) < len(holders):
            found = f"class {label} has {len(members)} samples for {len(holders)} clients"
            raise UserError(f"{found}; use fewer clients, or fewer classes per client")
        if holders:  # a class may have none, and its samples stay unused
            members = members[keyed.permutation(keyed.extend(k, c), len(members))]
            for i, part in zip(holders, np.array_split(members, len(holders)), strict=True):
                parts[i].append(part)
    return _sorted([np.concatenate(part) for part in parts])


def _assign_classes(classes: int, num_clients: int, classes_per_client: int, seed: int) -> list[list[int]]:
    """Return distinct classes for every client, taken in order from shuffled sequences of all classes."""
    queue: list[int] = []
    shuffles = 0
    assigned: list[list[int]] = []
    for _ in range(num_clients):
        chosen: list[int] = []
        while len(chosen) < classes_per_client:
            # A class that the client already has stays in the queue for the next client, so all are used evenly.
            label = next((label for label in queue if label not in chosen), None)
            if label is None:
                queue.extend(keyed.permutation(keyed.key(seed, "split.deck", shuffles), classes).tolist())
                shuffles += 1
            else:
                queue.remove(label)
                chosen.append(label)
        assigned.append(chosen)
    return assigned


def dirichlet(labels: Labels, num_clients: int, seed: int, alpha: float = 0.5) -> Clients:
    """Divide every class in proportions ~ Dir(alpha), drawn again until no client is empty; all samples are used."""
    _check(labels, num_clients)
    check_alpha(alpha)
    classes = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    for attempt in range(MAX_DRAWS):
        owner = np.empty(len(labels), np.int64)
        for c, members in enumerate(classes):
            key = keyed.key(seed, "split.dirichlet", attempt, c)
            shares = keyed.generator(key).dirichlet(np.full(num_clients, alpha))
            # Rounding the cumulative sum instead of each share uses every sample exactly once.
            cuts = np.rint(np.cumsum(shares) * len(members)).astype(np.int64)
            order = keyed.permutation(keyed.extend(key, 0), len(members))
            owner[members[order]] = np.searchsorted(cuts[:-1], np.arange(len(members)), side="right")
        if len(np.unique(owner)) == num_clients:
            return tuple(np.flatnonzero(owner == i) for i in range(num_clients))
    what = f"{MAX_DRAWS} Dirichlet draws all left some of the {num_clients} clients empty"
    raise UserError(f"{what}; use fewer clients, or an alpha above {alpha}")


def by_shards(labels: Labels, num_clients: int, seed: int, shards_per_client: int = 2) -> Clients:
    """Give every client random shards of the set sorted by label; samples that do not fill a shard stay unused."""
    _check(labels, num_clients)
    check_shards_per_client(shards_per_client)
    count = num_clients * shards_per_client
    size = len(labels) // count
    if size < 1:
        raise UserError(f"{len(labels)} samples do not fill {count} shards; use fewer clients, or shards per client")
    order = keyed.permutation(keyed.key(seed, "split.shards.samples"), len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    shards = order[: count * size].reshape(count, size)
    assigned = shards[keyed.permutation(keyed.key(seed, "split.shards.deal"), count)]
    return _sorted(list(assigned.reshape(num_clients, shards_per_client * size)))


OPTIONS: Final = {
    "classes_per_client": 2,
    "alpha": 0.5,
    "shards_per_client": 2,
    "samples_per_client": 100,
    "min_samples_per_client": 1,
}
"""Settings of [task] that a partition can declare as parameters, with their defaults."""

USERS: Final = "users"
"""The parameter by which a partition receives the id of every training sample's user."""

Partition = Callable[..., Clients]
"""(labels, num_clients, seed, and any of ``OPTIONS`` and ``users`` by name) -> the sample indices of every client."""


def _check_signature(name: str, partition: Partition) -> None:
    if not callable(partition):
        raise UserError(f"split {name!r} is {partition!r}; register a function of (labels, num_clients, seed)")
    parameters = list(signature(partition).parameters.values())
    if len(parameters) < 3:
        raise UserError(f"split {name!r} takes too few parameters; it receives (labels, num_clients, seed)")
    for other in parameters[3:]:
        if other.name not in (*OPTIONS, USERS) and other.default is Parameter.empty:
            remedy = f"give it a default, or use {', '.join(OPTIONS)}"
            raise UserError(f"split {name!r} needs {other.name!r}, which is not a task setting; {remedy}")


PARTITIONS: Registry[Partition] = Registry("split", "defedavg.partitions", _check_signature)


_IDENTICAL: set[str] = set()


def register_partition(name: str, partition: Partition, *, identical: bool = False) -> Partition:
    """Register a partition as a value of ``task.split`` in this process.

    ``identical`` declares that the samples of all clients have the distribution of the whole set.
    """
    PARTITIONS.register(name, partition)
    (_IDENTICAL.add if identical else _IDENTICAL.discard)(name)
    return partition


def is_identical(kind: str) -> bool:
    """Return whether a partition declares that its clients are identically distributed."""
    return kind in _IDENTICAL


_BUILT_IN: Final[tuple[Partition, ...]] = (
    iid,
    by_classes,
    random_classes,
    grouped_classes,
    dirichlet,
    by_shards,
    sampled,
    sampled_classes,
    natural,
)
for _partition in _BUILT_IN:
    _name = _partition.__name__.removeprefix("by_").replace("_", "-")
    register_partition(_name, _partition, identical=_partition in (iid, sampled))


def options_of(kind: str) -> tuple[str, ...]:
    """Return the ``OPTIONS`` that a partition declares as parameters; all of them if the name is not registered."""
    return tuple(name for name in OPTIONS if kind not in PARTITIONS or name in signature(PARTITIONS[kind]).parameters)


def check_options(kind: str, options: Mapping[str, int | float]) -> None:
    """Refuse options that a partition of the package reads, and with which it can partition no data."""
    if PARTITIONS.find(kind) in _BUILT_IN:
        for name in options_of(kind):
            OPTION_CHECKS[name](options[name])


def needs_users(kind: str) -> bool:
    """Return whether a partition declares that it needs data with users; False if the name is not registered."""
    found = signature(PARTITIONS[kind]).parameters.get(USERS) if kind in PARTITIONS else None
    return found is not None and found.default is Parameter.empty


def split(
    kind: str, labels: Labels, num_clients: int, seed: int, *, users: Ids | None = None, **options: int | float
) -> Clients:
    """Return the sample indices of every client, by the partition named ``kind``; it receives only its own options."""
    partition = PARTITIONS.find(kind)
    if needs_users(kind) and users is None:
        raise UserError(f"split = {kind} needs data with users, an id for every training sample; use another split")
    for name in options:
        if name not in OPTIONS:
            raise unknown("option of a split", name, OPTIONS)
    declared = signature(partition).parameters
    values = {**OPTIONS, **options} | ({USERS: users} if needs_users(kind) else {})
    return partition(labels, num_clients, seed, **{name: values[name] for name in values if name in declared})


def class_counts(clients: Clients, labels: Labels, classes: int) -> NDArray[np.int64]:
    """Return the number of samples of each class at each client, of shape (clients, classes)."""
    if len(labels) and not (labels.min() >= 0 and labels.max() < classes):
        raise UserError(f"labels go from {labels.min()} to {labels.max()}, outside 0..{classes - 1}; raise classes")
    counts = np.zeros((len(clients), classes), np.int64)
    for row, indices in zip(counts, clients, strict=True):
        row += np.bincount(labels[indices], minlength=classes)
    return counts


def _check(labels: Labels, num_clients: int) -> None:
    check_labels(labels, num_clients)
    if num_clients > len(labels):
        raise UserError(
            f"cannot split {len(labels)} samples among {num_clients} clients; "
            f"use at most {len(labels)}, or split = sampled, in which clients share samples"
        )


def _sorted(parts: list[NDArray[np.intp]]) -> Clients:
    return tuple(np.sort(part).astype(np.int64) for part in parts)
