"""Writing files so that a reader sees the old one or the new one, never half of one, even if the power fails."""

from __future__ import annotations

import fcntl
import os
import re
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import UserError, first_line


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What goes wrong while writing there becomes one line."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside it to write to; what is there at the end is moved in its place in one stroke, and stays there."""
    scratch = path.with_name(path.name + ".part")
    try:
        yield scratch
        sync(scratch)
        scratch.replace(path)
        sync(path.parent)
    except BaseException:  # a full disk above all: half a file only takes room
        scratch.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, data: bytes) -> None:
    """Write beside the path, then move there in one stroke."""
    with writing(path), replacing(path) as scratch:
        scratch.write_bytes(data)


def read_text(path: Path) -> str:
    """The text of a file; what goes wrong is one line."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}") from None


class InUseError(UserError):
    """Another process has claimed a folder."""


class FolderLock:
    """A folder, made if need be, for this process alone, until it is released or the process ends, however it does.

    If another one has it, it is waited for so many seconds.
    """

    def __init__(self, folder: Path, seconds: float = 0.0) -> None:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder, os.O_RDONLY)
        self.release = weakref.finalize(self, os.close, handle)
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.2)
                    continue
                self.release()
                raise InUseError(f"{folder} is in use by another process; wait for it, or use another name") from None
            except OSError:
                pass  # a file system without locks
            return

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *ended: object) -> None:
        self.release()


def file_name(label: str, seed: int) -> str:
    """A file name for a run."""
    return re.sub(r"[^A-Za-z0-9._=-]+", "_", f"{label} seed={seed}")
