"""Keyed randomness: scalars and arrays agree, draws are uniform, and every part of a key counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from defedavg import rng as keyed
from helpers.strategies import bounded

WORDS = st.integers(0, 2**64 - 1)
SIGNED = st.integers(-(2**63), 2**63 - 1)
MANY = keyed.extend_all(keyed.key(1, "test"), np.arange(20_000))


def chi_square_ok(counts: NDArray[np.int64]) -> bool:
    """Return whether counts are uniform within five deviations of the chi-square distribution."""
    expected = counts.sum() / len(counts)
    freedom = len(counts) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return abs(statistic - freedom) < 5.0 * math.sqrt(2.0 * freedom)


def test_the_mixer_is_splitmix64() -> None:
    """The published first outputs of SplitMix64 from state 0: extend(0, k·GOLDEN) is output k + 1."""
    published = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    assert [keyed.extend(0, k * keyed.GOLDEN) for k in range(3)] == list(published)


def test_keys_never_change() -> None:
    """Saved plans and published results depend on these values."""
    assert keyed.key(7, "batch", 3, 11) == 0xEAEE094A9FBF9ACB
    assert keyed.key(-1, "slowness", 2**40) == 0x75B14FA8AA6DAD99


@bounded(200)
@given(WORDS, st.lists(SIGNED, min_size=1, max_size=20))
def test_arrays_of_parts_yield_the_keys_of_scalars(start: int, parts: list[int]) -> None:
    found = keyed.extend_all(start, np.array(parts, np.int64))
    assert found.dtype == np.uint64
    assert found.tolist() == [keyed.extend(start, part) for part in parts]


@bounded(100)
@given(st.lists(WORDS, min_size=1, max_size=20), WORDS)
def test_arrays_of_starts_yield_the_keys_of_scalars(starts: list[int], part: int) -> None:
    found = keyed.extend_all(np.array(starts, np.uint64), np.array([part], np.uint64))
    assert found.tolist() == [keyed.extend(start, part) for start in starts]


@bounded(100)
@given(st.lists(WORDS, min_size=1, max_size=20))
def test_arrays_yield_the_draws_of_scalars(words: list[int]) -> None:
    keys = np.array(words, np.uint64)
    assert keyed.uniform_all(keys).tolist() == [keyed.uniform(word) for word in words]
    assert keyed.normal_all(keys) == pytest.approx([keyed.normal(word) for word in words], rel=1e-12, abs=1e-12)


def test_a_key_is_its_parts_mixed_in_one_by_one() -> None:
    assert keyed.key(5, "draw", 1, 2) == keyed.extend(keyed.extend(keyed.key(5, "draw"), 1), 2)


@bounded(200)
@given(WORDS, st.integers(1, 2**31))
def test_draws_stay_in_range(word: int, limit: int) -> None:
    assert 0 <= keyed.below(word, limit) < limit
    assert 0.0 <= keyed.uniform(word) < 1.0


def test_the_ends_of_the_range_are_reached() -> None:
    assert (keyed.below(0, 10), keyed.below(2**64 - 1, 10), keyed.below(2**64 - 1, 2**31)) == (0, 9, 2**31 - 1)
    assert (keyed.uniform(0), keyed.uniform(2**64 - 1)) == (0.0, 1.0 - 2.0**-53)


@pytest.mark.parametrize("limit", [2, 3, 10, 100])
def test_below_is_uniform(limit: int) -> None:
    counts = np.bincount([keyed.below(word, limit) for word in MANY.tolist()], minlength=limit)
    assert len(counts) == limit
    assert chi_square_ok(counts)


def test_uniform_is_uniform() -> None:
    draws = keyed.uniform_all(MANY)
    assert chi_square_ok(np.histogram(draws, bins=50, range=(0.0, 1.0))[0])
    # Draws of neighbouring keys must not correlate.
    assert abs(float(np.corrcoef(draws[:-1], draws[1:])[0, 1])) < 5.0 / math.sqrt(len(draws))


def test_normal_is_normal() -> None:
    draws = keyed.normal_all(MANY)
    assert abs(float(draws.mean())) < 5.0 / math.sqrt(len(draws))
    assert float(draws.std()) == pytest.approx(1.0, abs=0.03)
    assert float((np.abs(draws) < 1.0).mean()) == pytest.approx(math.erf(math.sqrt(0.5)), abs=0.02)


@bounded(100)
@given(WORDS, st.integers(0, 200))
def test_a_permutation_has_every_index_once(word: int, size: int) -> None:
    assert sorted(keyed.permutation(word, size).tolist()) == list(range(size))


def test_permutations_are_uniform() -> None:
    """All 24 orders of four items are equally frequent."""
    orders = [tuple(keyed.permutation(word, 4).tolist()) for word in MANY[:12_000].tolist()]
    counts = np.unique([sum(item * 4**i for i, item in enumerate(order)) for order in orders], return_counts=True)[1]
    assert len(counts) == 24
    assert chi_square_ok(counts)


def test_every_part_of_a_key_counts() -> None:
    keys = {
        keyed.key(seed, purpose, *parts)
        for seed in (0, 1, -1, 2**63)
        for purpose in ("draw", "Draw", "drawn", "slowness", "")
        for parts in ((), (0,), (1,), (0, 0), (0, 1), (1, 0), (2, 1), (1, 2))
    }
    assert len(keys) == 4 * 5 * 8


@bounded(200)
@given(SIGNED, SIGNED, SIGNED)
def test_the_order_of_parts_matters(seed: int, left: int, right: int) -> None:
    same = keyed.key(seed, "test", left, right) == keyed.key(seed, "test", right, left)
    assert same == (left == right)


@bounded(100)
@given(SIGNED, SIGNED)
def test_seed_and_part_are_not_interchangeable(seed: int, part: int) -> None:
    same = keyed.key(seed, "test", part) == keyed.key(part, "test", seed)
    assert same == (seed == part)


def test_a_generator_depends_on_its_key_alone() -> None:
    first, again, other = (keyed.generator(k).random(8).tolist() for k in (5, 5, 6))
    assert first == again
    assert first != other


def test_integers_of_arrays_are_those_of_scalars() -> None:
    limits = np.arange(1, 101, dtype=np.uint64)
    expected = [keyed.below(int(k), int(limit)) for k, limit in zip(MANY[:100], limits, strict=True)]
    assert keyed.below_all(MANY[:100], limits).tolist() == expected


@given(st.floats(1e-300, 1e300))
def test_portable_values_are_close_and_the_same_for_scalars_and_arrays(value: float) -> None:
    rounded = keyed.portable(value)
    assert abs(rounded - value) <= 2.0**-30 * value
    assert keyed.portable_all(np.array([value, -value])).tolist() == [rounded, -rounded]
    assert keyed.portable(rounded) == rounded


def test_portable_values_rarely_depend_on_the_last_bits() -> None:
    values = np.exp(5.0 * keyed.uniform_all(MANY))
    for other in (np.nextafter(values, 0.0), np.nextafter(values, np.inf)):
        assert (keyed.portable_all(values) == keyed.portable_all(other)).all()
