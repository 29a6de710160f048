"""Checks on the files of data sets, which are not trusted: sizes, checksums, labels, damaged archives.

A file with fewer images than the published one is accepted as long as images and labels agree.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final, cast

import numpy as np
from numpy.typing import NDArray

from ...errors import UserError
from .dataset import DataSet
from .locations import fetch_command

Pixels = NDArray[np.uint8]

DECOMPRESSION_ERRORS: Final = (gzip.BadGzipFile, EOFError, zlib.error)
MAX_IMAGES: Final = 1_000_000
"""Images in one file: a larger number in a header is taken for damage."""


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
        raise UserError(
            f"{path} is not the published file: the MD5 of its content is {found}, the published one is {file.md5}; "
            f"move it away and run '{fetch_command(dataset.name)}'"
        )


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
