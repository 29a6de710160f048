"""From a log back to a plan: the same engine sees the same events again, and what it does is written down as records.

What the replay decides is compared with what the log says was done, merge by merge. The plan can then be checked,
drawn, computed by an executor, or planned anew with other settings for the clients that were measured.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from ..algorithms.protocol import Drop, ProtocolError, Start, Upload
from ..errors import UserError
from ..planning.devices import Trace
from ..planning.plan import Plan
from ..planning.records import Absence, Header, Job, JobOutcome, Record, Round, Sent, Timeout, Uploaded, moment
from .deploy_config import DeployConfig
from .engine.engine import Engine
from .engine.event_log import Log, Note
from .engine.events import (
    ClientActed,
    Combine,
    Disconnected,
    Ended,
    Event,
    Exchange,
    Exchanged,
    ModelSent,
    Order,
    Refused,
    Replaced,
    Trained,
)
from .engine.setup import make_engine, notes_of, orders_of


@dataclass(slots=True)
class _Running:
    version: int
    start: float  # when it was sent off, or says that it started


@dataclass(frozen=True)
class Replay:
    """What a log tells."""

    orders: DeployConfig
    plan: Plan
    trace: Trace
    measured: tuple[int, ...]  # clients whose speed was seen; the others are given the median
    refused: tuple[Refused, ...]
    quarantined: tuple[int, ...]
    model_bytes: int


def replay(log: Log) -> Replay:
    """Replay a log; raises ``UserError`` where it does not agree with itself."""
    orders = orders_of(log)
    engine = make_engine(orders)
    writer = _Writer(engine)
    said = [line for line in log.lines if isinstance(line, Note) and line.name in _COMPARED]
    done: list[Note] = []
    for event in log.events:
        _known(event, engine)
        try:
            orders_given = engine.handle(event)
        except (ProtocolError, KeyError) as error:
            raise UserError(f"the log does not agree with itself at {event.t:.3f} s: {error}") from None
        writer.take(event, orders_given)
        done.extend(note for note in notes_of(event.t, orders_given) if note.name in _COMPARED)
    _compare(said, done)
    size = log.head.get("model_bytes")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise UserError("the log does not say how large the model is; it cannot be used")
    times = writer.times
    return Replay(
        orders,
        writer.plan(orders.seed),
        times.trace(len(engine.clients), size),
        tuple(sorted(times.steps)),
        tuple(event for event in log.events if isinstance(event, Refused)),
        tuple(client for client, link in enumerate(engine.links) if link.banned),
        size,
    )


_COMPARED = ("merge", "redrawn", "quarantined", "dropped")


def _known(event: Event, engine: Engine) -> None:
    client = getattr(event, "client", 0)
    if client >= len(engine.clients):
        raise UserError(f"the log speaks of client {client}, but there are {len(engine.clients)}")
    if isinstance(event, Trained | Exchanged):
        fault = engine.fault(event)
        if fault is not None:
            raise UserError(f"the log does not agree with itself at {event.t:.3f} s: client {client}: {fault}")


def _compare(said: list[Note], done: list[Note]) -> None:
    """The log may have lost its last notes in a crash, but none in the middle, and none may differ."""
    for number, (one, other) in enumerate(zip(said, done, strict=False)):
        if one != other:
            raise UserError(
                f"the log does not agree with itself: at {one.t:.3f} s it says {one.name} number {number}, but its "
                f"events lead to {other.name} at {other.t:.3f} s"
            )
    if len(said) > len(done):
        raise UserError(f"the log tells of {len(said) - len(done)} things that its events do not lead to")


@dataclass
class _Times:
    """What was measured of clients."""

    steps: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # seconds per step
    trips: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # seconds one way

    def trace(self, clients: int, size: int) -> Trace:
        """Profiles for a simulation: medians; a client of which nothing was seen is like the median of the others."""
        steps = self._medians(self.steps, clients)
        ways = self._medians(self.trips, clients)
        mbps = size * 8e-6 / np.maximum(ways, 1e-6)
        return Trace(np.maximum(steps, 1e-6), mbps, mbps)

    def _medians(self, found: dict[int, list[float]], clients: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        own = {client: median(values) for client, values in found.items()}
        usual = median(own.values()) if own else 0.01
        return np.array([own.get(client, usual) for client in range(clients)])


class _Writer:
    """Writes records of what an engine does; they are put in the order of their moments at the end."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._records: list[Record] = []
        self._running: dict[tuple[int, int], _Running] = {}
        self._away: dict[int, tuple[int, float]] = {}  # client -> place of its record, since when
        self._ended: set[tuple[int, int]] = set()
        self._asked: dict[int, float] = {}  # when messages went out that are answered at once
        self._now = 0.0
        self.times = _Times()

    def take(self, event: Event, orders: list[Order]) -> None:
        """An event and what followed."""
        self._now = event.t
        if isinstance(event, Trained):
            self._trained(event)
        elif isinstance(event, Exchanged) and event.client in self._asked:
            self.times.trips[event.client].append((event.t - self._asked.pop(event.client)) / 2.0)
        for order in orders:
            if isinstance(order, ClientActed):
                self._did(order)
            elif isinstance(order, Ended):
                self._stop((order.client, order.index), order.at, self._engine.steps, "ended")
            elif isinstance(order, Combine):
                self._records.append(Round(event.t, order.merge, order.freed))
            elif isinstance(order, ModelSent):
                self._records.append(Sent(order.version, order.client, event.t))
            elif isinstance(order, Replaced):
                self._records.append(Timeout(event.t, order.missing, order.drawn))
            elif isinstance(order, Disconnected):
                self._went(order)
            elif isinstance(order, Exchange) and not order.wanted:
                self._asked[order.client] = event.t

    def _trained(self, event: Trained) -> None:
        """A train message and its reply: the way there and the way back are taken to be alike."""
        key = (event.client, event.index)
        running = self._running.pop(key)
        way = max(0.0, (event.t - running.start - event.seconds) / 2.0)
        start, end = running.start + way, event.t - way
        self.times.trips[event.client].append(way)
        self.times.steps[event.client].append(event.seconds / max(1, event.steps))
        self._ended.add(key)
        self._records.append(Job(*key, event.version, event.steps, min(start, end), end, "ended"))
        if not self._engine.policy.hold_until_requested:
            self._records.append(Uploaded(*key, end, event.t))

    def _did(self, did: ClientActed) -> None:
        key = (did.client, did.action.index)
        if isinstance(did.action, Start):
            self._running[key] = _Running(did.action.version, did.at)
        elif isinstance(did.action, Upload):
            if key in self._running:  # in the background, and interrupted: otherwise its end was seen
                self._stop(key, did.at, did.steps, "interrupted")
            if self._engine.policy.hold_until_requested:
                self._records.append(Uploaded(*key, did.at, self._now))
        elif isinstance(did.action, Drop) and key in self._running:
            running = self._running.pop(key)
            self._records.append(Job(*key, running.version, 0, running.start, did.at, "lost"))

    def _stop(self, key: tuple[int, int], at: float, steps: int, fate: JobOutcome) -> None:
        running = self._running.pop(key)
        if steps:
            self.times.steps[key[0]].append((at - running.start) / steps)
        self._records.append(Job(*key, running.version, steps, running.start, at, fate))

    def _went(self, away: Disconnected) -> None:
        self._asked.pop(away.client, None)
        if not away.back:
            self._away[away.client] = (len(self._records), self._now)
            self._records.append(Absence(away.client, self._now, math.inf))
        elif away.client in self._away:
            place, since = self._away.pop(away.client)
            self._records[place] = Absence(away.client, since, self._now)

    def plan(self, seed: int) -> Plan:
        """The records in order, with the jobs that still run."""
        engine = self._engine
        setup = engine.server.setup
        header = Header(
            algorithm=engine.server.name,
            num_clients=setup.num_clients,
            updates_per_round=setup.updates_per_round,
            local_steps=engine.steps,
            seed=seed,
            allow_same_version=engine.policy.allow_same_version,
            interruptible=engine.policy.interruptible,
        )
        running = [
            Job(*key, job.version, engine.steps, job.start, max(job.start, self._now), "running")
            for key, job in sorted(self._running.items())
        ]
        return Plan(header, (*sorted(self._records, key=moment), *running))
