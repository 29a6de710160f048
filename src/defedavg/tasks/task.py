"""A task: a model, a loss, the data, and the training samples of every client.

A task holds no randomness and no settings of a run. Everything is checked when it is made, so the code that trains on
it needs no checks: no client is empty, no sample belongs to two clients, and every index and target is in range.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from ..errors import UserError
from .lazy_partition import LazyPartition

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> one value per sample, of shape (batch,)."""

Clients = tuple[NDArray[np.int64], ...] | LazyPartition
"""For every client, the indices of its training samples; a ``LazyPartition`` draws them when they are needed."""


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of every sample."""
    return F.cross_entropy(outputs, targets, reduction="none")


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return half the squared distance between output and target, for every sample."""
    # Without this check, (n, 1) and (n,) would broadcast to (n, n).
    if outputs.shape != targets.shape:
        shapes = f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}"
        raise UserError(f"squared_error needs equal shapes, not {shapes}; reshape the targets")
    return 0.5 * (outputs - targets).square().unsqueeze(-1).flatten(1).sum(1)


@dataclass(frozen=True, slots=True, eq=False)
class Data:
    """Samples: inputs and targets of the same length."""

    inputs: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        if self.inputs.ndim == 0 or self.targets.ndim == 0:
            raise UserError("inputs and targets need a first dimension that counts samples; pass at least 1-d tensors")
        if len(self.inputs) != len(self.targets):
            raise UserError(f"{len(self.inputs)} inputs but {len(self.targets)} targets; give one target per input")

    def __len__(self) -> int:
        return len(self.inputs)

    def to(self, device: str | torch.device) -> Data:
        """Return the same samples on a device."""
        return Data(self.inputs.to(device), self.targets.to(device))


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A model, a loss, training and test data, and the indices of each client's training samples."""

    name: str
    model: Callable[[], nn.Module]
    loss: Loss
    train: Data
    test: Data
    clients: Clients
    classes: int | None

    def __post_init__(self) -> None:
        if len(self.test) == 0:
            raise UserError("the test set is empty; give it at least one sample")
        _check_clients(self.clients, len(self.train))
        if self.classes is not None:
            _check_targets("training", self.train.targets, self.classes)
            _check_targets("test", self.test.targets, self.classes)

    def to(self, device: str | torch.device) -> Task:
        """Return the same task with its data on a device."""
        return dataclasses.replace(self, train=self.train.to(device), test=self.test.to(device))

    @property
    def num_clients(self) -> int:
        """The number of clients."""
        return len(self.clients)


def _check_clients(clients: Clients, samples: int) -> None:
    if not clients:
        raise UserError("the task has no clients; give the sample indices of at least one client")
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


def _check_targets(which: str, targets: Tensor, classes: int) -> None:
    if not _is_integer(targets):
        raise UserError(f"the {which} targets are {targets.dtype}, not integers; pass class numbers, or classes=None")
    if len(targets) and not (int(targets.min()) >= 0 and int(targets.max()) < classes):
        found = f"the {which} targets go from {int(targets.min())} to {int(targets.max())}, outside 0..{classes - 1}"
        raise UserError(f"{found}; renumber the classes, or pass classes=None")


def _is_integer(values: Tensor) -> bool:
    return not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)


def make_task(
    *,
    model: Callable[[], nn.Module] | nn.Module,
    train: Data | Dataset[Any] | tuple[Any, Any],
    test: Data | Dataset[Any] | tuple[Any, Any],
    clients: Sequence[Any],
    loss: Loss = cross_entropy,
    classes: int | Literal["auto"] | None = "auto",
    name: str = "custom",
    keep_dtype: bool = False,
) -> Task:
    """Return a task from your own model, loss and data: pairs (inputs, targets) of arrays, or map-style Datasets."""
    if not callable(model):
        raise UserError(f"model is {type(model).__name__}; pass a torch module, or a function that builds one")
    if isinstance(model, nn.Module):
        # Copied now, so that training the caller's module later does not change the task.
        model = partial(copy.deepcopy, copy.deepcopy(model))
    train, test = _to_data("train", train, keep_dtype), _to_data("test", test, keep_dtype)
    targets = train.targets
    if loss is cross_entropy and targets.is_floating_point() and targets.ndim == 1:
        raise UserError(f"cross_entropy needs integer targets, not {targets.dtype}; convert them, or pass another loss")
    if isinstance(classes, str):
        if classes != "auto":
            raise UserError(f"classes is {classes!r}; pass a number, None, or 'auto'")
        # A squared error compares numbers, so integer targets under it are values and not classes.
        classes = None if loss is squared_error else _count_classes(targets, test.targets)
    indices = tuple(_to_indices(i, part) for i, part in enumerate(clients))
    return Task(name, model, loss, train, test, indices, classes)


def _count_classes(train: Tensor, test: Tensor) -> int | None:
    """Return the number of classes, or None if the targets are not class numbers; rows of integers are not."""
    if not (_is_integer(train) and _is_integer(test) and train.ndim == 1):
        return None
    return max((int(targets.max()) for targets in (train, test) if targets.numel()), default=-1) + 1


def _to_data(which: str, source: Data | Dataset[Any] | tuple[Any, Any], keep_dtype: bool) -> Data:
    if isinstance(source, Data):
        inputs, targets = source.inputs, source.targets
    elif isinstance(source, Dataset):
        inputs, targets = _stack(which, source)
    elif isinstance(source, (tuple, list)) and len(source) == 2:
        inputs, targets = _to_tensor(which, source[0]), _to_tensor(which, source[1])
    else:
        raise UserError(f"{which} is {type(source).__name__}; pass a pair (inputs, targets) or a map-style Dataset")
    if not keep_dtype:
        inputs, targets = (part.float() if part.dtype == torch.float64 else part for part in (inputs, targets))
    if _is_integer(targets) or targets.dtype == torch.bool:
        targets = targets.long()  # the only integer type that torch's cross-entropy accepts
    return Data(inputs, targets)


def _stack(which: str, source: Dataset[Any]) -> tuple[Tensor, Tensor]:
    if isinstance(source, IterableDataset) or not hasattr(source, "__len__") or len(source) == 0:
        raise UserError(f"the {which} Dataset is empty or not map-style; pass one with a length and items, or arrays")
    items = [source[i] for i in range(len(source))]
    try:
        pairs = [(_to_tensor(which, x), _to_tensor(which, y)) for x, y in items]
        return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])
    except (TypeError, ValueError, RuntimeError):
        raise UserError(
            f"cannot stack the {which} Dataset; every item must be a pair (input, target) of arrays of one shape"
        ) from None


def _to_tensor(which: str, values: Any) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach()
    try:
        return torch.from_numpy(np.array(values))
    except (TypeError, ValueError):
        raise UserError(f"{which} holds values that are not numbers of one shape; pass tensors or arrays") from None


def _to_indices(client: int, part: Any) -> NDArray[np.int64]:
    indices = np.asarray(part)
    if indices.size and not np.issubdtype(indices.dtype, np.integer):
        raise UserError(f"the indices of client {client} are {indices.dtype}; pass whole sample numbers")
    return indices.astype(np.int64)
