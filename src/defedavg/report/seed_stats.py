"""Means and spreads over seeds: one function for the terminal's tables and for the page.

A record is the entry of one run: a mapping from the name of a number to its value, or to None where it is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean, stdev
from typing import Any, TypeAlias

Records: TypeAlias = Iterable[Mapping[str, Any]]


def values(records: Records, name: str) -> list[float]:
    """Return a number of every record that has it."""
    return [value for record in records if (value := record[name]) is not None]


def mean(records: Records, name: str) -> float | None:
    """Return the mean over the records that have the number, or None if none has."""
    known = values(records, name)
    return fmean(known) if known else None


def spread(records: Records, name: str) -> float | None:
    """Return the standard deviation over the records that have the number, or None if fewer than two have."""
    known = values(records, name)
    return stdev(known) if len(known) > 1 else None
