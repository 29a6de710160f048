"""Reading the files of FashionMNIST and CIFAR-10 as they are published.

Files are not trusted: magic numbers, sizes and labels are checked, and what is wrong with one is said in one line that
names it. Fewer images than published are fine, as long as images and labels agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...errors import UserError
from . import pickle_reader as pickled
from .locations import BROKEN, PUBLISHED, damaged, fetch_command, locate, md5, opened

Pixels = NDArray[np.uint8]
Part = tuple[Pixels, NDArray[np.int64]]
"""Images (n, channels, height, width), and their classes."""

CLASSES: Final = 10
MOST: Final = 1_000_000  # images in one file: a size that is read from a file is not believed beyond this
_FASHION: Final = "fashionmnist"
_CIFAR: Final = "cifar10"
_CIFAR_SHAPE: Final = (3, 32, 32)
_CIFAR_BYTES: Final = prod(_CIFAR_SHAPE)


@contextmanager
def _reading(name: str, path: Path) -> Iterator[None]:
    """What goes wrong while reading there becomes one line."""
    try:
        yield
    except BROKEN as error:
        raise damaged(name, path, f"it does not unpack ({error})") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}; make it readable") from None


def _check(name: str, path: Path, content: memoryview) -> None:
    """A file of exactly the published size must be the published file."""
    size, digest = PUBLISHED.get(path.name.removesuffix(".gz"), (-1, ""))
    if len(content) == size and (found := md5(content).hexdigest()) != digest:
        raise UserError(
            f"{path} is not the published file: the MD5 of what it holds is {found}, the published one {digest}; "
            f"move it away and run '{fetch_command(name)}'"
        )


def _classes(name: str, path: Path, labels: Pixels) -> NDArray[np.int64]:
    wrong = labels >= CLASSES
    if wrong.any():
        place = int(wrong.argmax())
        raise damaged(name, path, f"label {place} is {int(labels[place])}, outside 0..{CLASSES - 1}")
    return labels.astype(np.int64)


# FashionMNIST: idx files, raw or compressed.


def read_idx(name: str, path: Path, item: tuple[int, ...]) -> Pixels:
    """An idx file of bytes whose items have the given shape."""
    dims = 1 + len(item)
    with _reading(name, path), opened(path) as file:
        head = file.read(4 + 4 * dims)
        if head[:4] != bytes((0, 0, 8, dims)):
            raise damaged(name, path, f"it begins with {head[:4].hex()}, not with 000008{dims:02x}")
        if len(head) < 4 + 4 * dims:
            raise damaged(name, path, f"it ends after {len(head)} bytes")
        count, *rest = (int(side) for side in np.frombuffer(head, ">u4", offset=4))
        if tuple(rest) != item:
            raise damaged(name, path, f"its images are {'x'.join(map(str, rest))}, not {'x'.join(map(str, item))}")
        if not 1 <= count <= MOST:
            raise damaged(name, path, f"it says that it has {count:,} items")
        size = count * prod(item)
        body = file.read(size + 1)  # one more than there should be: the end, and with it a checksum, is reached
    if len(body) != size:
        more = "more" if len(body) > size else f"{len(body):,}"
        raise damaged(name, path, f"it has {more} bytes after its head, not the {size:,} that it says")
    whole = bytearray(head + body)
    _check(name, path, memoryview(whole))
    return np.frombuffer(whole, np.uint8, offset=len(head)).reshape(count, *item)


def _idx_part(images: Path, labels: Path) -> Part:
    inputs = read_idx(_FASHION, images, (28, 28))
    targets = read_idx(_FASHION, labels, ())
    if len(inputs) != len(targets):
        raise damaged(_FASHION, labels, f"it has {len(targets):,} labels for {len(inputs):,} images in {images.name}")
    return inputs[:, None], _classes(_FASHION, labels, targets)


def _fashionmnist(root: Path) -> tuple[Part, Part]:
    train, train_labels, test, test_labels = locate(_FASHION, root)
    return _idx_part(train, train_labels), _idx_part(test, test_labels)


# CIFAR-10: records of a label and 3072 pixels, or pickles of Python 2.


def read_binary(path: Path) -> Part:
    """A batch of the binary version."""
    size, record = _size(path), 1 + _CIFAR_BYTES
    if size == 0 or size % record:
        raise damaged(_CIFAR, path, f"its {size:,} bytes are not whole records of {record:,}")
    with _reading(_CIFAR, path):
        whole = np.fromfile(path, np.uint8, count=size)
    if len(whole) != size:
        raise damaged(_CIFAR, path, "it changed while it was read")
    _check(_CIFAR, path, whole.data)
    table = whole.reshape(-1, record)
    return table[:, 1:].reshape(-1, *_CIFAR_SHAPE), _classes(_CIFAR, path, table[:, 0])


def read_pickled(path: Path) -> Part:
    """A batch of the Python version, of which nothing is run."""
    _size(path)
    with _reading(_CIFAR, path):
        whole = path.read_bytes()
    _check(_CIFAR, path, memoryview(whole))
    try:
        inputs, targets = _batch(pickled.read(whole))
    except pickled.Unreadable as error:
        raise damaged(_CIFAR, path, str(error)) from None
    return inputs.reshape(-1, *_CIFAR_SHAPE), targets


def _batch(value: object) -> Part:
    """The rows of pixels of a batch, and its labels."""
    if not isinstance(value, dict):
        raise pickled.Unreadable("it is not a table")
    table = {key.decode("latin-1") if isinstance(key, bytes) else key: own for key, own in value.items()}
    inputs, labels = pickled.pixels(table.get("data"), _CIFAR_BYTES), table.get("labels")
    if not isinstance(labels, list) or any(type(label) is not int for label in labels):
        raise pickled.Unreadable("its labels are not a list of whole numbers")
    if len(labels) != len(inputs):
        raise pickled.Unreadable(f"it has {len(labels):,} labels for {len(inputs):,} images")
    for place, label in enumerate(labels):
        if not 0 <= label < CLASSES:
            raise pickled.Unreadable(f"label {place} is {str(label)[:20]}, outside 0..{CLASSES - 1}")
    return inputs, np.array(labels, np.int64)


def _size(path: Path) -> int:
    with _reading(_CIFAR, path):
        size = path.stat().st_size
    if size > MOST * (1 + _CIFAR_BYTES):
        raise damaged(_CIFAR, path, f"it has {size:,} bytes")
    return size


def _cifar10(root: Path) -> tuple[Part, Part]:
    *batches, test = locate(_CIFAR, root)
    read = read_binary if test.suffix == ".bin" else read_pickled
    inputs, targets = np.empty((0, *_CIFAR_SHAPE), np.uint8), np.empty(0, np.int64)
    for i, path in enumerate(batches):
        images, labels = read(path)
        if i == 0:  # one large array that is filled, instead of five that are joined
            inputs = np.empty((len(batches) * len(labels), *_CIFAR_SHAPE), np.uint8)
            targets = np.empty(len(batches) * len(labels), np.int64)
        each = len(targets) // len(batches)
        if len(labels) != each:
            raise damaged(_CIFAR, path, f"it has {len(labels):,} images, and {batches[0].name} has {each:,}")
        inputs[i * each : (i + 1) * each], targets[i * each : (i + 1) * each] = images, labels
    tested, labels = read(test)
    return (inputs, targets), (np.array(tested), labels)


READERS: Final[dict[str, Callable[[Path], tuple[Part, Part]]]] = {_FASHION: _fashionmnist, _CIFAR: _cifar10}
"""By name: training and test part of a data set, from the data folder."""
