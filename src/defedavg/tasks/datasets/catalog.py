"""Data sets by name, and classification tasks on them; nothing is downloaded here.

``load`` reads a registered data set and normalises it to float32. Names that begin with ``hf:`` are read through
Hugging Face's ``datasets``, and those with ``leaf:`` from a folder of LEAF's JSON files.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ... import rng as keyed
from ...errors import UserError, unknown
from .. import models
from ..client_tests import tests_of_users
from ..losses import IGNORED, cross_entropy, token_accuracy, token_cross_entropy
from ..partition import PARTITIONS, is_identical, needs_users, split
from ..samples import Data
from ..task import Task
from ..task_names import NORMALISATIONS, check_pooling
from ..users import Users, check_ids, count_users
from . import hub, leaf
from .array_cache import read_through_cache
from .builtin_datasets import BUILT_IN_READERS, DATASETS, kind_of_inputs
from .dataset import HUB_PREFIX, LEAF_PREFIX, DataSet
from .dataset_files import data_dir, locate

Loaded = tuple[Data, Data, int]
"""Training data, test data, and the number of classes."""

Scaling = Callable[[Tensor], Tensor]

CHUNK: Final = 256
"""Images at a time, so that large sets of bytes are never held whole in a wider type."""


def load_pixels(name: str) -> Loaded:
    """Return a data set with pixel values 0..255, as bytes or as float32; the files of one folder are read once."""
    if name.startswith(HUB_PREFIX):
        return hub.load(name.removeprefix(HUB_PREFIX))
    if name.startswith(LEAF_PREFIX):
        return leaf.load(name.removeprefix(LEAF_PREFIX))[:3]
    dataset = DATASETS.find(name)
    return _read_files(dataset)[0]


def _read_files(dataset: DataSet) -> tuple[Loaded, Users | None]:
    root = data_dir()
    return _read(dataset, locate(dataset, root), root)


@lru_cache(maxsize=3)
def _read(dataset: DataSet, paths: tuple[Path, ...], root: Path) -> tuple[Loaded, Users | None]:
    # The reader of a plugin may change without its files.
    cached = bool(paths) and dataset.read in BUILT_IN_READERS
    parts = read_through_cache(dataset, paths, root) if cached else dataset.read(paths)
    train, test = (Data(torch.from_numpy(part[0]), torch.from_numpy(part[1])) for part in parts)
    what = f"the data set {dataset.name!r}"
    ids = [check_ids(part[2], len(part[0]), what) if len(part) == 3 else None for part in parts]
    return (train, test, dataset.classes), None if ids[0] is None else Users(ids[0], ids[1])


def load_users(name: str, partition_by: str = "") -> Users:
    """Return the users of a data set: the id of every sample; ``partition_by`` names their column in one of the Hub."""
    if name.startswith(HUB_PREFIX):
        return hub.load_users(name.removeprefix(HUB_PREFIX), partition_by)
    if partition_by:
        raise UserError(f"task.partition_by names a column of a data set hf:NAME, and {name!r} is not one; remove it")
    if name.startswith(LEAF_PREFIX):
        return leaf.load(name.removeprefix(LEAF_PREFIX))[3]
    dataset = DATASETS.find(name)
    users = _read_files(dataset)[1]
    if users is None:
        raise UserError(f"the data set {name!r} has no users, which split = natural needs; use another split")
    return users


def natural_clients(data: str, partition_by: str, min_samples_per_client: int) -> int:
    """Return the number of users of a data set that have enough training samples."""
    return count_users(load_users(data, partition_by).train, min_samples_per_client)


def load(name: str, normalise: str = "standard", test_share: float = 0.0) -> Loaded:
    """Return a data set with scaled pixel values; inputs that are not images are not scaled.

    "standard" has mean 0 and deviation 1 per channel of the training set, "unit" is 0..1, "symmetric" is -1..1. With
    a ``test_share`` above 0, training and test set are pooled, and this share of all samples becomes the test set.
    """
    if normalise not in NORMALISATIONS:
        raise unknown("normalisation", normalise, NORMALISATIONS)
    loaded = load_pixels(name)
    if test_share:
        loaded = _pooled(loaded, test_share)
    return _normalised(loaded, normalise) if kind_of_inputs(name) == "images" else loaded


@lru_cache(maxsize=4)
def _pooled(loaded: Loaded, test_share: float) -> Loaded:
    """Draw a new test set from all samples by a fixed key: the data do not depend on the seed of a run."""
    train, test, classes = loaded
    pooled = [torch.cat(parts) for parts in zip(train.tensors, test.tensors, strict=True)]
    number = round(test_share * len(pooled[0]))
    if not 0 < number < len(pooled[0]):
        raise UserError(f"test_share is {test_share:g} of {len(pooled[0])} samples; leave samples to train and to test")
    order = torch.from_numpy(keyed.permutation(keyed.key(0, "test share"), len(pooled[0])))
    inputs, targets = pooled
    train, test = (Data(inputs[part], targets[part]) for part in (order[number:], order[:number]))
    return train, test, classes


@lru_cache(maxsize=4)
def _normalised(loaded: Loaded, normalise: str) -> Loaded:
    """Normalise pixels; the cache is keyed by the loaded tensors, so another folder is another data set."""
    train, test, classes = loaded
    scale = NORMALISERS[normalise](train.inputs)
    return Data(scale(train.inputs), train.targets), Data(scale(test.inputs), test.targets), classes


def classification_task(
    data: str,
    model: str,
    split_kind: str,
    num_clients: int,
    seed: int,
    *,
    normalise: str = "standard",
    test_share: float = 0.0,
    partition_by: str = "",
    **split_options: int | float,
) -> Task:
    """Return a classification task from the names of its data set, model and split, and the options of the split.

    If a sample has one target per position, the loss and the accuracy are those of tokens, and a sample has no class.
    """
    check_pooling(split_kind, test_share)
    train, test, classes = load(data, normalise, test_share)
    tokens = kind_of_inputs(data) == "tokens"
    if tokens:
        _check_texts(data, (train, test), classes)
    builder = partial(models.build, model, tuple(train.inputs.shape[1:]), classes)
    with torch.device("meta"):  # an unknown or unfit model is reported now, without memory or a random draw
        builder()
    users = load_users(data, partition_by) if needs_users(split_kind) else None
    ids = None if users is None else users.train
    name, labels = f"{data}/{model}/{split_kind}", train.targets.numpy()
    if not tokens:
        clients = split(split_kind, labels, num_clients, seed, users=ids, **split_options)
        tests = None if users is None else tests_of_users(users, clients)
        return Task(name, builder, cross_entropy, train, test, clients, classes, client_tests=tests)
    PARTITIONS.find(split_kind)
    if not (needs_users(split_kind) or is_identical(split_kind)):
        what = f"split = {split_kind} needs one class per sample, and {data!r} has a target for every token"
        raise UserError(f"{what}; use natural, iid or sampled")
    clients = split(split_kind, labels[:, 0], num_clients, seed, users=ids, **split_options)
    tests, loss = None if users is None else tests_of_users(users, clients), token_cross_entropy
    return Task(name, builder, loss, train, test, clients, None, metric=token_accuracy, client_tests=tests)


def _check_texts(data: str, parts: tuple[Data, Data], classes: int) -> None:
    """Refuse texts whose targets do not fit their inputs, or that have other numbers than those of the alphabet."""
    for part in parts:
        inputs, targets = part.inputs, part.targets
        if inputs.shape != targets.shape or inputs.is_floating_point():
            shapes = f"{tuple(inputs.shape)} {inputs.dtype} and {tuple(targets.shape)}"
            raise UserError(f"{data} has inputs and targets {shapes}; texts need integers (samples, length) for both")
        counted = torch.cat([inputs.flatten(), targets[targets != IGNORED]])
        if not (int(counted.min()) >= 0 and int(counted.max()) < classes):
            raise UserError(f"{data} has characters outside 0..{classes - 1}; renumber them, or raise its classes")


# Normalisation.


def _standard(train: Tensor) -> Scaling:
    if train.dtype == torch.uint8:
        return partial(_look_up, _standard_table(train))
    others = [d for d in range(train.ndim) if d != 1]
    std, mean = torch.std_mean(train.double(), dim=others, correction=0, keepdim=True)
    std = torch.where(std > 0, std, 1.0)

    def scale(values: Tensor) -> Tensor:
        scaled = torch.empty_like(values, dtype=torch.float32)
        for start in range(0, len(values), CHUNK):
            chunk = slice(start, start + CHUNK)
            scaled[chunk] = (values[chunk] - mean) / std
        return scaled

    return scale


def _standard_table(train: Tensor) -> Tensor:
    """Return the normalised value of every byte, per channel; counting bytes gives exact mean and deviation."""
    counts, source = torch.zeros(train.shape[1], 256, dtype=torch.int64), train.numpy()
    for start in range(0, len(train), CHUNK):
        for channel, channel_counts in enumerate(counts):
            channel_counts += torch.from_numpy(_byte_counts(source[start : start + CHUNK, channel]))
    values = torch.arange(256)
    number, total, squares = (int(counts[0].sum()), (counts * values).sum(1), (counts * values.square()).sum(1))
    mean = total.double() / number
    variance = [(number * int(q) - int(t) ** 2) / number**2 for t, q in zip(total, squares, strict=True)]
    std = torch.tensor(variance, dtype=torch.float64).sqrt()
    return ((values.double() - mean[:, None]) / torch.where(std > 0, std, 1.0)[:, None]).float()


def _byte_counts(values: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return how often every byte occurs; counting two bytes at once takes less time."""
    flat = np.ascontiguousarray(values).reshape(-1)
    paired, last = flat[: len(flat) // 2 * 2].view(np.uint16), flat[len(flat) // 2 * 2 :]
    pairs = np.bincount(paired, minlength=1 << 16).reshape(256, 256)
    counts: NDArray[np.int64] = pairs.sum(0) + pairs.sum(1) + np.bincount(last, minlength=256)
    return counts


def _look_up(table: Tensor, pixels: Tensor) -> Tensor:
    """Return ``table[channel, pixel]`` for every pixel."""
    scaled = np.empty(tuple(pixels.shape), np.float32)
    source, rows = pixels.numpy(), table.numpy()
    for start in range(0, len(source), CHUNK):
        chunk = slice(start, start + CHUNK)
        for channel, row in enumerate(rows):
            scaled[chunk, channel] = row.take(source[chunk, channel], mode="clip")  # unchecked: a byte is below 256
    return torch.from_numpy(scaled)


NORMALISERS: Final[dict[str, Callable[[Tensor], Scaling]]] = {
    "standard": _standard,
    "unit": lambda _: lambda values: values / 255,
    "symmetric": lambda _: lambda values: (values / 255).mul_(2).sub_(1),
}
"""By name: training inputs -> the function that scales any inputs."""
