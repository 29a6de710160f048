"""Data sets: each is one record in one file, registered by name.

A data set from outside the package is registered by an entry point of the group ``defedavg.datasets`` or by calling
``register_dataset`` in a plugin file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import UserError
from ...registry import Registry

Part = tuple[NDArray[Any], NDArray[np.int64]]
"""Images (n, channels, height, width) with pixel values 0..255, as bytes or as float32, and their classes.

Or texts: int64 numbers of characters (n, length), and a class at every position (n, length), -100 where none counts.
"""

Layout = tuple[str, tuple[tuple[str, ...], ...]]
"""A folder below the data folder, and the names that each file of the data set may have in it."""


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """A published file: its name, its size in bytes and its MD5."""

    name: str
    size: int
    md5: str


@dataclass(frozen=True, slots=True)
class Download:
    """What to download, from which mirrors (tried in order), and into which folder below the data folder.

    With ``members``, the one file is an archive: they are unpacked from the folder of the same name in it.
    """

    folder: str
    mirrors: tuple[str, ...]
    files: tuple[PublishedFile, ...]
    members: tuple[PublishedFile, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class DataSet:
    """A data set: what it holds, where its files are looked for, how they are read and downloaded.

    ``read`` receives the files of the first complete layout, in its order, and returns the training and the test part.
    ``package`` names an installed Python package and the path of a file in it, for data that come with a package.
    Without layouts and package, ``read`` receives no files.
    """

    name: str
    summary: str
    credit: str  # authors and licence
    image: tuple[int, ...]  # channels, height, width
    train_samples: int
    test_samples: int
    classes: int
    read: Callable[[Sequence[Path]], tuple[Part, Part]]
    layouts: tuple[Layout, ...] = ()
    published: Mapping[str, PublishedFile] = field(default_factory=lambda: MappingProxyType({}))
    download: Download | None = None
    package: tuple[str, str] | None = None


def _check(name: str, dataset: DataSet) -> None:
    if not isinstance(dataset, DataSet):
        raise UserError(f"data set {name!r} is {dataset!r}; register a DataSet record")
    if dataset.name != name:
        raise UserError(f"data set {name!r} calls itself {dataset.name!r}; register it under that name")
    if ":" in name or not name.strip():
        raise UserError(f"data set {name!r} needs a name without ':'")


DATASETS: Registry[DataSet] = Registry("data set", "defedavg.datasets", _check)


def register_dataset(dataset: DataSet) -> DataSet:
    """Register a data set under its name in this process."""
    return DATASETS.register(getattr(dataset, "name", repr(dataset)), dataset)
