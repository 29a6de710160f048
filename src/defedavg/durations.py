"""Durations for readers: ``15m`` is read as 900 seconds, and long times are written in minutes, hours or days."""

from __future__ import annotations

import math
import re

from .errors import UserError

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
MAX_SECONDS = 1e9
"""Thirty years: more than any plan simulates."""

_SHOWN = (("d", UNITS["d"], 1.0), ("h", UNITS["h"], 1.0), ("min", UNITS["m"], 2.0))
"""Units, their seconds, and the number of them from which on a duration is written in them."""


def parse_duration(text: str, name: str) -> float:
    """Return the seconds of ``90``, ``90s``, ``15m``, ``6h`` or ``1.5d``; ``name`` is what an error names."""
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([smhd]?)\s*", text)
    try:
        seconds = float(match[1]) * UNITS[match[2] or "s"] if match else math.nan
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_SECONDS:
        raise UserError(
            f"{name} is {text[:40]!r}; give a time above zero, such as 90 (seconds), 15m, 6h or 1d, of at most "
            f"{MAX_SECONDS:,.0f} seconds"
        )
    return seconds


def duration(seconds: float) -> str:
    """Format a duration in the largest unit that suits it: 0.4942 s, 13.8 min, 1 d."""
    if not math.isfinite(seconds):
        return "–"
    for unit, length, least in _SHOWN:
        if seconds >= least * length:
            return f"{seconds / length:.3g} {unit}" if seconds < 1e3 * length else f"{seconds / length:,.0f} {unit}"
    return f"{seconds:.4g} s"
