"""Shares drawn by key: independent of the order of access and of the number of clients, and uniform."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from defedavg.errors import UserError
from defedavg.tasks.lazy_partition import LazyPartition, sampled, sampled_classes
from helpers.strategies import bounded

LABELS = np.repeat(np.arange(5), (30, 10, 3, 40, 17))


def partition(kind: str, clients: int, seed: int, size: int) -> LazyPartition:
    if kind == "sampled":
        return sampled(LABELS, clients, seed, size)
    return sampled_classes(LABELS, clients, seed, size, 2)


@bounded(80)
@given(st.sampled_from(["sampled", "sampled-classes"]), st.integers(0, 2**32), st.integers(2, 100), st.data())
def test_shares_are_equal_in_any_order_of_access(kind: str, seed: int, size: int, data: st.DataObject) -> None:
    clients = data.draw(st.lists(st.integers(0, 999_999), min_size=1, max_size=20))
    one, other = partition(kind, 1_000_000, seed, size), partition(kind, 1_000_000, seed, size)
    forward = [one[client].tolist() for client in clients]
    backward = [other[client].tolist() for client in reversed(clients)]
    assert forward == backward[::-1]
    assert (
        partition(kind, clients[0] + 1, seed, size)[clients[0]].tolist() == forward[0]
    )  # the number of clients does not matter
    for share in forward:
        assert share == sorted(set(share))
        assert 0 <= share[0] <= share[-1] < len(LABELS)
        if kind == "sampled":
            assert len(share) == size
        else:
            assert 1 <= len(np.unique(LABELS[share])) <= 2
            assert 1 <= len(share) <= size


def test_shares_are_drawn_uniformly_and_differ() -> None:
    shares = sampled(LABELS, 2_000, 1, 20)
    counts = np.bincount(np.concatenate(list(shares)), minlength=len(LABELS))
    assert abs(counts / 400 - 1).max() < 0.25  # 400 each expected, deviation 18
    assert len({tuple(share) for share in shares}) == 2_000
    classes = sampled_classes(LABELS, 2_000, 1, 10, 2)
    held = [tuple(np.unique(LABELS[share])) for share in classes]
    assert all(len(classes_held) == 2 for classes_held in held)
    assert abs(np.bincount(np.ravel(held)) / 800 - 1).max() < 0.15  # each class with two fifths of the clients


def test_a_million_shares_cost_nothing_until_they_are_used() -> None:
    shares = sampled(LABELS, 1_000_000, 0, 20)
    assert len(shares) == 1_000_000
    assert not shares._cache
    assert shares[-1].tolist() == shares[999_999].tolist()
    with pytest.raises(IndexError):
        shares[1_000_000]
    for client in range(5_000):
        shares[client]
    assert len(shares._cache) == 4_096


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sampled(LABELS, 0, 0), "number of clients is 0"),
        (lambda: sampled(LABELS, 5, 0, 0), "samples_per_client is 0"),
        (lambda: sampled(LABELS, 5, 0, 101), "give 1 to 100"),
        (lambda: sampled_classes(LABELS, 5, 0, 10, 6), "classes_per_client is 6; give 1 to 5"),
        (lambda: sampled_classes(LABELS, 5, 0, 1, 2), "give 1 to 1"),
    ],
)
def test_shares_with_invalid_arguments_are_refused(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()
