"""Checks of what hooks of an algorithm return, so that a mistake is one line that names the hook."""

from __future__ import annotations

import math
from typing import Any

from ..errors import UserError


def positive(hook: str, value: Any) -> float:
    """Return the number that a hook returned; raise ``UserError`` unless it is above zero and finite."""
    try:
        number = float(value) if hasattr(value, "__float__") else math.nan  # a text is no number
    except (TypeError, ValueError):
        number = math.nan
    if not 0.0 < number < math.inf:
        raise UserError(f"{hook} returns {value!r:.60}; return a number above zero")
    return number
