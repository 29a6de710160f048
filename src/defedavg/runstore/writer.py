"""Writes a run folder: one run at a time holds its lock, and every file is complete or absent."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import UserError
from ..fileio import LOCK_FILE, FolderLock, write_whole, writing
from ..jsonio import finite, json_line
from .layout import MARKERS, OWNED, RunFiles


def open_folder(folder: Path, *, force: bool) -> None:
    """Create a run folder; refuse one that exists, or with ``force`` empty it if it holds a run."""
    with writing(folder):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} exists and is not a folder; choose another --out or name")
        folder.mkdir(parents=True, exist_ok=True)
        files = RunFiles(folder)
        if files.is_empty():
            return
        if not force:
            raise UserError(f"{folder} already exists; use --force to replace it, or another name")
        if not all((folder / name).exists() for name in MARKERS):
            raise UserError(f"{folder} holds something other than a run and is not replaced; choose another name")
        _remove_owned(folder)


def remove_run(folder: Path) -> list[str]:
    """Remove what a run wrote, and its folder if nothing else is in it; return the names of what remains."""
    with writing(folder):
        _remove_owned(folder)
        foreign = RunFiles(folder).foreign()
        if not foreign:
            (folder / LOCK_FILE).unlink(missing_ok=True)
            folder.rmdir()
    return foreign


def _remove_owned(folder: Path) -> None:
    for name in OWNED:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)  # removes a link inside without following it
        else:
            path.unlink(missing_ok=True)


class RunWriter:
    """A run folder that this process writes to, until ``close``."""

    def __init__(self, folder: Path, *, seconds: float = 0.0) -> None:
        self.files = RunFiles(folder)
        self._lock = FolderLock(folder, seconds)

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()

    def begin(self, config: str) -> None:
        """Write the configuration and create the folders for plans, weights and plots."""
        with writing(self.files.folder):
            for name in ("plans", "weights", "plots"):
                (self.files.folder / name).mkdir(exist_ok=True)
        write_whole(self.files.config, config.encode())

    def write_summary(
        self, name: str, origin: Mapping[str, Any], results: Mapping[str, Sequence[Any]], *, finished: bool
    ) -> None:
        """Write summary.json: ``results`` are the ``runs`` of a study or the ``best`` pairs of a search for rates."""
        head = {"name": name, "version": __version__, "finished": finished, "provenance": dict(origin)}
        text = json.dumps({**head, **finite(results)}, indent=1, allow_nan=False) + "\n"
        write_whole(self.files.summary, text.encode())

    def write_rate_points(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write the results of a search for learning rates."""
        write_whole(self.files.rate_points, "".join(json_line(record) + "\n" for record in records).encode())

    def write_partition(self, title: str, counts: list[list[int]]) -> None:
        """Write how many samples of every class each client holds."""
        write_whole(self.files.partition, (json_line({"title": title, "counts": counts}) + "\n").encode())

    def write_weights(self, label: str, seed: int, tensors: bytes) -> None:
        """Write the last version of a run, in the format of safetensors."""
        write_whole(self.files.weights(label, seed), tensors)
