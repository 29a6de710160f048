"""The files of data sets: where they are, and checks on their content, which is not trusted.

The data folder is the one given to ``set_data_dir`` (``--data-dir``), else ``DEFEDAVG_DATA``, else ``defedavg`` in the
user's cache. A file with fewer images than the published one is accepted as long as images and labels agree.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shlex
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO, Final, cast

import numpy as np
from numpy.typing import NDArray

from ...errors import UserError
from .dataset import DataSet

VARIABLE: Final = "DEFEDAVG_DATA"
DECOMPRESSION_ERRORS: Final = (gzip.BadGzipFile, EOFError, zlib.error)
MAX_IMAGES: Final = 1_000_000  # in one file: a larger number in a header is taken for damage

Pixels = NDArray[np.uint8]

_chosen: list[Path] = []  # at most one: the folder that the command line names


def set_data_dir(folder: Path | str | None) -> None:
    """Look for data sets in this folder, whatever the environment says; None restores the default."""
    _chosen[:] = [] if folder is None else [Path(folder)]


def data_dir() -> Path:
    """Return the folder in which data sets are looked for; it need not exist."""
    try:
        if _chosen:
            return _chosen[0].expanduser().absolute()
        if named := os.environ.get(VARIABLE):
            return Path(named).expanduser().absolute()
        cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (cache if cache.is_absolute() else Path.home() / ".cache") / "defedavg"
    except (RuntimeError, OSError) as error:
        raise UserError(f"the folder of data sets is not known: {error}; name one with --data-dir") from None


def fetch_command(name: str) -> str:
    """Return the command that downloads a data set into the data folder."""
    return f"defedavg data fetch {name}" + (f" --data-dir {shlex.quote(str(_chosen[0]))}" if _chosen else "")


def how_to_get(dataset: DataSet) -> str:
    """Return the command that makes a data set available, or an empty string if none is needed."""
    if dataset.package is not None:
        return f"pip install 'defedavg[{dataset.extra}]'" if dataset.extra else f"pip install {dataset.package[0]}"
    return fetch_command(dataset.name) if dataset.download is not None else ""


def locate(dataset: DataSet, root: Path) -> tuple[Path, ...]:
    """Return the files of a data set in the order of its layout; nothing is read yet."""
    if dataset.package is not None:
        return (_packaged(dataset, *dataset.package),)
    incomplete: tuple[Path, list[str]] | None = None
    for below, names in dataset.layouts:
        folder = root / below
        found = [_present(folder, spellings) for spellings in names]
        paths = tuple(path for path in found if path is not None)
        if len(paths) == len(names):
            return paths
        if paths and incomplete is None:
            incomplete = folder, [names[0] for names, path in zip(names, found, strict=True) if path is None]
    if not dataset.layouts:
        return ()
    raise _missing(dataset, root, incomplete)


def _missing(dataset: DataSet, root: Path, incomplete: tuple[Path, list[str]] | None) -> UserError:
    get, what = how_to_get(dataset), f"the data set {dataset.name!r}"
    if incomplete is not None:
        folder, names = incomplete
        remedy = f"get it with '{get}'" if get else "add the missing files"
        return UserError(f"{what} in {folder} is not complete: {', '.join(names)} missing; {remedy}")
    remedy = f"get it with '{get}', or name" if get else "name"
    return UserError(f"{what} is not in {root}; {remedy} a folder that has it with --data-dir or {VARIABLE}")


def _packaged(dataset: DataSet, package: str, file: str) -> Path:
    """Return a file of an installed package without importing the package."""
    spec = find_spec(package)
    for root in (spec and spec.submodule_search_locations) or ():
        if (path := Path(root, file)).is_file():
            return path
    what = f"the data set {dataset.name!r} comes with {package}, which is not installed"
    raise UserError(f"{what}; {how_to_get(dataset)}")


def _present(folder: Path, spellings: tuple[str, ...]) -> Path | None:
    try:
        return next((path for path in (folder / name for name in spellings) if path.is_file()), None)
    except OSError as error:
        raise UserError(f"the folder {folder} cannot be read: {error.strerror or error}; make it readable") from None


# Checks.


def md5(data: bytes | memoryview = b"") -> hashlib._Hash:
    """Return an MD5: the checksum that is published for these files, used only against damage."""
    return hashlib.md5(data, usedforsecurity=False)


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading, decompressed if its name ends in .gz."""
    return cast(BinaryIO, gzip.open(path) if path.suffix == ".gz" else path.open("rb"))


@contextmanager
def reading(dataset: DataSet, path: Path) -> Iterator[None]:
    """Turn a failure to read a file into one line."""
    try:
        yield
    except DECOMPRESSION_ERRORS as error:
        raise damaged(dataset, path, f"it cannot be decompressed ({error})") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}; make it readable") from None


def check_published(dataset: DataSet, path: Path, content: memoryview) -> None:
    """Refuse a file of exactly the published size that is not the published file."""
    file = dataset.published.get(path.name.removesuffix(".gz"))
    if file is not None and len(content) == file.size and (found := md5(content).hexdigest()) != file.md5:
        checksums = f"the MD5 of its content is {found}, the published one is {file.md5}"
        remedy = f"move it away and run '{fetch_command(dataset.name)}'"
        raise UserError(f"{path} is not the published file: {checksums}; {remedy}")


def check_classes(dataset: DataSet, path: Path, labels: Pixels) -> NDArray[np.int64]:
    """Return labels as whole numbers; refuse one that is not a class."""
    wrong = labels >= dataset.classes
    if wrong.any():
        first = int(wrong.argmax())
        raise damaged(dataset, path, f"label {first} is {int(labels[first])}, outside 0..{dataset.classes - 1}")
    return labels.astype(np.int64)


def intact(dataset: DataSet, paths: Iterable[Path]) -> bool:
    """Return whether these are the published files, compressed or not; one without a published MD5 is accepted."""
    for path in paths:
        file = dataset.published.get(path.name.removesuffix(".gz"))
        if file is not None:
            try:
                with open_file(path) as stream:
                    content = stream.read(file.size + 1)
            except (OSError, *DECOMPRESSION_ERRORS):
                return False
            if len(content) != file.size or md5(content).hexdigest() != file.md5:
                return False
    return True


def damaged(dataset: DataSet, path: Path, what: str) -> UserError:
    """Return the error for a damaged file, with both checksums where one is published."""
    file, checksums = dataset.published.get(path.name), ""
    if file is not None:
        with suppress(OSError), path.open("rb") as stream:  # unreadable by now: nothing can be said
            if (found := hashlib.file_digest(stream, md5).hexdigest()) != file.md5:
                checksums = f" (its MD5 is {found}, that of the published file is {file.md5})"
    return UserError(f"{path} is damaged: {what}{checksums}; move it away and run '{fetch_command(dataset.name)}'")
