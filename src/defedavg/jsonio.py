"""Numbers for readers: JSON has no NaN and no infinity, and people want few digits."""

from __future__ import annotations

import math
from typing import Any


def finite(value: Any) -> Any:
    """The same value, fit for strict JSON: what is not a finite number becomes null, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def about(value: float) -> str:
    """Two digits of a number, without an exponent where it can be helped: 160 for 157."""
    return f"{float(f'{value:.2g}'):g}"
