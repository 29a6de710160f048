"""Vectors by key: on the device of the model, and above a number of vectors in host memory.

Tensors on the device are never changed in place, so that a checkpoint can refer to them. A row of host memory is used
again. A vector in a row is copied to the device when it is read; the copy is kept until it is released.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from typing import Generic, TypeVar

import torch
from torch import Tensor

from .state_memory import VectorMemory

K = TypeVar("K", bound=Hashable)


def own_memory(value: Tensor) -> Tensor:
    """Return the value in memory of its own: a view would keep the memory of a whole batch."""
    return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value


class PlacedVectors(Generic[K]):
    """Vectors by key, each on the device or in a row of host memory; without a memory, they stay where they are.

    ``stays`` says which keys are always on the device.
    """

    def __init__(self, device: torch.device, stays: Callable[[K], bool] = lambda _: False) -> None:
        self._device, self._stays = device, stays
        self._values: dict[K, Tensor] = {}
        self._rows: dict[K, Tensor] = {}  # in host memory
        self._copies: dict[K, Tensor] = {}  # of rows on the device
        self._memory: VectorMemory | None = None

    def place(self, memory: VectorMemory) -> None:
        """Use this memory from now on, also for the vectors that exist."""
        values = {key: own_memory(value) for key, value in self.stored().items()}
        self.clear()
        self._memory = memory
        for key, value in values.items():
            self.put(key, value.to(self._device))
            self.release()

    def __contains__(self, key: object) -> bool:
        return key in self._values or key in self._rows

    def __iter__(self) -> Iterator[K]:
        yield from self._values
        yield from self._rows

    def __len__(self) -> int:
        return len(self._values) + len(self._rows)

    @property
    def on_device(self) -> int:
        """The number of vectors on the device, without copies of rows."""
        return len(self._values)

    def get(self, key: K) -> Tensor | None:
        """Return a vector on the device, None if there is none of this key."""
        value = self._values.get(key)
        if value is not None:
            return value if value.device == self._device else value.to(self._device)
        if key in self._rows and key not in self._copies:
            self._copies[key] = self._rows[key].to(self._device, non_blocking=True, copy=True)
        return self._copies.get(key)

    def put(self, key: K, value: Tensor) -> None:
        """Store a vector in the place that its key has, or else where there is one."""
        memory = None if key in self else self._memory
        if memory is not None and not memory.take_on_device(always=self._stays(key)):
            self._rows[key] = memory.take_row(value)
        if key in self._rows:
            self._rows[key].copy_(value, non_blocking=True)
            self._copies[key] = value
        else:
            self._values[key] = own_memory(value)

    def remove(self, key: K) -> None:
        """Remove a vector if there is one, and free its place."""
        self._copies.pop(key, None)
        row, value = self._rows.pop(key, None), self._values.pop(key, None)
        if self._memory is not None and row is not None:
            self._memory.free_row(row)
        elif self._memory is not None and value is not None:
            self._memory.free_on_device()

    def release(self) -> None:
        """Free the copies of rows on the device."""
        self._copies.clear()

    def stored(self) -> dict[K, Tensor]:
        """Return all vectors where they are; rows may change later."""
        if self._rows and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # the copies to host memory are complete
        return {**self._values, **self._rows}

    def restore(self, values: Mapping[K, Tensor]) -> None:
        """Replace all vectors."""
        self.clear()
        for key, value in values.items():
            if self._memory is None:
                self._values[key] = value
            else:
                self.put(key, value.to(self._device))

    def clear(self) -> None:
        """Remove all vectors."""
        for key in list(self):
            self.remove(key)


class LiveVersions(MutableMapping[int, Tensor]):
    """The versions of a run that are still used; a new one is on the device until a newer one replaces it."""

    def __init__(self, first: Tensor) -> None:
        self._device = first.device
        self._newest = {0: first}  # needs no place
        self._placed = PlacedVectors[int](first.device)

    def __getitem__(self, version: int) -> Tensor:
        found = self._newest.get(version)
        found = self._placed.get(version) if found is None else found
        if found is None:
            raise KeyError(version)
        return found

    def __setitem__(self, version: int, weights: Tensor) -> None:
        self._placed.remove(version)
        self._newest[version] = weights

    def __delitem__(self, version: int) -> None:
        if self._newest.pop(version, None) is None:
            if version not in self._placed:
                raise KeyError(version)
            self._placed.remove(version)

    def __contains__(self, version: object) -> bool:
        return version in self._newest or version in self._placed

    def __iter__(self) -> Iterator[int]:
        yield from sorted((*self._newest, *self._placed))

    def __len__(self) -> int:
        return len(self._newest) + len(self._placed)

    @property
    def on_device(self) -> int:
        """The number of versions on the device, without copies of those in host memory."""
        return len(self._newest) + self._placed.on_device

    def place(self, memory: VectorMemory) -> None:
        """Use this memory from now on."""
        self._placed.place(memory)

    def end_merge(self, newest: int) -> None:
        """Give a place to the versions that a newer one has replaced, and free copies."""
        for version in [version for version in self._newest if version != newest]:
            self._placed.put(version, self._newest.pop(version))
        self._placed.release()

    def release(self) -> None:
        """Free the copies on the device of versions in host memory."""
        self._placed.release()

    def stored(self) -> dict[int, Tensor]:
        """Return all versions where they are, in order; a later merge may change those in host memory."""
        return dict(sorted({**self._newest, **self._placed.stored()}.items()))

    def replace(self, versions: Mapping[int, Tensor]) -> None:
        """Replace all versions."""
        newest = max(versions)
        self._newest = {newest: versions[newest].to(self._device)}
        self._placed.restore({version: weights for version, weights in versions.items() if version != newest})
