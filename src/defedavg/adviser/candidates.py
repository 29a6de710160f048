"""The candidates of the adviser: for every algorithm, a grid over n, K, its own settings, the timeout and the rates.

A list in the study is an axis of the grid. Where the study has a single value of n, K, concurrency, timeout or a rate,
the axis has the values that ``default_axes`` derives from the fleet; a list of one value fixes a setting.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..algorithms import ALGORITHMS
from ..config.build import make_fleet
from ..config.settings import TABLES, Settings
from ..config.study import Study
from ..errors import UserError
from ..planning.devices import Fleet

SHARES_OF_CLIENTS = (0.05, 0.1, 0.2, 0.5)
"""n, as shares of the clients."""
SHARES_OF_STEPS = (0.2, 0.5, 1.0, 2.0)
"""K, relative to that of the study."""
SHARES_AT_WORK = (0.25, 0.5)
"""Concurrency, as shares of the clients; all of them is a further value."""
WAITS = (0.25, 1.0)
"""Seconds between merges at fixed intervals, relative to the median time in which a client answers."""
TIMEOUTS = (0.5, 2.0)
"""Relative to the automatic timeout, which is a further value; only where a client may not answer."""
LOCAL_RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
GLOBAL_RATES = (0.1, 0.3, 1.0, 3.0)
ADAPTIVE_RATES = (0.001, 0.003, 0.01, 0.03)
"""Global rates of a server optimiser that normalises its step."""

ADAPTIVE = ("adagrad", "adam", "amsgrad", "yogi")
RATES = ("training.global_lr", "training.local_lr")
SHORT = {
    "training.updates_per_round": "n",
    "training.local_steps": "K",
    "training.global_lr": "η",
    "training.local_lr": "η̄",
    "training.timeout_seconds": "timeout",
}
FIXED = ("task", "clients", "stop")
"""The tables that say what advice is for; they cannot be swept."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A setting and the values that are tried, in an order in which neighbours are alike."""

    name: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class GridCell:
    """One cell of the grid: an algorithm and a position on each of its axes; the rates are the last two axes."""

    algorithm: str
    position: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlanShape:
    """What a plan depends on: an algorithm and a position on the axes other than rates."""

    algorithm: str
    position: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AlgorithmGrid:
    """The grid of one algorithm: its settings in the study, and the axes that replace some of them."""

    base: Settings
    axes: tuple[Axis, ...]
    rate_axes: int

    def shape_of(self, candidate: GridCell) -> PlanShape:
        """Return the shape of a candidate."""
        return PlanShape(candidate.algorithm, candidate.position[: len(self.axes) - self.rate_axes])

    @property
    def shape_axes(self) -> tuple[Axis, ...]:
        """The axes on which plans depend."""
        return self.axes[: len(self.axes) - self.rate_axes]

    def shapes(self) -> Iterator[PlanShape]:
        """Yield every shape."""
        for position in itertools.product(*(range(len(axis.values)) for axis in self.shape_axes)):
            yield PlanShape(self.base.algorithm, position)

    def rate_positions(self) -> list[tuple[int, ...]]:
        """Return every position on the axes of rates."""
        rates = self.axes[len(self.axes) - self.rate_axes :]
        return list(itertools.product(*(range(len(axis.values)) for axis in rates)))

    def rates(self, candidate: GridCell) -> dict[str, Any]:
        """Return the rates of a candidate, by name."""
        return dict(list(self.chosen(candidate.position).items())[len(self.axes) - self.rate_axes :])

    def chosen(self, position: Sequence[int]) -> dict[str, Any]:
        """Return the values at a position, of a candidate or of a shape."""
        return {axis.name: axis.values[i] for axis, i in zip(self.axes, position, strict=False)}

    def settings(self, position: Sequence[int]) -> Settings:
        """Return the settings at a position; raise ``UserError`` where the algorithm refuses them."""
        tables: dict[str, dict[str, Any]] = {"training": {}, self.base.algorithm: {}}
        for name, value in self.chosen(position).items():
            table, _, key = name.partition(".")
            tables[table][key] = value
        own = tables[self.base.algorithm]
        return replace(
            self.base,
            training=replace(self.base.training, **tables["training"]),
            algorithm_settings=replace(self.base.algorithm_settings, **own) if own else self.base.algorithm_settings,
        )

    def label(self, position: Sequence[int]) -> str:
        """Return the algorithm and the values of all axes, as ``fedbuff n=10 K=50 concurrency=all η=1 η̄=0.1``."""
        words = [self.base.algorithm]
        for name, value in self.chosen(position).items():
            key = name.partition(".")[2]
            if key == "concurrency" and value == 0:
                value = "all"
            elif name == "training.timeout_seconds" and value == 0:
                value = "auto"
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            words.append(f"{SHORT.get(name, key)}={shown}")
        return " ".join(words)

    def neighbours(self, position: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield the positions one step away on one axis, and those where n or K and a rate change together."""
        steps: list[tuple[tuple[int, int], ...]] = [((i, d),) for i in range(len(self.axes)) for d in (1, -1)]
        names = [axis.name for axis in self.axes]
        # More local steps with a lower local rate, or fewer updates with a lower global rate, learn at a like pace.
        for one, other, sign in (
            ("training.local_steps", "training.local_lr", -1),
            ("training.updates_per_round", "training.global_lr", 1),
        ):
            if one in names and other in names:
                i, j = names.index(one), names.index(other)
                steps += [((i, d), (j, sign * d)) for d in (1, -1)]
        for moves in steps:
            moved = list(position)
            for i, d in moves:
                moved[i] += d
            if all(0 <= k < len(axis.values) for k, axis in zip(moved, self.axes, strict=True)):
                yield tuple(moved)


def grids_of(study: Study, algorithms: Sequence[str], fleet_seed: int) -> dict[str, AlgorithmGrid]:
    """Return the grid of every algorithm."""
    for table in FIXED:
        for key, value in study.tables[table].items():
            if isinstance(value, tuple):
                raise UserError(f"{table}.{key} is swept, but advice is for one task, fleet and target; give one value")
    return {name: _grid(study, name, fleet_seed) for name in algorithms}


def _grid(study: Study, name: str, seed: int) -> AlgorithmGrid:
    own = dict(study.tables.get(name, {}))
    training = {**study.tables["training"], **{key: own[key] for key in study.tables["training"] if key in own}}
    settings_type = ALGORITHMS[name].settings_type
    settings = {item.name: own.get(item.name, item.default) for item in dataclasses.fields(settings_type)}
    base = Settings(
        name,
        training=TABLES["training"](**_singles(training)),
        algorithm_settings=settings_type(**_singles(settings)),
        **{table: TABLES[table](**study.tables[table]) for table in FIXED},
    )
    given = {f"training.{key}": value for key, value in training.items()}
    axes = _axes(base, given | {f"{name}.{key}": value for key, value in settings.items()}, seed)
    rates = [Axis(rate, axes.pop(rate)) for rate in RATES if rate in axes]
    return AlgorithmGrid(base, (*(Axis(*each) for each in axes.items()), *rates), len(rates))


def _singles(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values, and of a list its first one."""
    return {key: value[0] if isinstance(value, tuple) else value for key, value in values.items()}


def _axes(base: Settings, given: Mapping[str, Any], seed: int) -> dict[str, tuple[Any, ...]]:
    """Return the values of every setting that is tried: the lists of the study, or else the default ones."""
    defaults = default_axes(base, make_fleet(base, seed))
    unused = {f"training.{key}" for key in ALGORITHMS[base.algorithm].unused_training()}
    if base.uses_global_lr:
        unused.discard(RATES[0])
    lists = {name: value for name, value in given.items() if isinstance(value, tuple) and name not in unused}
    tried = {**defaults, **lists}
    return {name: tried[name] for name in given if name in tried}


def default_axes(base: Settings, fleet: Fleet) -> Mapping[str, tuple[Any, ...]]:
    """Return the values that are tried where the study has no list, by setting."""
    kind, name, training = ALGORITHMS[base.algorithm], base.algorithm, base.training
    clients, keys = fleet.num_clients, {item.name for item in dataclasses.fields(base.algorithm_settings)}
    axes: dict[str, tuple[Any, ...]] = {}
    if kind.uses_updates_per_round:
        axes["training.updates_per_round"] = _counts(clients, SHARES_OF_CLIENTS)
    if kind.uses_local_steps:
        axes["training.local_steps"] = _counts(training.local_steps, SHARES_OF_STEPS)
    if "concurrency" in keys:
        axes[f"{name}.concurrency"] = (*sorted({*_counts(clients, SHARES_AT_WORK)} - {clients}), 0)
    answer = float(np.median(fleet.answer_times(kind.steps_per_job(training.local_steps))))
    if "wait_seconds" in keys:
        axes[f"{name}.wait_seconds"] = tuple(_rounded(wait * answer) for wait in WAITS)
    automatic = fleet.automatic_timeout(kind.steps_per_job(training.local_steps))
    if automatic is not None and not training.timeout_seconds:
        low, high = (_rounded(factor * automatic) for factor in TIMEOUTS)
        axes["training.timeout_seconds"] = (low, 0.0, high)
    return {**axes, **_rate_axes(base)}


def _rate_axes(base: Settings) -> dict[str, tuple[float, ...]]:
    kind = ALGORITHMS[base.algorithm]
    axes: dict[str, tuple[float, ...]] = {}
    if base.uses_global_lr:
        plain = GLOBAL_RATES if kind.uses_local_lr else LOCAL_RATES
        axes[RATES[0]] = ADAPTIVE_RATES if base.server_optimizer in ADAPTIVE else plain
    if kind.uses_local_lr:
        axes[RATES[1]] = LOCAL_RATES
    return axes


def _counts(whole: int, shares: Sequence[float]) -> tuple[int, ...]:
    return tuple(sorted({max(1, round(share * whole)) for share in shares}))


def _rounded(seconds: float) -> float:
    """Return a time with two digits, which reads well and is the same on every machine."""
    return float(f"{seconds:.2g}")
