"""The timeouts of a study, one line each, since they can decide how long a round takes."""

from __future__ import annotations

import math

from ..durations import duration
from .build import make_fleet
from .study import Study
from .timeouts import AUTOMATIC, answer_timeout


def timeout_lines(study: Study) -> list[str]:
    """Return one line for every timeout in the runs of a study's first seed: its length, and who chose it."""
    users: dict[tuple[float, bool], list[str]] = {}
    for point in study.points():
        settings = point.settings
        seconds = answer_timeout(settings, make_fleet(settings, study.seeds[0]))
        if seconds is not None and math.isfinite(seconds):
            users.setdefault((seconds, not settings.training.timeout_seconds), []).append(settings.algorithm)
    return [
        f"{', '.join(dict.fromkeys(names))}: a client that has not answered after {duration(seconds)} is replaced ("
        + (f"{AUTOMATIC}; training.timeout_seconds sets it)" if automatic else "training.timeout_seconds)")
        for (seconds, automatic), names in users.items()
    ]
