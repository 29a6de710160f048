"""Splits: which client gets which training samples.

Every split is a pure function of (labels, number of clients, seed, its own option). It gives each sample to at most one
client (but for the sampled ones), leaves no client empty, and returns sorted indices. A new split is a function and a
line in ``SPLITS``.

iid         equal parts of a shuffled set.
classes     exactly c classes per client (as in the pathological split), each class held by nearly as many clients.
dirichlet   each class divided in proportions ~ Dir(alpha) (Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data
            Distribution for Federated Visual Classification, 2019).
shards      the set sorted by label, cut into equal shards, s random shards per client (McMahan et al.:
            Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017).
sampled, sampled-classes
            a few samples each, drawn when they are needed and perhaps the same for two clients: for any number of
            clients (``drawn.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from inspect import signature
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .. import rng as keyed
from ..errors import UserError, unknown
from .lazy_partition import sampled, sampled_classes
from .task import Clients

REDRAWS: Final = 100

Labels = NDArray[np.integer[Any]]


def iid(labels: Labels, num_clients: int, seed: int) -> Clients:
    """Shuffled parts whose sizes differ by at most one; uses all samples."""
    _check(labels, num_clients)
    return _sorted(np.array_split(keyed.permutation(keyed.key(seed, "split.iid"), len(labels)), num_clients))


def by_classes(labels: Labels, num_clients: int, seed: int, classes_per_client: int = 2) -> Clients:
    """Exactly ``classes_per_client`` classes for each client; a class is divided evenly among its clients."""
    _check(labels, num_clients)
    classes = np.unique(labels)
    if classes_per_client < 1:
        raise UserError(f"classes_per_client is {classes_per_client}; give every client at least 1 class")
    if classes_per_client > len(classes):
        raise UserError(f"classes_per_client is {classes_per_client}, but the data has {len(classes)}; ask for fewer")
    hands = _deal(len(classes), num_clients, classes_per_client, seed)
    parts: list[list[NDArray[np.intp]]] = [[] for _ in hands]
    for c, label in enumerate(classes):
        holders = [i for i, hand in enumerate(hands) if c in hand]
        members = np.flatnonzero(labels == label)
        if len(members) < len(holders):
            raise UserError(
                f"class {label} has {len(members)} samples for {len(holders)} clients; "
                "use fewer clients, or fewer classes per client"
            )
        if holders:  # with few clients a class may have none: its samples stay unused
            members = members[keyed.permutation(keyed.key(seed, "split.classes", c), len(members))]
            for i, part in zip(holders, np.array_split(members, len(holders)), strict=True):
                parts[i].append(part)
    return _sorted([np.concatenate(part) for part in parts])


def _deal(classes: int, num_clients: int, hand_size: int, seed: int) -> list[list[int]]:
    """A hand of distinct classes for every client, dealt from shuffled decks of all classes."""
    deck: list[int] = []
    decks = 0
    hands: list[list[int]] = []
    for _ in range(num_clients):
        hand: list[int] = []
        while len(hand) < hand_size:
            # A card the client already holds stays in the deck for the next client: no class falls behind.
            card = next((card for card in deck if card not in hand), None)
            if card is None:
                deck.extend(keyed.permutation(keyed.key(seed, "split.deck", decks), classes).tolist())
                decks += 1
            else:
                deck.remove(card)
                hand.append(card)
        hands.append(hand)
    return hands


def dirichlet(labels: Labels, num_clients: int, seed: int, alpha: float = 0.5) -> Clients:
    """Every class divided in proportions ~ Dir(alpha), drawn anew until no client is empty; uses all samples."""
    _check(labels, num_clients)
    if not (alpha > 0 and math.isfinite(alpha)):
        raise UserError(f"alpha is {alpha}; give a number above 0 (small: few classes per client, large: nearly iid)")
    classes = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    for attempt in range(REDRAWS):
        owner = np.empty(len(labels), np.int64)
        for c, members in enumerate(classes):
            key = keyed.key(seed, "split.dirichlet", attempt, c)
            shares = keyed.generator(key).dirichlet(np.full(num_clients, alpha))
            # Rounding the running total, not the shares, uses every sample exactly once.
            cuts = np.rint(np.cumsum(shares) * len(members)).astype(np.int64)
            order = keyed.permutation(keyed.extend(key, 0), len(members))
            owner[members[order]] = np.searchsorted(cuts[:-1], np.arange(len(members)), side="right")
        if len(np.unique(owner)) == num_clients:
            return tuple(np.flatnonzero(owner == i) for i in range(num_clients))
    raise UserError(
        f"{REDRAWS} Dirichlet draws all left some of the {num_clients} clients empty; "
        f"use fewer clients, or an alpha above {alpha}"
    )


def by_shards(labels: Labels, num_clients: int, seed: int, shards_per_client: int = 2) -> Clients:
    """``shards_per_client`` random shards of the set sorted by label; what does not fill a shard stays unused."""
    _check(labels, num_clients)
    if shards_per_client < 1:
        raise UserError(f"shards_per_client is {shards_per_client}; give every client at least 1 shard")
    count = num_clients * shards_per_client
    size = len(labels) // count
    if size < 1:
        raise UserError(f"{len(labels)} samples do not fill {count} shards; use fewer clients, or shards per client")
    order = keyed.permutation(keyed.key(seed, "split.shards.samples"), len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    shards = order[: count * size].reshape(count, size)
    dealt = shards[keyed.permutation(keyed.key(seed, "split.shards.deal"), count)]
    return _sorted(list(dealt.reshape(num_clients, shards_per_client * size)))


SPLITS: Final[dict[str, Callable[..., Clients]]] = {
    "iid": iid,
    "classes": by_classes,
    "dirichlet": dirichlet,
    "shards": by_shards,
    "sampled": sampled,
    "sampled-classes": sampled_classes,
}


def split(
    kind: str,
    labels: Labels,
    num_clients: int,
    seed: int,
    *,
    classes_per_client: int = 2,
    alpha: float = 0.5,
    shards_per_client: int = 2,
    samples_per_client: int = 100,
) -> Clients:
    """The sample indices of every client, by the split named ``kind``; it reads only the options it has."""
    if kind not in SPLITS:
        raise unknown("split", kind, SPLITS)
    options = {
        "classes_per_client": classes_per_client,
        "alpha": alpha,
        "shards_per_client": shards_per_client,
        "samples_per_client": samples_per_client,
    }
    wanted = signature(SPLITS[kind]).parameters
    return SPLITS[kind](labels, num_clients, seed, **{name: options[name] for name in options if name in wanted})


def class_counts(clients: Clients, labels: Labels, classes: int) -> NDArray[np.int64]:
    """The number of samples of each class at each client, of shape (clients, classes)."""
    if len(labels) and not (labels.min() >= 0 and labels.max() < classes):
        raise UserError(f"labels go from {labels.min()} to {labels.max()}, outside 0..{classes - 1}; raise classes")
    counts = np.zeros((len(clients), classes), np.int64)
    for row, indices in zip(counts, clients, strict=True):
        row += np.bincount(labels[indices], minlength=classes)
    return counts


def _check(labels: Labels, num_clients: int) -> None:
    if labels.ndim != 1:
        raise UserError(f"labels have shape {labels.shape}; pass one label per sample")
    if num_clients < 1:
        raise UserError(f"the number of clients is {num_clients}; use at least 1")
    if num_clients > len(labels):
        raise UserError(
            f"cannot split {len(labels)} samples among {num_clients} clients; "
            f"use at most {len(labels)}, or split = sampled, which shares them"
        )


def _sorted(parts: list[NDArray[np.intp]]) -> Clients:
    return tuple(np.sort(part).astype(np.int64) for part in parts)
