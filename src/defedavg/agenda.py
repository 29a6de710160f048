"""The queue of coming events, in their total order.

A single heap of a hundred thousand events costs a cache miss at nearly every comparison. Here only events of the near
future lie in a heap; later ones wait unsorted in buckets of equal spans of time until theirs has come. The order of
events is that of one heap, to the letter.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

Event = tuple[float, int, int, int, int, int]
"""(time, priority, client, sequence, kind, detail)"""


class Agenda:
    """Push events at any time from now on; pop them in order."""

    def __init__(self, span: float) -> None:
        self._per_second = 1.0 / span
        self._near: list[Event] = []
        self._bucket = -1  # the newest bucket that is in the heap
        self._far: dict[int, list[Event]] = {}
        self._order: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._near or self._order)

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
            self._bucket = heappop(self._order)
            self._near = self._far.pop(self._bucket)
            heapify(self._near)
        return heappop(self._near)
