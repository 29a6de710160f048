"""Slowness: distributions of the speeds of clients, drawn by key."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError, counted, unknown
from ..rng import normal_all, portable_all, uniform_all
from . import phones
from .intervals import Floats


@dataclass(frozen=True, slots=True)
class _Distribution:
    """A family of distributions: its arguments, their defaults, their valid range, and the draw by key."""

    arguments: tuple[str, ...]
    defaults: tuple[float, ...]
    valid: Callable[..., bool]
    draw: Callable[..., Floats]


SLOWNESS: dict[str, _Distribution] = {
    "equal": _Distribution((), (), lambda: True, lambda keys: np.ones(len(keys))),
    "uniform": _Distribution(
        ("low", "high"),
        (1.0, 5.0),
        lambda low, high: 0 < low <= high,
        lambda keys, low, high: low + (high - low) * uniform_all(keys),
    ),
    "inverse-uniform": _Distribution(
        ("low", "high"),
        (1.0, 5.0),
        lambda low, high: 0 < low <= high,
        lambda keys, low, high: high / (low + (high - low) * uniform_all(keys)),
    ),
    "lognormal": _Distribution(
        ("sigma",), (0.5,), lambda sigma: sigma >= 0, lambda keys, sigma: portable_all(np.exp(sigma * normal_all(keys)))
    ),
    "exponential": _Distribution(
        ("mean",),
        (1.0,),
        lambda mean: mean >= 0,
        lambda keys, mean: portable_all(1.0 - mean * np.log1p(-uniform_all(keys))),
    ),
    "two-speed": _Distribution(
        ("share", "factor"),
        (0.2, 5.0),
        lambda share, factor: 0 <= share <= 1 and factor > 0,
        lambda keys, share, factor: np.where(uniform_all(keys) < share, factor, 1.0),
    ),
    "pareto": _Distribution(
        ("shape",), (2.0,), lambda shape: shape > 0, lambda keys, shape: (1.0 - uniform_all(keys)) ** (-1.0 / shape)
    ),
    "phones": _Distribution((), (), lambda: True, phones.slowness),
}


@dataclass(frozen=True, slots=True)
class Slowness:
    """A distribution of slowness, written like ``uniform(1, 5)``; at slowness 1 a local step takes ``step_seconds``.

    equal · uniform(low, high) · inverse-uniform(low, high): speeds are uniform, the fastest has slowness 1 and the
    slowest high/low · lognormal(sigma) with median 1 · exponential(mean), 1 plus an exponential delay ·
    two-speed(share, factor): a share of the clients is slower by the factor · pareto(shape), at least 1 · phones,
    fitted to measured ones, with median 1.
    """

    kind: str
    arguments: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Slowness:
        """Read ``name`` or ``name(number, …)``."""
        match = re.fullmatch(r"\s*([a-z-]+)\s*(?:\(([^()]*)\))?\s*", text)
        if not match:
            raise UserError(f"slowness {text!r} cannot be read; write it like 'uniform(1, 5)' or 'equal'")
        name = match[1]
        if name not in SLOWNESS:
            raise unknown("slowness", name, SLOWNESS)
        kind = SLOWNESS[name]
        form = f"{name}({', '.join(kind.arguments)})" if kind.arguments else name
        written = (match[2] or "").strip()
        try:
            given = tuple(map(float, written.split(","))) if written else kind.defaults
        except ValueError:
            hint = f"{form} with numbers" if kind.arguments else form
            raise UserError(f"slowness {text!r} cannot be read; write it as {hint}") from None
        if len(given) != len(kind.arguments):
            found, needed = counted(len(given), "argument"), len(kind.arguments) or "none"
            raise UserError(f"slowness {text!r} has {found}, but {name} takes {needed}; write it as {form}")
        if not all(map(math.isfinite, given)) or not kind.valid(*given):
            raise UserError(f"slowness {text!r} is out of range; write it as {form} with numbers in its range")
        return cls(name, given)

    def draw(self, keys: NDArray[np.uint64]) -> Floats:
        """Return a slowness for every key."""
        return SLOWNESS[self.kind].draw(keys, *self.arguments)


PAPER_SLOWNESS = Slowness("uniform", (1.0, 5.0))
