"""What the server must not forget: versions in use, updates not yet merged (safetensors), and where it is (JSON).

Every file is written beside its place, brought to the disk, and moved there in one stroke. An update is here before the
log says that it arrived, and it goes only after the version it was merged into is here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from ...algorithms.protocol import Update
from ...errors import UserError
from ...fileio import write_whole, writing


class StateStore:
    """The folder of a server's state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def _version(self, version: int) -> Path:
        return self.folder / f"version-{version}.safetensors"

    def _update(self, client: int, index: int) -> Path:
        return self.folder / f"update-{client}-{index}.safetensors"

    def save_version(self, version: int, weights: Tensor) -> None:
        """Keep a version."""
        write_whole(self._version(version), save({"weights": weights.contiguous()}))

    def save_update(self, client: int, index: int, delta: Tensor) -> None:
        """Keep an update."""
        write_whole(self._update(client, index), save({"update": delta.contiguous()}))

    def has_version(self, version: int) -> bool:
        """Whether a version is here."""
        return self._version(version).exists()

    def version(self, version: int) -> Tensor:
        """A version."""
        return _load(self._version(version), "weights")

    def update(self, update: Update) -> Tensor:
        """The values of an update."""
        return _load(self._update(update.client, update.index), "update")

    def keep(self, versions: Iterable[int], updates: Iterable[tuple[int, int]]) -> None:
        """Delete every other version and update."""
        kept = {self._version(version) for version in versions} | {self._update(*key) for key in updates}
        with writing(self.folder):
            for path in self.folder.glob("*.safetensors"):
                if path not in kept:
                    path.unlink(missing_ok=True)

    def save_state(self, state: dict[str, Any]) -> None:
        """Say where the server stands."""
        write_whole(self.folder / "state.json", (json.dumps(state, indent=1, allow_nan=False) + "\n").encode())

    def state(self) -> dict[str, Any] | None:
        """Where the server stood, or None if it never said."""
        path = self.folder / "state.json"
        if not path.exists():
            return None
        try:
            found = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(f"the state {path} cannot be read: {error}") from None
        if not isinstance(found, dict):
            raise UserError(f"the state {path} is not what a server leaves")
        return found


def _load(path: Path, name: str) -> Tensor:
    try:
        return load_file(path)[name]
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(f"the saved state is damaged: {path} cannot be read ({error})") from None
