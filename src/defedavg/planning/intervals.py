"""Availability in any number of intervals per client, which may repeat: what a trace describes.

Intervals are half-open: a client is reachable from a start, and no longer at the end. All intervals of all clients are
in two flat arrays, so that many clients are looked up at once by the same operations as one.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Spans = Sequence[tuple[float, float]]

MIN_SECONDS = 1e-3
"""The shortest interval: far more than the rounding of any time that a plan reaches."""


class Availability(Protocol):
    """When clients are reachable."""

    def opens(self, client: int, time: float) -> float:
        """Return the first time at or after ``time`` at which the client is reachable; infinity if there is none."""

    def opens_all(self, clients: Ints, times: Floats) -> Floats:
        """Return ``opens`` for many clients, by the same operations; infinity stays infinite."""


@dataclass(frozen=True)
class Intervals:
    """The intervals of client i are ``starts`` and ``ends`` from ``offsets[i]`` to ``offsets[i + 1]``, in order.

    They repeat every ``periods[i]`` seconds; infinity: they do not repeat.
    """

    starts: Floats
    ends: Floats
    offsets: Ints
    periods: Floats

    @classmethod
    def of(cls, clients: Iterable[tuple[Spans, float]]) -> Intervals:
        """Return the intervals of clients, each given as its disjoint intervals and its period."""
        spans, counts, periods = [], [0], []
        for given, period in clients:
            inside = sorted(piece for span in given for piece in wrapped(span, period))
            spans += inside
            counts.append(len(inside))
            periods.append(period)
        starts, ends = np.array(spans, np.float64).reshape(-1, 2).T.copy()
        return cls(starts, ends, np.cumsum(counts), np.array(periods, np.float64))

    def opens(self, client: int, time: float) -> float:
        """Return the first time at or after ``time`` at which the client is reachable; infinity if there is none."""
        low, high, period = int(self.offsets[client]), int(self.offsets[client + 1]), float(self.periods[client])
        cycle = math.floor(time / period)
        base = cycle * period if cycle else 0.0
        found = bisect_right(self.ends, time - base, low, high)
        if found < high:
            return max(time, base + float(self.starts[found]))
        # An opening is the same for all times at which the client is not reachable before it.
        return max(time, (cycle + 1) * period + float(self.starts[low]))

    def opens_all(self, clients: Ints, times: Floats) -> Floats:
        """Return ``opens`` for many clients, by the same operations; infinity stays infinite."""
        known = np.where(np.isfinite(times), times, 0.0)
        first, stop, periods = self.offsets[clients], self.offsets[clients + 1], self.periods[clients]
        cycles = np.floor(known / periods)
        with np.errstate(invalid="ignore"):  # zero times infinity
            bases = np.where(cycles > 0.0, cycles * periods, 0.0)
        found = self._first_ends_after(known - bases, first, stop)
        inside = found < stop
        found = np.where(inside, found, first)
        opening = np.where(inside, bases, (cycles + 1.0) * periods) + self.starts[found]
        return np.where(np.isfinite(times), np.maximum(known, opening), times)

    def _first_ends_after(self, moments: Floats, low: Ints, high: Ints) -> Ints:
        """Return, by bisection, the index of the first end in [low, high) that is later; high if there is none."""
        while (low < high).any():
            middle = (low + high) // 2
            searching = low < high
            earlier = searching & (self.ends[np.where(searching, middle, 0)] <= moments)
            low = np.where(earlier, middle + 1, low)
            high = np.where(searching & ~earlier, middle, high)
        return low

    @cached_property
    def longest_closed(self) -> float:
        """The longest time from the start, or from an end, until a client is reachable; clients that end excepted."""
        first, last = self.offsets[:-1], self.offsets[1:] - 1
        repeats = np.isfinite(self.periods)
        again = self.periods[repeats] + self.starts[first[repeats]] - self.ends[last[repeats]]
        between = np.maximum(0.0, self.starts[1:] - self.ends[:-1])
        between[self.offsets[1:-1] - 1] = 0.0  # from one client to the next
        closed = (self.starts[first], between, again)
        return float(max(part.max(initial=0.0) for part in closed))

    @cached_property
    def ends_at(self) -> Floats:
        """When each client is reachable for the last time; infinity: it always is again."""
        return np.where(np.isfinite(self.periods), np.inf, self.ends[self.offsets[1:] - 1])


def wrapped(span: tuple[float, float], period: float) -> list[tuple[float, float]]:
    """Return an interval as one or two within one period: what is beyond its end is at its start."""
    start, end = span
    return [span] if end <= period else [(start, period), (0.0, end - period)]


def as_list(times: Floats) -> list[float]:
    """Return a list; a broadcast value is converted once."""
    return [float(times[0])] * len(times) if times.strides == (0,) else times.tolist()
