"""Schedules of learning rates: a factor as a pure function of x, a version's number or the time at which it was made.

constant                1
step(every, factor)     factor^⌊x / every⌋
cosine(end)             (1 + cos(π·x / end)) / 2 up to ``end``, then 0
inverse-sqrt(scale)     1 / √(1 + x / scale)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from ..errors import UserError

LEAST, MOST = 1e-9, 1e15
"""Of a number of versions or seconds in a schedule."""


def _length(value: float) -> bool:
    return LEAST <= value <= MOST


@dataclass(frozen=True, slots=True)
class _Form:
    """A family of schedules: its arguments, an example, their valid range, and the factor at x."""

    arguments: tuple[str, ...]
    example: str
    valid: Callable[..., bool]
    factor: Callable[..., float]


SCHEDULES: dict[str, _Form] = {
    "constant": _Form((), "constant", lambda: True, lambda _: 1.0),
    "step": _Form(
        ("every", "factor"),
        "step(100, 0.5)",
        lambda every, factor: _length(every) and 0 < factor <= 1,
        lambda x, every, factor: factor ** math.floor(x / every),
    ),
    "cosine": _Form(
        ("end",),
        "cosine(400)",
        _length,
        lambda x, end: 0.5 * (1.0 + math.cos(math.pi * x / end)) if x < end else 0.0,
    ),
    "inverse-sqrt": _Form(("scale",), "inverse-sqrt(100)", _length, lambda x, scale: 1.0 / math.sqrt(1.0 + x / scale)),
}
SCHEDULE_TEXT = "constant, step(every, factor), cosine(end) or inverse-sqrt(scale)"


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule, written like ``cosine(400)``."""

    kind: str
    arguments: tuple[float, ...]

    @classmethod
    def parse(cls, text: str, name: str = "a schedule") -> Schedule:
        """Read ``name`` or ``name(number, …)``; ``name`` is that of the setting, for the error."""
        match = re.fullmatch(r"\s*([a-z-]+)\s*(?:\(([^()]*)\))?\s*", text)
        if not match or match[1] not in SCHEDULES:
            raise UserError(f"{name} is {text[:80]!r}; write {SCHEDULE_TEXT}")
        form = SCHEDULES[match[1]]
        written = (match[2] or "").strip()
        try:
            given = tuple(map(float, written.split(","))) if written else ()
        except ValueError:
            given = (math.nan,)
        if len(given) != len(form.arguments) or not all(map(math.isfinite, given)) or not form.valid(*given):
            shape = f"{match[1]}({', '.join(form.arguments)})" if form.arguments else match[1]
            rule = "; a factor is above 0 and at most 1" if "factor" in form.arguments else ""
            above = f" with numbers above zero, like {form.example}{rule}" if form.arguments else ""
            raise UserError(f"{name} is {text[:80]!r}; write {shape}{above}")
        return cls(match[1], given)

    def factor(self, x: float) -> float:
        """Return the factor of the rate at x; it is between zero and one."""
        return SCHEDULES[self.kind].factor(x, *self.arguments)


schedule_of = lru_cache(maxsize=256)(Schedule.parse)
"""``Schedule.parse``, with the schedules read last."""
