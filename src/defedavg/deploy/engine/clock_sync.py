"""Clients' clocks on the server's: what a client reports of its own time becomes times of the run.

A reply that left the client at its time ``c`` and came at the server's time ``t`` says that the clocks differ by at
most ``t − c``. The smallest such bound seen is used, so a reported moment is never before it happened, and never
after the reply that told of it. Moments of one client never go back, even where a later bound is smaller.
"""

from __future__ import annotations

import math
from dataclasses import replace

from .events import Report

Who = tuple[int, int]  # client and epoch: a trainer that began anew has another clock


class Clocks:
    """The bounds seen so far."""

    def __init__(self) -> None:
        self._offset: dict[Who, float] = {}
        self._last: dict[int, float] = {}

    def moved(self, who: Who, reports: tuple[Report, ...], clock: float, t: float) -> tuple[Report, ...]:
        """Reports with moments on the server's clock; ``clock`` is the client's at its reply, ``t`` when that came."""
        offset = self._offset[who] = min(self._offset.get(who, math.inf), t - clock)
        found = []
        for report in reports:
            at = max(0.0, self._last.get(who[0], 0.0), min(t, report.at + offset))
            self._last[who[0]] = at
            found.append(replace(report, at=at))
        return tuple(found)
