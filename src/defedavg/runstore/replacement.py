"""Replaces a run by another one in the same folder; after any crash, one of the two is complete.

The old run is kept aside until the new one has results:

    .previous.part   the old run while it is moved aside or back; what is beside it belongs to the old run too
    .previous        the complete old run; what is beside it belongs to the new run, which has no results yet
    .previous.old    the old run while it is removed; what is beside it belongs to the new run

Every change from one of these states to another is one rename. The caller holds the lock of the folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..fileio import sync, writing
from .layout import OWNED, PREVIOUS, PREVIOUS_MOVING, PREVIOUS_REMOVING

_STATES = (PREVIOUS, PREVIOUS_MOVING, PREVIOUS_REMOVING)


class Replacement:
    """The old run in a folder, if there is one; ``names`` are the files and folders that belong to a run."""

    def __init__(self, folder: Path, names: Iterable[str] = OWNED) -> None:
        self._folder = folder
        self._names = tuple(name for name in names if name not in _STATES)
        self._kept, self._moving, self._removing = (folder / name for name in _STATES)

    @property
    def pending(self) -> bool:
        """Whether an old run is kept aside."""
        return self._kept.is_dir()

    def set_aside(self) -> None:
        """Keep the run in the folder aside; do nothing if there is none."""
        with writing(self._folder):
            owned = list(self._owned())
            if owned:
                self._moving.mkdir()
                for path in owned:
                    path.rename(self._moving / path.name)
                self._rename(self._moving, self._kept)

    def commit(self) -> None:
        """Remove the old run: the new one has results."""
        if self.pending:
            with writing(self._folder):
                self._rename(self._kept, self._removing)
                shutil.rmtree(self._removing)

    def restore(self) -> bool:
        """Remove the new run and move the old one back; return whether there was an old one."""
        with writing(self._folder):
            if self.pending:
                for path in self._owned():
                    remove(path)
                self._rename(self._kept, self._moving)
            if not self._moving.is_dir():
                return False
            for path in self._moving.iterdir():
                path.rename(self._folder / path.name)
            self._moving.rmdir()
        return True

    def recover(self, *, begun: bool = False) -> bool:
        """Complete what a killed process began; return whether the old run was restored.

        With ``begun``, the new run has results, so the old one is removed.
        """
        with writing(self._folder):
            if self._removing.is_dir():
                shutil.rmtree(self._removing)
        if begun:
            self.commit()
        return self.restore()

    def _owned(self) -> Iterator[Path]:
        for name in self._names:
            for path in (self._folder / name, self._folder / f"{name}.part"):  # .part: of a killed process
                if path.exists() or path.is_symlink():
                    yield path

    def _rename(self, path: Path, to: Path) -> None:
        path.rename(to)
        sync(self._folder)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder; links are not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)  # removes a link inside without following it
    else:
        path.unlink(missing_ok=True)
