"""When a command whose output is not a terminal prints a plain line of progress."""

from __future__ import annotations

import time

QUIET_SECONDS = 10.0


class LineTimer:
    """Says when the next line is due: ten seconds after the last one, or after the start."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def due(self) -> bool:
        """Return whether a line is due now; if it is, the next one is due ten seconds later."""
        now = time.monotonic()
        if now - self._last < QUIET_SECONDS:
            return False
        self._last = now
        return True
