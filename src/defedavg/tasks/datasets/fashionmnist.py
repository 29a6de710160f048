"""FashionMNIST: four idx files, raw or compressed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from . import idx_files
from .dataset import DataSet, Download, Part, PublishedFile
from .dataset_files import Pixels

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
    return idx_files.read_idx(FASHIONMNIST, path, item)


def _read(paths: Sequence[Path]) -> tuple[Part, Part]:
    train_images, train_labels, test_images, test_labels = paths
    return (
        idx_files.read_part(FASHIONMNIST, train_images, train_labels),
        idx_files.read_part(FASHIONMNIST, test_images, test_labels),
    )


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
