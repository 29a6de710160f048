"""Files that users and readers can trust.

Readers of a file see the old content or the new one, never a part, even after a crash. A link is followed, so that it
stays a link; what is not a regular file (a device, a pipe) is written to and never replaced. Files of a run folder are
read only if they are regular files: a pipe would wait forever, and a device may never end.
"""

from __future__ import annotations

import errno
import io
import os
import re
import select
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from .errors import UserError, first_line

LOCK_FILE = ".lock"
LAUNCH_FILE = ".launch.lock"
LOCK_FILES = (LOCK_FILE, LAUNCH_FILE)
MAX_INPUT = 64 << 20  # bytes of a configuration or a Python file, from a device or a pipe above all
# Opening a pipe does not wait for its writer. Windows has no such pipes.
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
START_AGAIN = "; free some space there, then start again (a run continues with --resume)"
"""How an error about a full disk ends."""
PIPE_SECONDS = 10.0
"""How long a pipe that a user names as input may stay silent."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an ``OSError`` in the block into a ``UserError`` that names the path."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader has seen enough; the command line ends silently
    except OSError as error:
        raise UserError(f"{path} cannot be written: {_reason(path, error)}") from None


def _reason(path: Path, error: OSError) -> str:
    """Return why a path cannot be written, and what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.strerror}{START_AGAIN}"
    if error.errno == errno.ENOENT and not path.parent.exists():
        return f"the folder {path.parent} does not exist"
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        for place in path.parents:
            if place.exists() and not place.is_dir():
                return f"{place} is a file, not a folder; choose another folder, or rename the file"
        if path.is_file():
            return "it is a file that already exists; choose another name, or rename the file"
    return str(error.strerror or error)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a scratch path; at the end of the block, flush it to disk and rename it to ``path``.

    If ``path`` is a link, the file that it points to is replaced. If it is a device, a pipe or standard output, the
    content is copied to it.
    """
    if _is_stream(path):
        with tempfile.TemporaryDirectory() as folder:
            scratch = Path(folder) / "content"
            yield scratch
            _copy_to_stream(scratch, path)
        return
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    scratch = target.with_name(target.name + ".part")
    scratch.unlink(missing_ok=True)  # of a killed process
    try:
        yield scratch
        sync(scratch)
        scratch.replace(target)
        sync(target.parent)
    except BaseException:  # a full disk above all: an incomplete file only takes space
        with suppress(OSError):
            scratch.unlink()
        raise


def _is_stream(path: Path) -> bool:
    """Return whether a path names something that must not be replaced by a file, and can be written to."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    return not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)) or is_standard_output(path)


def is_standard_output(path: Path) -> bool:
    """Return whether a path, such as /dev/stdout, names what this process prints to."""
    try:
        return os.path.samestat(path.stat(), os.fstat(1))
    except OSError:
        return False


def _copy_to_stream(content: Path, path: Path) -> None:
    # Standard output keeps its position, which opening it a second time would not.
    if is_standard_output(path):
        sys.stdout.flush()
        handle = os.dup(1)
    else:
        handle = os.open(path, os.O_WRONLY)
    with content.open("rb") as source, os.fdopen(handle, "wb") as stream:
        shutil.copyfileobj(source, stream)


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


def write_flushed(path: Path, data: bytes) -> None:
    """Write a file that no other file refers to yet, and flush it; a crash may leave a part of it.

    A failure raises ``UserError`` and removes the file. The name is on disk after ``sync`` of the folder.
    """
    with writing(path):
        try:
            with path.open("wb", buffering=0) as file:
                rest = memoryview(data)
                while rest:  # a disk that is almost full takes a part, and refuses the next
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                if path.is_file():  # never a device
                    path.unlink()
            raise


class NotRegularError(OSError):
    """Something other than a regular file has the name of a file that is to be read."""


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; raise ``NotRegularError`` for a pipe, a device or a folder, without waiting."""
    handle = os.open(path, _READ)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise NotRegularError("it is not a regular file")
    return os.fdopen(handle, "rb")


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file; see ``open_regular``."""
    with open_regular(path) as file:
        return file.read()


def read_text(path: Path) -> str:
    """Return the text of a regular file; a failure raises ``UserError``."""
    try:
        return _text(read_regular(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}") from None


def _text(data: bytes) -> str:
    return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()  # any kind of line break is \n


def read_input(path: Path) -> str:
    """Return the text of a small file that a user names, which may also be a pipe.

    Raise ``OSError`` if it has more than ``MAX_INPUT`` bytes, or if a pipe stays silent for ``PIPE_SECONDS``.
    """
    handle = os.open(path, _READ)
    mode = os.fstat(handle).st_mode
    if stat.S_ISDIR(mode):
        os.close(handle)
        raise NotRegularError("it is a folder")
    with os.fdopen(handle, "rb", buffering=0) as file:
        is_pipe = stat.S_ISFIFO(mode)
        if is_pipe:
            os.set_blocking(handle, True)
        data = io.BytesIO()
        while data.tell() <= MAX_INPUT:
            if is_pipe and not select.select([handle], [], [], PIPE_SECONDS)[0]:
                raise TimeoutError(f"the pipe sent nothing for {PIPE_SECONDS:g} seconds")
            part = file.read(1 << 16)
            if not part:
                return _text(data.getvalue())
            data.write(part)
    raise OSError(f"it has more than {MAX_INPUT >> 20} MiB")


class InUseError(UserError):
    """Another process has locked a folder."""


class FolderLock:
    """A folder, created if needed, that only this process writes to until the lock is released or the process ends.

    If another process holds the lock, wait up to ``seconds`` for it. A process that starts others which write to the
    folder holds a ``launch_lock`` meanwhile: only they, with ``launched``, get the lock then.
    """

    def __init__(self, folder: Path, seconds: float = 0.0, *, launched: bool = False, name: str = LOCK_FILE) -> None:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(folder / name, thread_local=False)
            try:
                self._lock.acquire(timeout=seconds, poll_interval=0.2)
            except Timeout:
                user = _holder(folder / name)
                raise InUseError(f"{folder} is in use by {user}; wait for it, or use another name") from None
            except NotImplementedError:
                pass  # a file system without locks
        if name == LOCK_FILE and not launched and (folder / LAUNCH_FILE).exists():
            try:
                launch_lock(folder).release()  # left by a killed process, unless this raises
            except BaseException:
                self.release()
                raise

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


def _holder(path: Path) -> str:
    """Describe the process that has a lock file open; the system does not show the processes of other users."""
    import psutil  # only an error needs it

    locked = os.path.realpath(path)
    for process in psutil.process_iter(["pid", "name"]):
        try:
            if process.pid != os.getpid() and any(opened.path == locked for opened in process.open_files()):
                return f"another process ({process.pid}, {process.info['name']})"
        except (psutil.Error, OSError):
            continue
    return "another process"


def launch_lock(folder: Path) -> FolderLock:
    """Return a lock of a folder for a process that lets others, which it starts, write there."""
    return FolderLock(folder, name=LAUNCH_FILE)


def file_name(label: str, seed: int) -> str:
    """Return a file name for a run."""
    return re.sub(r"[^A-Za-z0-9._=-]+", "_", f"{label} seed={seed}")
