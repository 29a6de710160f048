"""Partitions: every sample at most once, no empty client, and the definition of each, for random labels and seeds."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from defedavg import rng as keyed
from defedavg.errors import UserError
from defedavg.tasks import (
    PARTITIONS,
    by_classes,
    by_shards,
    class_counts,
    dirichlet,
    grouped_classes,
    iid,
    random_classes,
    sampled_classes,
    split,
)
from defedavg.tasks.lazy_partition import Clients
from defedavg.tasks.partition import is_identical, needs_users

WITHOUT_USERS = [kind for kind in sorted(PARTITIONS) if not needs_users(kind)]  # test_users.py has the others

Labels = NDArray[np.int64]

SEEDS = st.integers(0, 2**64 - 1)
EIGHTY = np.repeat(np.arange(8), 10)


@st.composite
def labels_of(draw: st.DrawFn, least: int = 1) -> Labels:
    """Shuffled labels of up to eight classes with between ``least`` and 60 samples each."""
    sizes = draw(st.lists(st.integers(least, 60), min_size=1, max_size=8))
    ordered = np.repeat(np.arange(len(sizes)), sizes)
    return ordered[keyed.permutation(draw(SEEDS), len(ordered))]


def check(clients: Clients, num_clients: int, samples: int, *, all_used: bool = False) -> None:
    assert len(clients) == num_clients
    for part in clients:
        assert part.dtype == np.int64
        assert part.ndim == 1
        assert len(part) > 0
        assert np.all(np.diff(part) > 0)
    used = np.concatenate(clients)
    assert used.min() >= 0
    assert used.max() < samples
    assert len(np.unique(used)) == len(used)
    if all_used:
        assert len(used) == samples


def same(a: Clients, b: Clients) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@given(labels=labels_of(), num_clients=st.integers(1, 12), seed=SEEDS)
@settings(deadline=None)
def test_iid_uses_everything_evenly(labels: Labels, num_clients: int, seed: int) -> None:
    assume(num_clients <= len(labels))
    clients = iid(labels, num_clients, seed)
    check(clients, num_clients, len(labels), all_used=True)
    sizes = [len(part) for part in clients]
    assert max(sizes) - min(sizes) <= 1


@given(labels=labels_of(least=20), num_clients=st.integers(1, 20), c=st.integers(1, 8), seed=SEEDS)
@settings(deadline=None)
def test_classes_gives_exactly_c_classes_evenly(labels: Labels, num_clients: int, c: int, seed: int) -> None:
    classes = int(labels.max()) + 1
    assume(c <= classes)
    clients = by_classes(labels, num_clients, seed, c)
    check(clients, num_clients, len(labels))
    counts = class_counts(clients, labels, classes)
    assert np.all((counts > 0).sum(axis=1) == c)
    holders = (counts > 0).sum(axis=0)
    assert holders.max() - holders.min() <= 1
    for k in np.flatnonzero(holders):
        shares = counts[counts[:, k] > 0, k]
        assert shares.max() - shares.min() <= 1
        assert shares.sum() == np.count_nonzero(labels == k)  # a class that is held is used up


@given(labels=labels_of(least=20), num_clients=st.integers(1, 20), c=st.integers(1, 8), seed=SEEDS)
@settings(deadline=None)
def test_random_classes_are_c_per_client_and_shared_by_their_holders(
    labels: Labels, num_clients: int, c: int, seed: int
) -> None:
    classes = int(labels.max()) + 1
    assume(c <= classes)
    clients = random_classes(labels, num_clients, seed, c)
    check(clients, num_clients, len(labels))
    counts = class_counts(clients, labels, classes)
    assert np.all((counts > 0).sum(axis=1) == c)
    for k in range(classes):
        shares = counts[counts[:, k] > 0, k]
        assert shares.sum() == (np.count_nonzero(labels == k) if len(shares) else 0)
        assert len(shares) == 0 or shares.max() - shares.min() <= 1


@given(labels=labels_of(least=20), num_clients=st.integers(1, 20), c=st.integers(1, 8), seed=SEEDS)
@settings(deadline=None)
def test_grouped_classes_form_groups_that_share_no_class(labels: Labels, num_clients: int, c: int, seed: int) -> None:
    classes = int(labels.max()) + 1
    assume(c <= classes)
    clients = grouped_classes(labels, num_clients, seed, c)
    check(clients, num_clients, len(labels))
    counts = class_counts(clients, labels, classes)
    groups = sorted(set(held(clients, labels)))
    assert all(len(group) == c for group in groups)
    assert len(groups) == min(num_clients, -(-classes // c))
    if classes % c == 0:  # otherwise the last group continues with the first class
        assert len({k for group in groups for k in group}) == c * len(groups)
        assert all(group == tuple(range(group[0], group[0] + c)) and group[0] % c == 0 for group in groups)
    sizes = [held(clients, labels).count(group) for group in groups]
    assert max(sizes) - min(sizes) <= 1
    for k in range(classes):
        shares = counts[counts[:, k] > 0, k]
        assert shares.sum() == (np.count_nonzero(labels == k) if len(shares) else 0)
        assert len(shares) == 0 or shares.max() - shares.min() <= 1


def test_grouped_classes_of_the_paper_are_five_groups_of_twenty() -> None:
    labels = np.repeat(np.arange(10), 60)
    clients = grouped_classes(labels, 100, seed=3)
    assert held(clients, labels) == [(2 * (i // 20), 2 * (i // 20) + 1) for i in range(100)]
    assert not same(clients, grouped_classes(labels, 100, seed=4))  # the seed decides which samples of a class


@given(
    labels=labels_of(least=20), clients=st.tuples(st.integers(1, 20), st.integers(1, 20)), seed=SEEDS, data=st.data()
)
@settings(deadline=None)
def test_the_random_classes_of_a_client_depend_on_its_key_alone(
    labels: Labels, clients: tuple[int, int], seed: int, data: st.DataObject
) -> None:
    c = data.draw(st.integers(1, int(labels.max()) + 1))
    one, other = (held(random_classes(labels, number, seed, c), labels) for number in clients)
    assert all(a == b for a, b in zip(one, other, strict=False))
    size = data.draw(st.integers(c, len(labels)))
    drawn = sampled_classes(labels, clients[0], seed, size, c)
    assert held(drawn, labels) == one  # the two partitions differ in the samples alone
    for part in drawn:
        for label in np.unique(labels[part]):
            share, available = (int(np.count_nonzero(some == label)) for some in (labels[part], labels))
            assert min(size // c, available) <= share <= min(-(-size // c), available)


def held(clients: Iterable[NDArray[np.int64]], labels: Labels) -> list[tuple[int, ...]]:
    """Return the classes of every client."""
    return [tuple(np.unique(labels[part]).tolist()) for part in clients]


TEN = np.repeat(np.arange(10), 1000)


@pytest.mark.parametrize("kind", ["random-classes", "sampled-classes"])
def test_pairs_of_random_classes_are_uniform_and_independent(kind: str) -> None:
    chains = [held(split(kind, TEN, 500, seed, samples_per_client=2), TEN) for seed in range(20)]
    position: dict[tuple[int, ...], int] = {pair: i for i, pair in enumerate(combinations(range(10), 2))}
    counts = np.bincount([position[pair] for chain in chains for pair in chain], minlength=45)
    assert chi_square(counts, np.full(45, 1 / 45)) < 78.7  # the quantile 0.999 for 44 degrees of freedom
    common = np.bincount([len({*a} & {*b}) for chain in chains for a, b in pairwise(chain)], minlength=3)
    assert chi_square(common, np.array([28, 16, 1]) / 45) < 13.8  # hypergeometric; 2 degrees of freedom


def test_holders_of_a_random_class_are_binomial() -> None:
    holders = np.array([(class_counts(random_classes(TEN, 100, seed), TEN, 10) > 0).sum(axis=0) for seed in range(300)])
    assert np.all(holders.sum(axis=1) == 200)
    assert holders.var() == pytest.approx(100 * 0.2 * 0.8, rel=0.1)  # deviation of the estimate: 3 %


def chi_square(counts: NDArray[np.int64], shares: NDArray[np.float64]) -> float:
    expected = counts.sum() * shares
    return float(((counts - expected) ** 2 / expected).sum())


@given(labels=labels_of(least=8), num_clients=st.integers(1, 6), alpha=st.floats(0.3, 1e3), seed=SEEDS)
@settings(deadline=None)
def test_dirichlet_uses_everything(labels: Labels, num_clients: int, alpha: float, seed: int) -> None:
    try:
        clients = dirichlet(labels, num_clients, seed, alpha)
    except UserError:
        assert alpha < 10  # near-equal shares of eight samples cannot leave one of six clients empty a hundred times
        return
    check(clients, num_clients, len(labels), all_used=True)


@given(labels=labels_of(), num_clients=st.integers(1, 12), s=st.integers(1, 4), seed=SEEDS)
@settings(deadline=None)
def test_shards_are_equal_and_hold_few_classes(labels: Labels, num_clients: int, s: int, seed: int) -> None:
    assume(num_clients * s <= len(labels))
    clients = by_shards(labels, num_clients, seed, s)
    check(clients, num_clients, len(labels))
    size = len(labels) // (num_clients * s)
    assert {len(part) for part in clients} == {size * s}
    # N s contiguous shards have N s - 1 inner borders; each of the K - 1 class borders is inside at most one shard.
    classes = int(labels.max()) + 1
    held = (class_counts(clients, labels, classes) > 0).sum()
    assert held <= num_clients * s + classes - 1


@pytest.mark.parametrize("kind", WITHOUT_USERS)
@given(seed=SEEDS, other=SEEDS)
@settings(deadline=None, max_examples=25)
def test_a_split_is_a_function_of_its_seed(kind: str, seed: int, other: int) -> None:
    assume(seed != other)
    first = split(kind, EIGHTY, 5, seed, samples_per_client=10)
    assert same(first, split(kind, EIGHTY.copy(), 5, seed, samples_per_client=10))
    assert not same(first, split(kind, EIGHTY, 5, other, samples_per_client=10))


@pytest.mark.parametrize("kind", WITHOUT_USERS)
def test_the_global_generator_is_neither_read_nor_moved(kind: str) -> None:
    before = np.random.get_state(legacy=False)  # noqa: NPY002
    split(kind, EIGHTY, 4, 0, samples_per_client=10)
    after = np.random.get_state(legacy=False)  # noqa: NPY002
    assert str(before) == str(after)


def test_split_passes_each_option_to_its_split() -> None:
    options: dict[str, Any] = {"classes_per_client": 3, "alpha": 5.0, "shards_per_client": 4}
    assert same(split("classes", EIGHTY, 6, 1, **options), by_classes(EIGHTY, 6, 1, 3))
    assert same(split("dirichlet", EIGHTY, 6, 1, **options), dirichlet(EIGHTY, 6, 1, 5.0))
    assert same(split("shards", EIGHTY, 6, 1, **options), by_shards(EIGHTY, 6, 1, 4))
    assert same(split("iid", EIGHTY, 6, 1, **options), iid(EIGHTY, 6, 1))
    assert same(split("random-classes", EIGHTY, 6, 1, **options), random_classes(EIGHTY, 6, 1, 3))


def test_only_partitions_without_class_structure_are_declared_identical() -> None:
    assert {kind for kind in PARTITIONS if is_identical(kind)} == {"iid", "sampled"}


def test_classes_may_be_any_integers() -> None:
    labels = np.where(EIGHTY % 2 == 0, -7, 1000)
    assert [len(np.unique(labels[part])) for part in by_classes(labels, 4, 0, 1)] == [1, 1, 1, 1]


def test_a_random_class_without_holder_stays_unused() -> None:
    for seed in range(20):
        clients = random_classes(EIGHTY, 2, seed, 2)
        classes = {c for classes in held(clients, EIGHTY) for c in classes}
        assert 2 <= len(classes) <= 4
        assert np.concatenate(clients).size == 10 * len(classes)


def test_classes_with_few_clients_leaves_the_other_classes_unused() -> None:
    clients = by_classes(EIGHTY, 2, 0, 2)
    assert sum(len(part) for part in clients) == 40


@pytest.mark.parametrize(("num_clients", "c"), [(7, 3), (5, 8), (9, 5), (20, 2)])
def test_every_class_is_held_when_there_are_enough_clients(num_clients: int, c: int) -> None:
    labels = np.repeat(np.arange(8), 20)
    for seed in range(20):
        holders = (class_counts(by_classes(labels, num_clients, seed, c), labels, 8) > 0).sum(axis=0)
        assert holders.sum() == num_clients * c
        assert holders.min() >= num_clients * c // 8


def test_classes_are_shuffled_again_for_later_clients() -> None:
    held = class_counts(by_classes(EIGHTY, 8, 0, 2), EIGHTY, 8) > 0  # four clients of two classes use all eight
    assert held[:4].tolist() != held[4:].tolist()


def test_small_alpha_concentrates_and_large_alpha_is_nearly_iid() -> None:
    labels = np.repeat(np.arange(10), 1000)

    def largest_share(alpha: float) -> float:
        counts = class_counts(dirichlet(labels, 10, 3, alpha), labels, 10)
        return float((counts.max(axis=0) / 1000).mean())

    assert largest_share(0.1) > 0.4
    assert largest_share(1e4) < 0.11


def test_dirichlet_shares_have_the_moments_of_the_distribution() -> None:
    alpha, clients = 2.0, 5
    labels = np.repeat(np.arange(400), 1000)
    shares = class_counts(dirichlet(labels, clients, 0, alpha), labels, 400) / 1000
    variance = (clients - 1) / (clients**2 * (clients * alpha + 1))
    assert np.allclose(shares.mean(axis=1), 1 / clients, atol=4 * np.sqrt(variance / 400))
    assert shares.var() == pytest.approx(variance, rel=0.1)


def test_dirichlet_redraws_an_empty_client() -> None:
    labels = np.zeros(12, np.int64)
    for seed in range(30):
        check(dirichlet(labels, 4, seed, 1.0), 4, 12, all_used=True)


def test_class_counts() -> None:
    labels = np.array([0, 2, 2, 1, 0])
    counts = class_counts((np.array([0, 1]), np.array([2, 4])), labels, 4)
    assert counts.dtype == np.int64
    assert counts.tolist() == [[1, 0, 1, 0], [1, 0, 1, 0]]


THREE = np.array([0, 0, 1])
DISJOINT = [
    kind for kind in WITHOUT_USERS if not kind.startswith("sampled")
]  # the others share samples among any number


@pytest.mark.parametrize(
    ("kind", "labels", "num_clients", "options", "line"),
    [
        *((kind, THREE, 4, {}, "cannot split 3 samples among 4 clients; use at most 3") for kind in DISJOINT),
        *((kind, THREE, 0, {}, "the number of clients is 0; use at least 1") for kind in WITHOUT_USERS),
        ("iid", THREE.reshape(1, 3), 1, {}, "labels have shape (1, 3)"),
        ("classes", EIGHTY, 4, {"classes_per_client": 9}, "classes_per_client is 9, but the data has 8"),
        ("classes", EIGHTY, 4, {"classes_per_client": 0}, "classes_per_client is 0; give every client at least 1"),
        ("classes", THREE, 2, {"classes_per_client": 2}, "class 1 has 1 samples for 2 clients; use fewer clients"),
        ("random-classes", EIGHTY, 4, {"classes_per_client": 9}, "classes_per_client is 9, but the data has 8"),
        ("random-classes", EIGHTY, 4, {"classes_per_client": 0}, "classes_per_client is 0; give every client at least"),
        ("random-classes", THREE, 2, {"classes_per_client": 2}, "class 1 has 1 samples for 2 clients; use fewer"),
        ("dirichlet", EIGHTY, 4, {"alpha": 0.0}, "alpha is 0.0; give a number above 0"),
        ("dirichlet", EIGHTY, 4, {"alpha": -1.0}, "alpha is -1.0"),
        ("dirichlet", EIGHTY, 4, {"alpha": float("nan")}, "alpha is nan"),
        ("dirichlet", EIGHTY, 4, {"alpha": float("inf")}, "alpha is inf"),
        ("dirichlet", EIGHTY, 40, {"alpha": 1e-3}, "100 Dirichlet draws all left some of the 40 clients empty"),
        ("shards", EIGHTY, 41, {}, "80 samples do not fill 82 shards; use fewer clients"),
        ("shards", EIGHTY, 4, {"shards_per_client": 0}, "shards_per_client is 0"),
        ("dirichlt", EIGHTY, 4, {}, "unknown split 'dirichlt'; did you mean 'dirichlet'?"),
    ],
)
def test_errors(kind: str, labels: Labels, num_clients: int, options: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as caught:
        split(kind, labels, num_clients, 0, **options)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_class_counts_refuses_labels_out_of_range() -> None:
    with pytest.raises(UserError, match=r"labels go from 0 to 7, outside 0\.\.2"):
        class_counts((np.array([0]),), EIGHTY, 3)
