"""Numbers for readers: strict JSON without NaN and infinity, and short figures."""

from __future__ import annotations

import json
import math
from typing import Any


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
