"""The convergence theorems: their formulas, estimates of their constants, and measurements of the speedup.

``formulas`` has rates, conditions and bounds; ``estimates`` estimates the constants of a task; ``speedup`` measures
the rounds needed against the updates merged per round. This package exports only the formulas, which do not need
PyTorch.
"""

from __future__ import annotations

from .formulas import (
    THEOREMS,
    Constants,
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
    "Constants",
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
