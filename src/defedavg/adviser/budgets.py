"""The budget of a search: its default, what it must suffice for, and whether it compared enough."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from ..durations import duration
from ..errors import UserError, counted
from ..jsonio import three_digits
from .exploring import SMALL, steps_to_compare, too_small
from .racing import Budget
from .screening import Screening
from .search_state import SearchState

DEFAULT_RUNS = 40
"""The default budget, in runs of a mean candidate to the horizon."""


@dataclass(frozen=True, slots=True)
class AskedBudget:
    """The budget that was asked for: updates of some local steps, or real seconds since ``began``, or the default."""

    updates: float | None
    seconds: float | None
    steps_per_update: int
    began: float

    def require_time(self, doing: str, remedy: str) -> None:
        """Refuse a budget of time that is spent before anything is raced; the remedy is that of what was done."""
        if self.seconds is not None and time.monotonic() - self.began >= self.seconds:
            raise UserError(
                f"the budget of {duration(self.seconds)} was spent while {doing}, before any candidate was raced; "
                f"give {remedy}"
            )

    def of(self, screening: Screening) -> Budget:
        """Return the budget in local steps or in seconds; refuse updates below a single run."""
        costs = {shape: plan.steps_per_second * screening.horizon for shape, plan in screening.kept.items()}
        if self.seconds is not None:
            return Budget(seconds=self.seconds)
        if self.updates is None:
            return Budget(DEFAULT_RUNS * float(np.mean(list(costs.values()))))
        cheapest, size = min(costs, key=lambda shape: costs[shape]), counted(self.steps_per_update, "step")
        if self.updates * self.steps_per_update < costs[cheapest]:
            needed = counted(math.ceil(costs[cheapest] / self.steps_per_update), "update")
            raise UserError(
                f"the budget is below one run: the cheapest of {counted(len(costs), 'setting')} that can be raced, "
                f"{screening.labels[cheapest]}, trains {needed} of {size} in {duration(screening.horizon)}, the budget "
                f"has {self.updates:g}; give more, or a shorter stop.max_seconds"
            )
        return Budget(self.updates * self.steps_per_update)

    def shortage(self, search: SearchState) -> str | None:
        """Return in one line that the budget was too small to choose among all settings, and the least one; or None."""
        plans = search.screening.kept.values()
        if search.race.spent_share < 1.0 or not too_small(search, search.race.steps):
            return None
        trained = three_digits(search.race.steps / self.steps_per_update)
        needed = counted(math.ceil(SMALL * steps_to_compare(plans) / self.steps_per_update), "update")
        return (
            f"the budget was too small to choose among all {counted(len(plans), 'setting')}: it trained {trained} "
            f"updates of {counted(self.steps_per_update, 'step')}, and a search chooses among them all from {needed} "
            "on; give a larger budget, fewer algorithms, or lists of fewer values"
        )
