"""mnist-writers: all of MNIST, divided by the people who wrote the digits, whom QMNIST's label files name.

Yadav, Bottou: Cold Case: The Lost MNIST Digits, 2019. The first 60,000 rows of QMNIST's training labels are MNIST's
training set in its order, and the first 10,000 rows of its test labels are MNIST's test set. Column 0 of a row is the
digit and column 2 the writer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from .dataset import DataSet, Download, PublishedFile, UserPart
from .dataset_files import damaged
from .idx_files import INTEGERS, read_idx, read_part

COLUMNS: Final = 8
DIGIT, WRITER = 0, 2

_QMNIST: Final = ("https://raw.githubusercontent.com/facebookresearch/qmnist/master/",)
_DIGITS: Final = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
_WRITERS: Final = ("qmnist-train-labels-idx2-int", "qmnist-test-labels-idx2-int")
_NAMES: Final = (*_DIGITS, *_WRITERS)
_FILES: Final = tuple((name, f"{name}.gz") for name in _NAMES)
_TORCHVISION: Final = tuple(
    tuple(f"{'QMNIST' if name in _WRITERS else 'MNIST'}/raw/{spelling}" for spelling in (name, f"{name}.gz"))
    for name in _NAMES
)
_PUBLISHED: Final = {
    file.name: file
    for file in (
        PublishedFile("train-images-idx3-ubyte", 47_040_016, "6bbc9ace898e44ae57da46a324031adb"),
        PublishedFile("train-labels-idx1-ubyte", 60_008, "a25bea736e30d166cdddb491f175f624"),
        PublishedFile("t10k-images-idx3-ubyte", 7_840_016, "2646ac647ad5339dbf082846283269ea"),
        PublishedFile("t10k-labels-idx1-ubyte", 10_008, "27ae3e4e09519cfbb04c329615203637"),
        PublishedFile("qmnist-train-labels-idx2-int", 1_920_012, "1d43300e7f41ddcbf7fd006cbe865af9"),
        PublishedFile("qmnist-test-labels-idx2-int", 1_920_012, "5e00709fb0090091f3afc51d204ad83c"),
        PublishedFile("train-images-idx3-ubyte.gz", 9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        PublishedFile("train-labels-idx1-ubyte.gz", 28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
        PublishedFile("t10k-images-idx3-ubyte.gz", 1_648_877, "9fb629c4189551a2d022fa330f9573f3"),
        PublishedFile("t10k-labels-idx1-ubyte.gz", 4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
        PublishedFile("qmnist-train-labels-idx2-int.gz", 463_024, "0058f8dd561b90ffdd0f734c6a30e5e4", _QMNIST),
        PublishedFile("qmnist-test-labels-idx2-int.gz", 526_800, "5b5b05890a5e13444e108efe57b788aa", _QMNIST),
    )
}


def _part(images: Path, labels: Path, writers: Path) -> UserPart:
    inputs, targets = read_part(MNIST_WRITERS, images, labels)
    rows = read_idx(MNIST_WRITERS, writers, (COLUMNS,), INTEGERS)[: len(targets)]
    if len(rows) < len(targets):
        what = f"it has {len(rows):,} rows for {len(targets):,} images in {images.name}"
        raise damaged(MNIST_WRITERS, writers, what)
    wrong = rows[:, DIGIT] != targets
    if wrong.any():
        first = int(wrong.argmax())
        what = f"row {first} has the digit {int(rows[first, DIGIT])}, and {labels.name} has {int(targets[first])}"
        raise damaged(MNIST_WRITERS, writers, what)
    return inputs, targets, rows[:, WRITER].astype(np.int64)


def _read(paths: Sequence[Path]) -> tuple[UserPart, UserPart]:
    train_images, train_labels, test_images, test_labels, train_writers, test_writers = paths
    return _part(train_images, train_labels, train_writers), _part(test_images, test_labels, test_writers)


MNIST_WRITERS = DataSet(
    name="mnist-writers",
    summary="MNIST's handwritten digits; users are the writers",
    credit="MNIST: LeCun, Cortes, Burges; writers: Yadav, Bottou (2019), QMNIST, BSD-3-Clause",
    image=(1, 28, 28),
    train_samples=60_000,
    test_samples=10_000,
    classes=10,
    read=_read,
    layouts=(("mnist-writers", _FILES), ("", _TORCHVISION), ("", _FILES)),
    published=_PUBLISHED,
    download=Download(
        folder="mnist-writers",
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        files=tuple(_PUBLISHED[f"{name}.gz"] for name in _NAMES),
    ),
)
