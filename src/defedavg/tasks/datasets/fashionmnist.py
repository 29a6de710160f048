"""FashionMNIST: four idx files, raw or compressed."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Final

import numpy as np

from .dataset import DataSet, Download, Part, PublishedFile
from .dataset_files import MAX_IMAGES, Pixels, check_classes, check_published, damaged, open_file, reading

_NAMES: Final = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
_FILES: Final = tuple((name, f"{name}.gz") for name in _NAMES)
_PUBLISHED: Final = {
    file.name: file
    for file in (
        PublishedFile("train-images-idx3-ubyte", 47_040_016, "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
        PublishedFile("train-labels-idx1-ubyte", 60_008, "9018921c3c673c538a1fc5bad174d6f9"),
        PublishedFile("t10k-images-idx3-ubyte", 7_840_016, "8181f5470baa50b63fa0f6fddb340f0a"),
        PublishedFile("t10k-labels-idx1-ubyte", 10_008, "15d484375f8d13e6eb1aabb0c3f46965"),
        PublishedFile("train-images-idx3-ubyte.gz", 26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        PublishedFile("train-labels-idx1-ubyte.gz", 29_515, "25c81989df183df01b3e8a0aad5dffbe"),
        PublishedFile("t10k-images-idx3-ubyte.gz", 4_422_102, "bef4ecab320f06d8554ea6380940ec79"),
        PublishedFile("t10k-labels-idx1-ubyte.gz", 5_148, "bb300cfdad3c16e7a12a480ee83cd310"),
    )
}


def read_idx(path: Path, item: tuple[int, ...]) -> Pixels:
    """Return the content of an idx file of bytes whose items have the given shape."""
    dims = 1 + len(item)
    with reading(FASHIONMNIST, path), open_file(path) as file:
        head = file.read(4 + 4 * dims)
        if head[:4] != bytes((0, 0, 8, dims)):
            raise damaged(FASHIONMNIST, path, f"it begins with {head[:4].hex()}, not with 000008{dims:02x}")
        if len(head) < 4 + 4 * dims:
            raise damaged(FASHIONMNIST, path, f"it ends after {len(head)} bytes")
        count, *shape = (int(side) for side in np.frombuffer(head, ">u4", offset=4))
        if tuple(shape) != item:
            found, expected = ("x".join(map(str, sides)) for sides in (shape, item))
            raise damaged(FASHIONMNIST, path, f"its images are {found}, not {expected}")
        if not 1 <= count <= MAX_IMAGES:
            raise damaged(FASHIONMNIST, path, f"its header announces {count:,} items")
        size = count * prod(item)
        body = file.read(size + 1)  # one byte more than expected, so that the end and its checksum are reached
    if len(body) != size:
        found = "more" if len(body) > size else f"{len(body):,}"
        raise damaged(FASHIONMNIST, path, f"it has {found} bytes after its header, not the announced {size:,}")
    whole = bytearray(head + body)
    check_published(FASHIONMNIST, path, memoryview(whole))
    return np.frombuffer(whole, np.uint8, offset=len(head)).reshape(count, *item)


def _part(images: Path, labels: Path) -> Part:
    inputs, targets = read_idx(images, (28, 28)), read_idx(labels, ())
    if len(inputs) != len(targets):
        what = f"it has {len(targets):,} labels for {len(inputs):,} images in {images.name}"
        raise damaged(FASHIONMNIST, labels, what)
    return inputs[:, None], check_classes(FASHIONMNIST, labels, targets)


def _read(paths: Sequence[Path]) -> tuple[Part, Part]:
    train_images, train_labels, test_images, test_labels = paths
    return _part(train_images, train_labels), _part(test_images, test_labels)


FASHIONMNIST = DataSet(
    name="fashionmnist",
    summary="grey images of clothing in ten classes",
    credit="Xiao, Rasul, Vollgraf (2017), Zalando Research; MIT licence",
    image=(1, 28, 28),
    train_samples=60_000,
    test_samples=10_000,
    classes=10,
    read=_read,
    layouts=(
        ("FashionMNIST/raw", _FILES),  # of torchvision, and of ``defedavg data fetch``
        ("fashion-mnist", _FILES),
        ("", _FILES),
        ("/usr/share/datasets/fashion-mnist", _FILES),  # of Debian's package dataset-fashion-mnist
    ),
    published=_PUBLISHED,
    download=Download(
        folder="FashionMNIST/raw",
        mirrors=(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",  # does not offer https
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        ),
        files=tuple(_PUBLISHED[f"{name}.gz"] for name in _NAMES),
    ),
)
