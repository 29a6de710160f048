"""The queue of coming events, in their total order.

A single heap of a hundred thousand events costs a cache miss at nearly every comparison. Here only events of the near
future lie in a heap; later ones wait unsorted in buckets of equal spans of time until theirs has come. The order of
events is that of one heap, to the letter.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

CHUNK = 4096

Floats = NDArray[np.float64]
Event = tuple[float, int, int, int, int, int]
"""(time, priority, client, sequence, kind, detail)"""


class EventQueue:
    """Push events at any time from now on; pop them in order."""

    def __init__(self, span: float) -> None:
        self._per_second = 1.0 / span
        self._near: list[Event] = []
        self._bucket = -1  # the newest bucket that is in the heap
        self._far: dict[int, list[Event]] = {}
        self._order: list[int] = []
        self._waves: list[tuple[Floats, NDArray[np.int64], int, int]] = []  # times, clients, sequence, kind

    def __bool__(self) -> bool:
        return bool(self._near or self._order or self._waves)

    def schedule(self, times: Floats, clients: NDArray[np.int64], sequence: int, kind: int) -> None:
        """Add an event of one kind for each client, all later than any bucket that has come; at 16 bytes each."""
        order = np.lexsort((clients, times))
        self._waves.append((times[order], clients[order], sequence, kind))

    def _arrive(self, bucket: int) -> None:
        """Put the events of waves that lie in a bucket into the heap."""
        waves, self._waves = self._waves, []
        for times, clients, sequence, kind in waves:
            # A product with the same factor is rounded the same way: the bucket of an event is that of ``push``.
            count = int(np.searchsorted((times[:CHUNK] * self._per_second).astype(np.int64), bucket, "right"))
            while count == CHUNK and count < len(times) and int(times[count] * self._per_second) <= bucket:
                count += 1
            now = zip(times[:count].tolist(), clients[:count].tolist(), strict=True)
            self._near.extend((time, kind // 10, client, sequence, kind, 0) for time, client in now)
            if count < len(times):
                self._waves.append((times[count:], clients[count:], sequence, kind))

    def push(self, event: Event) -> None:
        """Add an event that is not earlier than the last one popped."""
        bucket = int(event[0] * self._per_second)
        if bucket <= self._bucket:
            heappush(self._near, event)
        elif bucket in self._far:
            self._far[bucket].append(event)
        else:
            self._far[bucket] = [event]
            heappush(self._order, bucket)

    def pop(self) -> Event:
        """Remove and give the first event."""
        if not self._near:
            coming = [int(times[0] * self._per_second) for times, *_ in self._waves]
            self._bucket = min([*self._order[:1], *coming])
            if self._order and self._order[0] == self._bucket:
                heappop(self._order)
                self._near = self._far.pop(self._bucket)
            if coming:
                self._arrive(self._bucket)
            heapify(self._near)
        return heappop(self._near)
