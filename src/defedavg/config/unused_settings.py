"""Settings that a user gave and that no run of the study reads, one line each.

The rules are declared where a setting is defined or read: ``needs``, ``replaced_by`` and ``idle_while`` of a field in
``settings.py``,
``unused_training`` of an algorithm, and the parameters of a partition. A value that equals its default is not reported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from ..algorithms import ALGORITHMS
from ..planning.devices import PHONES
from ..planning.profiles import PROFILES
from .settings import SERVER_CONSTANTS, TABLES, TrainingSettings
from .study import Study


class NoEffectWarning(UserWarning):
    """A setting was given that has no effect."""


def unused_settings(study: Study, *, equal_runs: bool = True) -> list[str]:
    """Return one line for every given setting that has no effect in any run of the study.

    ``equal_runs``: the values of a list give runs of their own, so those of one without an effect give equal runs.
    """
    reasons = {**_by_fields(study), **_by_options(study), **_by_partition(study), **_by_algorithms(study)}
    reasons |= _by_server_optimizer(study) | _by_uploads(study) | _by_devices(study)
    lines = [
        f"[{table}] has no effect: {table} is not in algorithms"
        for table in study.tables
        if table not in TABLES and table not in study.algorithms and _given_in(study, table)
    ]
    for name, reason in reasons.items():
        if name in study.given:
            table, _, key = name.partition(".")
            values = study.tables[table][key]
            swept = equal_runs and isinstance(values, tuple)
            repeats = f"; its {len(values)} values give equal runs" if swept else ""
            lines.append(f"{name} has no effect: {reason}{repeats}")
    if equal_runs:
        lines += [line for name in study.algorithms for line in _swept_in_vain(study, name, reasons)]
    return lines


def _swept_in_vain(study: Study, algorithm: str, reasons: Mapping[str, str]) -> list[str]:
    """Return a line for every swept key of [training], and for uploads, that has no effect on this algorithm alone."""
    own = study.tables.get(algorithm, {})
    swept = {key: study.tables["training"][key] for key in _unused_training(study, algorithm) if key not in own}
    found = [
        f"training.{key} has no effect on {algorithm}: {algorithm} does not use it; its {len(values)} values give "
        "equal runs"
        for key, values in swept.items()
        if isinstance(values, tuple) and f"training.{key}" not in reasons
    ]
    uploads = study.tables["clients"]["upload"]
    if isinstance(uploads, tuple) and "clients.upload" not in reasons and _waits_for_uploads(study, algorithm):
        found.append(
            f"clients.upload has no effect on {algorithm}: its clients {_WAITING}; its {len(uploads)} values give "
            "equal runs"
        )
    return found


def replaced(
    study: Study, table: str, reason: str, names: tuple[str, ...] = (), kept: tuple[str, ...] = ()
) -> list[str]:
    """Return a line for every given setting of a table that a command or an argument replaces.

    ``names`` are those that it replaces, if not all; ``kept`` are those that keep their effect.
    """
    given = [name.partition(".")[2] for name in sorted(study.given) if name.startswith(f"{table}.")]
    found = [name for name in given if (not names or name in names) and name not in kept]
    return [f"{table}.{name} has no effect: {reason}" for name in found]


def _given_in(study: Study, table: str) -> bool:
    return any(name.startswith(f"{table}.") for name in study.given)


def _values(study: Study, table: str, name: str) -> tuple[Any, ...]:
    value = study.tables[table][name]
    return value if isinstance(value, tuple) else (value,)


def _by_fields(study: Study) -> dict[str, str]:
    """Return what ``needs`` another setting that is zero, false or empty, or is ``replaced_by`` others that are set."""
    reasons = {}
    for table, kind in TABLES.items():
        if kind is TrainingSettings:  # an algorithm may override it
            continue
        for item in dataclasses.fields(kind):
            for other in item.metadata.get("needs", ()):
                if not any(_values(study, table, other)):
                    reasons[f"{table}.{item.name}"] = f"{table}.{other} is {_shown(study.tables[table][other])}"
            others = item.metadata.get("replaced_by", ())
            names = [f"{table}.{other}" for other in others]
            in_every_run = all(all(_values(study, table, other)) for other in others)
            if others and in_every_run and study.given.issuperset(names):
                reasons[f"{table}.{item.name}"] = f"{_subject(names, 'replaces', 'replace')} it"
    return reasons


def _by_devices(study: Study) -> dict[str, str]:
    """Return the profile if every setting that it would set is given, and bandwidths if links are drawn."""
    reasons = {}
    profile = [f"clients.{name}" for name in PROFILES.get(str(study.tables["clients"]["profile"]), {})]
    if profile and study.given.issuperset(profile):
        reasons["clients.profile"] = f"{_subject(profile, 'replaces', 'replace')} it"
    if set(_values(study, "clients", "links")) == {PHONES} and not any(_values(study, "clients", "trace")):
        reasons |= {f"clients.{name}": "clients.links is phones" for name in ("uplink_mbps", "downlink_mbps")}
    return reasons


def _by_options(study: Study) -> dict[str, str]:
    """Return the keys of [training] that need other values of [training], for each algorithm and for all of them."""
    reasons: dict[str, str] = {}
    for item in dataclasses.fields(TrainingSettings):
        found = [_idle(study, name, item) for name in study.algorithms]
        own = {f"{name}.{item.name}": reason for name, reason in zip(study.algorithms, found, strict=True) if reason}
        reasons |= own
        if own and all(found):
            reasons[f"training.{item.name}"] = next(iter(own.values()))
    return reasons


def _idle(study: Study, algorithm: str, item: dataclasses.Field[Any]) -> str:
    """Return why a key of [training] has no effect on an algorithm; empty if it has one."""

    def values(name: str) -> tuple[Any, ...]:
        value = study.tables.get(algorithm, {}).get(name, study.tables["training"][name])
        return value if isinstance(value, tuple) else (value,)

    names = [name for name in item.metadata.get("needs", ()) if not any(values(name))]
    idle = item.metadata.get("idle_while", {})
    if idle and all(set(values(name)) <= set(some) for name, some in idle.items()):
        names += idle
    shown = [f"training.{name} is {' and '.join(map(_shown, values(name)))}" for name in names]
    return " and ".join(shown)


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


def _by_partition(study: Study) -> dict[str, str]:
    """Return the options of partitions that no partition of the study declares."""
    if not _given_in(study, "task") or any(_values(study, "task", "module")):  # a task module may read every setting
        return {}
    from ..tasks.partition import OPTIONS, needs_users, options_of

    splits = _values(study, "task", "split")
    read = {option for split in splits for option in options_of(split)}
    names = " and ".join(f"split = {split}" for split in splits)
    idle = [option for option in OPTIONS if option not in read]
    idle += [] if any(map(needs_users, splits)) else ["partition_by"]
    return {f"task.{option}": f"{names} does not use it" for option in idle} | _by_data(study)


def _by_data(study: Study) -> dict[str, str]:
    """Return ``task.normalise`` if no data set of the study has images."""
    if "task.normalise" not in study.given:
        return {}
    from ..tasks.datasets.builtin_datasets import kind_of_inputs

    names = _values(study, "task", "data")
    if "images" in map(kind_of_inputs, names):
        return {}
    return {"task.normalise": f"{_subject(names, 'has', 'have')} no images"}


def _by_algorithms(study: Study) -> dict[str, str]:
    """Return the keys of [training] that no algorithm of the study reads, and those that one overrides in vain."""
    reasons: dict[str, str] = {}
    unused = {name: _unused_training(study, name) for name in study.algorithms}
    for key in (item.name for item in dataclasses.fields(TrainingSettings)):
        users = [name for name, keys in unused.items() if key not in keys]
        reasons |= {f"{name}.{key}": f"{name} does not use it" for name in unused if name not in users}
        if not users:
            reasons[f"training.{key}"] = f"{_subject(unused, 'does', 'do')} not use it"
        elif all(key in study.tables.get(name, {}) for name in users):
            reasons[f"training.{key}"] = f"{_subject([f'[{name}]' for name in users], 'overrides', 'override')} it"
    return reasons


def _server_optimizers(study: Study, algorithm: str) -> set[str]:
    """Return the server optimisers in the runs of an algorithm."""
    own = study.tables.get(algorithm, {})
    chosen = _values(study, algorithm if "server_optimizer" in own else "training", "server_optimizer")
    return {name or ALGORITHMS[algorithm].server_optimizer for name in chosen}


def _unused_training(study: Study, algorithm: str) -> tuple[str, ...]:
    """Return the keys of [training] that an algorithm does not use; a server optimiser uses the global rate."""
    keys = ALGORITHMS[algorithm].unused_training()
    plain = _server_optimizers(study, algorithm) == {"sgd"}
    return keys if plain else tuple(key for key in keys if key != "global_lr")


def _by_server_optimizer(study: Study) -> dict[str, str]:
    """Return the constants of server optimisers that no server optimiser of the study uses."""
    used = {chosen for name in study.algorithms for chosen in _server_optimizers(study, name)}
    names = " and ".join(sorted(used))
    return {
        f"training.{constant}": f"the server optimiser {names} does not use it"
        for constant, users in SERVER_CONSTANTS.items()
        if not used & set(users)
    }


def _by_uploads(study: Study) -> dict[str, str]:
    """Return ``clients.upload`` if it has an effect on no algorithm of the study."""
    if "clients.upload" not in study.given or not all(_waits_for_uploads(study, name) for name in study.algorithms):
        return {}
    return {"clients.upload": f"clients of {' and '.join(study.algorithms)} {_WAITING}"}


_WAITING = "receive no version while they send an update unrequested"


def _waits_for_uploads(study: Study, algorithm: str) -> bool:
    """Return whether no client receives its next version before its update has arrived."""
    runs = (point.settings for point in study.points() if point.settings.algorithm == algorithm)
    return not any(ALGORITHMS[algorithm].overlaps_uploads(run.algorithm_settings) for run in runs)


def _subject(names: Collection[str], singular: str, plural: str) -> str:
    """Return names and the verb that follows them."""
    return f"{' and '.join(names)} {singular if len(names) == 1 else plural}"
