"""Where data sets lie: the folder, the layouts looked for in it, and the published checksums.

The folder is what ``set_data_dir`` was given (``--data-dir``), else ``DEFEDAVG_DATA``, else ``defedavg`` in the user's
cache.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shlex
import zlib
from pathlib import Path
from typing import BinaryIO, Final, cast

from ...errors import UserError

VARIABLE: Final = "DEFEDAVG_DATA"
BROKEN: Final = (gzip.BadGzipFile, EOFError, zlib.error)
"""What reading a damaged compressed file raises."""

_chosen: list[Path] = []  # at most one: what the command line says


def set_data_dir(folder: Path | str | None) -> None:
    """Look for data sets there, whatever the environment says; None: as if this had never been called."""
    _chosen[:] = [] if folder is None else [Path(folder)]


def data_dir() -> Path:
    """The folder in which data sets are looked for; it need not exist."""
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
    """The command that gets a data set to where it is looked for."""
    return f"defedavg data fetch {name}" + (f" --data-dir {shlex.quote(str(_chosen[0]))}" if _chosen else "")


# Layouts: a folder below the data folder, and the names that every file may have there.

_IDX: Final = tuple(
    (name, f"{name}.gz")
    for name in (
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    )
)
_BATCHES: Final = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
_BINARY: Final = tuple((f"{name}.bin",) for name in _BATCHES)
_PICKLED: Final = tuple((name,) for name in _BATCHES)

Layout = tuple[str, tuple[tuple[str, ...], ...]]

LAYOUTS: Final[dict[str, tuple[Layout, ...]]] = {
    "fashionmnist": (
        ("FashionMNIST/raw", _IDX),  # torchvision's, and that of ``defedavg data fetch``
        ("fashion-mnist", _IDX),
        ("", _IDX),
        ("/usr/share/datasets/fashion-mnist", _IDX),  # Debian's package dataset-fashion-mnist
    ),
    "cifar10": (
        ("cifar-10-batches-bin", _BINARY),
        ("", _BINARY),
        ("cifar-10-batches-py", _PICKLED),
        ("", _PICKLED),
    ),
}


def locate(name: str, root: Path) -> list[Path]:
    """The files of a data set, in the order of its layout; nothing is read yet."""
    partial: tuple[Path, list[str]] | None = None
    for below, names in LAYOUTS[name]:
        folder = root / below
        found = [_present(folder, spellings) for spellings in names]
        paths = [path for path in found if path is not None]
        if len(paths) == len(names):
            return paths
        if paths and partial is None:
            partial = folder, [own[0] for own, path in zip(names, found, strict=True) if path is None]
    if partial is not None:
        raise UserError(
            f"the data set {name!r} in {partial[0]} is not complete: {', '.join(partial[1])} missing; "
            f"get it with '{fetch_command(name)}'"
        )
    raise UserError(
        f"the data set {name!r} is not in {root}; get it with '{fetch_command(name)}', "
        f"or name a folder that has it with --data-dir or {VARIABLE}"
    )


def _present(folder: Path, spellings: tuple[str, ...]) -> Path | None:
    try:
        return next((path for path in (folder / name for name in spellings) if path.is_file()), None)
    except OSError as error:
        raise UserError(f"the folder {folder} cannot be read: {error.strerror or error}; make it readable") from None


# Checksums.

PUBLISHED: Final[dict[str, tuple[int, str]]] = {
    "train-images-idx3-ubyte": (47_040_016, "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
    "train-labels-idx1-ubyte": (60_008, "9018921c3c673c538a1fc5bad174d6f9"),
    "t10k-images-idx3-ubyte": (7_840_016, "8181f5470baa50b63fa0f6fddb340f0a"),
    "t10k-labels-idx1-ubyte": (10_008, "15d484375f8d13e6eb1aabb0c3f46965"),
    "train-images-idx3-ubyte.gz": (26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
    "train-labels-idx1-ubyte.gz": (29_515, "25c81989df183df01b3e8a0aad5dffbe"),
    "t10k-images-idx3-ubyte.gz": (4_422_102, "bef4ecab320f06d8554ea6380940ec79"),
    "t10k-labels-idx1-ubyte.gz": (5_148, "bb300cfdad3c16e7a12a480ee83cd310"),
    "cifar-10-binary.tar.gz": (170_052_171, "c32a1d4ab5d03f1284b67883e8d87530"),
    "data_batch_1.bin": (30_730_000, "5dd7e06a14cb22eb9f671a540d1b7c25"),
    "data_batch_2.bin": (30_730_000, "5ea93a67294ea407fff1d09f752e9692"),
    "data_batch_3.bin": (30_730_000, "942cd6a4bcdd0dd3c604fbe906cb4421"),
    "data_batch_4.bin": (30_730_000, "ae636b3ba5c66a11e91e8cb52e771fcb"),
    "data_batch_5.bin": (30_730_000, "53f37980c15c3d472c316c40844f3f0d"),
    "test_batch.bin": (30_730_000, "803d5f7f4d78ea53de84dbe85f74fb6d"),
    "data_batch_1": (31_035_704, "c99cafc152244af753f735de768cd75f"),
    "data_batch_2": (31_035_320, "d4bba439e000b95fd0a9bffe97cbabec"),
    "data_batch_3": (31_035_999, "54ebc095f3ab1f0389bbae665268c751"),
    "data_batch_4": (31_035_696, "634d18415352ddfa80567beed471001a"),
    "data_batch_5": (31_035_623, "482c414d41f54cd18b22e5b47cb7c3cb"),
    "test_batch": (31_035_526, "40351d587109b95175f43aff81a1287e"),
}
"""Size in bytes and MD5 of the published files, by name."""


def md5(data: bytes | memoryview = b"") -> hashlib._Hash:
    """An MD5: published for these files, and here only a guard against damage."""
    return hashlib.md5(data, usedforsecurity=False)


def opened(path: Path) -> BinaryIO:
    """The file for reading, unpacked if its name says that it is compressed."""
    return cast(BinaryIO, gzip.open(path) if path.suffix == ".gz" else path.open("rb"))


def intact(paths: list[Path]) -> bool:
    """Whether these are the published files; how they are compressed does not matter."""
    return all(_is_published(path) for path in paths)


def _is_published(path: Path) -> bool:
    size, digest = PUBLISHED[path.name.removesuffix(".gz")]
    found = md5()
    try:
        with opened(path) as file:
            while size >= 0 and (block := file.read(1 << 20)):
                size -= len(block)
                found.update(block)
    except (OSError, *BROKEN):
        return False
    return size == 0 and found.hexdigest() == digest


def damaged(name: str, path: Path, what: str) -> UserError:
    """What to say of a file of a data set that cannot be right, with the checksums where one is published."""
    checksums = ""
    if path.name in PUBLISHED:
        try:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, md5).hexdigest()
        except OSError:
            found = PUBLISHED[path.name][1]  # unreadable now: nothing can be said
        if found != PUBLISHED[path.name][1]:
            checksums = f" (its MD5 is {found}, that of the published file {PUBLISHED[path.name][1]})"
    return UserError(f"{path} is damaged: {what}{checksums}; move it away and run '{fetch_command(name)}'")
