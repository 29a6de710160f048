"""LEAF's JSON files: images, characters, tweets and vectors of named users; damage is one line with file and user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from defedavg import simulate
from defedavg.config import study as config
from defedavg.config.build import build_task
from defedavg.errors import UserError
from defedavg.tasks import load, load_users
from defedavg.tasks.datasets import leaf
from defedavg.tasks.datasets.builtin_datasets import kind_of_inputs
from defedavg.tasks.datasets.catalog import load_pixels
from defedavg.tasks.datasets.characters import encode
from helpers.user_errors import line_of

Samples = dict[str, tuple[list[Any], list[Any]]]


@pytest.fixture(autouse=True)
def _forget() -> None:
    leaf.load.cache_clear()


def content(samples: Samples) -> dict[str, Any]:
    data = {user: {"x": x, "y": y} for user, (x, y) in samples.items()}
    return {"users": list(data), "num_samples": [len(entry["y"]) for entry in data.values()], "user_data": data}


def write(folder: Path, train: Samples, test: Samples | None = None, *more: Samples) -> str:
    """Write training files, each with some users, and a test file; return the name of the data set."""
    for part, files in (("train", (train, *more)), ("test", (test or train,))):
        (folder / part).mkdir(parents=True, exist_ok=True)
        for i, samples in enumerate(files):
            (folder / part / f"all_data_{i}_niid.json").write_text(json.dumps(content(samples)))
    return f"leaf:{folder}"


def images(*values: float) -> list[list[float]]:
    return [[value] * 784 for value in values]


def test_femnist(tmp_path: Path) -> None:
    more: Samples = {"f0001_00": (images(1.0), [3])}
    name = write(tmp_path, {"f0002_41": (images(0.0, 0.2), [61, 0])}, {"f0003_07": (images(0.4), [1])}, more)
    train, test, classes = load_pixels(name)
    assert (tuple(train.inputs.shape), len(test), classes) == ((3, 1, 28, 28), 1, 62)
    assert train.inputs[:, 0, 5, 5].tolist() == [0, 51, 255]
    assert np.allclose(load(name, "unit")[0].inputs[:, 0, 0, 0].numpy(), [0, 0.2, 1])
    users = load_users(name)
    assert users.test is not None
    assert (users.train.tolist(), users.test.tolist()) == (["f0002_41", "f0002_41", "f0001_00"], ["f0003_07"])
    task = config.study({"task": {"data": name, "model": "softmax", "split": "natural"}}).points()[0].settings
    assert [part.tolist() for part in build_task(task, 0).clients] == [[2], [0, 1]]


def test_shakespeare(tmp_path: Path) -> None:
    text = "Thou art a villain, and I say so to thy face before the whole assembly of lords!"
    name = write(tmp_path, {"ROMEO": ([text, text[1:] + "?"], ["?", "\n"])})
    train, _, classes = load(name)
    assert (len(text), classes, kind_of_inputs(name)) == (80, 82, "tokens")
    assert train.inputs[0].tolist() == encode(text).tolist()
    assert train.targets[0].tolist() == encode(text[1:] + "?").tolist()
    assert train.targets[1, -1] == encode("\n")[0]


def test_tweets_are_hashed_bags_of_words(tmp_path: Path) -> None:
    rows = [["1", "Mon", "NO_QUERY", "u", text, "x"] for text in ("so good, SO good", "so bad", "good so good so")]
    name = write(tmp_path, {"u": (rows, ["4", 0, 4])})
    train, _, classes = load(name)
    assert (tuple(train.inputs.shape), train.targets.tolist(), classes) == ((3, leaf.WORDS), [1, 0, 1], 2)
    assert sorted(train.inputs[0][train.inputs[0] > 0].tolist()) == [2, 2]
    assert train.inputs[0].equal(train.inputs[2])
    assert train.inputs.sum(1).tolist() == [4, 2, 4]


def test_a_run_on_vectors(tmp_path: Path) -> None:
    rng = np.random.Generator(np.random.Philox(key=0))
    made: Samples = {}
    for i in range(4):
        x = rng.normal(size=(20, 6))
        made[f"user {i}"] = (x.tolist(), (x.sum(1) > 0).astype(int).tolist())
    options: dict[str, Any] = {"task.data": write(tmp_path, made), "task.model": "softmax", "task.split": "natural"}
    options |= {"training.updates_per_round": 2, "training.local_lr": 0.3, "stop.max_rounds": 20}
    best = simulate("fedavg", settings=options).best_accuracy
    assert best is not None
    assert best > 0.85


def ann(x: list[Any], y: list[Any]) -> dict[str, Any]:
    return {"user_data": {"ann": {"x": x, "y": y}}}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"user_data": {}}, "user 'ann': 'user_data' has no lists 'x' and 'y' for it"),
        (ann([[1.0]], []), "user 'ann': it has 1 inputs and 0 targets, and 2 in 'num_samples'"),
        ({"num_samples": [3]}, "user 'ann': it has 2 inputs and 2 targets, and 3 in 'num_samples'"),
        (ann([[1.0], [1, 2]], [0, 1]), "user 'ann': its inputs have different lengths"),
        (ann([[1.0], [1e99]], [0, 1]), "user 'ann': an input has a value that is not a finite number"),
        (ann([[1.0], "a"], [0, 1]), "user 'ann': sample 1 is not of the kind vector of the first sample"),
        (ann([None, 1], [0, 1]), "user 'ann': an input is neither numbers, 80 characters nor a row of text"),
        (ann([[1], [2]], [0, -1]), "user 'ann': the target '-1' is not a class number"),
        (ann([[1], [2]], [0, "b"]), "user 'ann': the target 'b' is not a class number"),
        (ann(images(0, 1.5), [0, 1]), "user 'ann': a pixel value is 1.5, outside 0..1"),
        (ann(["a" * 80] * 2, ["b", "bc"]), "user 'ann': the target 'bc' is not one character"),
        ({"users": None}, "has no list 'users' of names and table 'user_data'"),
        ({"users": ["ann"] * 2, "num_samples": [2, 2]}, "has 2 users, which repeat or differ from its 'num_samples'"),
        ({"num_samples": []}, "has 1 users, which repeat or differ from its 'num_samples'"),
    ],
)
def test_damaged_files(tmp_path: Path, change: dict[str, Any], line: str) -> None:
    name = write(tmp_path, {"ann": ([[1.0], [2.0]], [0, 1])})
    path = tmp_path / "train" / "all_data_0_niid.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    said = line_of(lambda: load(name))
    assert said.startswith(str(path))
    assert line in said


def test_missing_files(tmp_path: Path) -> None:
    assert line_of(lambda: load("leaf:")).startswith("leaf: needs a folder")
    assert line_of(lambda: load(f"leaf:{tmp_path}")).startswith(f"{tmp_path / 'train'} cannot be read: No such file")
    name = write(tmp_path, {"ann": ([[1.0]], [0])}, {"ann": ([[1.0, 2.0]], [0])})
    assert "training and test inputs of the shapes (1,) and (2,)" in line_of(lambda: load(name))
    path = tmp_path / "test" / "all_data_0_niid.json"
    path.write_text("{")
    assert line_of(lambda: load(name)).startswith(f"{path} is not valid JSON: ")
    path.unlink()
    assert line_of(lambda: load(name)).startswith(f"{tmp_path / 'test'} has no JSON file with samples")


def test_users_whose_inputs_differ_in_size(tmp_path: Path) -> None:
    name = write(tmp_path, {"ann": ([[1.0]], [0]), "bob": ([[1.0, 2.0]], [0]), "empty": ([], [])})
    assert "the inputs of user 'bob' differ in size" in line_of(lambda: load(name))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["x", "y", "ann"]), inner, max_size=3),
    max_leaves=8,
)


@given(users=st.just(["ann"]) | JSON, counts=JSON, data=JSON, x=JSON, y=JSON)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_content_is_read_or_refused_in_one_line(
    tmp_path: Path, users: Any, counts: Any, data: Any, x: Any, y: Any
) -> None:
    name = write(tmp_path, {"ann": ([[1.0]], [0])})
    for user_data in (data, {"ann": {"x": x, "y": y}}):
        found = {"users": users, "user_data": user_data} | ({} if counts is None else {"num_samples": counts})
        (tmp_path / "train" / "all_data_0_niid.json").write_text(json.dumps(found))
        leaf.load.cache_clear()
        try:
            load(name)
        except UserError as error:
            assert len(str(error).splitlines()) == 1  # noqa: PT017 (most content is refused, some is read)
