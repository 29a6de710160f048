"""Which settings a plan depends on: those of the clients and of the server, not those of the model and its training."""

from __future__ import annotations

from collections.abc import Iterable

from .study import Study, SweepPoint

PLANNED_TRAINING = ("updates_per_round", "local_steps", "weighting", "server_optimizer", "timeout_seconds")
PLANNED_STOP = ("max_rounds",)


def swept_without_effect_on_plans(study: Study) -> list[str]:
    """Return one line for every swept setting whose values give equal plans."""
    points = study.points()
    return [
        f"{name} has no effect on a plan, which trains nothing; its {len(values)} values give equal rows"
        for name, values in _swept(points).items()
        if not _is_planned(name, points)
    ]


def _swept(points: Iterable[SweepPoint]) -> dict[str, set[object]]:
    values: dict[str, set[object]] = {}
    for point in points:
        for name, value in point.swept:
            values.setdefault(name, set()).add(value)
    return values


def _is_planned(name: str, points: Iterable[SweepPoint]) -> bool:
    table, _, key = name.partition(".")
    if table == "task":  # weights by samples are coefficients of merges, which plans contain
        return any(point.settings.training.weighting == "samples" for point in points)
    planned = {"training": PLANNED_TRAINING, "stop": PLANNED_STOP}
    return key in planned.get(table, (key,))
