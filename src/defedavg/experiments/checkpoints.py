"""Checkpoints: one file each, in the format of safetensors, so that loading one executes nothing.

    checkpoints/000042.safetensors
        header   format, format_version, sha256, and state: everything but tensors, as JSON
        tensors  versions and updates of the runs under way

The checksum is over the state and over name, type, shape and bytes of every tensor. A file is written beside its place,
brought to the disk, and moved there; the one before it is kept, and used if this one turns out to be damaged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError, first_line
from ..fileio import replacing, writing

FORMAT = "defedavg-checkpoint"
VERSION = 1
KEPT = 2
SUFFIX = ".safetensors"


class Damaged(Exception):
    """A file is not what was written."""


def _digest(state: str, tensors: Mapping[str, Tensor]) -> str:
    digest = sha256(state.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write(path: Path, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint whole, or raise ``UserError`` and leave what was there."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(state, allow_nan=False)
    header = {"format": FORMAT, "format_version": str(VERSION), "sha256": _digest(text, own), "state": text}
    with writing(path):
        try:
            with replacing(path) as scratch:
                save_file(own, scratch, header)
        except SafetensorError as error:
            raise UserError(f"{path} cannot be written: {first_line(error)}") from None


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The state and the tensors; ``Damaged`` if they are not what was written."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise Damaged("it is no checkpoint")
            _check_version(path, header.get("format_version", ""))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise Damaged(first_line(error)) from None
    if _digest(header.get("state", ""), tensors) != header.get("sha256"):
        raise Damaged("its checksum is wrong")
    state = json.loads(header["state"])
    if not isinstance(state, dict):
        raise Damaged("its state is none")
    return state, tensors


def _check_version(path: Path, found: str) -> None:
    if not found.isdecimal():
        raise Damaged(f"its format version is {found[:20]!r}")
    if int(found) > VERSION:
        raise UserError(
            f"the checkpoint {path} has format version {int(found)}, but this program reads up to {VERSION}; "
            "update defedavg"
        )


class CheckpointDir:
    """The checkpoints of a run folder, numbered; the newest few are kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.damaged: dict[Path, str] = {}  # found so, and why

    def paths(self) -> list[Path]:
        """What is there, the newest first."""
        found = [p for p in self.folder.glob(f"*{SUFFIX}") if p.stem.isdecimal()]
        return sorted(found, key=lambda path: int(path.stem), reverse=True)

    def newest(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """The newest that is whole; None if there is none at all."""
        for path in self.paths():
            try:
                return read(path)
            except Damaged as reason:
                self.damaged[path] = str(reason)
        if self.damaged:
            path, why = next(iter(self.damaged.items()))
            raise UserError(f"no checkpoint can be used ({path}: {why}); begin anew with --force")
        return None

    def save(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Add one, and drop what is more than enough."""
        there = self.paths()
        number = int(there[0].stem) + 1 if there else 1
        with writing(self.folder):
            self.folder.mkdir(exist_ok=True)
        write(self.folder / f"{number:06d}{SUFFIX}", state, tensors)
        good = [path for path in there if path not in self.damaged]
        self._remove([*self.damaged, *good[KEPT - 1 :], *self._halves()])

    def clear(self) -> None:
        """Remove all: the runs are over."""
        self._remove([*self.paths(), *self._halves()])
        with suppress(OSError):
            self.folder.rmdir()

    def _halves(self) -> list[Path]:
        """What was being written when a process was killed; safetensors has names of its own for it."""
        return [path for path in self.folder.glob("*") if path.suffix == ".part" or path.name.startswith(".tmp")]

    def _remove(self, paths: Iterable[Path]) -> None:
        for path in paths:
            with suppress(OSError):  # what cannot be removed does no harm
                path.unlink()
