"""Which settings a plan depends on: those of the clients and of the server, not those of the model and its training."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from .study import Study, SweepPoint

PLANNED_TRAINING = ("updates_per_round", "local_steps", "weighting", "server_optimizer", "timeout_seconds")
PLANNED_STOP = ("max_rounds",)


def swept_without_effect_on_plans(study: Study) -> list[str]:
    """Return one line for every swept setting on which no plan depends; the plans need not exist yet."""
    points = study.points()
    return [
        f"{name} has no effect on a plan, which trains nothing; its {len(values)} values give equal rows"
        for name, values in _swept(points).items()
        if not _is_planned(name, points)
    ]


def swept_with_equal_figures(study: Study, figures: Sequence[Hashable]) -> list[str]:
    """Return one line for every other swept setting whose values gave equal figures, given those of every point.

    Such a setting may still change coefficients of merges, which plans contain and figures do not show. No list of
    settings could say this beforehand: which ones act depends on the algorithm, the fleet and the other settings.
    """
    points = study.points()
    return [
        f"{name} has no effect on the figures of these plans; its {len(values)} values give equal rows"
        for name, values in _swept(points).items()
        if len(values) > 1 and _is_planned(name, points) and _equal_figures(name, points, figures)
    ]


def _equal_figures(name: str, points: Sequence[SweepPoint], figures: Sequence[Hashable]) -> bool:
    """Return whether points that differ in this setting alone have equal figures."""
    found: dict[Hashable, set[Hashable]] = {}
    for point, row in zip(points, figures, strict=True):
        if any(swept == name for swept, _ in point.swept):
            others = tuple(pair for pair in point.swept if pair[0] != name)
            found.setdefault((point.settings.algorithm, others), set()).add(row)
    return all(len(rows) == 1 for rows in found.values())


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
