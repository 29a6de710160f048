"""Stored runs grouped by setting, and the filters of ``defedavg runs``."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError, unknown
from ..runstore.reader import RunEntry, RunFolder, find_runs


@dataclass(frozen=True, slots=True)
class RunGroup:
    """One setting of a run folder with its entries, one per seed; none while the folder has no results."""

    run: RunFolder
    label: str
    entries: tuple[RunEntry, ...]


@dataclass(frozen=True, slots=True)
class RunFilter:
    """The groups that a user asked for; ``where`` are pairs of a setting's name and its value as text."""

    algorithm: str | None
    where: tuple[tuple[str, str], ...]
    status: str | None

    def matches(self, group: RunGroup) -> bool:
        """Return whether a group passes every filter."""
        return self._matches_algorithm(group) and self._matches_status(group) and self._matches_settings(group)

    def _matches_algorithm(self, group: RunGroup) -> bool:
        named = {entry.algorithm for entry in group.entries} or group.run.algorithms
        return self.algorithm is None or self.algorithm in named

    def _matches_status(self, group: RunGroup) -> bool:
        return self.status is None or self.status in {group.run.status, *(entry.status for entry in group.entries)}

    def _matches_settings(self, group: RunGroup) -> bool:
        run = group.run
        runs = [(entry.algorithm, entry.swept) for entry in group.entries]
        runs = runs or [(name, {}) for name in run.algorithms[:1]]
        return all(any(_equal(run.setting(key, *one), text) for one in runs) for key, text in self.where)


def _equal(value: Any, text: str) -> bool:
    try:
        wanted = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        wanted = text
    if isinstance(value, list) and not isinstance(wanted, list):
        return any(_equal(item, text) for item in value)  # a swept setting of a folder without results
    return bool(value == wanted and isinstance(value, bool) == isinstance(wanted, bool)) or str(value) == text


def group_runs(runs: Iterable[RunFolder]) -> list[RunGroup]:
    """Return the settings of all runs, in the order of their summaries."""
    groups = []
    for run in runs:
        labels: dict[str, list[RunEntry]] = {}
        for entry in run.entries:
            labels.setdefault(entry.label, []).append(entry)
        if not labels:
            labels[", ".join(run.algorithms) + (" (tuning)" if run.tuned else "")] = []
        groups += [RunGroup(run, label, tuple(entries)) for label, entries in labels.items()]
    return groups


def select_groups(
    folder: Path, algorithm: str | None, where: Sequence[str] | None, status: str | None
) -> list[RunGroup]:
    """Return the groups in a folder that pass the filters; a filter that no run can pass is an error."""
    runs = find_runs(folder)
    groups = group_runs(runs)
    wanted = RunFilter(algorithm, tuple(_parse_where(text) for text in where or ()), status)
    if runs:
        names = _setting_names(groups)
        for key, _ in wanted.where:
            if key not in names:
                raise unknown("setting", key, names)
    if algorithm is not None:
        from ..algorithms import ALGORITHMS

        if algorithm not in {*ALGORITHMS, *(name for run in runs for name in run.algorithms)}:
            raise unknown("algorithm", algorithm, ALGORITHMS)
    return [group for group in groups if wanted.matches(group)]


def _parse_where(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--where {text!r} is not a filter; write it like key=value")
    return key.strip(), value.strip()


def _setting_names(groups: Iterable[RunGroup]) -> set[str]:
    """Return the names of all settings, with and without their tables."""
    names: set[str] = set()
    for group in groups:
        names.update(group.run.flat_config)
        names.update(name for entry in group.entries for name in entry.swept)
    return names | {name.rpartition(".")[2] for name in names}
