"""A study: what a TOML file says, checked once and complete, and its expansion to the settings of single runs.

A list where one value is expected is swept. The table of an algorithm may also override any key of ``[training]`` for
that algorithm alone. ``study`` and ``load`` import the plugins that a study names; ``stored_study``, for run folders,
imports nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from ..algorithms import ALGORITHMS, BUILT_IN
from ..compat import make_callable
from ..errors import UserError, first_line, unknown
from ..fileio import read_input
from ..planning.profiles import BY_PROFILE, PROFILES
from ..planning.traces import read_trace
from ..plugins import load_plugins
from ..rng import MASK
from .renamed_settings import current_name, current_names
from .settings import (
    DEFAULT_PROFILE,
    MAX_COUNT,
    TABLES,
    ClientSettings,
    Settings,
    StopSettings,
    TaskSettings,
    TrainingSettings,
    given_settings,
)
from .task_checks import check_tasks
from .task_module import absolute_spec, file_of, task_from_module
from .unread_settings import plain_text, unknown_key

__all__ = [
    "TABLES", "ClientSettings", "Settings", "StopSettings", "Study", "SweepPoint", "TaskSettings", "TrainingSettings",
    "checked_seed", "load", "override", "single", "stored_study", "study",
]  # fmt: skip

TOP_KEYS = ("name", "algorithms", "seeds", "plugins", *TABLES)
NAMED_TASK = ("data", "model", "split")  # keys of [task] without effect beside task.module
NATURAL = "natural"  # the split whose clients are the users of the data


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One run of a study without its seed: the swept values, and the settings that result."""

    swept: tuple[tuple[str, Any], ...]
    settings: Settings

    @property
    def label(self) -> str:
        """The algorithm and the swept values, suitable for a file name and a legend."""
        parts = [f"{name.split('.')[-1]}={value}" for name, value in self.swept]
        return " ".join([self.settings.algorithm, *parts])


@dataclass(frozen=True)
class Study:
    """A complete study: every key has a value, or a tuple of values to sweep."""

    name: str = "study"
    algorithms: tuple[str, ...] = ("defedavg-iid",)
    seeds: tuple[int, ...] = (0,)
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()  # absolute paths
    given: frozenset[str] = field(default=frozenset(), compare=False)  # settings that differ from their defaults

    def points(self) -> tuple[SweepPoint, ...]:
        """Return the runs, one per algorithm and combination of swept values.

        A stored study may name algorithms of a plugin that this process has not loaded; they have no points.
        """
        return tuple(point for name in self.algorithms if name in ALGORITHMS for point in self._points(name))

    def _points(self, algorithm: str) -> list[SweepPoint]:
        values = self._values(algorithm)
        swept = [name for name, value in values.items() if isinstance(value, tuple)]
        kinds = {**TABLES, algorithm: ALGORITHMS[algorithm].settings_type}
        points = []
        for choice in itertools.product(*(values[name] for name in swept)):
            chosen = tuple(zip(swept, choice, strict=True))
            single_values = {**values, **dict(chosen)}
            made = {
                table: kind(**{item.name: single_values[f"{table}.{item.name}"] for item in dataclasses.fields(kind)})
                for table, kind in kinds.items()
            }
            settings = Settings(algorithm, algorithm_settings=made.pop(algorithm), **made)
            points.append(SweepPoint(chosen, settings))
        return points

    def _values(self, algorithm: str) -> dict[str, Any]:
        """Return every setting of an algorithm's runs by name, swept ones as tuples."""
        given, kind = self.tables.get(algorithm, {}), ALGORITHMS[algorithm].settings_type
        values = {f"{table}.{name}": value for table in TABLES for name, value in self.tables[table].items()}
        values |= {f"training.{name}": given[name] for name in self.tables["training"] if name in given}
        return values | {f"{algorithm}.{i.name}": given.get(i.name, i.default) for i in dataclasses.fields(kind)}

    def python_files(self) -> tuple[str, ...]:
        """Return the paths of all Python files that a run of this study executes: plugins and task modules."""
        task_files = filter(None, map(file_of, _all(self.tables["task"]["module"])))
        return tuple(dict.fromkeys([*self.plugins, *task_files]))

    def to_toml(self) -> str:
        """Return the study as TOML with all defaults written out."""
        import tomli_w

        whole = {"name": self.name, "algorithms": self.algorithms, "seeds": self.seeds}
        plugins = {"plugins": self.plugins} if self.plugins else {}
        # Of the two ways to name a task, only the one in use is written.
        unused = NAMED_TASK if self.tables["task"]["module"] else ("module",)
        task = {name: value for name, value in self.tables["task"].items() if name not in unused}
        return tomli_w.dumps({**whole, **plugins, **self.tables, "task": task})


# Reading.


def load(
    path: str | Path,
    overrides: tuple[str, ...] = (),
    plugins: Iterable[str | Path] = (),
    *,
    seconds: float | None = None,
) -> Study:
    """Read a study from a TOML file, apply ``table.key=value`` overrides, and load its plugins and further ones.

    ``seconds`` is the simulated time of all its runs (see ``with_horizon``).
    """
    path = Path(path)
    try:
        found = tomllib.loads(read_input(path))
    except FileNotFoundError:
        raise UserError(f"there is no configuration file {path}") from None
    except UnicodeDecodeError:
        raise UserError(f"the configuration {path} is not UTF-8; save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"the configuration {path} cannot be read: {first_line(error)}") from None
    except (ValueError, RecursionError) as error:  # TOMLDecodeError among them
        raise UserError(f"{path} is not valid TOML: {first_line(error)}") from None
    merged = with_horizon(override(found, overrides), seconds)
    return study(merged, folder=path.parent, fallback_name=path.stem, plugins=plugins)


def with_horizon(found: Mapping[str, Any], seconds: float | None) -> Mapping[str, Any]:
    """Return a study that ends after a simulated time, whatever its rounds, unless it sets a limit on them itself."""
    stop = found.get("stop", {})
    if seconds is None or not isinstance(stop, dict):  # what is not a table is refused later
        return found
    return {**found, "stop": {"max_rounds": MAX_COUNT, **stop, "max_seconds": seconds}}


def override(found: Mapping[str, Any], overrides: tuple[str, ...]) -> dict[str, Any]:
    """Apply ``key=value`` or ``table.key=value``; read the value as TOML, or else as plain text."""
    merged = current_names(found, warn=True)
    given = _read_overrides(overrides)
    clients = merged.get("clients")
    if "clients.profile" in given and isinstance(clients, dict):
        # The profile of the command line replaces what the file says of the settings that it sets.
        by_profile = PROFILES.get(str(given["clients.profile"]), {})
        merged["clients"] = {name: value for name, value in clients.items() if name not in by_profile}
    for name, value in given.items():
        table, dot, key = name.partition(".")
        target = merged.setdefault(table, {}) if dot else merged
        if not isinstance(target, dict):
            raise UserError(f"--set {name}=…: {table} is a key, not a table")
        target[key or table] = value
    return merged


def _read_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    old_names: dict[str, str] = {}
    for text in overrides:
        name, equals, raw = text.partition("=")
        parts = name.strip().split(".")
        if not equals or len(parts) > 2 or not all(parts):
            raise UserError(f"--set {text!r} cannot be read; write it as table.key=value")
        new = current_name(name.strip(), warn=True)
        if old_names.setdefault(new, name.strip()) != name.strip():
            raise UserError(f"{new} is set twice, once under its old name; give --set {new}=… alone")
        try:
            given[new] = tomllib.loads(f"value = {raw.strip()}")["value"]
        except (ValueError, RecursionError):
            given[new] = plain_text(new, raw.strip())
    return given


def study(
    found: Mapping[str, Any],
    *,
    folder: Path | None = None,
    fallback_name: str = "study",
    plugins: Iterable[str | Path] = (),
    other_tables: tuple[str, ...] = (),
) -> Study:
    """Load the plugins of a study, check its values and fill in defaults; paths are relative to ``folder``.

    ``other_tables`` are tables of the same file that the caller has read and removed: a misspelt name may mean them.
    """
    found = current_names(found, warn=True)
    files = list(dict.fromkeys([*_plugin_paths(found, folder), *(str(Path(path).resolve()) for path in plugins)]))
    load_plugins(files)
    known = (*TOP_KEYS, *ALGORITHMS)
    for name in found:
        if name not in known:
            raise unknown_key(name, (*known, *other_tables))
    made = _complete({**found, "plugins": files}, folder, fallback_name)
    for name in made.algorithms:
        ALGORITHMS.find(name)
    check_tasks(point.settings for point in made.points())
    made = dataclasses.replace(_with_clients_of_task(made, found), given=given_settings(found))
    made.points()  # every combination is checked before the first run starts
    return made


def stored_study(found: Mapping[str, Any], *, folder: Path | None = None, fallback_name: str = "study") -> Study:
    """Check the configuration of a stored run without importing any file that it names.

    Old names of settings are accepted. The tables of algorithms that this process does not know are kept unchecked.
    """
    found = _with_old_uploads(current_names(found))
    for name, value in found.items():
        if name not in TOP_KEYS and name not in ALGORITHMS and not isinstance(value, dict):
            raise unknown("key", name, TOP_KEYS)
    made = _complete(found, folder, fallback_name)
    made.points()
    return made


def _with_old_uploads(found: dict[str, Any]) -> dict[str, Any]:
    """Return a stored configuration with ``clients.upload``: before it existed, all uploads were blocking."""
    clients, names = found.get("clients"), found.get("algorithms")
    named = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    known = [ALGORITHMS[name] for name in named if name in BUILT_IN]
    changed = any(kind.client_policy(kind.settings_type()).background_upload for kind in known)
    if not changed or not isinstance(clients, dict) or "upload" in clients:
        return found
    return {**found, "clients": {**clients, "upload": "blocking"}}


def _complete(found: Mapping[str, Any], folder: Path | None, fallback_name: str) -> Study:
    """Check every value and add the defaults."""
    name = found.get("name", fallback_name)
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", name):
        raise UserError(f"name is {name!r}; use letters, digits, '.', '_' and '-', since a folder is named after it")
    algorithms = _several("algorithms", found.get("algorithms", ["defedavg-iid"]), str)
    seeds = _seeds(found.get("seeds", [0]))
    tables = {table: _table(table, found.get(table, {}), kind) for table, kind in TABLES.items()}
    _fill_task(tables["task"], folder)
    _fill_clients(tables["clients"], folder)
    for table, kind in TABLES.items():
        tables[table] = {item.name: tables[table].get(item.name, item.default) for item in dataclasses.fields(kind)}
    for algorithm in [*ALGORITHMS, *(name for name in found if name not in ALGORITHMS)]:
        if algorithm in found and algorithm not in TOP_KEYS:
            kinds = (ALGORITHMS[algorithm].settings_type, TrainingSettings) if algorithm in ALGORITHMS else None
            tables[algorithm] = _table(algorithm, found[algorithm], *kinds) if kinds else dict(found[algorithm])
    return Study(name, algorithms, seeds, tables, _plugin_paths(found, folder))


def _plugin_paths(found: Mapping[str, Any], folder: Path | None) -> tuple[str, ...]:
    named = found.get("plugins", [])
    paths = _several("plugins", named, str) if named != [] else ()
    try:
        return tuple(dict.fromkeys(str(((folder or Path()) / path).resolve()) for path in paths))
    except (OSError, ValueError) as error:
        raise UserError(f"plugins cannot be read: {first_line(error)}") from None


def _fill_task(task: dict[str, Any], folder: Path | None) -> None:
    """Make the paths of task modules absolute; refuse other names of the task beside them; split by a named column."""
    if task.get("partition_by"):
        task.setdefault("split", NATURAL)
    modules = task.get("module", "")
    specs = [absolute_spec(spec, folder) if spec else "" for spec in _all(modules)]
    task["module"] = tuple(specs) if isinstance(modules, tuple) else specs[0]
    for name in NAMED_TASK if any(specs) else ():
        default = getattr(TaskSettings(), name)
        if task.get(name, default) != default:
            raise UserError(f"task.module makes the whole task, so task.{name} has no effect; remove one of the two")


def _with_clients_of_task(made: Study, found: Mapping[str, Any]) -> Study:
    """Take the number of clients from the task module, or from the users of the data, where the study has none."""
    clients = found.get("clients", {})
    if "num_clients" in clients or clients.get("trace"):
        return made
    number = _clients_of_module(made) if any(_all(made.tables["task"]["module"])) else _users_of_data(made)
    if number is None:
        return made
    tables = {**made.tables, "clients": {**made.tables["clients"], "num_clients": number}}
    return dataclasses.replace(made, tables=tables)


def _clients_of_module(made: Study) -> int | None:
    spec = _all(made.tables["task"]["module"])[0]
    if not spec:
        return None
    values = {name: _all(value)[0] for name, value in made._values(made.algorithms[0]).items()}
    del values["clients.num_clients"]
    return task_from_module(spec, {"algorithm": made.algorithms[0], "seed": made.seeds[0], **values}, None).num_clients


def _users_of_data(made: Study) -> int | None:
    """Return the number of users that become clients; None if the study has other splits, or sweeps the users."""
    task = made.tables["task"]
    chosen = [task[name] for name in ("data", "partition_by", "min_samples_per_client")]
    if task["split"] != NATURAL or any(isinstance(value, tuple) for value in chosen):
        return None
    from ..tasks.datasets.catalog import natural_clients

    return natural_clients(*chosen)


def _all(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _fill_clients(clients: dict[str, Any], folder: Path | None) -> None:
    """Add the values of the profile and the number of clients of the trace, where the file does not set them."""
    profile = clients.get("profile", DEFAULT_PROFILE)
    if isinstance(profile, str) and profile in PROFILES:
        clients.update({**PROFILES[profile], **clients})
    elif isinstance(profile, tuple) and not set(clients) >= BY_PROFILE:
        raise UserError("clients.profile cannot be swept; write one file per profile, or sweep step_seconds")
    traces = clients.get("trace", "")
    paths = [(folder or Path()) / trace if trace else None for trace in _all(traces)]
    for path in filter(None, paths):
        clients.setdefault("num_clients", len(read_trace(path).step_seconds))
    names = tuple("" if path is None else str(path.resolve()) for path in paths)
    clients["trace"] = names if isinstance(traces, tuple) else names[0]


# Values.


def checked_seed(given: Any, what: str = "seed is") -> int:
    """Return a seed of a run, a whole number from 0 to 2⁶⁴ − 1."""
    seed: int = single("seed", given, int)
    if not 0 <= seed <= MASK:
        raise UserError(f"{what} {seed}; a seed must be from 0 to {MASK}, because draws use 64 bits of it")
    return seed


def _seeds(given: Any) -> tuple[int, ...]:
    return tuple(checked_seed(seed, "seeds has") for seed in _several("seeds", given, int))


def _several(name: str, value: Any, kind: type[Any], example: Any = None) -> tuple[Any, ...]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise UserError(f"{name} is empty; give at least one")
    read = tuple(single(name, item, kind, example) for item in values)
    if len(set(read)) != len(read):
        raise UserError(f"{name} names something twice: {', '.join(map(str, read))}")
    return read


def _table(table: str, found: Any, *kinds: type[Any]) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise UserError(f"{table} must be a table: write [{table}] and its keys below it")
    known = {item.name: item for kind in kinds for item in dataclasses.fields(kind)}
    read = {}
    for name, value in found.items():
        if name not in known:
            raise unknown(f"key in [{table}]", name, known)
        default, word = known[name].default, f"{table}.{name}"
        read[name] = (_several if isinstance(value, list) else single)(word, value, type(default), default)
    return read


_TYPE_NAMES = {int: "a whole number", float: "a number", str: "text in quotes", bool: "true or false"}


def single(name: str, value: Any, kind: type[Any], example: Any = None) -> Any:
    """Return a value of that type, or raise ``UserError`` with the name of the setting and an example of a text."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()  # from Python: a scalar of NumPy or PyTorch
    numbers = {int: Integral, float: Real}.get(kind)
    try:
        read = kind(value) if numbers and isinstance(value, numbers) and not isinstance(value, bool) else value
    except OverflowError:
        read = None
    if type(read) is not kind or read != read:
        such = f", such as {example!r}" if kind is str and example else ""
        raise UserError(f"{name} is {repr(value)[:80]}; it must be {_TYPE_NAMES[kind]}{such}")
    return read


make_callable(__name__)  # ``config.study(…)``, from when ``defedavg.config`` was a module
