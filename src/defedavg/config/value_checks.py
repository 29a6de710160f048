"""Reads and checks a single value of a setting that is given outside a study."""

from __future__ import annotations

import dataclasses
import tomllib
from typing import Any

from ..algorithms import ALGORITHMS
from .settings import TABLES
from .study import single


def value_of_text(text: str) -> Any:
    """Return the value of a setting that is written as in a study; text may be without quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def check_setting_value(name: str, value: Any) -> None:
    """Refuse a value that no setting of this name can have; the name may be without its table."""
    kinds = _kinds(name)
    if not kinds or str in kinds:  # an unknown setting, of a plugin for instance, may have any value; a text any text
        return
    if isinstance(value, int | float) and not isinstance(value, bool) and kinds & {int, float}:
        return
    if isinstance(value, bool) and bool in kinds:
        return
    single(name, value, min(kinds, key=lambda kind: kind.__name__))


def _kinds(name: str) -> set[type[Any]]:
    table, _, key = name.rpartition(".")
    tables = {**TABLES, **{algorithm: kind.settings_type for algorithm, kind in ALGORITHMS.items()}}
    return {
        type(item.default)
        for other, kind in tables.items()
        if table in ("", other) or (other == "training" and table in ALGORITHMS)
        for item in dataclasses.fields(kind)
        if item.name == key
    }
