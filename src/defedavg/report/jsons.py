"""JSON has no NaN and no infinity: what is not a finite number becomes null, at any depth."""

from __future__ import annotations

import math
from typing import Any


def finite(value: Any) -> Any:
    """The same value, fit for strict JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
