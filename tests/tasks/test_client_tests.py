"""Samples of every client's own evaluation: the keyed draw, test users, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from defedavg.config import study as config
from defedavg.config.build import build_task
from defedavg.errors import UserError
from defedavg.tasks import ClientTests, Task, hold_out, make_task
from defedavg.tasks.client_tests import tests_of_users as samples_of_users
from defedavg.tasks.users import Users

SEEDS = st.integers(0, 2**63)


def task_of(sizes: list[int], order: np.random.Generator | None = None) -> Task:
    """Return a task whose clients have so many samples each, of shuffled numbers if a generator is given."""
    total = sum(sizes)
    numbers = np.arange(total) if order is None else order.permutation(total)
    data = np.zeros((total, 2), np.float32), np.zeros(total, np.int64)
    clients = np.split(numbers, np.cumsum(sizes)[:-1])
    return make_task(model=lambda: nn.Linear(2, 1), train=data, test=data, clients=clients)


@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=9), share=st.floats(0.01, 0.99), seed=SEEDS)
@settings(deadline=None, max_examples=40)
def test_every_client_holds_out_its_share_and_keeps_a_sample(sizes: list[int], share: float, seed: int) -> None:
    task = task_of(sizes, np.random.default_rng(0))
    wanted = [min(int(share * size + 0.5), size - 1) for size in sizes]
    if not any(wanted):
        with pytest.raises(UserError, match="too few to hold one out"):
            hold_out(task, share, seed)
        return
    held = hold_out(task, share, seed)
    assert held.client_tests is not None
    assert [len(part) for part in held.client_tests.samples] == wanted
    for before, kept, tested in zip(task.clients, held.clients, held.client_tests.samples, strict=True):
        assert len(kept) > 0
        assert sorted([*kept.tolist(), *tested.tolist()]) == sorted(before.tolist())


def test_the_draw_depends_on_seed_and_samples_alone() -> None:
    def held(task: Task, seed: int) -> list[list[int]]:
        tests = hold_out(task, 0.25, seed).client_tests
        assert tests is not None
        return [part.tolist() for part in tests.samples]

    task = task_of([12, 20, 8])
    found = held(task, 7)
    assert found == held(task, 7)
    assert found != held(task, 8)
    turned = dataclasses.replace(task, clients=tuple(part[::-1].copy() for part in reversed(task.clients)))
    assert held(turned, 7) == found[::-1]
    tables = {
        "task": {"model": "softmax", "split": "classes", "client_test_share": 0.2},
        "clients": {"num_clients": 10},
    }
    faster: dict[str, Any] = {**tables, "training": {"local_lr": 0.3}, "algorithms": ["fedbuff"]}
    faster["clients"] = {"num_clients": 10, "slowness": "equal"}
    tests = [build_task(config.study(each).points()[0].settings, 3).client_tests for each in (tables, faster)]
    assert tests[0] is not None
    assert tests[1] is not None
    assert all(map(np.array_equal, tests[0].samples, tests[1].samples))


def test_every_sample_is_held_out_equally_often() -> None:
    task, counts = task_of([10]), np.zeros(10)
    for seed in range(600):
        tests = hold_out(task, 0.3, seed).client_tests
        assert tests is not None
        counts[tests.samples[0]] += 1
    assert counts.sum() == 1800
    assert np.abs(counts - 180).max() < 5 * np.sqrt(600 * 0.3 * 0.7)  # five standard deviations


def test_test_samples_of_users_that_are_clients() -> None:
    users = Users(np.array(["b", "b", "a", "c"]), np.array(["c", "b", "c", "d"]))
    clients = (np.array([2]), np.array([0, 1]), np.array([3]))
    tests = samples_of_users(users, clients)
    assert tests is not None
    assert (tests.part, tests.clients, tests.names) == ("test", (0, 1, 2), ("a", "b", "c"))
    assert [part.tolist() for part in tests.samples] == [[], [1], [0, 2]]


def test_test_users_that_are_no_clients_have_no_number() -> None:
    clients = (np.array([0]), np.array([1]))
    tests = samples_of_users(Users(np.array([1, 2]), np.array([8, 9, 8])), clients)
    assert tests is not None
    assert (tests.clients, tests.names) == ((None, None), ("8", "9"))
    assert [part.tolist() for part in tests.samples] == [[0, 2], [1]]
    assert samples_of_users(Users(np.array([1, 2])), clients) is None
    assert samples_of_users(Users(np.array([1, 2]), np.array([1])), (np.array([0, 1]),)) is None


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_share_outside_the_unit_interval_is_refused(share: float) -> None:
    with pytest.raises(UserError, match=r"task.client_test_share is .*; give a number from 0 to below 1"):
        config.study({"task": {"client_test_share": share}}).points()


def test_splits_with_shared_samples_and_trained_test_samples_are_refused() -> None:
    shared = config.study({"task": {"model": "softmax", "split": "sampled", "client_test_share": 0.2}})
    with pytest.raises(UserError, match="clients share samples; use another split"):
        build_task(shared.points()[0].settings, 0)
    task = task_of([3, 3])
    for samples, message in (([1], "some client trains on"), ([6], "outside 0..5")):
        tests = ClientTests.of("train", (np.array(samples), np.array([], np.int64)))
        with pytest.raises(UserError, match=message):
            dataclasses.replace(task, client_tests=tests)
