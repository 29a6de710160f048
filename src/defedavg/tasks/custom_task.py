"""``make_task``: a task from the user's own model, loss and data. Everything is checked; nothing is trained."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Integral
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from ..errors import CastWarning, UserError, first_line
from .losses import Loss, Metric, cross_entropy, squared_error
from .samples import Data, Inputs
from .task import Logits, Task, is_integer
from .users import indices_by_group

Source = Data | Dataset[Any] | tuple[Any, Any]
"""Training or test data: a pair (inputs, targets) of arrays, or a map-style Dataset of such pairs."""


def make_task(
    *,
    model: Callable[[], nn.Module] | nn.Module,
    train: Source,
    test: Source,
    clients: Any,
    loss: Loss = cross_entropy,
    classes: int | Literal["auto"] | None = "auto",
    name: str = "custom",
    keep_dtype: bool = False,
    logits: Logits | None = None,
    metric: Metric | None = None,
) -> Task:
    """Return a task from your own model, loss and data.

    ``train`` and ``test`` are pairs (inputs, targets) of arrays, or map-style Datasets of such pairs. A dict of arrays
    as inputs becomes keyword arguments of the model. ``clients`` is a sequence with the sample indices of every client,
    or an array with the id of the client of every training sample. ``logits`` picks the tensor for the loss out of the
    model's output: a name, a position, or a function. ``metric`` (outputs, targets) replaces the accuracy; higher is
    better. float64 data become float32 unless ``keep_dtype`` is True.
    """
    model = _to_builder(model)
    _check_functions(loss, logits, metric)
    train, test = _to_data("train", train), _to_data("test", test)
    if not keep_dtype:
        train, test = _single_precision(train, test)
    _check_same_kind(train, test)
    targets = train.targets
    if loss is cross_entropy and targets.is_floating_point() and targets.ndim == 1:
        raise UserError(f"cross_entropy needs integer targets, not {targets.dtype}; convert them, or pass another loss")
    if isinstance(classes, str) and classes == "auto":
        # A squared error compares numbers, so integer targets under it are values and not classes.
        classes = None if loss is squared_error else _count_classes(targets, test.targets)
    elif classes is not None:
        if isinstance(classes, bool) or not isinstance(classes, Integral) or classes < 1:
            raise UserError(f"classes is {classes!r}; pass a number, None, or 'auto'")
        classes = int(classes)
    return Task(name, model, loss, train, test, _to_clients(clients, len(train)), classes, logits, metric)


def _to_builder(model: Any) -> Callable[[], nn.Module]:
    if not callable(model):
        raise UserError(f"model is {type(model).__name__}; pass a torch module, or a function that builds one")
    if isinstance(model, nn.Module):
        # Copied now, so that training the caller's module later does not change the task.
        return partial(copy.deepcopy, copy.deepcopy(model))
    builder: Callable[[], nn.Module] = model
    return builder


def _check_functions(loss: Any, logits: Any, metric: Any) -> None:
    for name, function in (("loss", loss), ("metric", metric)):
        if isinstance(function, type):
            raise UserError(f"{name} is the class {function.__name__}; pass an object of it, or a function")
        if not callable(function) and (name, function) != ("metric", None):
            raise UserError(f"{name} is {function!r}; pass a function of (outputs, targets)")
    if not (logits is None or callable(logits) or isinstance(logits, str | Integral)) or isinstance(logits, bool):
        raise UserError(f"logits is {logits!r}; pass a name, a position, or a function of the model's output")


def _check_same_kind(train: Data, test: Data) -> None:
    """Refuse training and test data that no model can use both; lengths of texts and sizes of images may differ."""
    kinds = [
        {name: (part.ndim, part.dtype) for name, part in data.inputs.items()}
        if isinstance(data.inputs, dict)
        else (data.inputs.ndim, data.inputs.dtype)
        for data in (train, test)
    ]
    if kinds[0] != kinds[1]:
        shown = " and ".join(", ".join(map(_shown, data.tensors[:-1])) for data in (train, test))
        raise UserError(f"the training and test inputs differ in kind: {shown}; give both the same form")
    one, other = train.targets, test.targets
    if one.ndim != other.ndim:
        raise UserError(f"the targets differ in kind: {_shown(one)} and {_shown(other)}; give both the same form")


def _shown(part: Tensor) -> str:
    return f"{tuple(part.shape)} {str(part.dtype).removeprefix('torch.')}"


def _count_classes(train: Tensor, test: Tensor) -> int | None:
    """Return the number of classes, or None if the targets are not class numbers; rows of integers are not."""
    if not (is_integer(train) and is_integer(test) and train.ndim == 1):
        return None
    return max((int(targets.max()) for targets in (train, test) if targets.numel()), default=-1) + 1


# Data.


def _to_data(which: str, source: Any) -> Data:
    if isinstance(source, Data):
        inputs, targets = source.inputs, source.targets
    elif isinstance(source, Dataset):
        inputs, targets = _stack(which, source)
    elif isinstance(source, (tuple, list)) and len(source) == 2:
        inputs, targets = _to_inputs(which, source[0]), _to_tensor(which, source[1])
    else:
        raise UserError(f"{which} is {type(source).__name__}; pass a pair (inputs, targets) or a map-style Dataset")
    if is_integer(targets) or targets.dtype == torch.bool:
        targets = targets.long()  # the only integer type that torch's cross-entropy accepts
    data = Data(inputs, targets)
    _check_numbers(which, data)
    return data


def _single_precision(*several: Data) -> list[Data]:
    if any(part.dtype == torch.float64 for data in several for part in data.tensors):
        text = "float64 data become float32; pass float32, or keep_dtype=True together with a model in float64"
        warnings.warn(text, CastWarning, stacklevel=3)
    return [data.map(lambda part: part.float() if part.dtype == torch.float64 else part) for data in several]


def _check_numbers(which: str, data: Data) -> None:
    """Refuse NaN and infinity; the parts of a dict may have infinity, since attention masks use it."""
    for part in data.tensors:
        if not (part.is_floating_point() or part.is_complex()):
            continue
        masks = isinstance(data.inputs, dict) and part is not data.targets
        for bad, word in ((part.isnan(), "NaN"), (part.isinf(), "infinity")):
            if bool(bad.any()) and not (masks and word == "infinity"):
                sample, kind = int(bad.nonzero()[0, 0]), "targets" if part is data.targets else "inputs"
                raise UserError(
                    f"the {which} {kind} have {word}, first in sample {sample}; fill or remove such samples"
                )


PAIRS = "every item must be a pair (input, target) of arrays of one shape; an input may be a dict of arrays"


def _stack(which: str, source: Dataset[Any]) -> tuple[Inputs, Tensor]:
    pairs = [(_to_inputs(which, x), _to_tensor(which, y)) for x, y in _pairs(which, source)]
    inputs: list[Any] = [x for x, _ in pairs]
    targets = [y for _, y in pairs]
    try:
        if isinstance(inputs[0], dict):
            return {name: torch.stack([x[name] for x in inputs]) for name in inputs[0]}, torch.stack(targets)
        return torch.stack(inputs), torch.stack(targets)
    except (TypeError, KeyError, IndexError, RuntimeError):
        raise UserError(f"cannot stack the {which} Dataset; {PAIRS}") from None


def _pairs(which: str, source: Dataset[Any]) -> list[Any]:
    if isinstance(source, IterableDataset) or not hasattr(source, "__len__") or len(source) == 0:
        raise UserError(f"the {which} Dataset is empty or not map-style; pass one with a length and items, or arrays")
    try:
        items = [source[i] for i in range(len(source))]
    except Exception as error:  # the user's code may raise anything
        failure = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"the {which} Dataset cannot be read: {failure}; correct its __getitem__") from error
    if not all(isinstance(item, tuple | list) and len(item) == 2 for item in items):
        raise UserError(f"cannot stack the {which} Dataset; {PAIRS}")
    return items


def _to_inputs(which: str, values: Any) -> Inputs:
    if not isinstance(values, Mapping):
        return _to_tensor(which, values)
    for name in values:
        if not isinstance(name, str):
            raise UserError(f"the {which} inputs have the key {name!r}; keys are names of the model's arguments")
    return {name: _to_tensor(which, part) for name, part in values.items()}


def _to_tensor(which: str, values: Any) -> Tensor:
    if isinstance(values, Tensor):
        if values.layout != torch.strided or values.is_nested or values.is_meta:
            raise UserError(f"{which} has a sparse, nested or meta tensor; pass a dense one (to_dense)")
        return values.detach()
    try:
        return torch.from_numpy(np.array(values))
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{which} holds values that are not numbers of one shape; pass tensors or arrays") from None


# Clients.


def _to_clients(clients: Any, samples: int) -> tuple[NDArray[np.int64], ...]:
    """Return the sample indices of every client, from such indices or from the client of every sample."""
    if isinstance(clients, str | bytes | Mapping) or not (hasattr(clients, "__iter__") and hasattr(clients, "__len__")):
        wanted = "pass the sample indices of every client, or an array with the client id of every training sample"
        raise UserError(f"clients is {type(clients).__name__}; {wanted}")
    entries = list(clients)
    if entries and all(_is_id(entry) for entry in entries):
        return _by_id(entries, samples)
    return tuple(_to_indices(i, part) for i, part in enumerate(entries))


def _is_id(entry: Any) -> bool:
    return isinstance(entry, str | bytes) or not hasattr(entry, "__iter__") or getattr(entry, "ndim", 1) == 0


def _by_id(ids: list[Any], samples: int) -> tuple[NDArray[np.int64], ...]:
    """Return the samples of every client, the clients in sorted order of their ids."""
    ids = [one.item() if isinstance(one, np.generic | Tensor) else one for one in ids]
    kinds = {type(one) for one in ids}
    if len(kinds) > 1 or not kinds <= {int, str, bytes}:
        found = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise UserError(f"the client ids are of type {found}; pass whole numbers or text, all of one type")
    if len(ids) != samples:
        remedy = "pass the client id of every training sample, or the list of sample indices of every client"
        raise UserError(f"clients has {len(ids)} ids for {samples} training samples; {remedy}")
    numbers = {one: number for number, one in enumerate(sorted(set(ids)))}  # an array of text would lose final NULs
    return indices_by_group(np.array([numbers[one] for one in ids], dtype=np.int64))


def _to_indices(client: int, part: Any) -> NDArray[np.int64]:
    try:
        indices = np.asarray(part)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"the indices of client {client} are not an array; pass whole sample numbers") from None
    if indices.size and not np.issubdtype(indices.dtype, np.integer):
        raise UserError(f"the indices of client {client} are {indices.dtype}; pass whole sample numbers")
    if indices.ndim != 1:
        raise UserError(f"the indices of client {client} are not a 1-d int64 array; pass a list of sample numbers")
    return indices.astype(np.int64)
