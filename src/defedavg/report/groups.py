"""Groups of series that can be ranked against each other, for the page and for figures.

Two settings are comparable if they learn the same task to the same target. If a study sweeps a property of the fleet,
such as ``clients.slowness``, every value of it has its own group too: a fleet is given, not chosen, and the question of
such a sweep is which algorithm is best on each fleet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..runstore.reader import RunFolder
from .series import Series
from .tables import grouped

FLEET = (
    *("step_seconds", "slowness", "jitter", "links", "uplink_mbps", "downlink_mbps", "latency_seconds"),
    *("availability", "failure_rate", "return_seconds", "trace"),
)
"""The keys of ``[clients]`` that say how fast, connected and reliable the clients are."""


def series_of(folder: RunFolder) -> list[Series]:
    """Return the settings of a folder, each with its seeds."""
    return [Series(folder, label, runs) for label, runs in grouped(folder.runs, lambda run: run.label).items()]


def groups_of(every: Sequence[Series]) -> list[list[Series]]:
    """Return the series in groups of equal task, target, metric and swept fleet, in the order given."""
    fleets = swept_fleets(every)

    def key(series: Series) -> tuple[Any, ...]:
        return (*series.key(), *((name, str(series.settings.get(name))) for name in fleets))

    return list(grouped(every, key).values())


def swept_fleets(every: Sequence[Series]) -> list[str]:
    """Return the properties of the fleet that differ within one study of these series, as ``table.key``."""
    values: dict[tuple[str, str], set[str]] = {}
    for series in every:
        for name in (f"clients.{key}" for key in FLEET):
            if name in series.settings:  # missing where the configuration cannot be read
                values.setdefault((name, str(series.folder.path)), set()).add(str(series.settings[name]))
    return list(dict.fromkeys(name for (name, _), different in values.items() if len(different) > 1))


def titles_of(groups: Sequence[Sequence[Series]]) -> list[str]:
    """Return the names of the studies, with what differs between the groups where the names are not unique."""
    names = [" + ".join(dict.fromkeys(series.folder.title for series in group)) for group in groups]
    if len(set(names)) == len(names):
        return names
    details = differences_of(groups)
    return [f"{name}: {words}" if words else name for name, words in zip(names, details, strict=True)]


def differences_of(groups: Sequence[Sequence[Series]]) -> list[str]:
    """Return, for every group, those values of its task, its fleet and its target that differ between the groups."""
    firsts = [group[0] for group in groups]
    keys = differing_keys(groups)
    details = [[f"{key.split('.')[-1]} {one.settings.get(key)}" for key in keys] for one in firsts]
    if len({one.target for one in firsts}) > 1:
        for words, one in zip(details, firsts, strict=True):
            words += [f"target {one.goal()}"] if one.target else []
    return [", ".join(words) for words in details]


def differing_keys(groups: Sequence[Sequence[Series]]) -> list[str]:
    """Return the settings of the task and the swept properties of the fleet that differ between the groups."""
    settings = [group[0].settings for group in groups]
    fleets = swept_fleets([series for group in groups for series in group])
    known = [*(key for key in settings[0] if key.startswith("task.")), *fleets]
    return [key for key in known if len({str(each.get(key)) for each in settings}) > 1]
