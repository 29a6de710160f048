"""One frozen configuration, checked once, TOML in and out.

A ``Study`` is what a file says: algorithms, seeds, and tables of settings in which a list where one value is expected
is swept. Its ``points`` are ``Settings``, in which every value is single. An algorithm's own table may also override
any key of ``[training]`` for that algorithm alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from ..algorithms import ALGORITHMS
from ..errors import UserError, first_line, unknown
from ..planning.devices import PAPER, Slowness, Windows
from ..planning.sparse_simulator import PLAN_DETAIL
from ..planning.traces import read_trace

PROFILE = "paper-fashionmnist"  # unless a file names another


def _key(default: Any, text: str, **more: Any) -> Any:
    """A key of a table with the line that explains it."""
    return field(default=default, metadata={"help": text, **more})


def _need(good: bool, word: str, value: object, what: str) -> None:
    if not good:
        raise UserError(f"{word} is {value}; {what}")


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """[task]: what is learned, and who holds which data."""

    data: str = _key("mnist5k", "mnist5k, fashionmnist or cifar10 (see `defedavg data`), or hf:NAME from Hugging Face")
    model: str = _key("cnn", "cnn, mlp, softmax, resnet or transformer")
    split: str = _key("iid", "iid, classes, dirichlet, shards; for any number of clients: sampled, sampled-classes")
    classes_per_client: int = _key(2, "for split = classes or sampled-classes")
    alpha: float = _key(0.5, "for split = dirichlet: smaller is more uneven")
    shards_per_client: int = _key(2, "for split = shards")
    samples_per_client: int = _key(100, "for split = sampled or sampled-classes: drawn when a client trains")
    normalise: str = _key("standard", "standard (mean 0, deviation 1) or unit (0 to 1)")


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """[clients]: how many, how fast, how reliable."""

    num_clients: int = _key(100, "N")
    profile: str = _key(PROFILE, "gives step_seconds and model_megabytes where they are not set")
    step_seconds: float = _key(PAPER[PROFILE]["step_seconds"], "one local step on the fastest client", profile=True)
    model_megabytes: float = _key(
        PAPER[PROFILE]["model_megabytes"], "one model on the wire, in 10^6 bytes", profile=True
    )
    slowness: str = _key(
        "uniform(1, 5)",
        "equal, uniform(low, high), lognormal(sigma), exponential(mean), two-speed(share, factor), pareto(shape)",
    )
    jitter: float = _key(0.0, "spread of a job's time around the client's usual (sigma of a log-normal of mean 1)")
    uplink_mbps: float = _key(400.0, "Mbit/s from client to server")
    downlink_mbps: float = _key(400.0, "Mbit/s from server to client")
    latency_seconds: float = _key(0.0, "added to every message")
    availability: str = _key("always", "always, or windows(on_seconds, off_seconds)")
    failure_rate: float = _key(0.0, "probability that a started job kills its client")
    return_seconds: float = _key(1.0, "a client that failed returns after this long (inf: never)")
    trace: str = _key(
        "", "CSV instead of steps and links: client,step_seconds,up_mbps,down_mbps[,leaves_at,returns_at]"
    )
    plan_detail: str = _key(
        "auto", "in plans: all, used (those that are uploaded), or auto (used from 20,000 clients on, if none is lost)"
    )

    def __post_init__(self) -> None:
        _need(self.num_clients >= 1, "clients.num_clients", self.num_clients, "it must be at least 1")
        if self.profile not in PAPER:
            raise unknown("profile", self.profile, PAPER)
        if self.plan_detail not in PLAN_DETAIL:
            raise unknown("clients.plan_detail", self.plan_detail, PLAN_DETAIL)
        Slowness.parse(self.slowness)
        Windows.parse(self.availability)


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """[training]: how much is trained, and how fast it is learned."""

    updates_per_round: int = _key(10, "n")
    local_steps: int = _key(50, "K")
    batch_size: int = _key(10, "samples per local step")
    global_lr: float = _key(1.0, "η, the server's rate")
    local_lr: float = _key(0.05, "η̄, the clients' rate")
    sampling: str = _key("replacement", "mini-batches: replacement, or shuffle (pass after pass)")
    timeout_seconds: float = _key(
        0.0, "wait for a client before another is drawn; 0: ten times the longest round trip where clients can be lost"
    )

    def __post_init__(self) -> None:
        for word in ("updates_per_round", "local_steps", "batch_size"):
            _need(getattr(self, word) >= 1, f"training.{word}", getattr(self, word), "it must be at least 1")
        for word in ("global_lr", "local_lr"):
            value = getattr(self, word)
            _need(0 < value < math.inf, f"training.{word}", value, "a learning rate must be above zero")
        if self.sampling not in ("replacement", "shuffle"):
            raise unknown("sampling", self.sampling, ("replacement", "shuffle"))
        _need(self.timeout_seconds >= 0, "training.timeout_seconds", self.timeout_seconds, "it must be zero or more")


@dataclass(frozen=True, slots=True)
class StopSettings:
    """[stop]: when a run is over, and how often it is measured."""

    target_accuracy: float = _key(0.0, "stop when a measured accuracy reaches it; 0: no target")
    stop_at_target: bool = _key(True, "false: go on after the target")
    consecutive_hits: int = _key(1, "measurements in a row at the target that end a run; 5: a sustained hit")
    max_rounds: int = _key(400, "merges at most")
    max_seconds: float = _key(math.inf, "simulated seconds at most")
    eval_every_rounds: int = _key(1, "rounds from one measurement to the next, at least")
    eval_every_seconds: float = _key(0.0, "simulated seconds from one measurement to the next, at least")
    train_samples: int = _key(0, "training samples on which the training loss is measured; 0: not measured")

    def __post_init__(self) -> None:
        _need(0 <= self.target_accuracy <= 1, "stop.target_accuracy", self.target_accuracy, "give a share, like 0.8")
        _need(self.consecutive_hits >= 1, "stop.consecutive_hits", self.consecutive_hits, "it must be at least 1")
        _need(self.max_rounds >= 1, "stop.max_rounds", self.max_rounds, "it must be at least 1")
        _need(self.max_seconds > 0, "stop.max_seconds", self.max_seconds, "it must be above zero")
        _need(self.eval_every_rounds >= 1, "stop.eval_every_rounds", self.eval_every_rounds, "it must be at least 1")
        _need(
            self.eval_every_seconds >= 0, "stop.eval_every_seconds", self.eval_every_seconds, "it must be zero or more"
        )
        _need(self.train_samples >= 0, "stop.train_samples", self.train_samples, "it must be zero or more")


TABLES: dict[str, type[Any]] = {
    "task": TaskSettings,
    "clients": ClientSettings,
    "training": TrainingSettings,
    "stop": StopSettings,
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything one run is told, except its seed."""

    algorithm: str = "defedavg-iid"
    task: TaskSettings = TaskSettings()
    clients: ClientSettings = ClientSettings()
    training: TrainingSettings = TrainingSettings()
    stop: StopSettings = StopSettings()
    own: Any = None  # settings of the algorithm

    @property
    def algorithm_settings(self) -> Any:
        """The algorithm's own settings, defaults where none were given."""
        return ALGORITHMS[self.algorithm].settings_type() if self.own is None else self.own


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One run of a study but for the seed: what was swept, and the settings that result."""

    swept: tuple[tuple[str, Any], ...]
    settings: Settings

    @property
    def label(self) -> str:
        """The algorithm and what was swept, fit for a file name and a legend."""
        parts = [f"{name.split('.')[-1]}={value}" for name, value in self.swept]
        return " ".join([self.settings.algorithm, *parts])


@dataclass(frozen=True)
class Study:
    """What a configuration file says, complete: every key has a value, or a tuple of values to sweep."""

    name: str = "study"
    algorithms: tuple[str, ...] = ("defedavg-iid",)
    seeds: tuple[int, ...] = (0,)
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def points(self) -> tuple[SweepPoint, ...]:
        """The runs, one per algorithm and combination of swept values."""
        return tuple(point for name in self.algorithms for point in self._points(name))

    def _points(self, algorithm: str) -> list[SweepPoint]:
        own = self.tables.get(algorithm, {})
        values: dict[str, Any] = {}
        for table, kind in TABLES.items():
            for item in dataclasses.fields(kind):
                value = own[item.name] if table == "training" and item.name in own else self.tables[table][item.name]
                values[f"{table}.{item.name}"] = value
        own_type = ALGORITHMS[algorithm].settings_type
        for item in dataclasses.fields(own_type):
            values[f"{algorithm}.{item.name}"] = own.get(item.name, item.default)
        swept = [name for name, value in values.items() if isinstance(value, tuple)]
        found = []
        for choice in itertools.product(*(values[name] for name in swept)):
            single = {**values, **dict(zip(swept, choice, strict=True))}
            made = {
                table: kind(**{f.name: single[f"{table}.{f.name}"] for f in dataclasses.fields(kind)})
                for table, kind in TABLES.items()
            }
            mine = own_type(**{f.name: single[f"{algorithm}.{f.name}"] for f in dataclasses.fields(own_type)})
            found.append(SweepPoint(tuple(zip(swept, choice, strict=True)), Settings(algorithm, **made, own=mine)))
        return found

    def to_toml(self) -> str:
        """The study as TOML, every key written out."""
        import tomli_w

        whole: dict[str, Any] = {"name": self.name, "algorithms": list(self.algorithms), "seeds": list(self.seeds)}
        for table, keys in self.tables.items():
            whole[table] = {name: list(v) if isinstance(v, tuple) else v for name, v in keys.items()}
        return tomli_w.dumps(whole)


# Reading.


def load(path: str | Path, overrides: tuple[str, ...] = ()) -> Study:
    """Read a study from a TOML file, then apply ``table.key=value`` overrides."""
    path = Path(path)
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no configuration file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the configuration {path} cannot be read: {first_line(error)}") from None
    except (ValueError, RecursionError) as error:  # TOMLDecodeError among them
        raise UserError(f"{path} is not valid TOML: {first_line(error)}") from None
    return study(override(found, overrides), folder=path.parent, fallback_name=path.stem)


def override(found: dict[str, Any], overrides: tuple[str, ...]) -> dict[str, Any]:
    """Apply ``key=value`` or ``table.key=value``, the value read as TOML or else as plain text."""
    merged = {name: dict(value) if isinstance(value, dict) else value for name, value in found.items()}
    given = {text.partition("=")[0].strip() for text in overrides}
    if "clients.profile" in given and isinstance(merged.get("clients"), dict):
        for name in PAPER[PROFILE]:  # the newer word outweighs what a file says of an older one
            if f"clients.{name}" not in given:
                merged["clients"].pop(name, None)
    for text in overrides:
        name, equals, raw = text.partition("=")
        parts = name.strip().split(".")
        if not equals or len(parts) > 2 or not all(parts):
            raise UserError(f"--set {text!r} cannot be read; write it as table.key=value")
        try:
            value = tomllib.loads(f"value = {raw.strip()}")["value"]
        except (ValueError, RecursionError):
            value = raw.strip()
        target = merged
        if len(parts) == 2:
            target = merged.setdefault(parts[0], {})
            if not isinstance(target, dict):
                raise UserError(f"--set {text!r}: {parts[0]} is a key, not a table")
        target[parts[-1]] = value
    return merged


def study(found: Mapping[str, Any], *, folder: Path | None = None, fallback_name: str = "study") -> Study:
    """Check what was read and fill in what was not said."""
    tops = ("name", "algorithms", "seeds", *TABLES, *ALGORITHMS)
    for name in found:
        if name not in tops:
            raise unknown("key", name, tops)
    name = found.get("name", fallback_name)
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", name):
        raise UserError(f"name is {name!r}; use letters, digits, '.', '_' and '-', since a folder is named after it")
    algorithms = _several("algorithms", found.get("algorithms", ["defedavg-iid"]), str)
    for algorithm in algorithms:
        if algorithm not in ALGORITHMS:
            raise unknown("algorithm", algorithm, ALGORITHMS)
    seeds = _several("seeds", found.get("seeds", [0]), int)
    tables: dict[str, dict[str, Any]] = {}
    for table, kind in TABLES.items():
        tables[table] = _table(table, found.get(table, {}), {table: kind})
    _fill_clients(tables["clients"], folder)
    for table, kind in TABLES.items():
        defaults = {f.name: f.default for f in dataclasses.fields(kind)}
        tables[table] = {**defaults, **tables[table]}
    for algorithm in ALGORITHMS:
        if algorithm in found:
            allowed = {algorithm: ALGORITHMS[algorithm].settings_type, "training": TrainingSettings}
            tables[algorithm] = _table(algorithm, found[algorithm], allowed)
    made = Study(name, algorithms, seeds, tables)
    made.points()  # every combination is checked now, not in the middle of the night
    return made


def _fill_clients(clients: dict[str, Any], folder: Path | None) -> None:
    """What the profile and the trace say, where the file says nothing."""
    profile = clients.get("profile", PROFILE)
    if isinstance(profile, str) and profile in PAPER:
        for name, value in PAPER[profile].items():
            clients.setdefault(name, value)
    elif isinstance(profile, tuple) and not {"step_seconds", "model_megabytes"} <= set(clients):
        raise UserError("clients.profile cannot be swept; write one file per profile, or sweep step_seconds")
    traces = clients.get("trace", "")
    swept = isinstance(traces, tuple)
    found = []
    for trace in traces if swept else (traces,):
        place = (folder or Path()) / trace if trace else None
        if place is not None:
            clients.setdefault("num_clients", len(read_trace(place).step_seconds))
        found.append("" if place is None else str(place.resolve()))
    clients["trace"] = tuple(found) if swept else found[0]


def _several(name: str, value: Any, kind: type[Any]) -> tuple[Any, ...]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise UserError(f"{name} is empty; give at least one")
    read = tuple(single(name, item, kind) for item in values)
    if len(set(read)) != len(read):
        raise UserError(f"{name} names something twice: {', '.join(map(str, read))}")
    return read


def _table(table: str, found: Any, kinds: Mapping[str, type[Any]]) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise UserError(f"{table} must be a table: write [{table}] and its keys below it")
    known = {f.name: f for kind in kinds.values() for f in dataclasses.fields(kind)}
    read = {}
    for name, value in found.items():
        if name not in known:
            raise unknown(f"key in [{table}]", name, known)
        default = known[name].default
        assert default is not MISSING
        kind = type(default)
        word = f"{table}.{name}"
        read[name] = _several(word, value, kind) if isinstance(value, list) else single(word, value, kind)
    return read


_WORDS = {int: "a whole number", float: "a number", str: "text in quotes", bool: "true or false"}


def single(name: str, value: Any, kind: type[Any]) -> Any:
    """A value of that kind, or an error that names the key."""
    wrong = UserError(f"{name} is {repr(value)[:80]}; it must be {_WORDS[kind]}")
    if kind in (int, float) and not isinstance(value, bool):
        numbers = Integral if kind is int else Real  # NumPy's numbers too, from Python
        try:
            number = kind(value) if isinstance(value, numbers) else None
        except OverflowError:
            raise wrong from None
        if number is None or number != number:
            raise wrong
        return number
    if type(value) is not kind:
        raise wrong
    return value
