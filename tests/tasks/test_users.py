"""Data with users: the natural partition, held-out samples, and studies on such data."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from defedavg import simulate
from defedavg.config import study as config
from defedavg.config.build import build_task, make_plan
from defedavg.config.unused_settings import unused_settings
from defedavg.tasks import DATASETS, DataSet, classification_task, load, load_users, make_task, natural, split
from defedavg.tasks.datasets.dataset import UserPart
from defedavg.tasks.users import count_users, held_out, indices_by_group
from helpers.user_errors import line_of

USERS = st.lists(st.integers(0, 9), min_size=1, max_size=60).map(np.array)
SEEDS = st.integers(0, 2**63)


def zeros(users: NDArray[Any]) -> NDArray[np.int64]:
    return np.zeros(len(users), np.int64)


@given(users=USERS, seed=SEEDS, data=st.data())
@settings(deadline=None)
def test_every_client_has_all_samples_of_one_user(users: NDArray[Any], seed: int, data: st.DataObject) -> None:
    names, counts = np.unique(users, return_counts=True)
    least = data.draw(st.integers(1, int(counts.max())))
    num_clients = data.draw(st.integers(1, int((counts >= least).sum())))
    clients = natural(zeros(users), num_clients, seed, users, least)
    assert len(clients) == num_clients
    owners = [int(users[part[0]]) for part in clients]
    assert owners == sorted(set(owners))
    for owner, part in zip(owners, clients, strict=True):
        assert part.tolist() == np.flatnonzero(users == owner).tolist()
        assert len(part) >= least
    assert count_users(users, least) == sum(counts >= least)
    assert set(owners) <= set(names.tolist())


@given(users=USERS, seed=SEEDS)
@settings(deadline=None)
def test_the_users_of_fewer_clients_are_among_those_of_more(users: NDArray[Any], seed: int) -> None:
    total = len(np.unique(users))
    drawn = [{int(users[part[0]]) for part in natural(zeros(users), n, seed, users)} for n in range(1, total + 1)]
    assert all(few < more for few, more in pairwise(drawn))
    assert len(drawn[-1]) == total


def test_every_user_is_drawn_equally_often() -> None:
    users = np.arange(8)
    counts = np.zeros(8)
    for seed in range(400):
        for part in natural(users, 2, seed, users):
            counts[part[0]] += 1
    assert np.abs(counts - 100).max() < 40  # 100 ± 8.7 each


@given(users=USERS)
@settings(deadline=None)
def test_groups_are_those_of_make_task(users: NDArray[Any]) -> None:
    x = np.zeros((len(users), 1), np.float32)
    task = make_task(model=lambda: None, train=(x, zeros(users)), test=(x, zeros(users)), clients=users)  # type: ignore[arg-type, return-value]
    numbered = indices_by_group(np.unique(users, return_inverse=True)[1].astype(np.int64))
    whole = natural(zeros(users), len(np.unique(users)), 0, users)
    for one, other, third in zip(task.clients, whole, numbered, strict=True):
        assert one.tolist() == other.tolist() == third.tolist()


@given(users=USERS)
@settings(deadline=None)
def test_a_fifth_of_every_users_samples_is_held_out(users: NDArray[Any]) -> None:
    testing = held_out(users, "some")
    for user in np.unique(users):
        mine = users == user
        assert testing[mine].sum() == (mine.sum() + 2) // 5
        assert (mine & ~testing).any()
    assert held_out(users, "some").tolist() == testing.tolist()


def test_held_out_samples_are_drawn_at_random() -> None:
    testing = held_out(np.zeros(10_000, int), "some")
    assert testing.sum() == 2000
    assert abs(int(testing[:5000].sum()) - 1000) < 100  # 1000 ± 20
    assert (testing != held_out(np.zeros(10_000, int), "other")).any()


@pytest.mark.parametrize(
    ("num_clients", "options", "line"),
    [
        (
            4,
            {},
            "clients.num_clients is 4, but the data set has 3 users; set it to at most 3, or leave it out to use all",
        ),
        (
            3,
            {"min_samples_per_client": 2},
            "clients.num_clients is 3, but the data set has 2 users with at least 2 training samples; set it",
        ),
        (1, {"min_samples_per_client": 4}, "min_samples_per_client is 4, but no user has more than 3 training samples"),
        (1, {"min_samples_per_client": 0}, "min_samples_per_client is 0; it must be at least 1"),
        (0, {}, "the number of clients is 0; use at least 1"),
    ],
)
def test_numbers_of_clients_that_the_users_do_not_allow(num_clients: int, options: dict[str, int], line: str) -> None:
    users = np.array(["a", "b", "b", "c", "c", "c"])
    assert line_of(lambda: split("natural", zeros(users), num_clients, 0, users=users, **options)).startswith(line)


def test_ids_that_are_not_one_per_sample() -> None:
    three = np.zeros(3, np.int64)
    assert "of shape (2,) for 3 samples" in line_of(lambda: natural(three, 1, 0, np.zeros(2, int)))
    assert "of type float64; give whole numbers or text" in line_of(lambda: natural(three, 1, 0, np.zeros(3)))
    assert line_of(lambda: split("natural", three, 1, 0)).startswith("split = natural needs data with users")


# Studies


def read(_: Sequence[Path]) -> tuple[UserPart, UserPart]:
    rng = np.random.Generator(np.random.Philox(key=0))
    inputs, users = (
        rng.normal(size=(90, 4)).astype(np.float32),
        np.repeat(["x", "y", "z", "u", "v"], [5, 10, 15, 20, 40]),
    )
    targets = (inputs.sum(1) > 0).astype(np.int64)
    return (inputs, targets, users), (inputs[:20], targets[:20], users[:20])


SENSORS = DataSet("sensors", "numbers", "made up", (4,), 90, 20, 2, read, inputs="vectors")


@pytest.fixture
def _sensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATASETS._known, "sensors", SENSORS)


TASK = {"data": "sensors", "model": "mlp", "split": "natural"}


@pytest.mark.usefixtures("_sensors")
def test_a_study_without_a_number_of_clients_has_all_users() -> None:
    assert config.study({"task": TASK}).points()[0].settings.clients.num_clients == 5
    least = {**TASK, "min_samples_per_client": 15}
    assert config.study({"task": least}).points()[0].settings.clients.num_clients == 3
    assert config.study({"task": TASK, "clients": {"num_clients": 2}}).points()[0].settings.clients.num_clients == 2
    swept = {**TASK, "min_samples_per_client": [1, 15]}
    assert {point.settings.clients.num_clients for point in config.study({"task": swept}).points()} == {100}


@pytest.mark.usefixtures("_sensors")
def test_a_stored_study_reads_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    import tomllib

    text = config.study({"task": TASK}).to_toml()
    monkeypatch.delitem(DATASETS._known, "sensors")
    assert config.stored_study(tomllib.loads(text)).points()[0].settings.clients.num_clients == 5


@pytest.mark.usefixtures("_sensors")
def test_a_run_on_users_trains_and_weights_them_by_their_samples() -> None:
    options: dict[str, Any] = {f"task.{name}": value for name, value in TASK.items()} | {
        "training.weighting": "samples"
    }
    options |= {"training.updates_per_round": 2, "training.local_lr": 0.3, "stop.max_rounds": 15}
    result = simulate("fedavg", settings=options)
    assert result.plan.header.num_clients == 5
    assert result.best_accuracy is not None
    assert result.best_accuracy > 0.8
    settings = config.study({"algorithms": ["fedavg"], "task": TASK}).points()[0].settings
    sizes = [len(part) for part in build_task(settings, 0).clients]
    assert sizes == [20, 40, 5, 10, 15]  # u, v, x, y, z
    assert make_plan(settings, 0, 2).header.num_clients == 5


@pytest.mark.usefixtures("_sensors")
def test_vectors_are_not_normalised() -> None:
    assert load("sensors")[0].inputs.tolist() == read(())[0][0].tolist()
    assert load("sensors", "unit")[0] is load("sensors", "standard")[0]
    assert unused_settings(config.study({"task": {**TASK, "normalise": "unit"}})) == [
        "task.normalise has no effect: sensors has no images"
    ]


@pytest.mark.usefixtures("_sensors")
def test_settings_of_users_without_effect_are_named() -> None:
    found = {**TASK, "split": "iid", "min_samples_per_client": 2, "partition_by": "writer"}
    assert unused_settings(config.study({"task": found, "clients": {"num_clients": 2}})) == [
        "task.min_samples_per_client has no effect: split = iid does not use it",
        "task.partition_by has no effect: split = iid does not use it",
    ]


@pytest.mark.usefixtures("_sensors")
def test_users_of_a_data_set() -> None:
    users = load_users("sensors")
    assert users.test is not None
    assert (len(users.train), users.test.tolist()) == (90, ["x"] * 5 + ["y"] * 10 + ["z"] * 5)
    line = "task.partition_by names a column of a data set hf:NAME, and 'sensors' is not one; remove it"
    assert line_of(lambda: load_users("sensors", "writer")) == line


def test_data_without_users_cannot_be_divided_by_user() -> None:
    line = "the data set 'mnist5k' has no users, which split = natural needs; use another split"
    assert line_of(lambda: classification_task("mnist5k", "mlp", "natural", 5, 0)) == line
    assert line_of(lambda: config.study({"task": {"split": "natural"}})) == line
