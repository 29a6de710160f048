"""Fields of settings: their help texts and limits, and the checks of their values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import field
from typing import Any

from ..errors import UserError


def setting(default: Any, text: str, **metadata: Any) -> Any:
    """Return the field of a setting.

    ``most`` is the largest value that is not infinite; ``profile`` marks a value that a profile sets. The setting has
    no effect while one of those that it ``needs``, of the same table, is zero, false or empty, beside all of those
    that it is ``replaced_by``, and while each setting of ``idle_while`` has one of the values given there.
    """
    return field(default=default, metadata={"help": text, **metadata})


def require(table: Any, valid: Callable[[Any], bool], rule: str, *names: str) -> None:
    """Raise a UserError that states the rule for the first setting, such as ``task.alpha``, that is not valid."""
    for name in names:
        value = getattr(table, name.partition(".")[2])
        if not valid(value):
            raise UserError(f"{name} is {value}; {rule}")


def is_count(value: int) -> bool:
    """Return whether a number counts at least one thing."""
    return value >= 1


def _limit(most: float) -> str:
    return f"{most:,.0f}" if most < 1e15 else f"{most:g}"


def check_limits(table: Any, name: str) -> None:
    """Raise a UserError for a setting above its ``most``."""
    for item in dataclasses.fields(table):
        value, most = getattr(table, item.name), item.metadata.get("most")
        if most is not None and most < value < math.inf:
            shown = value if isinstance(value, float) or value < 1e30 else "far larger"
            raise UserError(f"{name}.{item.name} is {shown}; it must be at most {_limit(most)}")
