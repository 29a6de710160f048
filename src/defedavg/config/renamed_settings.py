"""Settings that have a new name: the old one works for one more version, with a warning that names the new one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..compat import warn_renamed
from ..errors import UserError

RENAMED = {
    "stop.hits": "stop.consecutive_hits",
    "stop.at_target": "stop.stop_at_target",
    "stop.measure_rounds": "stop.eval_every_rounds",
    "stop.measure_seconds": "stop.eval_every_seconds",
    "clients.dropout": "clients.failure_rate",
    "clients.record_jobs": "clients.plan_detail",
}
"""Old name -> new name, in the same table."""


def current_name(name: str, *, warn: bool = False) -> str:
    """Return the present name of a setting such as ``stop.hits``."""
    new = RENAMED.get(name, name)
    if warn and new != name:
        warn_renamed(name, new)
    return new


def current_names(found: Mapping[str, Any], *, warn: bool = False, table: str = "") -> dict[str, Any]:
    """Return a copy of a study or of flat settings with the present names; refuse both names of one setting.

    ``warn`` is for input that a user can edit. Stored runs are read without a warning.
    """
    renamed: dict[str, Any] = {}
    for name, value in found.items():
        old = f"{table}{name}"
        new = current_name(old, warn=warn).removeprefix(table)
        if new != name and new in found:
            raise UserError(f"{RENAMED[old]} is set twice, once under its old name {old}; remove the old one")
        inner = isinstance(value, Mapping) and not table
        renamed[new] = current_names(value, warn=warn, table=f"{name}.") if inner else value
    return renamed


def current_label(label: str) -> str:
    """Return the label of a stored run with the present names of the settings that were swept."""
    keys = {old.partition(".")[2]: new.partition(".")[2] for old, new in RENAMED.items()}
    words = (word.partition("=") for word in label.split(" "))
    return " ".join(f"{keys.get(name, name) if equals else name}{equals}{value}" for name, equals, value in words)
