"""Checks of the study, the budget and the number of seeds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import study as config
from ..config.study import Study, single
from ..durations import MAX_SECONDS
from ..errors import UserError

if TYPE_CHECKING:
    from ..tasks import Task

MAX_UPDATES = 1e15
MOST_SEEDS = 100


def checked_budget(updates: Any, seconds: Any) -> tuple[float | None, float | None]:
    """Return the budget in updates or in real seconds, at most one of which is given."""
    if updates is not None and seconds is not None:
        raise UserError("budget_updates and budget_seconds are both given; give one of them")
    return _above_zero("budget_updates", updates, MAX_UPDATES), _above_zero("budget_seconds", seconds, MAX_SECONDS)


def _above_zero(name: str, value: Any, most: float) -> float | None:
    if value is None:
        return None
    number: float = single(name, value, float)
    if not 0 < number <= most:
        raise UserError(f"{name} is {number:g}; give a number above zero and at most {most:,.0f}")
    return number


def checked_seeds(seeds: Any) -> int:
    """Return how many seeds a finalist may have."""
    number: int = single("seeds", seeds, int)
    if not 1 <= number <= MOST_SEEDS:
        raise UserError(f"seeds is {number}; it is the number of seeds of a finalist, from 1 to {MOST_SEEDS}")
    return number


def checked_study(study: Study | str | Path | Mapping[str, Any], task: Task | None) -> Study:
    """Return the study, from a file or a dictionary as well; refuse one without a target."""
    if task is not None and not hasattr(task, "num_clients"):
        raise UserError(f"task is {type(task).__name__}; pass what make_task returns")
    if isinstance(study, str | Path):
        study = config.load(study)
    elif isinstance(study, Mapping):
        if task is not None:
            study = {**study, "clients": {"num_clients": task.num_clients, **study.get("clients", {})}}
        study = config.study(study)
    if not isinstance(study, Study):
        raise UserError(f"study is {type(study).__name__}; pass a file, a dict or a Study")
    target = study.tables["stop"]["target_accuracy"]
    if not (target[0] if isinstance(target, tuple) else target):
        raise UserError("advice is the setting that reaches a target first; set stop.target_accuracy")
    return study
