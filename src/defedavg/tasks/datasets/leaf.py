"""LEAF's data sets (Caldas et al.: LEAF: A Benchmark for Federated Settings, 2018), as its scripts write them.

A folder has ``train/*.json`` and ``test/*.json``. A file names its users and, for every user, inputs x and targets y:

numbers     784 from 0 to 1 are a grey image of 28x28 pixels (FEMNIST), kept as bytes; others are a vector.
80 characters
            and as y the next one (Shakespeare): the targets are the following character at every position.
rows of text
            as in Sent140, whose fifth field is the tweet: counts of hashed words. A target 4 counts as 1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import UserError, first_line
from ..samples import Data
from ..users import Users
from .characters import CLASSES, LENGTH, encode
from .dataset import LEAF_PREFIX as PREFIX

SIDE: Final = 28
WORDS: Final = 1024
"""The number of features into which words are hashed."""
TEXT_FIELD: Final = 4
"""The field of a tweet in a row of Sent140."""
MAX_CLASS: Final = 100_000
_WORD: Final = re.compile(r"\w+")

Arrays = tuple[NDArray[Any], NDArray[np.int64]]
Reader = Callable[[list[Any], list[Any]], Arrays]


@lru_cache(maxsize=2)
def load(name: str) -> tuple[Data, Data, int, Users, str]:
    """Return training and test data, the number of classes, the users, and the kind of the inputs."""
    if not name:
        raise UserError(f"{PREFIX} needs a folder; write {PREFIX}/path/of/a/folder that has train and test")
    folder = Path(name).expanduser()
    kind: list[str] = []  # of the first sample; all others must be of this kind
    parts = [_part(folder / part, kind) for part in ("train", "test")]
    if parts[0][0].shape[1:] != parts[1][0].shape[1:]:
        shapes = " and ".join(str(part[0].shape[1:]) for part in parts)
        raise UserError(f"{PREFIX}{name} has training and test inputs of the shapes {shapes}; make them equal")
    train, test = (Data(torch.from_numpy(inputs), torch.from_numpy(targets)) for inputs, targets, _ in parts)
    highest = max(int(part.targets.max()) for part in (train, test))
    classes = CLASSES if kind[0] == "characters" else highest + 1
    inputs = {"image": "images", "characters": "tokens"}.get(kind[0], "vectors")
    return train, test, classes, Users(parts[0][2], parts[1][2]), inputs


def _part(folder: Path, kind: list[str]) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[Any]]:
    """Return inputs, targets and users of all files of a folder, in the order of their names."""
    users: list[str] = []
    inputs: list[NDArray[Any]] = []
    targets: list[NDArray[np.int64]] = []
    for path in _files(folder):
        for user, (x, y) in _users(path, kind):
            if inputs and x.shape[1:] != inputs[0].shape[1:]:
                raise UserError(f"{path}: the inputs of user {user!r} differ in size from those of other users")
            users.append(user)
            inputs.append(x)
            targets.append(y)
    if not users:
        raise UserError(f"{folder} has no JSON file with samples; run LEAF's preprocess.sh, and name its folder data")
    ids = np.repeat(np.array(users, dtype=str), [len(y) for y in targets])
    return np.concatenate(inputs), np.concatenate(targets), ids


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".json")
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror or error}; name the folder above it") from None


def _users(path: Path, kind: list[str]) -> list[tuple[str, Arrays]]:
    """Return the users of a file that have samples, with their samples."""
    found, read = _table(path), []
    for user, count in _counts(path, found):
        try:
            arrays = _samples(found["user_data"].get(user), count, kind)
        except (ValueError, TypeError, OverflowError) as error:
            raise UserError(f"{path}: user {user!r}: {first_line(error)}; create the file again") from None
        if arrays is not None:
            read.append((user, arrays))
    return read


def _counts(path: Path, found: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return every user of a file with its number of samples, None where the file does not give them."""
    users, data = found.get("users"), found.get("user_data")
    if not isinstance(users, list) or not isinstance(data, dict) or not all(isinstance(user, str) for user in users):
        raise UserError(f"{path} has no list 'users' of names and table 'user_data'; create it again")
    counts = found.get("num_samples", [None] * len(users))
    if not isinstance(counts, list) or len(counts) != len(users) or len(set(users)) != len(users):
        what = f"{path} has {len(users)} users, which repeat or differ from its 'num_samples'"
        raise UserError(f"{what}; create it again")
    return list(zip(users, counts, strict=True))


def _table(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}; make it readable") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {first_line(error)}; create it again") from None
    return found if isinstance(found, dict) else {}


def _samples(entry: Any, count: Any, kind: list[str]) -> Arrays | None:
    """Return the samples of one user; raise ``ValueError`` or ``TypeError`` that says what is wrong."""
    if not isinstance(entry, dict) or not isinstance(entry.get("x"), list) or not isinstance(entry.get("y"), list):
        raise TypeError("'user_data' has no lists 'x' and 'y' for it")
    x, y = entry["x"], entry["y"]
    if len(x) != len(y) or count not in (None, len(x)):
        announced = "" if count is None else f", and {count} in 'num_samples'"
        raise ValueError(f"it has {len(x)} inputs and {len(y)} targets{announced}")
    if not x:
        return None
    kind[:] = kind or [_kind(x[0])]
    for position, sample in enumerate(x):
        if _kind(sample) != kind[0]:
            raise ValueError(f"sample {position} is not of the kind {kind[0]} of the first sample")
    return READERS[kind[0]](x, y)


def _kind(sample: Any) -> str:
    if isinstance(sample, str):
        return "characters" if len(sample) == LENGTH else "text"
    if isinstance(sample, list) and sample and all(type(value) in (int, float) for value in sample):
        return "image" if len(sample) == SIDE * SIDE else "vector"
    if isinstance(sample, list) and len(sample) > TEXT_FIELD and isinstance(sample[TEXT_FIELD], str):
        return "text"
    raise ValueError("an input is neither numbers, 80 characters nor a row of text")


def _images(x: list[Any], y: list[Any]) -> Arrays:
    values = _numbers(x)
    if values.min() < 0 or values.max() > 1:
        raise ValueError(f"a pixel value is {values.min() if values.min() < 0 else values.max():g}, outside 0..1")
    return np.rint(values * 255).astype(np.uint8).reshape(-1, 1, SIDE, SIDE), _classes(y)


def _vectors(x: list[Any], y: list[Any]) -> Arrays:
    return _numbers(x).astype(np.float32), _classes(y)


def _numbers(x: list[Any]) -> NDArray[np.float64]:
    if len({len(sample) for sample in x}) > 1:
        raise ValueError("its inputs have different lengths")
    values = np.array(x, np.float64)
    if not (np.abs(values) <= np.finfo(np.float32).max).all():  # of NaN too
        raise ValueError("an input has a value that is not a finite number")
    return values


def _classes(y: list[Any]) -> NDArray[np.int64]:
    for value in y:
        whole = type(value) in (int, float) and value == int(value)
        if not whole or not 0 <= value <= MAX_CLASS:
            raise ValueError(f"the target {str(value)[:20]!r} is not a class number 0, 1, …")
    return np.array(y).astype(np.int64)


def _characters(x: list[Any], y: list[Any]) -> Arrays:
    for value in y:
        if not isinstance(value, str) or len(value) != 1:
            raise ValueError(f"the target {str(value)[:20]!r} is not one character")
    whole = np.stack([encode(text + following) for text, following in zip(x, y, strict=True)])
    return whole[:, :-1].copy(), whole[:, 1:].copy()


def _texts(x: list[Any], y: list[Any]) -> Arrays:
    inputs = np.zeros((len(x), WORDS), np.float32)
    for row, sample in zip(inputs, x, strict=True):
        for word in _WORD.findall((sample if isinstance(sample, str) else sample[TEXT_FIELD]).lower()):
            row[_feature(word)] += 1
    targets = _classes([int(value) if isinstance(value, str) and value.isdecimal() else value for value in y])
    return inputs, np.where(targets == 4, 1, targets)


@lru_cache(maxsize=1 << 16)
def _feature(word: str) -> int:
    return int.from_bytes(blake2b(word.encode("utf-8", "replace"), digest_size=8).digest(), "little") % WORDS


READERS: Final[dict[str, Reader]] = {
    "image": _images, "vector": _vectors, "characters": _characters, "text": _texts,
}  # fmt: skip
