"""A task: a model, a loss, the data, and the training samples of every client.

A task holds no randomness and no settings of a run. Everything is checked when it is made, so the code that trains on
it needs no checks: no client is empty, no sample belongs to two clients, and every index and target is in range.
``make_task`` (``custom_task.py``) makes one from the user's own model and data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..errors import UserError
from .lazy_partition import Clients, LazyPartition
from .losses import Loss, Metric
from .samples import Data

Logits = str | int | Callable[[Any], Tensor]
"""Where a model's output has the logits: a key or attribute, a position, or a function of the output."""

ACCURACY = "accuracy"
"""The name of the metric of a task with classes, unless it has a metric of its own."""


@dataclass(frozen=True, slots=True, eq=False)
class ClientTests:
    """The samples on which the model is evaluated per client, as indices of the training or of the test data.

    ``clients`` are the numbers of the clients, None for a test user that is not a client. A client may have no sample.
    """

    part: Literal["train", "test"]
    samples: tuple[NDArray[np.int64], ...]
    clients: tuple[int | None, ...]
    names: tuple[str, ...]

    @classmethod
    def of(
        cls, part: Literal["train", "test"], samples: tuple[NDArray[np.int64], ...], names: Sequence[object] = ()
    ) -> ClientTests:
        """Return the samples of all clients, in their order; without names, a client has its number."""
        numbers = tuple(range(len(samples)))
        return cls(part, samples, numbers, tuple(map(str, names or numbers)))


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A model, a loss, training and test data, and the indices of each client's training samples.

    ``logits`` says where the model's output has the tensor that the loss receives, if the output is not a tensor.
    ``metric`` replaces the accuracy. ``client_tests`` are the samples of every client's own evaluation.
    """

    name: str
    model: Callable[[], nn.Module]
    loss: Loss
    train: Data
    test: Data
    clients: Clients
    classes: int | None
    logits: Logits | None = None
    metric: Metric | None = None
    client_tests: ClientTests | None = None

    def __post_init__(self) -> None:
        if len(self.test) == 0:
            raise UserError("the test set is empty; give it at least one sample")
        _check_clients(self.clients, len(self.train))
        if self.classes is not None:
            _check_targets("training", self.train.targets, self.classes)
            _check_targets("test", self.test.targets, self.classes)
        if self.client_tests is not None:
            _check_tests(self.client_tests, self)

    def to(self, device: str | torch.device) -> Task:
        """Return the same task with its data on a device."""
        return dataclasses.replace(self, train=self.train.to(device), test=self.test.to(device))

    @property
    def num_clients(self) -> int:
        """The number of clients."""
        return len(self.clients)

    @property
    def metric_name(self) -> str:
        """The name under which tables and figures show the metric: that of its function."""
        return ACCURACY if self.metric is None else _name(self.metric).rpartition(".")[2].strip("<>")

    @property
    def function_names(self) -> tuple[str, ...]:
        """The names of loss, logits and metric; equal for two tasks of one task module that can share batches."""
        return tuple(_name(each) if callable(each) else repr(each) for each in (self.loss, self.logits, self.metric))


def _name(function: Callable[..., Any]) -> str:
    """Return the name of a function, of the function inside a ``partial``, or of an object's class."""
    function = getattr(function, "func", function)
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _check_clients(clients: Clients, samples: int) -> None:
    if not clients:
        raise UserError("the task has no clients; give the sample indices of at least one client")
    if not samples:
        raise UserError("the training set is empty; give it at least one sample")
    if isinstance(clients, LazyPartition):
        return  # correct by construction, and too many to check
    for i, indices in enumerate(clients):
        if len(indices) == 0:
            raise UserError(f"client {i} has no samples; use fewer clients, more data, or another split")
        if indices.ndim != 1 or indices.dtype != np.int64:
            raise UserError(f"the indices of client {i} are not a 1-d int64 array; pass them through make_task")
        if indices.min() < 0 or indices.max() >= samples:
            raise UserError(f"client {i} has a sample index outside 0..{samples - 1}; index the {samples} samples")
    uses = np.bincount(np.concatenate(clients), minlength=samples)
    if uses.max() > 1:
        raise UserError(f"sample {int(uses.argmax())} is assigned {int(uses.max())} times; give it to one client, once")


def _check_tests(tests: ClientTests, task: Task) -> None:
    samples, total = np.concatenate(tests.samples), len(task.train if tests.part == "train" else task.test)
    if len(samples) and not (samples.min() >= 0 and samples.max() < total):
        raise UserError(f"a client is evaluated on a sample outside 0..{total - 1}; index the {tests.part} data")
    if tests.part == "train" and np.isin(samples, np.concatenate(list(task.clients))).any():
        raise UserError("a client is evaluated on a sample that some client trains on; hold it out")


def _check_targets(which: str, targets: Tensor, classes: int) -> None:
    if not is_integer(targets):
        raise UserError(f"the {which} targets are {targets.dtype}, not integers; pass class numbers, or classes=None")
    if len(targets) and not (int(targets.min()) >= 0 and int(targets.max()) < classes):
        found = f"the {which} targets go from {int(targets.min())} to {int(targets.max())}, outside 0..{classes - 1}"
        raise UserError(f"{found}; renumber the classes, or pass classes=None")


def is_integer(values: Tensor) -> bool:
    """Return whether the values are integers; Boolean values are not."""
    return not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)
