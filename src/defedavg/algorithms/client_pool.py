"""A set of clients from which one can be drawn by position; every operation costs the same at any N."""

from __future__ import annotations

from ..rng import below, extend


class ClientPool:
    """A subset of ``range(total)``, all of it at first; positions are remembered only where they moved."""

    __slots__ = ("_at", "_place", "_size", "_total")

    def __init__(self, total: int) -> None:
        self._total = total
        self._size = total
        self._at: dict[int, int] = {}
        self._place: dict[int, int] = {}

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < self._size:
            raise IndexError(position)
        return self._at.get(position, position)

    def __contains__(self, client: int) -> bool:
        return self._place.get(client, client) < self._size

    def _swap(self, a: int, b: int) -> None:
        left, right = self._at.get(a, a), self._at.get(b, b)
        for position, client in ((a, right), (b, left)):
            if position == client:
                self._at.pop(position, None)
                self._place.pop(client, None)
            else:
                self._at[position] = client
                self._place[client] = position

    def remove(self, client: int) -> None:
        """Take a client out, if it is in."""
        if client in self:
            self._size -= 1
            self._swap(self._place.get(client, client), self._size)

    def add(self, client: int) -> None:
        """Put a client in, if it is not."""
        if client not in self:
            self._swap(self._place.get(client, client), self._size)
            self._size += 1

    def sample(self, count: int, k: int) -> list[int]:
        """Draw ``count`` different clients by key; the pool stays as it is."""
        moved: dict[int, int] = {}
        drawn = []
        for i in range(count):
            j = i + below(extend(k, i), self._size - i)
            drawn.append(self[moved.get(j, j)])
            moved[j] = moved.get(i, i)
        return drawn
