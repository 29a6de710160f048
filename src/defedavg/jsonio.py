"""Numbers in JSON and for readers: checks of what was read, strict JSON without NaN and infinity, short figures."""

from __future__ import annotations

import json
import math
from typing import Any


def is_whole(value: Any) -> bool:
    """Return whether this is an integer of 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def is_count(value: Any) -> bool:
    """Return whether this is an integer of 64 bits from zero on."""
    return is_whole(value) and value >= 0


def finite(value: Any) -> Any:
    """Return the value with every number that is not finite replaced by None, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def json_line(value: Any) -> str:
    """Return a value as one line of strict JSON, without the line break."""
    return json.dumps(finite(value), allow_nan=False)


def about(value: float) -> str:
    """Return a number with two significant digits, without an exponent where possible: 160 for 157."""
    return f"{float(f'{value:.2g}'):g}"


def three_digits(value: float) -> str:
    """Return a number with three significant digits, a large one with commas instead of an exponent: 1,670 for 1674."""
    rounded = float(f"{value:.3g}")  # first: 999.6 is 1,000
    return f"{rounded:,.0f}" if 1e3 <= abs(rounded) < 1e15 else f"{rounded:.3g}"
