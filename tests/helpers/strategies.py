"""Random cases for planning: algorithms with all their settings, fleets of every kind, and a guarded simulator."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from defedavg.algorithms import ALGORITHMS, ServerMachine, Setup
from defedavg.algorithms.protocol import UPLOADS
from defedavg.planning.devices import Fleet, Trace, Windows
from defedavg.planning.intervals import Intervals
from defedavg.planning.plan import Plan
from defedavg.planning.records import Record, Round
from defedavg.planning.simulator import Simulator
from defedavg.planning.slowness import Slowness

SLOWNESS_TEXTS = (
    "equal",
    "uniform(1, 5)",
    "inverse-uniform(1, 5)",
    "lognormal(1)",
    "exponential(2)",
    "two-speed(0.5, 10)",
    "pareto(1.5)",
    "phones",
)


EDGES = [0.0, 0.05, 0.1, 0.11, 0.25, 0.5, 0.75, 1.0, 1.3, 1.999]
"""Starts and ends of intervals, in seconds."""

CHOICES: dict[tuple[str, str], list[Any]] = {
    ("asysg", "concurrency"): [0, 1],
    ("fadas", "delay_threshold"): [0, 1],
    ("fedfa", "window"): [5, 2],
    ("quafl", "bits"): [8, 32],
    ("delay-adaptive-sgd", "threshold"): [4],
    ("ringmaster", "threshold"): [0, 4],
    ("ace", "max_staleness"): [0, 7],
}
"""Values of numeric settings that change what a plan contains; other numbers have their defaults."""


def bounded(examples: int) -> settings:
    """Return settings with that many examples and no deadline: a slow machine is not a failure."""
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


def variants(kind: type[ServerMachine]) -> list[Any]:
    """Return every combination of an algorithm's choices: flags, bounds, and the words that its help texts list."""
    choices: list[list[tuple[str, Any]]] = []
    for field in dataclasses.fields(kind.settings_type):
        values: list[Any] = CHOICES.get((kind.name, field.name), [field.default])
        if isinstance(field.default, bool):
            values = [True, False]
        elif isinstance(field.default, str):
            values = [
                word
                for word in dict.fromkeys(re.findall(r"[a-z-]+", field.metadata["help"]))
                if _accepts(kind, field, word)
            ]
        choices.append([(field.name, value) for value in values])
    return [kind.settings_type(**dict(choice)) for choice in itertools.product(*choices)]


def _accepts(kind: type[ServerMachine], field: dataclasses.Field[Any], word: str) -> bool:
    try:
        kind.settings_type(**{field.name: word})
    except Exception:
        return False
    return True


class GuardedSimulator(Simulator):
    """A simulator that fails after too many events without a merge instead of planning without end."""

    def __init__(self, server: ServerMachine, fleet: Fleet, max_events: int = 20_000) -> None:
        super().__init__(server, fleet)
        self.max_events = max_events
        self.events = 0
        self._events_at_merge = 0

    def _handle(self, event: int, client: int, detail: int) -> None:
        before = self.server.version
        self.events += 1
        super()._handle(event, client, detail)
        if self.server.version > before:
            self._events_at_merge = self.events
        assert self.events - self._events_at_merge < self.max_events, (
            f"{self.server.name} hangs: {self.max_events} events without a merge since version {self.server.version} "
            f"(now {self.now} s)"
        )


@dataclass(frozen=True)
class Case:
    """One run to plan; every call creates new machines."""

    algorithm: str
    settings: Any
    setup: Setup
    fleet: Fleet

    def server(self) -> ServerMachine:
        """Return a new server machine."""
        return ALGORITHMS[self.algorithm](self.setup, self.settings)

    def simulator(self) -> GuardedSimulator:
        """Return a new simulator at time zero."""
        return GuardedSimulator(self.server(), self.fleet)

    def plan(self, rounds: int) -> Plan:
        """Plan that many rounds."""
        return Plan.collect(self.simulator(), rounds)


def case(
    algorithm: str,
    clients: int,
    n: int,
    *,
    steps: int = 5,
    seed: int = 0,
    timeout: float | None = None,
    settings: Any = None,
    **fleet: Any,
) -> Case:
    """Return a case; further arguments are those of ``Fleet``."""
    kind = ALGORITHMS[algorithm]
    settings = kind.settings_type() if settings is None else settings
    setup = Setup(clients, kind.updates_per_merge(n), steps, seed, timeout)
    return Case(algorithm, settings, setup, Fleet(clients, seed, **fleet))


def equal_speeds() -> dict[str, Any]:
    """Return arguments of a fleet in which all times tie."""
    return {"slowness": Slowness.parse("equal"), "step_seconds": 0.25, "model_megabytes": 25.0}


def traces(clients: int, *, leave: bool = False) -> st.SearchStrategy[Trace]:
    """Return unequal clients and links from few values, so that ties are common; with ``leave``, some leave."""

    def floats(values: list[float]) -> st.SearchStrategy[Any]:
        return st.lists(st.sampled_from(values), min_size=clients, max_size=clients).map(np.array)

    absences: st.SearchStrategy[dict[int, tuple[float, float]]] = st.just({})
    if leave:
        moment = st.sampled_from([0.0, 0.05, 0.11, 0.5, 1.3])
        away = st.sampled_from([0.0, 0.02, 0.3, 2.0, math.inf])
        absences = st.dictionaries(
            st.integers(0, clients - 1), st.tuples(moment, away).map(lambda pair: (pair[0], pair[0] + pair[1]))
        )
    return st.builds(
        Trace,
        floats([0.001, 0.002, 0.003, 0.02]),
        floats([10.0, 400.0, math.inf]),
        floats([10.0, 400.0, math.inf]),
        absences,
    )


@st.composite
def intervals(draw: st.DrawFn, clients: int, *, end: bool = False) -> Intervals:
    """Draw intervals of times that tie with others; they repeat or last for ever, unless they may ``end``."""
    found = []
    for _ in range(clients):
        edges = draw(st.lists(st.sampled_from(EDGES), min_size=2, max_size=8, unique=True).map(sorted))
        spans = list(zip(edges[::2], edges[1::2], strict=False))
        period = draw(st.sampled_from([edges[-1], 2.0, 2.5, math.inf]))
        if math.isinf(period) and not (end and draw(st.booleans())):
            spans[-1] = (spans[-1][0], math.inf)
        elif math.isfinite(period) and draw(st.booleans()) and spans[0][0] > 0.0:
            spans.append((edges[-1], period + 0.5 * spans[0][0]) if edges[-1] < period else (0.0, 0.5 * spans[0][0]))
        found.append((spans, period))
    return Intervals.of(found)


@st.composite
def fleets(draw: st.DrawFn, clients: int, *, lossy: bool = False, windows: bool = True) -> Fleet:
    """Draw fleets of every kind; clients of ``lossy`` ones fail at random, leave at given times, or both."""
    links = st.sampled_from([10.0, 400.0, math.inf])
    opening = st.sampled_from([None, Windows(0.2, 0.3), Windows(0.05, 1.0), Windows(1.0, 0.0)])
    failure_rate = draw(st.sampled_from([0.0, 0.05, 0.3, 0.5])) if lossy else 0.0
    return Fleet(
        num_clients=clients,
        seed=draw(st.integers(0, 2**32)),
        step_seconds=draw(st.sampled_from([0.0017, 0.25])),
        slowness=Slowness.parse(draw(st.sampled_from(SLOWNESS_TEXTS))),
        jitter=draw(st.sampled_from([0.0, 0.0, 0.3])),
        uplink_mbps=draw(links),
        downlink_mbps=draw(links),
        latency_seconds=draw(st.sampled_from([0.0, 0.01])),
        model_megabytes=draw(st.sampled_from([0.0, 2.2])),
        availability=draw(opening) if windows else None,
        failure_rate=failure_rate,
        return_seconds=draw(st.sampled_from([0.0, 0.1, 1.0, 2.0, math.inf])) if lossy else 1.0,
        trace=draw(st.none() | traces(clients, leave=lossy)),
        upload=draw(st.sampled_from(UPLOADS)),
    )


@st.composite
def cases(draw: st.DrawFn, names: tuple[str, ...] = (), *, lossy: bool = False, windows: bool = True) -> Case:
    """Draw any registered algorithm with any of its settings on any fleet of 1 to 12 clients."""
    name = draw(st.sampled_from(names or tuple(ALGORITHMS)))
    kind = ALGORITHMS[name]
    clients = draw(st.integers(1, 12))
    n = draw(st.integers(1, clients))
    settings = draw(st.sampled_from(variants(kind)))
    if "concurrency" in {field.name for field in dataclasses.fields(kind.settings_type)}:
        settings = dataclasses.replace(settings, concurrency=draw(st.integers(0, clients)))
    fleet = draw(fleets(clients, lossy=lossy, windows=windows))
    steps = draw(st.integers(1, 6))
    timeout = 10.0 * fleet.round_trip(kind.steps_per_job(steps)) if fleet.lossy else None
    setup = Setup(clients, kind.updates_per_merge(n), steps, draw(st.integers(0, 2**32)), timeout)
    return Case(name, settings, setup, fleet)


def up_to(records: Iterator[Record], rounds: int) -> list[Record]:
    """Return the records up to and including that round."""
    taken = []
    for record in records:
        taken.append(record)
        if isinstance(record, Round) and record.merge.version >= rounds:
            break
    return taken


def positive(low: float = 1e-4, high: float = 1e4) -> st.SearchStrategy[float]:
    return st.floats(math.log(low), math.log(high)).map(math.exp)
