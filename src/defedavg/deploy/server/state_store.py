"""The server's saved state: versions in use, state vectors and updates not yet merged (safetensors), progress (JSON).

The file of a state vector is named by the version whose merge assigned it, so that an interrupted merge leaves the
value before it. A vector that is zero has a file without values.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from ...algorithms.protocol import StateVector, Update
from ...errors import UserError
from ...fileio import open_regular, read_regular, write_whole, writing


class StateStore:
    """The folder with a server's state; every vector in it has the shape and the number type of ``model``."""

    def __init__(self, folder: Path, model: Tensor) -> None:
        self.folder = folder
        self._model = model
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def _version_path(self, version: int) -> Path:
        return self.folder / f"version-{version}.safetensors"

    def _update_path(self, client: int, index: int) -> Path:
        return self.folder / f"update-{client}-{index}.safetensors"

    def _vector_path(self, vector: StateVector, version: int) -> Path:
        return self.folder / f"state-{vector.name}-{vector.index}-{version}.safetensors"

    def save_version(self, version: int, weights: Tensor) -> None:
        """Save the weights of a version."""
        write_whole(self._version_path(version), save({"weights": weights.contiguous()}))

    def save_update(self, client: int, index: int, delta: Tensor) -> None:
        """Save the values of an update."""
        write_whole(self._update_path(client, index), save({"update": delta.contiguous()}))

    def save_vector(self, vector: StateVector, version: int, value: Tensor | None) -> None:
        """Save the value that the merge of a version assigned to a state vector; None is zero."""
        stored = torch.zeros(0, dtype=self._model.dtype) if value is None else value.contiguous()
        write_whole(self._vector_path(vector, version), save({"state": stored}))

    def has_version(self, version: int) -> bool:
        """Return whether a version is saved."""
        return self._version_path(version).exists()

    def version(self, version: int) -> Tensor:
        """Load the weights of a version."""
        return self._load(self._version_path(version), "weights")

    def update(self, update: Update) -> Tensor:
        """Load the values of an update."""
        return self._load(self._update_path(update.client, update.index), "update")

    def vector(self, vector: StateVector, version: int) -> Tensor | None:
        """Load the value that the merge of a version assigned to a state vector; None is zero."""
        value = self._load(self._vector_path(vector, version), "state", may_be_empty=True)
        return value if value.numel() else None

    def _load(self, path: Path, name: str, *, may_be_empty: bool = False) -> Tensor:
        try:
            open_regular(path).close()  # a pipe would wait forever
            value = load_file(path)[name]
        except (OSError, SafetensorError, KeyError) as error:
            raise UserError(f"the saved state is damaged: {path} cannot be read ({error})") from None
        shapes = (self._model.shape, torch.Size([0])) if may_be_empty else (self._model.shape,)
        if value.shape not in shapes or value.dtype != self._model.dtype:
            raise UserError(f"the saved state is damaged: {path} has other values than this model; restore the file")
        return value

    def keep(
        self, versions: Iterable[int], updates: Iterable[tuple[int, int]], vectors: Mapping[StateVector, int]
    ) -> None:
        """Delete all other versions and updates, and all other values of state vectors; also what a crash cut off."""
        kept = {self._version_path(version) for version in versions} | {self._update_path(*key) for key in updates}
        kept |= {self._vector_path(vector, version) for vector, version in vectors.items()}
        with writing(self.folder):
            for path in self.folder.glob("*.safetensors*"):
                if path not in kept:
                    path.unlink(missing_ok=True)

    def save_state(self, state: dict[str, Any]) -> None:
        """Save the progress of the server."""
        write_whole(self.folder / "state.json", (json.dumps(state, allow_nan=False) + "\n").encode())

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
