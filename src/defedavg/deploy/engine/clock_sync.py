"""Translation of clients' clocks to the server's clock.

If a reply left the client at its time ``c`` and arrived at the server's time ``t``, the clocks differ by at most
``t − c``. The smallest bound seen so far is the offset. A translated time is therefore never before the event, and
never after the reply that reported it. The times of one client never decrease, even where a later bound is smaller.
"""

from __future__ import annotations

import math
from dataclasses import replace

from .events import Report

ClientEpoch = tuple[int, int]  # client and epoch: a client process that restarted has another clock


class ClockSync:
    """The smallest bound of every client so far."""

    def __init__(self) -> None:
        self._offset: dict[ClientEpoch, float] = {}
        self._last: dict[int, float] = {}

    def to_server_time(
        self, key: ClientEpoch, reports: tuple[Report, ...], clock: float, t: float
    ) -> tuple[Report, ...]:
        """Translate reports of a reply that left at ``clock`` (client's time) and arrived at ``t`` (server's time)."""
        offset = self._offset[key] = min(self._offset.get(key, math.inf), t - clock)
        translated = []
        for report in reports:
            at = max(0.0, self._last.get(key[0], 0.0), min(t, report.at + offset))
            self._last[key[0]] = at
            translated.append(replace(report, at=at))
        return tuple(translated)
