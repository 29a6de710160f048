"""Writing files so that a reader sees the old one or the new one, never half of one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import UserError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What goes wrong while writing there becomes one line."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None


def write_whole(path: Path, data: bytes) -> None:
    """Write beside the path, then move there in one stroke."""
    with writing(path):
        scratch = path.with_name(path.name + ".part")
        scratch.write_bytes(data)
        scratch.replace(path)


def file_name(label: str, seed: int) -> str:
    """A file name for a run."""
    return re.sub(r"[^A-Za-z0-9._=-]+", "_", f"{label} seed={seed}")
