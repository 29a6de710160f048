"""What the convergence theorems say, estimated and measured.

``formulas`` has rates, conditions and bounds; ``estimates`` finds the constants of a task; ``speedup`` measures rounds
against the updates merged per round. Only the formulas are loaded here, which need nothing but arithmetic.
"""

from __future__ import annotations

from .formulas import (
    THEOREMS,
    Bound,
    Condition,
    Constants,
    Rates,
    Theorem,
    draw_probability,
    probable_staleness,
    rounds_needed,
    rounds_needed_drawn,
    rounds_to_apply,
    rounds_to_reach,
    stated_staleness,
    theorem,
)

__all__ = [
    "THEOREMS",
    "Bound",
    "Condition",
    "Constants",
    "Rates",
    "Theorem",
    "draw_probability",
    "probable_staleness",
    "rounds_needed",
    "rounds_needed_drawn",
    "rounds_to_apply",
    "rounds_to_reach",
    "stated_staleness",
    "theorem",
]
