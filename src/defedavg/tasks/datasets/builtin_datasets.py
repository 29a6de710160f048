"""The registry with the data sets that come with the package, and what is known of a data set without reading it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import UserError
from .cifar10 import CIFAR10
from .dataset import DATASETS, HUB_PREFIX, LEAF_PREFIX, DataSet, register_dataset
from .dataset_files import data_dir, how_to_get, locate
from .fashionmnist import FASHIONMNIST
from .flights import FLIGHTS
from .mnist5k import MNIST5K
from .mnist_writers import MNIST_WRITERS
from .shakespeare_roles import SHAKESPEARE_ROLES

__all__ = ["BUILT_IN_READERS", "DATASETS", "dataset_rows", "find", "kind_of_inputs", "register_dataset"]

_BUILT_IN = (MNIST5K, FASHIONMNIST, CIFAR10, FLIGHTS, MNIST_WRITERS, SHAKESPEARE_ROLES)
BUILT_IN_READERS = frozenset(dataset.read for dataset in _BUILT_IN)

for _dataset in _BUILT_IN:
    register_dataset(_dataset)


def kind_of_inputs(name: str) -> str:
    """Return which of ``KINDS`` the inputs of a data set are; only images are normalised."""
    if name.startswith(HUB_PREFIX):
        return "images"
    if name.startswith(LEAF_PREFIX):
        from . import leaf  # PyTorch is loaded with the samples

        return leaf.load(name.removeprefix(LEAF_PREFIX))[4]
    return DATASETS.find(name).inputs


def find(name: str) -> Path | None:
    """Return the folder in which a registered data set was found; None if it needs no files."""
    paths = locate(DATASETS.find(name), data_dir())
    return paths[0].parent if paths else None


def dataset_rows() -> list[dict[str, Any]]:
    """Return what ``defedavg data list`` shows: every data set, where it was found, or how to get it."""
    return [_row(dataset) for dataset in DATASETS.values()]


def _row(dataset: DataSet) -> dict[str, Any]:
    row: dict[str, Any] = {"name": dataset.name, "image": list(dataset.image)}
    row |= {"train": dataset.train_samples, "test": dataset.test_samples, "folder": None, "problem": None}
    try:
        folder = find(dataset.name)
        row["folder"] = None if folder is None else str(folder)
    except UserError as error:
        row["problem"] = str(error)
    row["get"] = how_to_get(dataset)
    return row | {word: getattr(dataset, word) for word in ("classes", "summary", "credit")}
