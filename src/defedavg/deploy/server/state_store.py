"""The server's saved state: versions in use, state vectors and updates not yet merged (safetensors), progress (JSON).

Updates that arrived together share a file, with a number that increases. ``state.json`` names the version at which the
rest was saved: it is written last, so files of an interrupted save are never read. The file of a state vector is named
by the version whose merge assigned it, so that they leave the value before it. A vector that is zero has a file without
values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ...algorithms.protocol import StateVector, Update
from ...errors import UserError
from ...fileio import open_regular, read_regular, sync, write_flushed, write_whole, writing

UpdateKey = tuple[int, int]
"""Client and index of an update."""

_UPDATES = re.compile(r"updates-([0-9]+)\.safetensors")
_KEY = re.compile(r"([0-9]+)-([0-9]+)")


class StateStore:
    """The folder with a server's state; every vector in it has the shape and the number type of ``model``."""

    def __init__(self, folder: Path, model: Tensor) -> None:
        self.folder = folder
        self._model = model
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._file_of: dict[UpdateKey, Path] = {}
        for path in sorted(filter(_file_number, folder.glob("updates-*.safetensors")), key=_file_number):
            self._file_of |= dict.fromkeys(_keys_in(path), path)  # if an update arrived twice, the last file counts

    def _version_path(self, version: int) -> Path:
        return self.folder / f"version-{version}.safetensors"

    def _vector_path(self, vector: StateVector, version: int) -> Path:
        return self.folder / f"state-{vector.name}-{vector.index}-{version}.safetensors"

    def save_version(self, version: int, weights: Tensor) -> None:
        """Write the weights of a version; ``save_state`` makes them count."""
        write_flushed(self._version_path(version), save({"weights": weights.contiguous()}))

    def save_updates(self, number: int, updates: Mapping[UpdateKey, Tensor]) -> None:
        """Write the values of updates that arrived together; they are on disk when this returns."""
        path = self.folder / f"updates-{number}.safetensors"
        values = {f"{client}-{index}": delta.contiguous() for (client, index), delta in updates.items()}
        write_flushed(path, save(values))
        self.sync()
        self._file_of |= dict.fromkeys(updates, path)

    def sync(self) -> None:
        """Flush the names of the files."""
        with writing(self.folder):
            sync(self.folder)

    def save_vector(self, vector: StateVector, version: int, value: Tensor | None) -> None:
        """Write the value that the merge of a version assigned to a state vector; None is zero."""
        stored = torch.zeros(0, dtype=self._model.dtype) if value is None else value.contiguous()
        write_flushed(self._vector_path(vector, version), save({"state": stored}))

    def version(self, version: int) -> Tensor:
        """Load the weights of a version."""
        return self._load(self._version_path(version), "weights")

    def update(self, update: Update) -> Tensor:
        """Load the values of an update."""
        client, index = key = update.client, update.index
        if key in self._file_of:
            return self._load(self._file_of[key], f"{client}-{index}")
        return self._load(self._file_of_one(key), "update")

    def _file_of_one(self, key: UpdateKey) -> Path:
        """Return the file of an update in folders of earlier versions, where every update had its own."""
        return self.folder / f"update-{key[0]}-{key[1]}.safetensors"

    def vector(self, vector: StateVector, version: int) -> Tensor | None:
        """Load the value that the merge of a version assigned to a state vector; None is zero."""
        value = self._load(self._vector_path(vector, version), "state", may_be_empty=True)
        return value if value.numel() else None

    def _load(self, path: Path, name: str, *, may_be_empty: bool = False) -> Tensor:
        try:
            open_regular(path).close()  # a pipe would wait forever
            with safe_open(path, framework="pt") as file:
                value: Tensor = file.get_tensor(name)
        except (OSError, SafetensorError, KeyError) as error:
            raise UserError(f"the saved state is damaged: {path} cannot be read ({error})") from None
        shapes = (self._model.shape, torch.Size([0])) if may_be_empty else (self._model.shape,)
        if value.shape not in shapes or value.dtype != self._model.dtype:
            raise UserError(f"the saved state is damaged: {path} has other values than this model; restore the file")
        return value

    def keep(self, versions: Iterable[int], updates: Iterable[UpdateKey], vectors: Mapping[StateVector, int]) -> None:
        """Delete all other versions and updates, and all other values of state vectors; also what a crash cut off."""
        kept = {self._version_path(version) for version in versions}
        kept |= {self._file_of.get(key) or self._file_of_one(key) for key in updates}
        kept |= {self._vector_path(vector, version) for vector, version in vectors.items()}
        self._file_of = {key: path for key, path in self._file_of.items() if path in kept}
        with writing(self.folder):
            for path in self.folder.glob("*.safetensors*"):
                if path not in kept:
                    path.unlink(missing_ok=True)

    def save_state(self, state: dict[str, Any]) -> None:
        """Save the progress of the server, after everything that was written before."""
        self.sync()
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
        if not isinstance(state, dict) or any(type(state.get(name)) is not int for name in ("lines", "version")):
            raise UserError(f"{path} is not the state of a server; restore the file, or start another run")
        return state


def _file_number(path: Path) -> int:
    """Return the number of a file of updates, from 1; 0: it has another name."""
    found = _UPDATES.fullmatch(path.name)
    return int(found[1]) if found else 0


def _keys_in(path: Path) -> list[UpdateKey]:
    """Return the updates in a file; a crash may have left a part of one, which no event refers to."""
    try:
        open_regular(path).close()  # a pipe would wait forever
        with safe_open(path, framework="pt") as file:
            found = [_KEY.fullmatch(name) for name in file.keys()]  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError):
        return []
    return [(int(match[1]), int(match[2])) for match in found if match]
