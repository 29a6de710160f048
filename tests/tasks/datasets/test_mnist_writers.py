"""mnist-writers: MNIST's files with QMNIST's labels, which name the writers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from defedavg.config import study as config
from defedavg.config.build import build_task
from defedavg.tasks import DATASETS, load_users, set_data_dir
from defedavg.tasks.datasets import download
from defedavg.tasks.datasets.catalog import load_pixels
from defedavg.tasks.datasets.dataset import Download, PublishedFile
from defedavg.tasks.datasets.mnist_writers import MNIST_WRITERS
from helpers.data_files import integer_idx, write_writers
from helpers.user_errors import line_of

WRITERS = [7, 7, 2, 9, 2, 7, 2]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path) -> Iterator[None]:
    set_data_dir(tmp_path)
    yield
    set_data_dir(None)


@pytest.mark.parametrize(("below", "packed"), [("mnist-writers", False), ("mnist-writers", True), ("", True)])
def test_the_writers_are_the_users(tmp_path: Path, below: str, packed: bool) -> None:
    labels = write_writers(tmp_path / below, WRITERS, packed=packed)
    train, test, classes = load_pixels("mnist-writers")
    assert (tuple(train.inputs.shape), tuple(test.inputs.shape), classes) == ((7, 1, 28, 28), (3, 1, 28, 28), 10)
    assert train.targets.tolist() == labels
    users = load_users("mnist-writers")
    assert users.test is not None
    assert (users.train.tolist(), users.test.tolist()) == (WRITERS, [900, 901, 902])


def test_the_folders_of_torchvision(tmp_path: Path) -> None:
    write_writers(tmp_path, WRITERS)
    for folder in ("MNIST/raw", "QMNIST/raw"):
        (tmp_path / folder).mkdir(parents=True)
    for path in [path for path in tmp_path.iterdir() if path.is_file()]:
        path.rename(tmp_path / ("QMNIST" if path.name.startswith("q") else "MNIST") / "raw" / path.name)
    assert load_users("mnist-writers").train.tolist() == WRITERS


def test_a_client_is_a_writer(tmp_path: Path) -> None:
    write_writers(tmp_path, WRITERS)
    task = {"data": "mnist-writers", "model": "softmax", "split": "natural", "min_samples_per_client": 2}
    settings = config.study({"task": task}).points()[0].settings
    assert [part.tolist() for part in build_task(settings, 0).clients] == [[2, 4, 6], [0, 1, 5]]


def test_damaged_labels_of_writers(tmp_path: Path) -> None:
    labels = write_writers(tmp_path, WRITERS)
    path = tmp_path / "qmnist-train-labels-idx2-int"
    rows = np.zeros((7, 8), np.int64)
    rows[:, 0] = labels
    for content, said in (
        (integer_idx(rows[:5]), "it has 5 rows for 7 images in train-images-idx3-ubyte"),
        (integer_idx(rows[:, :7]), "its rows are 7, not 8"),
        (integer_idx(rows + 1), f"row 0 has the digit {labels[0] + 1}, and train-labels-idx1-ubyte has {labels[0]}"),
        (integer_idx(rows)[:-3], "it has 221 bytes after its header, not the announced 224"),
        (b"\0\0\x08\x02" + integer_idx(rows)[4:], "it begins with 00000802, not with 00000c02"),
    ):
        path.write_bytes(content)
        line = line_of(lambda: load_users("mnist-writers"))
        assert line.startswith(f"{path} is damaged: ")
        assert said in line
        assert "run 'defedavg data fetch mnist-writers" in line


def test_missing_labels_of_writers_are_fetched(tmp_path: Path) -> None:
    write_writers(tmp_path / "mnist-writers", WRITERS)
    (tmp_path / "mnist-writers" / "qmnist-test-labels-idx2-int").unlink()
    line = line_of(lambda: load_users("mnist-writers"))
    assert "qmnist-test-labels-idx2-int missing; get it with 'defedavg data fetch mnist-writers" in line


def test_a_file_with_mirrors_of_its_own_is_downloaded_from_there(tmp_path: Path) -> None:
    write_writers(tmp_path / "source", WRITERS, packed=True)
    (tmp_path / "other").mkdir()
    files = []
    for file in MNIST_WRITERS.download.files if MNIST_WRITERS.download else ():
        path = tmp_path / "source" / file.name
        mirrors: tuple[str, ...] = ()
        if file.mirrors:
            path = path.rename(tmp_path / "other" / file.name)
            mirrors = (f"file://{tmp_path}/other/",)
        content = path.read_bytes()
        files.append(PublishedFile(file.name, len(content), hashlib.md5(content).hexdigest(), mirrors))  # noqa: S324 (the published checksum)
    source = Download("mnist-writers", (f"file://{tmp_path}/source/",), tuple(files))
    small = replace(MNIST_WRITERS, download=source, published={file.name: file for file in files})
    folder = download.fetch(small, tmp_path / "data")
    assert sorted(path.name for path in folder.iterdir()) == sorted(file.name for file in files)
    set_data_dir(tmp_path / "data")
    assert load_users("mnist-writers").train.tolist() == WRITERS


def test_the_record_names_every_file_raw_and_compressed() -> None:
    assert DATASETS["mnist-writers"] is MNIST_WRITERS
    for name, file in MNIST_WRITERS.published.items():
        assert name == file.name
        assert name.removesuffix(".gz") in MNIST_WRITERS.published
    assert len(MNIST_WRITERS.published) == 12
