"""The arrays of a data set in one file that loads at once, in the folder ``arrays`` of the data folder.

Reading published files means decompressing, parsing and checking them, which takes longer than a small study. A cache
file holds what the reader returned, and the size and the time of change of every file that was read: it is used only
while these are the same and this version of the package reads it. It is a NumPy archive, whose checksums are verified
when it is read. A damaged one is replaced, with one line; a folder that cannot be written to works without a cache.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ... import __version__
from ...errors import FallbackWarning, first_line
from .dataset import DataSet, Part, UserPart

FOLDER: Final = "arrays"
ORIGIN: Final = "origin"
NAMES: Final = ("inputs", "targets", "users")

Parts = tuple[Part | UserPart, Part | UserPart]


def read_through_cache(dataset: DataSet, paths: Sequence[Path], root: Path) -> Parts:
    """Return what the reader of a data set returns for its files; ``root`` is the data folder, which has the cache."""
    try:
        origin = _origin(paths)
    except OSError:
        return dataset.read(paths)  # which says in one line what is wrong with the files
    key = sha256("\0".join(map(str, paths)).encode(errors="surrogateescape")).hexdigest()[:16]
    cache = root / FOLDER / f"{dataset.name}-{key}.npz"
    if (parts := _load(cache, origin, dataset)) is None:
        parts = dataset.read(paths)
        _store(cache, origin, parts)
    return parts


def _origin(paths: Sequence[Path]) -> str:
    """Return what must be the same for a cache file to be used."""
    found = [path.stat() for path in paths]
    return json.dumps([__version__, *([str(p), s.st_size, s.st_mtime_ns] for p, s in zip(paths, found, strict=True))])


def _load(cache: Path, origin: str, dataset: DataSet) -> Parts | None:
    """Return the arrays of a cache file; None if it does not exist, is damaged, or is of other files."""
    try:
        with cache.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            if archive[ORIGIN].tobytes().decode() != origin:
                return None
            train, test = (_part(archive, name, dataset) for name in ("train", "test"))
            return train, test
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    except Exception as error:  # zipfile and NumPy's parser of headers raise almost anything
        line = f"the cache {cache} is damaged and is made again from the data set's files: {first_line(error)}"
        warnings.warn(line, FallbackWarning, stacklevel=2)
        return None


def _part(archive: Any, name: str, dataset: DataSet) -> Part | UserPart:
    """Return one part; raise ``ValueError`` if it is not what a reader returns."""
    arrays: list[NDArray[Any]] = [archive[key] for kind in NAMES if (key := f"{name}_{kind}") in archive]
    inputs, targets = arrays[:2]
    classes = targets[targets >= 0]
    if not len(inputs) or any(len(each) != len(inputs) for each in arrays) or targets.dtype != np.int64:
        raise ValueError(f"its arrays of {name} do not fit each other")
    if inputs.dtype.kind not in "uif" or (len(classes) and classes.max() >= dataset.classes):
        raise ValueError(f"its arrays of {name} are not those of {dataset.name}")
    return (inputs, targets, arrays[2]) if len(arrays) == len(NAMES) else (inputs, targets)


def _store(cache: Path, origin: str, parts: Parts) -> None:
    """Write a cache file, complete or not at all; other processes may write the same one."""
    arrays = {
        f"{name}_{kind}": np.ascontiguousarray(array)
        for name, part in zip(("train", "test"), parts, strict=True)
        for kind, array in zip(NAMES, part, strict=False)  # only some have users
    }
    if any(array.dtype.hasobject for array in arrays.values()):
        return
    with suppress(OSError):  # a read-only folder, or a full disk
        cache.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(".part", f"{cache.stem}-", cache.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                np.savez(file, **{ORIGIN: np.frombuffer(origin.encode(), np.uint8)}, **arrays)  # type: ignore[arg-type]
            Path(scratch).chmod(0o644)
            Path(scratch).replace(cache)
        except BaseException:
            Path(scratch).unlink(missing_ok=True)
            raise
