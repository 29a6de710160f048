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

from ...errors import UserError, unknown
from ...registry import Registry

Part = tuple[NDArray[Any], NDArray[np.int64]]
"""Images (n, channels, height, width) with pixel values 0..255, as bytes or as float32, and their classes.

Vectors and tokens have other shapes; see ``KINDS``.
"""

UserPart = tuple[NDArray[Any], NDArray[np.int64], NDArray[Any]]
"""A part and the id of every sample's user, a whole number or text."""

KINDS = ("images", "vectors", "tokens")
"""Inputs: pixel values, which ``task.normalise`` scales; vectors (n, features) of float32, used as they are; or tokens
(n, length) of int64, with a class for every one of them, -100 where none counts."""

HUB_PREFIX, LEAF_PREFIX = "hf:", "leaf:"
"""How names begin that are read through Hugging Face's ``datasets``, and from a folder of LEAF's JSON files."""

Layout = tuple[str, tuple[tuple[str, ...], ...]]
"""A folder below the data folder, and the names that each file of the data set may have in it."""


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """A published file: its name, its size in bytes, its MD5, and its mirrors if not those of the whole download."""

    name: str
    size: int
    md5: str
    mirrors: tuple[str, ...] = ()


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
    ``extra`` is the extra of this package that installs it. Without layouts and package, ``read`` receives no files.
    A part with a third array, the id of every sample's user, can be divided with ``task.split = "natural"``.
    """

    name: str
    summary: str
    credit: str  # authors and licence
    image: tuple[int, ...]  # channels, height, width; the shape of one input for other kinds of inputs
    train_samples: int
    test_samples: int
    classes: int
    read: Callable[[Sequence[Path]], tuple[Part | UserPart, Part | UserPart]]
    layouts: tuple[Layout, ...] = ()
    published: Mapping[str, PublishedFile] = field(default_factory=lambda: MappingProxyType({}))
    download: Download | None = None
    package: tuple[str, str] | None = None
    extra: str = ""
    inputs: str = "images"


def _check(name: str, dataset: DataSet) -> None:
    if not isinstance(dataset, DataSet):
        raise UserError(f"data set {name!r} is {dataset!r}; register a DataSet record")
    if dataset.name != name:
        raise UserError(f"data set {name!r} calls itself {dataset.name!r}; register it under that name")
    if ":" in name or not name.strip():
        raise UserError(f"data set {name!r} needs a name without ':'")
    if dataset.inputs not in KINDS:
        raise unknown(f"kind of inputs of the data set {name!r}:", str(dataset.inputs), KINDS)


DATASETS: Registry[DataSet] = Registry("data set", "defedavg.datasets", _check)


def register_dataset(dataset: DataSet) -> DataSet:
    """Register a data set under its name in this process."""
    return DATASETS.register(getattr(dataset, "name", repr(dataset)), dataset)
