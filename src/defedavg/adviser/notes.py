"""What the adviser makes of settings that a run would use otherwise, one line each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..algorithms import ALGORITHMS
from ..config.study import Study
from ..config.unused_settings import unused_settings

REPLACED = ("updates_per_round", "global_lr", "local_lr", "concurrency", "wait_seconds")
"""Settings whose single value is none of those that are tried, unless by chance."""


def notes_on(study: Study, algorithms: Sequence[str] | None) -> list[str]:
    """Return the lines about a study; ``algorithms`` are those that are compared, None for all that are registered."""
    known = tuple(name for name in algorithms or ALGORITHMS if name in ALGORITHMS)  # the search refuses the others
    compared = dataclasses.replace(study, algorithms=known)
    lines = _on_algorithms(study) if algorithms is None else []
    return lines + unused_settings(compared, equal_runs=False) + _on_single_values(compared)


def _on_algorithms(study: Study) -> list[str]:
    if study.algorithms == Study().algorithms:
        return []
    names = ",".join(study.algorithms)
    return [f"advise compares all {len(ALGORITHMS)} algorithms; --algorithms {names} compares those of the study alone"]


def _on_single_values(study: Study) -> list[str]:
    lines = []
    for table in ("training", *study.algorithms):
        values = study.tables.get(table, {})
        for key in REPLACED:
            name, value = f"{table}.{key}", values.get(key)
            if name in study.given and isinstance(value, int | float):
                lines.append(f"advise tries other values of {name}; {name} = [{value:g}] fixes it")
    return lines
