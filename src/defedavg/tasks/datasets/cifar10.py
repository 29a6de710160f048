"""CIFAR-10: six batches, either records of a label and 3072 pixels, or pickles of Python 2, which are not executed."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Final

import numpy as np

from . import pickle_reader
from .dataset import DataSet, Download, Part, PublishedFile
from .dataset_files import MAX_IMAGES, check_classes, check_published, damaged, reading

_SHAPE: Final = (3, 32, 32)
_PIXELS: Final = prod(_SHAPE)
_BATCHES: Final = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
_BINARY: Final = tuple((f"{name}.bin",) for name in _BATCHES)
_PICKLED: Final = tuple((name,) for name in _BATCHES)
_PUBLISHED: Final = {
    file.name: file
    for file in (
        PublishedFile("cifar-10-binary.tar.gz", 170_052_171, "c32a1d4ab5d03f1284b67883e8d87530"),
        PublishedFile("data_batch_1.bin", 30_730_000, "5dd7e06a14cb22eb9f671a540d1b7c25"),
        PublishedFile("data_batch_2.bin", 30_730_000, "5ea93a67294ea407fff1d09f752e9692"),
        PublishedFile("data_batch_3.bin", 30_730_000, "942cd6a4bcdd0dd3c604fbe906cb4421"),
        PublishedFile("data_batch_4.bin", 30_730_000, "ae636b3ba5c66a11e91e8cb52e771fcb"),
        PublishedFile("data_batch_5.bin", 30_730_000, "53f37980c15c3d472c316c40844f3f0d"),
        PublishedFile("test_batch.bin", 30_730_000, "803d5f7f4d78ea53de84dbe85f74fb6d"),
        PublishedFile("data_batch_1", 31_035_704, "c99cafc152244af753f735de768cd75f"),
        PublishedFile("data_batch_2", 31_035_320, "d4bba439e000b95fd0a9bffe97cbabec"),
        PublishedFile("data_batch_3", 31_035_999, "54ebc095f3ab1f0389bbae665268c751"),
        PublishedFile("data_batch_4", 31_035_696, "634d18415352ddfa80567beed471001a"),
        PublishedFile("data_batch_5", 31_035_623, "482c414d41f54cd18b22e5b47cb7c3cb"),
        PublishedFile("test_batch", 31_035_526, "40351d587109b95175f43aff81a1287e"),
    )
}


def read_binary(path: Path) -> Part:
    """Return a batch of the binary version."""
    size, record = _size(path), 1 + _PIXELS
    if size == 0 or size % record:
        raise damaged(CIFAR10, path, f"its {size:,} bytes are not whole records of {record:,}")
    with reading(CIFAR10, path):
        whole = np.fromfile(path, np.uint8, count=size)
    if len(whole) != size:
        raise damaged(CIFAR10, path, "it changed while it was read")
    check_published(CIFAR10, path, whole.data)
    table = whole.reshape(-1, record)
    return table[:, 1:].reshape(-1, *_SHAPE), check_classes(CIFAR10, path, table[:, 0])


def read_pickled(path: Path) -> Part:
    """Return a batch of the Python version without executing the pickle."""
    _size(path)
    with reading(CIFAR10, path):
        whole = path.read_bytes()
    check_published(CIFAR10, path, memoryview(whole))
    try:
        inputs, targets = _batch(pickle_reader.read(whole))
    except pickle_reader.UnreadablePickleError as error:
        raise damaged(CIFAR10, path, str(error)) from None
    return inputs.reshape(-1, *_SHAPE), targets


def _batch(value: object) -> Part:
    """Return the rows of pixels of a batch, and its labels."""
    if not isinstance(value, dict):
        raise pickle_reader.UnreadablePickleError("it is not a table")
    table = {key.decode("latin-1") if isinstance(key, bytes) else key: entry for key, entry in value.items()}
    inputs, labels = pickle_reader.rows_of_bytes(table.get("data"), _PIXELS), table.get("labels")
    if not isinstance(labels, list) or any(type(label) is not int for label in labels):
        raise pickle_reader.UnreadablePickleError("its labels are not a list of whole numbers")
    if len(labels) != len(inputs):
        raise pickle_reader.UnreadablePickleError(f"it has {len(labels):,} labels for {len(inputs):,} images")
    for position, label in enumerate(labels):
        if not 0 <= label < CIFAR10.classes:
            outside = f"outside 0..{CIFAR10.classes - 1}"
            raise pickle_reader.UnreadablePickleError(f"label {position} is {str(label)[:20]}, {outside}")
    return inputs, np.array(labels, np.int64)


def _size(path: Path) -> int:
    with reading(CIFAR10, path):
        size = path.stat().st_size
    if size > MAX_IMAGES * (1 + _PIXELS):
        raise damaged(CIFAR10, path, f"it has {size:,} bytes")
    return size


def _read(paths: Sequence[Path]) -> tuple[Part, Part]:
    *batches, test = paths
    read = read_binary if test.suffix == ".bin" else read_pickled
    inputs, targets = np.empty((0, *_SHAPE), np.uint8), np.empty(0, np.int64)
    for i, path in enumerate(batches):
        images, labels = read(path)
        if i == 0:  # fill one large array instead of joining five, which would need the memory twice
            inputs = np.empty((len(batches) * len(labels), *_SHAPE), np.uint8)
            targets = np.empty(len(batches) * len(labels), np.int64)
        each = len(targets) // len(batches)
        if len(labels) != each:
            raise damaged(CIFAR10, path, f"it has {len(labels):,} images, and {batches[0].name} has {each:,}")
        inputs[i * each : (i + 1) * each], targets[i * each : (i + 1) * each] = images, labels
    test_images, labels = read(test)
    return (inputs, targets), (np.array(test_images), labels)


CIFAR10 = DataSet(
    name="cifar10",
    summary="colour images of animals and vehicles in ten classes",
    credit="Krizhevsky (2009), Learning Multiple Layers of Features from Tiny Images; published without a licence",
    image=_SHAPE,
    train_samples=50_000,
    test_samples=10_000,
    classes=10,
    read=_read,
    layouts=(("cifar-10-batches-bin", _BINARY), ("", _BINARY), ("cifar-10-batches-py", _PICKLED), ("", _PICKLED)),
    published=_PUBLISHED,
    download=Download(
        folder="cifar-10-batches-bin",
        mirrors=("https://www.cs.toronto.edu/~kriz/",),
        files=(_PUBLISHED["cifar-10-binary.tar.gz"],),
        members=tuple(_PUBLISHED[f"{name}.bin"] for name in _BATCHES),
    ),
)
