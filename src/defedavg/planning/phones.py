"""A fleet of phones: slowness, links and availability, drawn by key from quantiles of measured phones.

Every quantity has a quantile function that is linear between a few points in log space. The points are rounded
quantiles of published measurements:

* slowness: training latencies of 948 phone models in FLHetBench (Zhang et al.: FLHetBench: Benchmarking Device and
  State Heterogeneity in Federated Learning, CVPR 2024), relative to their median, since their unit is not stated.
* links: 10,000 measurements of M-Lab's Network Diagnostic Tool, as reduced by fl-experiments.
* availability: 710 phones that were charging, idle and on Wi-Fi, from the state traces of FLASH (Yang et al.:
  Characterizing Impacts of Heterogeneity in Federated Learning upon Large-Scale Smartphone Data, WWW 2021), as reduced
  by FLHetBench.

Time 0 is midnight, for all phones. Intervals are generated when they are needed, for a phone and a day that starts and
ends between 8 and 16 o'clock, so that the night is in one piece.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from ..rng import Keys, extend_all, key, portable_all, uniform_all
from .intervals import Floats, Ints

DAY = 86400.0
BLOCK = 1024  # phones whose intervals of a day are generated together
MAX_BLOCKS = 2048  # that are kept: about 150 MB
MAX_LAST = 1 << 18  # phones whose last interval is kept: about 50 MB
TRACE_DAYS = 5  # the median length of the measured traces, in which the intervals of a phone are counted
LONGEST_CLOSED = (TRACE_DAYS + 2) * DAY
"""A phone is reachable again after this time: every phone has an interval in any ``TRACE_DAYS + 1`` days."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A quantile function that is linear in the logarithm of the value between the points given."""

    shares: tuple[float, ...]
    values: tuple[float, ...]

    def __call__(self, u: Floats) -> Floats:
        """Return the values at shares u in [0, 1)."""
        return portable_all(np.exp(np.interp(u, self.shares, np.log(self.values))))


_SHARES = (0.0, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1.0)
LATENCY = Quantiles(_SHARES, (34, 59, 68, 96, 172, 306, 480, 572, 1650, 6000))
UP_MBPS = Quantiles(_SHARES, (0.02, 0.08, 0.34, 3.1, 10.8, 31, 96, 220, 640, 1500))
DOWN_MBPS = Quantiles(_SHARES, (0.05, 2, 5, 19.5, 57, 163, 365, 500, 840, 1500))
READY_SHARE = Quantiles(_SHARES, (2e-5, 3e-4, 0.002, 0.019, 0.061, 0.134, 0.25, 0.315, 0.46, 0.7))
INTERVALS = Quantiles(_SHARES, (1, 1.3, 2, 5, 12, 27, 48, 60, 110, 197))
SAME_LINK = 0.6  # rank correlation of up and down
SAME_USE = 0.55  # rank correlation of the share and the number of intervals
MEDIAN_LATENCY = 172.0

CYCLE = 0.31
"""Relative amplitude of the daily cycle. It is smaller than that of the sum, whose best hour is twice the worst."""
BEST_HOUR = 4.0
# The relative readiness of each hour of two days, and its integral.
_HOURS = [round(1.0 + CYCLE * math.cos((hour + 0.5 - BEST_HOUR) * math.pi / 12.0), 3) for hour in range(48)]
_EDGES = np.arange(49) / 24.0
_READINESS = np.concatenate([[0.0], np.cumsum(_HOURS) / sum(_HOURS[:24])])
FIRST_HOUR, LAST_HOUR = 8.0, 16.0  # between which the day of a phone starts, so that its night is in one piece

MAX_READY = 0.95  # of the part of a day that an interval may use


def slowness(keys: Keys) -> Floats:
    """Return the slowness of phones; the median is one."""
    return LATENCY(uniform_all(keys)) / MEDIAN_LATENCY


def links(seed: int, clients: Ints) -> tuple[Floats, Floats]:
    """Return Mbit/s up and down of phones."""
    up, down = _two_shares(extend_all(key(seed, "phone-links"), clients), SAME_LINK)
    return UP_MBPS(up), DOWN_MBPS(down)


def _two_shares(keys: Keys, correlation: float) -> tuple[Floats, Floats]:
    """Return two uniform draws by key: the same one with the probability that is their rank correlation."""
    first, other, same = (uniform_all(extend_all(keys, np.array([part]))) for part in range(3))
    return first, np.where(same < correlation, first, other)


@dataclass(frozen=True)
class PhoneHours:
    """When phones are ready: the share of the time and the number of intervals of each, and a daily cycle."""

    seed: int
    _blocks: dict[tuple[int, int], tuple[Ints, Floats, Floats]] = field(default_factory=dict, compare=False, repr=False)
    _last: dict[int, tuple[float, float, float]] = field(default_factory=dict, compare=False, repr=False)

    def use(self, clients: Ints) -> tuple[Floats, Floats]:
        """Return the share of the time in which phones are ready, and their intervals per day."""
        share, count = _two_shares(extend_all(key(self.seed, "phone-use"), clients), SAME_USE)
        per_day = INTERVALS(count) / TRACE_DAYS
        # A phone with fewer than one interval a day is ready on some days only.
        return np.minimum(READY_SHARE(share), 0.7 * np.minimum(per_day, 1.0)), per_day

    def day(self, clients: Ints, days: Ints) -> tuple[Ints, Floats, Floats]:
        """Return (offsets, starts, ends) of the intervals of each phone on its day, in order.

        A day with k intervals has k equal parts with one interval each. The part of the cycle sets the mean length, and
        a draw varies it: by 4u³ where phones are rarely ready, as measured lengths vary, and less where they often are.
        """
        share, per_day = self.use(clients)
        phase, shift = self._phases(clients)
        counts = (np.floor(per_day * (days + 1) + phase) - np.floor(per_day * days + phase)).astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        row = np.repeat(np.arange(len(clients)), counts)
        part = np.arange(offsets[-1]) - offsets[row]
        width = 1.0 / counts[row]
        edge = shift[row] + part * width
        low, high = (np.interp(side, _EDGES, _READINESS) for side in (edge, edge + width))
        keys = extend_all(key(self.seed, "phone-interval"), clients[row])
        keys = extend_all(extend_all(keys, days[row]), part)
        length, place = (uniform_all(extend_all(keys, np.array([purpose]))) for purpose in range(2))
        mean = np.minimum((share / np.minimum(per_day, 1.0))[row] * ((high - low) / width), MAX_READY)
        ready = mean * _varied(length, np.floor(MAX_READY / mean))
        ready = np.maximum(ready, 1.0 / (width * DAY))
        middle = np.interp(low + place * (high - low), _READINESS, _EDGES)
        starts = (edge + (middle - edge) * (1.0 - ready) + (days[row] - 1)) * DAY
        return offsets, starts, starts + ready * width * DAY

    def _phases(self, clients: Ints) -> tuple[Floats, Floats]:
        """Return when phones with few intervals have one, in [0, 1), and when their days start, in days."""
        keys = extend_all(key(self.seed, "phone-phase"), clients)
        phase, shift = (uniform_all(extend_all(keys, np.array([part]))) for part in range(2))
        return phase, (FIRST_HOUR + (LAST_HOUR - FIRST_HOUR) * shift) / 24.0

    def opens(self, client: int, time: float) -> float:
        """Return the first time at or after ``time`` at which the phone is ready."""
        asked, start, end = self._last.get(client, (0.0, 0.0, 0.0))
        if asked <= time < end:  # the interval that was found for the time asked last
            return max(time, start)
        block, row = divmod(client, BLOCK)
        day = math.floor(time / DAY)  # it ends on the next day of the calendar
        while True:
            offsets, starts, ends = self._block(block, day)
            low, high = offsets[row], offsets[row + 1]
            found = low + ends[low:high].searchsorted(time, "right")
            if found < high:
                if len(self._last) >= MAX_LAST:
                    self._last.clear()
                self._last[client] = time, float(starts[found]), float(ends[found])
                return max(time, float(starts[found]))
            day += 1

    def _block(self, block: int, day: int) -> tuple[Ints, Floats, Floats]:
        found = self._blocks.get((block, day))
        if found is None:
            while len(self._blocks) >= MAX_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            clients = np.arange(block * BLOCK, (block + 1) * BLOCK)
            found = self._blocks[block, day] = self.day(clients, np.full(BLOCK, day))
        return found

    def opens_all(self, clients: Ints, times: Floats) -> Floats:
        """Return ``opens`` for many phones, by the same operations; infinity stays infinite."""
        result = np.array(times, np.float64)
        rows = np.flatnonzero(np.isfinite(result))
        days = np.floor(result[rows] / DAY).astype(np.int64)
        while len(rows):
            offsets, starts, ends = self.day(clients[rows], days)
            of = np.repeat(np.arange(len(rows)), np.diff(offsets))
            found = offsets[:-1] + np.bincount(of[ends <= result[rows][of]], minlength=len(rows))
            ready = found < offsets[1:]
            result[rows[ready]] = np.maximum(result[rows[ready]], starts[found[ready]])
            rows, days = rows[~ready], days[~ready] + 1
        return result


def _varied(u: Floats, most: Floats) -> Floats:
    """Return factors of mean one: 4u³, 3u², 2u or 1, the first that is never above ``most``."""
    factors = np.where(most >= 3.0, 3.0 * u * u, np.where(most >= 2.0, 2.0 * u, 1.0))
    return np.where(most >= 4.0, 4.0 * u * u * u, factors)
