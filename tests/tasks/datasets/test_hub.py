"""Data sets through Hugging Face's library, which a small module stands for: tests need no network and no extra."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from defedavg.config import study as config
from defedavg.config.build import build_task
from defedavg.errors import UserError
from defedavg.tasks import load, load_users
from defedavg.tasks.datasets.hub import load as hub_load
from defedavg.tasks.datasets.hub import load_users as hub_users


def line_of(act: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        act()
    assert "\n" not in str(caught.value)
    return str(caught.value)


class Picture:
    """As much of a picture as is used."""

    def __init__(self, mode: str, value: int, size: tuple[int, int] = (8, 6)) -> None:
        self.mode, self.value, self.size = mode, value, size

    def convert(self, mode: str) -> Picture:
        return Picture(mode, self.value, self.size)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        width, height = self.size
        return np.full((height, width, 3) if self.mode == "RGB" else (height, width), self.value, np.uint8)


class Rows(dict[str, list[Any]]):
    """A split, by column."""

    def __init__(self, features: Any = None, /, **columns: list[Any]) -> None:
        super().__init__(columns)
        self.features = dict.fromkeys(columns) | (features or {})

    @property
    def column_names(self) -> list[str]:
        return list(self.keys())

    def __len__(self) -> int:
        return len(next(iter(self.values())))


def both(**columns: list[Any]) -> dict[str, Rows]:
    """The same for training and testing."""
    return {"train": Rows(**columns), "test": Rows(**columns)}


def pictures(count: int, mode: str = "L") -> list[Picture]:
    return [Picture(mode, value) for value in range(count)]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Stands for ``datasets``: what it is to find, by name."""
    found: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in found:
            raise FileNotFoundError(f"Dataset '{name}' doesn't exist on the Hub\nor cannot be accessed")
        return found[name]

    module: Any = types.ModuleType("datasets")
    module.load_dataset = get
    module.load_from_disk = lambda path: get(f"disk {path}")
    monkeypatch.setitem(sys.modules, "datasets", module)
    for cached in (hub_load, hub_users):
        cached.cache_clear()
    yield found
    for cached in (hub_load, hub_users):
        cached.cache_clear()


def test_a_data_set_of_the_hub(library: dict[str, Any]) -> None:
    library["some/digits"] = {
        "train": Rows({"label": types.SimpleNamespace(num_classes=5)}, image=pictures(3), label=[0, 2, 1]),
        "test": Rows(image=pictures(2), label=[1, 1]),
    }
    train, test, classes = load("hf:some/digits", "unit")
    assert (train.inputs.shape, test.inputs.shape, classes) == ((3, 1, 6, 8), (2, 1, 6, 8), 5)
    assert train.targets.tolist() == [0, 2, 1]
    assert torch.equal(train.inputs[:, 0, 0, 0], torch.arange(3) / 255)
    assert load("hf:some/digits", "unit") is load("hf:some/digits", "unit")


def test_colours_other_columns_and_a_validation_split(library: dict[str, Any]) -> None:
    mixed = [*pictures(2, "RGBA"), Picture("L", 7)]
    library["x"] = {"train": Rows(img=mixed, labels=[0, 1, 2]), "validation": Rows(img=mixed, labels=[0, 1, 2])}
    train, test, classes = hub_load("x")
    assert (train.inputs.shape, train.inputs.dtype, len(test), classes) == ((3, 3, 6, 8), torch.uint8, 3, 3)
    assert bool((train.inputs[2] == 7).all())


def test_a_saved_folder_is_read_from_the_disk(library: dict[str, Any], tmp_path: Path) -> None:
    grey = [[[1, 2], [3, 255]]]
    part = {"train": Rows(image=grey, label=[0]), "test": Rows(image=grey, label=[1])}
    library[str(tmp_path)] = part
    assert hub_load(str(tmp_path))[0].inputs.tolist() == [grey]
    (tmp_path / "dataset_dict.json").write_text("{}")
    library[f"disk {tmp_path}"] = {**part, "test": Rows(image=grey, label=[7])}
    hub_load.cache_clear()
    assert hub_load(str(tmp_path))[2] == 8


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([1], "has no splits"),
        ({"train": Rows(image=pictures(1), label=[0])}, "has the splits train; it needs train and one of test, val"),
        (both(pic=pictures(1), label=[0]), "has the columns pic, label; the image must be in image or img"),
        (both(image=pictures(1), fine=[0]), "has the columns image, fine; the label must be in label or labels"),
        (both(image=[], label=[]), "a split without samples"),
        (both(image=[Picture("I;16", 1)], label=[0]), "not 8-bit grey or colour"),
        (both(image=[[[1, 256]]], label=[0]), "not 8-bit grey or colour"),
        (both(image=[*pictures(1), Picture("L", 1, (3, 3))], label=[0, 1]), "images of several sizes"),
        (both(image=pictures(1)) | {"train": Rows(image=pictures(1, "RGB"), label=[0])}, "cannot be decoded: 'label'"),
        (both(image=pictures(1), label=[0]) | {"train": Rows(image=pictures(1, "RGB"), label=[0])}, "several shapes"),
        (both(image=pictures(2), label=[0, -1]), "not class numbers"),
        (both(image=pictures(2), label=["a", "b"]), "not class numbers"),
        (both(image=pictures(2), label=[[0], [0, 1]]), "cannot be decoded"),
    ],
)
def test_data_sets_of_the_hub_that_do_not_fit(library: dict[str, Any], found: Any, said: str) -> None:
    library["x"] = found
    assert said in line_of(lambda: load("hf:x"))


def test_a_data_set_that_the_hub_does_not_have(library: dict[str, Any]) -> None:
    assert line_of(lambda: load("hf:y")) == (
        "hf:y cannot be loaded: Dataset 'y' doesn't exist on the Hub; check the name and the network"
    )
    assert "write hf:NAME" in line_of(lambda: load("hf:"))


def test_without_the_library_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert re.search(r"pip install 'defedavg\[hub\]'$", line_of(lambda: load("hf:never-there")))


def by_writer(**test: list[Any]) -> dict[str, Rows]:
    train = Rows(image=pictures(5), label=[0, 1, 0, 1, 0], writer_id=["b", "a", "b", "c", "a"], pages=[3, 3, 3, 8, 8])
    return {"train": train, "test": Rows(image=pictures(2), label=[0, 1], **test)}


def test_a_column_names_the_users(library: dict[str, Any]) -> None:
    library["x"] = by_writer(writer_id=["d", "e"])
    users = load_users("hf:x", "writer_id")
    assert users.test is not None
    assert (users.train.tolist(), users.test.tolist()) == (["b", "a", "b", "c", "a"], ["d", "e"])
    library["y"] = by_writer()
    assert load_users("hf:y", "pages").train.tolist() == [3, 3, 3, 8, 8]
    assert load_users("hf:y", "pages").test is None


def test_a_column_divides_the_data_among_its_values(library: dict[str, Any]) -> None:
    library["x"] = by_writer()
    study = config.study({"task": {"data": "hf:x", "model": "softmax", "partition_by": "writer_id"}})
    settings = study.points()[0].settings
    assert (settings.task.split, settings.clients.num_clients) == ("natural", 3)
    assert [part.tolist() for part in build_task(settings, 0).clients] == [[1, 4], [0, 2], [3]]


@pytest.mark.parametrize(
    ("column", "line"),
    [
        (
            "writer",
            "hf:x has no column 'writer'; set task.partition_by to one of its columns: image, label, writer_id, p",
        ),
        ("", "hf:x names no users; set task.partition_by to one of its columns: image, label, writer_id, pages"),
        ("image", "hf:x has values of type Picture in 'image'; users are whole numbers or text"),
        ("odd", "hf:x has values of type NoneType, int in 'odd'; users are whole numbers or text"),
        ("nested", "hf:x cannot be decoded: "),
    ],
)
def test_columns_that_name_no_users(library: dict[str, Any], column: str, line: str) -> None:
    library["x"] = by_writer()
    library["x"]["train"] |= {"odd": [1, None, 2, 3, 4], "nested": [[1], [1, 2], [], [1], [1]]}
    if column not in ("odd", "nested"):
        del library["x"]["train"]["odd"], library["x"]["train"]["nested"]
    assert line_of(lambda: load_users("hf:x", column)).startswith(line)
