"""A file of lines that only grows, knows how long it is and what is in it, and can be cut back to where it once was."""

from __future__ import annotations

import os
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from ..errors import UserError
from ..fileio import writing


@dataclass(frozen=True, slots=True)
class JournalPosition:
    """A place in a journal: its length there, and the SHA-256 of all before."""

    size: int = 0
    sha256: str = sha256().hexdigest()


class Journal:
    """Open for appending behind a mark; what stood behind it is gone."""

    def __init__(self, path: Path, mark: JournalPosition | None = None) -> None:
        self._path = path
        mark = mark or JournalPosition()
        self._size = mark.size
        self._digest = sha256(read(path, mark))
        with writing(path):
            self._file = path.open("ab")
            self._file.truncate(mark.size)

    def append(self, line: str) -> None:
        """One more line, seen by readers at once."""
        data = line.encode() + b"\n"
        with writing(self._path):
            self._file.write(data)
            self._file.flush()
        self._size += len(data)
        self._digest.update(data)

    def mark(self) -> JournalPosition:
        """Where it ends now; everything before is on the disk."""
        with writing(self._path):
            os.fsync(self._file.fileno())
        return JournalPosition(self._size, self._digest.hexdigest())

    def close(self) -> None:
        """Write no more."""
        with writing(self._path):
            self._file.close()


def read(path: Path, mark: JournalPosition) -> bytes:
    """All before a mark; refuses a file that is not what it was there."""
    if mark.size == 0:
        return b""
    try:
        with path.open("rb") as file:
            data = file.read(mark.size)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    if sha256(data).hexdigest() != mark.sha256:
        raise UserError(f"{path} is not what it was when the checkpoint was made")
    return data
