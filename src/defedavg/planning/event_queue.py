"""The queue of future events, in their total order.

A single heap of a hundred thousand events costs a cache miss at nearly every comparison. Here only events of the near
future are in a heap; later ones wait unsorted in buckets of equal time spans. The order of events is exactly that of
one heap.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from .intervals import Floats

CHUNK = 4096

Event = tuple[float, int, int, int, int, int]
"""(time, priority, client, sequence, kind, detail)"""


class EventKind:
    """Kinds of events; the tens are the priority: arrivals, deliveries, dispatches, timers."""

    ENDED = 0
    ARRIVED = 1
    DIED = 2
    RETURNED = 3
    FIRST_ENDED = 4
    MODEL = 10
    REQUEST = 11
    GO = 20
    END_OF_INSTANT = 21
    TIMER = 30


class EventQueue:
    """Push events that are not earlier than the last one popped; pop them in order."""

    def __init__(self, span: float) -> None:
        self._per_second = 1.0 / span
        self._near: list[Event] = []
        self._bucket = -1  # the latest bucket that is in the heap
        self._far: dict[int, list[Event]] = {}
        self._far_buckets: list[int] = []  # a heap
        self._waves: list[tuple[Floats, NDArray[np.int64], int, int]] = []  # times, clients, sequence, kind

    def __bool__(self) -> bool:
        return bool(self._near or self._far_buckets or self._waves)

    def schedule(self, times: Floats, clients: NDArray[np.int64], sequence: int, kind: int) -> None:
        """Add one event of a kind for each client, all later than the bucket in the heap, at 16 bytes each."""
        order = np.lexsort((clients, times))
        self._waves.append((times[order], clients[order], sequence, kind))

    def _load_waves(self, bucket: int) -> None:
        """Move the events of scheduled waves that belong to a bucket into the heap."""
        waves, self._waves = self._waves, []
        for times, clients, sequence, kind in waves:
            # The same factor and the same rounding as in ``push`` select the same bucket.
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
            heappush(self._far_buckets, bucket)

    def pop(self) -> Event:
        """Remove and return the first event."""
        if not self._near:
            starts = [int(times[0] * self._per_second) for times, *_ in self._waves]
            self._bucket = min([*self._far_buckets[:1], *starts])
            if self._far_buckets and self._far_buckets[0] == self._bucket:
                heappop(self._far_buckets)
                self._near = self._far.pop(self._bucket)
            if starts:
                self._load_waves(self._bucket)
            heapify(self._near)
        return heappop(self._near)
