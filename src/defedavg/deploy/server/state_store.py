"""The server's saved state: versions in use and updates not yet merged (safetensors), and its progress (JSON)."""

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
from ...fileio import open_regular, read_regular, write_whole, writing


class StateStore:
    """The folder with a server's state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def _version_path(self, version: int) -> Path:
        return self.folder / f"version-{version}.safetensors"

    def _update_path(self, client: int, index: int) -> Path:
        return self.folder / f"update-{client}-{index}.safetensors"

    def save_version(self, version: int, weights: Tensor) -> None:
        """Save the weights of a version."""
        write_whole(self._version_path(version), save({"weights": weights.contiguous()}))

    def save_update(self, client: int, index: int, delta: Tensor) -> None:
        """Save the values of an update."""
        write_whole(self._update_path(client, index), save({"update": delta.contiguous()}))

    def has_version(self, version: int) -> bool:
        """Return whether a version is saved."""
        return self._version_path(version).exists()

    def version(self, version: int) -> Tensor:
        """Load the weights of a version."""
        return _load(self._version_path(version), "weights")

    def update(self, update: Update) -> Tensor:
        """Load the values of an update."""
        return _load(self._update_path(update.client, update.index), "update")

    def keep(self, versions: Iterable[int], updates: Iterable[tuple[int, int]]) -> None:
        """Delete all other versions and updates."""
        kept = {self._version_path(version) for version in versions} | {self._update_path(*key) for key in updates}
        with writing(self.folder):
            for path in self.folder.glob("*.safetensors"):
                if path not in kept:
                    path.unlink(missing_ok=True)

    def save_state(self, state: dict[str, Any]) -> None:
        """Save the progress of the server."""
        write_whole(self.folder / "state.json", (json.dumps(state, indent=1, allow_nan=False) + "\n").encode())

    def state(self) -> dict[str, Any] | None:
        """Load the progress of the server, or return None if it was never saved."""
        path = self.folder / "state.json"
        try:
            state = json.loads(read_regular(path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UserError(f"the state {path} cannot be read: {error}") from None
        if not isinstance(state, dict) or type(state.get("lines")) is not int:
            raise UserError(f"{path} is not the state of a server; restore the file, or start another run")
        return state


def _load(path: Path, name: str) -> Tensor:
    try:
        open_regular(path).close()  # a pipe would wait forever
        return load_file(path)[name]
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(f"the saved state is damaged: {path} cannot be read ({error})") from None
