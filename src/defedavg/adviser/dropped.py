"""The reasons for which settings are dropped without training, by kind, and what a user can do about each kind."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..durations import duration
from ..errors import counted

REFUSED, NO_MERGE, UNHEARD = "refused: ", "merges no update", "never hears"
"""How reasons begin: the algorithm refuses the settings, no update is merged, or a class is not heard."""

REMEDIES = {
    REFUSED: "change what is refused, or leave these --algorithms out",
    UNHEARD: "check [clients], or set a longer stop.max_seconds",
}


def kind_of(reason: str) -> str:
    """Return a reason without the settings, classes, numbers and units that vary within its kind."""
    for varying, fixed in (
        (r", \S+ n=.*| [a-z0-9-]+ (n|K)=.*", ""),
        (r"class(es)? [\d, ]+( and more)?", "classes "),
        (r"[\d.,]*\d( (s|min|h|d)\b)?", "#"),
    ):
        reason = re.sub(varying, fixed, reason)
    return re.sub(r" +", " ", reason)


def grouped(dropped: Iterable[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Return the settings and their reasons by kind of reason, the most frequent kind first."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for label, reason in dropped:
        groups.setdefault(kind_of(reason), []).append((label, reason))
    return sorted(groups.values(), key=len, reverse=True)


def nothing_left(dropped: Iterable[tuple[str, str]], number: int, horizon: float, *, scheduled: bool) -> str:
    """Return in one line why no setting is left; ``scheduled``: clients are available at some times only."""
    most = grouped(dropped)[0]
    reason = most[0][1]
    remedy = next((text for start, text in REMEDIES.items() if reason.startswith(start)), None)
    if remedy is None:
        remedy = "check when clients are available, or set a longer stop.max_seconds"
        remedy = remedy if scheduled else "set a longer stop.max_seconds, or lower training.updates_per_round"
    return (
        f"no planned setting can be advised for {duration(horizon)} of simulated time; {len(most):,} of "
        f"{counted(number, 'setting')}: {reason}; {remedy}"
    )
