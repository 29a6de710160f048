"""Writes a plan file record by record, while a run is in progress."""

from __future__ import annotations

import zlib
from hashlib import sha256
from pathlib import Path

from ..fileio import writing
from .plan_io import encode
from .records import Header, Record

CHUNK = 1 << 16  # bytes collected before the file is opened: many runs are in progress, with few open files


class PlanWriter:
    """A plan file in progress; it appears under its name when it is closed."""

    def __init__(self, path: Path, header: Header) -> None:
        self._path = path
        self._scratch = path.with_name(path.name + ".part")
        self._digest = sha256()
        self._lines: list[str] = []
        self._size = 0
        # A gzip stream without a name and a time, so that the same plan is the same file.
        self._packer = zlib.compressobj(wbits=31)
        with writing(path):
            self._scratch.write_bytes(b"")
        self.add(header)

    def add(self, item: Header | Record) -> None:
        """Append a record."""
        line = encode(item)
        self._lines.append(line)
        self._size += len(line) + 1  # one byte for each character: JSON is written in ASCII
        if self._size >= CHUNK:
            self._flush()

    def _flush(self, end: bool = False) -> None:
        text = "\n".join([*self._lines, ""]).encode()
        self._lines, self._size = [], 0
        self._digest.update(text)
        data = self._packer.compress(text) + (self._packer.flush() if end else b"")
        if data:
            with writing(self._path), self._scratch.open("ab") as file:
                file.write(data)

    def close(self) -> str:
        """Complete the file and return the hash of the plan."""
        self._flush(end=True)
        with writing(self._path):
            self._scratch.replace(self._path)
        return self._digest.hexdigest()

    def discard(self) -> None:
        """Remove an incomplete file."""
        self._scratch.unlink(missing_ok=True)
