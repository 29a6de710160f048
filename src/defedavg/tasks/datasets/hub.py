"""Data sets of the Hugging Face Hub, or of a folder on this machine, read with the package ``datasets``.

The package is an optional dependency, imported when it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import UserError, first_line
from ..samples import Data
from ..users import Ids, Users, check_ids
from .dataset import HUB_PREFIX as PREFIX

IMAGES: Final = ("image", "img")
LABELS: Final = ("label", "labels")
TESTS: Final = ("test", "validation", "valid")

_GREY: Final = {"1", "L", "LA"}
_COLOUR: Final = {"P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"}


@lru_cache(maxsize=2)
def load(name: str) -> tuple[Data, Data, int]:
    """Return (train, test, classes) of a data set on the Hub or in a folder, with pixel values 0..255."""
    train, test = _train_and_test(name)
    image, label = _column(name, train, "image", IMAGES), _column(name, train, "label", LABELS)
    for part in (train, test):
        if len(part) == 0:
            raise UserError(f"{PREFIX}{name} has a split without samples; use another data set")
    data = [_data(name, part, image, label) for part in (train, test)]
    if data[0].inputs.shape[1:] != data[1].inputs.shape[1:]:
        raise UserError(f"{PREFIX}{name} has images of several shapes; resize them to one, and use make_task")
    known = getattr(train.features[label], "num_classes", None)
    highest = max(int(part.targets.max()) for part in data)
    return data[0], data[1], max(highest + 1, known if isinstance(known, int) else 0)


@lru_cache(maxsize=2)
def load_users(name: str, column: str) -> Users:
    """Return the users of a data set: the values of a column, and of the same column of the test split if it exists."""
    train, test = _train_and_test(name)
    if column not in train.column_names:
        wrong = f"has no column {column!r}" if column else "names no users"
        remedy = f"set task.partition_by to one of its columns: {_listed(train.column_names)}"
        raise UserError(f"{PREFIX}{name} {wrong}; {remedy}")
    tested = _ids(name, test, column) if column in test.column_names else None
    return Users(_ids(name, train, column), tested)


def _ids(name: str, part: Any, column: str) -> Ids:
    try:
        values = list(part[column])
        ids = np.array(values)
    except Exception as error:  # whatever the package raises when it decodes
        raise UserError(f"{PREFIX}{name} cannot be decoded: {first_line(error)[:300]}") from None
    if any(type(value) not in (int, str) for value in values) or len(set(map(type, values))) > 1:
        found = ", ".join(sorted({type(value).__name__ for value in values}))
        raise UserError(f"{PREFIX}{name} has values of type {found} in {column!r}; users are whole numbers or text")
    return check_ids(ids, len(part), f"{PREFIX}{name}")


def _train_and_test(name: str) -> tuple[Any, Any]:
    parts = _parts(name)
    if "train" not in parts or not set(TESTS) & set(parts):
        raise UserError(f"{PREFIX}{name} has the splits {_listed(parts)}; it needs train and one of {_listed(TESTS)}")
    return parts["train"], parts[next(split for split in TESTS if split in parts)]


def _parts(name: str) -> Any:
    """Return the splits by name."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"{PREFIX}{name} is read with the package datasets; pip install 'defedavg[hub]'") from None
    if not name:
        raise UserError(f"{PREFIX} needs the name of a data set; write {PREFIX}NAME or {PREFIX}/path/of/a/folder")
    folder = Path(name).expanduser()
    saved = any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))
    read: Callable[[str], Any] = datasets.load_from_disk if saved else datasets.load_dataset
    try:
        found = read(str(folder) if folder.is_dir() else name)
    except Exception as error:  # whatever the network, the files and the package raise
        line = first_line(error)[:300]
        raise UserError(f"{PREFIX}{name} cannot be loaded: {line}; check the name and the network") from None
    if not isinstance(found, dict):
        raise UserError(f"{PREFIX}{name} has no splits; save it as a DatasetDict with train and test")
    return found


def _listed(names: Any) -> str:
    return ", ".join(map(str, names)) or "(none)"


def _column(name: str, part: Any, what: str, candidates: tuple[str, ...]) -> str:
    for column in candidates:
        if column in part.column_names:
            return column
    found = f"{PREFIX}{name} has the columns {_listed(part.column_names)}"
    raise UserError(f"{found}; the {what} must be in {' or '.join(candidates)}")


def _data(name: str, part: Any, image_column: str, label: str) -> Data:
    try:
        read = [_pixels(value) for value in part[image_column]]
        targets = np.array(list(part[label]))
    except Exception as error:  # whatever the package raises when it decodes
        raise UserError(f"{PREFIX}{name} cannot be decoded: {first_line(error)[:300]}") from None
    images = [image for image in read if image is not None]
    if len(images) < len(read):
        raise UserError(f"{PREFIX}{name} has images that are not 8-bit grey or colour; convert them, and use make_task")
    if len({image.shape[1:] for image in images}) > 1:
        raise UserError(f"{PREFIX}{name} has images of several sizes; resize them to one, and use make_task")
    channels = max(map(len, images))  # grey images get the channels of the others
    inputs = np.stack([image if len(image) == channels else image.repeat(channels, 0) for image in images])
    if targets.ndim != 1 or not np.issubdtype(targets.dtype, np.integer) or targets.min() < 0:
        raise UserError(f"{PREFIX}{name} has labels in {label} that are not class numbers 0, 1, …; renumber them")
    return Data(torch.from_numpy(inputs), torch.from_numpy(targets.astype(np.int64)))


def _pixels(value: Any) -> NDArray[np.uint8] | None:
    """Return an image, or rows of grey values 0..255, as (channels, height, width); None for anything else."""
    mode = getattr(value, "mode", None)
    if mode in _GREY:
        return np.asarray(value.convert("L"))[None]
    if mode in _COLOUR:
        return np.asarray(value.convert("RGB")).transpose(2, 0, 1)
    plain = np.asarray(value if mode is None else 0)
    grey = plain.ndim == 2 and plain.size > 0 and np.issubdtype(plain.dtype, np.integer)
    return plain.astype(np.uint8)[None] if grey and plain.min() >= 0 and plain.max() <= 255 else None
