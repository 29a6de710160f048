"""idx files: arrays of bytes or of 32-bit integers, raw or compressed, the format of MNIST and its relatives."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .dataset import DataSet, Part
from .dataset_files import MAX_IMAGES, check_classes, check_published, damaged, open_file, reading

BYTES: Final = 8
INTEGERS: Final = 12
TYPES: Final[dict[int, np.dtype[Any]]] = {BYTES: np.dtype(np.uint8), INTEGERS: np.dtype(">i4")}
"""Codes of types in the third byte of a file."""


def read_idx(dataset: DataSet, path: Path, item: tuple[int, ...], code: int = BYTES) -> NDArray[Any]:
    """Return the content of an idx file whose items have the given shape."""
    dims, kind = 1 + len(item), TYPES[code]
    with reading(dataset, path), open_file(path) as file:
        head = file.read(4 + 4 * dims)
        if head[:4] != bytes((0, 0, code, dims)):
            raise damaged(dataset, path, f"it begins with {head[:4].hex()}, not with 0000{code:02x}{dims:02x}")
        if len(head) < 4 + 4 * dims:
            raise damaged(dataset, path, f"it ends after {len(head)} bytes")
        count, *shape = (int(side) for side in np.frombuffer(head, ">u4", offset=4))
        if tuple(shape) != item:
            found, expected = ("x".join(map(str, sides)) for sides in (shape, item))
            raise damaged(dataset, path, f"its {'images' if dims > 2 else 'rows'} are {found}, not {expected}")
        if not 1 <= count <= MAX_IMAGES:
            raise damaged(dataset, path, f"its header announces {count:,} items")
        size = count * prod(item) * kind.itemsize
        body = file.read(size + 1)  # one byte more than expected, so that the end and its checksum are reached
    if len(body) != size:
        found = "more" if len(body) > size else f"{len(body):,}"
        raise damaged(dataset, path, f"it has {found} bytes after its header, not the announced {size:,}")
    whole = bytearray(head + body)
    check_published(dataset, path, memoryview(whole))
    return np.frombuffer(whole, kind, offset=len(head)).reshape(count, *item)


def read_part(dataset: DataSet, images: Path, labels: Path) -> Part:
    """Return grey images of 28x28 pixels and their classes."""
    inputs, targets = read_idx(dataset, images, (28, 28)), read_idx(dataset, labels, ())
    if len(inputs) != len(targets):
        what = f"it has {len(targets):,} labels for {len(inputs):,} images in {images.name}"
        raise damaged(dataset, labels, what)
    return inputs[:, None], check_classes(dataset, labels, targets)
