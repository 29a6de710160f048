"""Memory for the state vectors and versions of runs: on the device, and above a number of vectors in host memory.

Host memory is pinned, in a few large chunks whose rows are used again, because pinning is slow. All copies are made on
the current stream, in order, so the host never waits for one. On the CPU there is no other memory to use.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UserError
from .memory import SHARE, free, readable

CHUNK_BYTES, CHUNK_ROWS = 256 << 20, 1024
HOST_SHARE = SHARE["cpu"]  # of the free host memory: a checkpoint copies what is there


@dataclass(frozen=True, slots=True)
class StateNeed:
    """Numbers of state vectors: of runs that must be in progress together, and of all runs that share a trainer."""

    together: int = 0
    all_runs: int = 0


NO_NEED = StateNeed()


class VectorMemory:
    """Memory for vectors of one size: ``on_device`` of them at most on the device (None: all), the others in rows.

    Memories can share ``rows``, the free rows of host memory.
    """

    def __init__(self, on_device: int | None = None, rows: list[Tensor] | None = None) -> None:
        self.on_device = on_device
        self.rows: list[Tensor] = [] if rows is None else rows
        self.used_on_device = 0

    def take_on_device(self, *, always: bool = False) -> bool:
        """Return whether one more vector may be on the device."""
        taken = always or self.on_device is None or self.used_on_device < self.on_device
        self.used_on_device += taken
        return taken

    def free_on_device(self) -> None:
        """Give back the place of a vector on the device."""
        self.used_on_device -= 1

    def take_row(self, like: Tensor) -> Tensor:
        """Return host memory for a vector; its contents are undefined."""
        if not self.rows:
            count = max(2, min(CHUNK_ROWS, CHUNK_BYTES // like.nbytes))  # never one: a row is part of a larger tensor
            try:
                chunk = torch.empty((count, like.numel()), dtype=like.dtype, pin_memory=like.device.type == "cuda")
            except RuntimeError as error:
                raise UserError(
                    "the host has not enough memory for the state vectors and versions of the runs; use fewer clients, "
                    "a lower concurrency or a smaller model"
                ) from error
            self.rows.extend(chunk.unbind())
        return self.rows.pop()

    def free_row(self, row: Tensor) -> None:
        """Give back a row."""
        self.rows.append(row)


class StateMemory(VectorMemory):
    """The memory for the state vectors of the runs of one trainer, as numbers of vectors of one size.

    ``capacity`` vectors can be stored, and ``reserved`` of them are expected.
    """

    def __init__(self, vector_bytes: int, capacity: int, reserved: int = 0, on_device: int | None = None) -> None:
        super().__init__(on_device)
        self.vector_bytes, self.capacity, self.reserved = vector_bytes, capacity, reserved

    @classmethod
    def within(
        cls, device: torch.device, vector_bytes: int, allowed: int, training: int, need: StateNeed = NO_NEED
    ) -> StateMemory:
        """Divide ``allowed`` bytes of a device, of which ``training`` are needed to train one client.

        On a CUDA device, at least half of the rest is for training, and host memory is used in addition.
        """
        spare = max(0, allowed - training) // vector_bytes
        if device.type == "cuda":
            capacity = spare // 2 + int(HOST_SHARE * free(torch.device("cpu"))) // vector_bytes
            reserved = min(need.all_runs, capacity)
            return cls(vector_bytes, capacity, reserved, min(reserved, spare // 2))
        return cls(vector_bytes, spare, min(need.all_runs, max(need.together, spare // 2), spare))

    def for_versions(self, on_device: int | None) -> VectorMemory:
        """Return a memory for versions with a limit of its own and the same rows."""
        return VectorMemory(on_device, self.rows)

    @property
    def device_bytes(self) -> int:
        """The bytes of the device that state vectors are expected to take."""
        return self.vector_bytes * (self.reserved if self.on_device is None else self.on_device)

    def check(self, who: str, vectors: int) -> None:
        """Raise ``UserError`` if that many vectors cannot be stored."""
        if vectors > self.capacity:
            sizes = [readable(n * self.vector_bytes) for n in (1, vectors, self.capacity)]
            raise UserError(
                f"{who} keeps {vectors:,} state vectors of {sizes[0]}: {sizes[1]}; only {sizes[2]} may be used for "
                "them; give more with --memory, or use fewer clients or a smaller model"
            )
