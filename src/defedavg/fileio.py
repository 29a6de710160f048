"""File output that readers can trust: they see the old content or the new one, never a part, even after a crash."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from .errors import UserError, first_line

LOCK_FILE = ".lock"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an ``OSError`` in the block into a ``UserError`` that names the path."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a scratch path beside ``path``; at the end of the block, flush it to disk and rename it to ``path``."""
    scratch = path.with_name(path.name + ".part")
    try:
        yield scratch
        sync(scratch)
        scratch.replace(path)
        sync(path.parent)
    except BaseException:  # a full disk above all: an incomplete file only takes space
        scratch.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically; a failure raises ``UserError`` and leaves the old file."""
    with writing(path), replacing(path) as scratch:
        scratch.write_bytes(data)


def read_text(path: Path) -> str:
    """Return the text of a file; a failure raises ``UserError``."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}") from None


class InUseError(UserError):
    """Another process has locked a folder."""


class FolderLock:
    """A folder, created if needed, that only this process writes to until the lock is released or the process ends.

    If another process holds the lock, wait up to ``seconds`` for it.
    """

    def __init__(self, folder: Path, seconds: float = 0.0) -> None:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(folder / LOCK_FILE, thread_local=False)
            try:
                self._lock.acquire(timeout=seconds, poll_interval=0.2)
            except Timeout:
                raise InUseError(f"{folder} is in use by another process; wait for it, or use another name") from None
            except NotImplementedError:
                pass  # a file system without locks

    def release(self) -> None:
        """Release the lock and remove its file; calling it again does nothing."""
        if self._lock.is_locked:
            # filelock retries if the file that it locked has been removed, so this cannot admit two processes.
            Path(self._lock.lock_file).unlink(missing_ok=True)
            self._lock.release(force=True)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()


def file_name(label: str, seed: int) -> str:
    """Return a file name for a run."""
    return re.sub(r"[^A-Za-z0-9._=-]+", "_", f"{label} seed={seed}")
