"""A set of clients with draws by position; the cost of every operation is independent of N."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..rng import below, extend


class ClientPool:
    """A subset of ``range(total)``, initially all of it; only positions that changed take memory."""

    __slots__ = ("_client_at", "_position", "_size", "_total")

    def __init__(self, total: int) -> None:
        self._total = total
        self._size = total
        self._client_at: dict[int, int] = {}
        self._position: dict[int, int] = {}

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < self._size:
            raise IndexError(position)
        return self._client_at.get(position, position)

    def __contains__(self, client: int) -> bool:
        return self._position.get(client, client) < self._size

    def _swap(self, a: int, b: int) -> None:
        left, right = self._client_at.get(a, a), self._client_at.get(b, b)
        for position, client in ((a, right), (b, left)):
            if position == client:
                self._client_at.pop(position, None)
                self._position.pop(client, None)
            else:
                self._client_at[position] = client
                self._position[client] = position

    def remove(self, client: int) -> None:
        """Remove a client, if it is a member."""
        if client in self:
            self._size -= 1
            self._swap(self._position.get(client, client), self._size)

    def add(self, client: int) -> None:
        """Add a client, if it is not a member."""
        if client not in self:
            self._swap(self._position.get(client, client), self._size)
            self._size += 1

    def sample(self, count: int, k: int) -> list[int]:
        """Draw ``count`` distinct clients by key; the pool does not change."""
        moved: dict[int, int] = {}
        drawn = []
        for i in range(count):
            j = i + below(extend(k, i), self._size - i)
            drawn.append(self[moved.get(j, j)])
            moved[j] = moved.get(i, i)
        return drawn

    def state(self) -> dict[str, Any]:
        """Return the order of the clients as JSON values: later draws depend on it."""
        moved = [[position, client] for position, client in sorted(self._client_at.items())]
        return {"total": self._total, "size": self._size, "moved": moved}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> ClientPool:
        """Return the pool whose ``state`` this is."""
        pool = cls(int(state["total"]))
        pool._size = int(state["size"])
        pool._client_at = dict(state["moved"])
        pool._position = {client: position for position, client in pool._client_at.items()}
        return pool
