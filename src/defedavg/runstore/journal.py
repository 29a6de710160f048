"""An append-only file of lines that can be truncated to an earlier position, with a checksum of what precedes it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from ..errors import UserError
from ..fileio import open_regular, writing


@dataclass(frozen=True, slots=True)
class JournalPosition:
    """A position in a journal: its size there, and the SHA-256 of all bytes before."""

    size: int = 0
    sha256: str = sha256().hexdigest()


class Journal:
    """A journal that is open for appending at a position; what followed that position is discarded."""

    def __init__(self, path: Path, position: JournalPosition | None = None) -> None:
        self._path = path
        position = position or JournalPosition()
        self._size = position.size
        self._digest = sha256(read_until(path, position))
        with writing(path):
            self._file = path.open("ab")
            self._file.truncate(position.size)

    def append(self, line: str) -> None:
        """Append a line; readers see it at once."""
        data = line.encode() + b"\n"
        with writing(self._path):
            self._file.write(data)
            self._file.flush()
        self._size += len(data)
        self._digest.update(data)

    def position(self) -> JournalPosition:
        """Flush to disk and return the position of the end."""
        with writing(self._path):
            os.fsync(self._file.fileno())
        return JournalPosition(self._size, self._digest.hexdigest())

    def close(self) -> None:
        """Close the file."""
        with writing(self._path):
            self._file.close()


def read_until(path: Path, position: JournalPosition) -> bytes:
    """Return all bytes before a position; raise ``UserError`` if they have changed since."""
    if position.size == 0:
        return b""
    try:
        with open_regular(path) as file:
            data = file.read(position.size)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    if sha256(data).hexdigest() != position.sha256:
        raise UserError(f"{path} has changed since the checkpoint was made; start again with --force")
    return data
