"""Small files in the formats in which data sets are published."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def idx(array: Bytes) -> bytes:
    """Return an idx file of bytes."""
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def binary_batch(pixels: Bytes, labels: Sequence[int]) -> bytes:
    """Return a batch of CIFAR-10's binary version."""
    return b"".join(bytes([label]) + row.tobytes() for label, row in zip(labels, pixels, strict=True))


def _short(text: str) -> bytes:
    return b"U" + bytes([len(text)]) + text.encode()


def python2_batch(pixels: Bytes, labels: Sequence[int]) -> bytes:
    """Return a batch of CIFAR-10's Python version, as Python 2 wrote it: protocol 2, with bytes as text."""
    rows, width = pixels.shape
    head = b"\x80\x02}q\x01(" + _short("batch_label") + b"q\x02" + _short("training batch 1 of 5") + b"q\x03"
    numbers = _short("labels") + b"q\x04]q\x05(" + b"".join(b"K" + bytes([v]) for v in labels) + b"e"
    array = (
        _short("data")
        + b"q\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\x09(K\x01K"
        + bytes([rows])
        + b"M"
        + struct.pack("<H", width)
        + b"\x86cnumpy\ndtype\nq\nU\x02u1K\x00K\x01\x87Rq\x0b"
        + b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + struct.pack("<I", pixels.size)
        + pixels.tobytes()
        + b"tb"
    )
    names = _short("filenames") + b"q\x0c]q\x0d(" + b"".join(_short(f"image_{i}.png") for i in range(rows)) + b"eu."
    return head + numbers + array + names


def python3_batch(pixels: Bytes, labels: Sequence[int]) -> bytes:
    """Return the same batch as Python 3 writes it: protocol 4, with bytes as bytes."""

    def text(word: str) -> bytes:
        return b"\x8c" + bytes([len(word)]) + word.encode() + b"\x94"

    def name(module: str, word: str) -> bytes:
        return text(module) + text(word) + b"\x93\x94"

    rows, width = pixels.shape
    whole = (
        b"}\x94(C\x04data\x94"
        + name("numpy._core.multiarray", "_reconstruct")
        + name("numpy", "ndarray")
        + b"K\x00\x85\x94C\x01b\x94\x87\x94R\x94(K\x01K"
        + bytes([rows])
        + b"M"
        + struct.pack("<H", width)
        + b"\x86\x94"
        + name("numpy", "dtype")
        + text("u1")
        + b"\x89\x88\x87\x94R\x94(K\x03"
        + text("|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00t\x94b\x89B"
        + struct.pack("<I", pixels.size)
        + pixels.tobytes()
        + b"\x94t\x94b"
        + text("labels")
        + b"]\x94("
        + b"".join(b"K" + bytes([v]) for v in labels)
        + b"eu."
    )
    return b"\x80\x04\x95" + struct.pack("<Q", len(whole)) + whole


def _draw(seed: int, count: int, width: int) -> tuple[Bytes, list[int]]:
    draws = np.random.Generator(np.random.Philox(key=seed))
    return draws.integers(0, 256, (count, width), dtype=np.uint8), draws.integers(0, 10, count).tolist()


def write_fashion(
    folder: Path, *, packed: bool = False, seed: int = 0, counts: tuple[int, int] = (7, 3)
) -> tuple[Bytes, list[int]]:
    """Write the four files of FashionMNIST and return the training images and labels."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for i, (part, count) in enumerate(zip(("train", "t10k"), counts, strict=True)):
        pixels, labels = _draw(2 * seed + i, count, 784)
        made.append((pixels.reshape(-1, 28, 28), labels))
        contents = {"images-idx3": idx(made[i][0]), "labels-idx1": idx(np.array(labels, np.uint8))}
        for kind, content in contents.items():
            name = f"{part}-{kind}-ubyte"
            (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)
    return made[0]


def integer_idx(array: np.ndarray[Any, Any]) -> bytes:
    """Return an idx file of 32-bit integers."""
    return bytes((0, 0, 12, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(">i4").tobytes()


def write_writers(folder: Path, writers: Sequence[int], *, test: int = 3, packed: bool = False) -> list[int]:
    """Write MNIST's four files and QMNIST's two with these writers; return the training labels.

    QMNIST's files have two rows more than there are images.
    """
    counts = len(writers), test
    labels = write_fashion(folder, counts=counts, packed=packed)[1]
    _, test_labels = _draw(1, test, 784)
    for part, digits, owners in (("train", labels, writers), ("test", test_labels, [900 + i for i in range(test)])):
        rows = np.zeros((len(digits) + 2, 8), np.int64)
        rows[: len(digits), 0], rows[: len(digits), 2] = digits, owners
        name, content = f"qmnist-{part}-labels-idx2-int", integer_idx(rows)
        (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)
    return labels


def write_cifar(
    folder: Path, kind: str = "bin", *, seed: int = 0, change: Callable[[Bytes], None] | None = None
) -> tuple[Bytes, list[int]]:
    """Write six batches of CIFAR-10 with four images each and return the training images and labels."""
    folder.mkdir(parents=True, exist_ok=True)
    write = {"bin": binary_batch, "py": python2_batch, "py3": python3_batch}[kind]
    pixels, labels = _draw(seed, 24, 3072)
    if change is not None:
        change(pixels)
    for i, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        rows = slice(4 * i, 4 * i + 4)
        (folder / (f"{name}.bin" if kind == "bin" else name)).write_bytes(write(pixels[rows], labels[rows]))
    return pixels[:20], labels[:20]
