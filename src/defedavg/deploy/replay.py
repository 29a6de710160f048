"""Replay: rebuild the plan of a deployment from its log.

The same engine handles the logged events again, and its commands become the records of a plan. The replay compares its
decisions with those that the log notes, merge by merge. The plan can then be checked, drawn and computed by an
executor, and the measured clients can be simulated with other settings.
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
from .engine.event_log import EventLog, LogNote
from .engine.events import (
    ClientActed,
    Combine,
    Command,
    Disconnected,
    Ended,
    Event,
    Exchange,
    Exchanged,
    ModelSent,
    Refused,
    Replaced,
    Trained,
)
from .engine.setup import logged_config, make_engine, notes_for

_COMPARED = ("merge", "redrawn", "quarantined", "dropped")
"""Names of the notes that a replay must reproduce."""


@dataclass(slots=True)
class _RunningJob:
    version: int
    start: float  # when the server sent it, or when the client reports that it started


@dataclass(frozen=True)
class Replay:
    """The result of a replay."""

    config: DeployConfig
    plan: Plan
    trace: Trace
    measured_clients: tuple[int, ...]  # the trace gives all other clients the median speed
    refused: tuple[Refused, ...]
    quarantined: tuple[int, ...]
    model_bytes: int


def replay(log: EventLog) -> Replay:
    """Replay a log; raise ``UserError`` if it is inconsistent."""
    config = logged_config(log)
    engine = make_engine(config)
    recorder = _PlanRecorder(engine)
    reproduced: list[LogNote] = []
    for event in log.events:
        _check_event(event, engine)
        try:
            commands = engine.handle(event)
        except (ProtocolError, KeyError) as error:
            raise UserError(f"the log is inconsistent at {event.t:.3f} s: {error}") from None
        recorder.record(event, commands)
        reproduced.extend(notes_for(event.t, commands))
    _compare([line for line in log.lines if isinstance(line, LogNote)], reproduced)
    size = log.head.get("model_bytes")
    if type(size) is not int or size < 1:
        raise UserError("the log does not contain the size of the model; it cannot be used")
    times = recorder.times
    return Replay(
        config,
        recorder.plan(config.seed),
        times.trace(len(engine.clients), size),
        tuple(sorted(times.steps)),
        tuple(event for event in log.events if isinstance(event, Refused)),
        tuple(client for client, link in enumerate(engine.links) if link.quarantined),
        size,
    )


def _check_event(event: Event, engine: Engine) -> None:
    client = getattr(event, "client", 0)
    if client >= len(engine.clients):
        raise UserError(f"the log names client {client}, but the run has {len(engine.clients)} clients")
    if isinstance(event, Trained | Exchanged):
        fault = engine.fault(event)
        if fault is not None:
            raise UserError(f"the log is inconsistent at {event.t:.3f} s: client {client}: {fault}")


def _compare(logged: list[LogNote], reproduced: list[LogNote]) -> None:
    """Raise ``UserError`` if a note differs; a crash may have lost the last notes of the log, but none before them."""
    expected, found = ([note for note in notes if note.name in _COMPARED] for notes in (logged, reproduced))
    for number, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one != other:
            raise UserError(
                f"the log is inconsistent: at {one.t:.3f} s it contains {one.name} number {number}, but its events "
                f"lead to {other.name} at {other.t:.3f} s"
            )
    if len(expected) > len(found):
        raise UserError(f"the log contains {len(expected) - len(found)} decisions that its events do not lead to")


@dataclass
class _MeasuredTimes:
    """Times of clients, measured from their events."""

    steps: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # seconds per step
    trips: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # seconds one way

    def trace(self, clients: int, size: int) -> Trace:
        """Return profiles for a simulation: medians; a client without measurements gets the median of the others."""
        steps = self._medians(self.steps, clients)
        trips = self._medians(self.trips, clients)
        mbps = size * 8e-6 / np.maximum(trips, 1e-6)
        return Trace(np.maximum(steps, 1e-6), mbps, mbps)

    def _medians(self, measured: dict[int, list[float]], clients: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        medians = {client: median(values) for client, values in measured.items()}
        default = median(medians.values()) if medians else 0.01
        return np.array([medians.get(client, default) for client in range(clients)])


class _PlanRecorder:
    """Turns commands of an engine into records of a plan, which are sorted by time at the end."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._records: list[Record] = []
        self._running: dict[tuple[int, int], _RunningJob] = {}
        self._absent: dict[int, tuple[int, float]] = {}  # client -> position of its record, since when
        self._sent: dict[int, float] = {}  # client -> when an exchange was sent that the client answers at once
        self._now = 0.0
        self.times = _MeasuredTimes()

    def record(self, event: Event, commands: list[Command]) -> None:
        """Record an event and the commands that followed from it."""
        self._now = event.t
        if isinstance(event, Trained):
            self._trained(event)
        elif isinstance(event, Exchanged) and event.client in self._sent:
            self.times.trips[event.client].append((event.t - self._sent.pop(event.client)) / 2.0)
        for command in commands:
            self._command(command)

    def _command(self, command: Command) -> None:
        if isinstance(command, ClientActed):
            self._client_acted(command)
        elif isinstance(command, Ended):
            self._stop((command.client, command.index), command.at, self._engine.steps, "ended")
        elif isinstance(command, Combine):
            self._records.append(Round(self._now, command.merge, command.freed))
        elif isinstance(command, ModelSent):
            self._records.append(Sent(command.version, command.client, self._now))
        elif isinstance(command, Replaced):
            self._records.append(Timeout(self._now, command.missing, command.drawn))
        elif isinstance(command, Disconnected):
            self._disconnected(command)
        elif isinstance(command, Exchange) and not command.wanted:
            self._sent[command.client] = self._now

    def _trained(self, event: Trained) -> None:
        """Record a job, assuming that the message and its reply took equally long."""
        key = (event.client, event.index)
        running = self._running.pop(key)
        trip = max(0.0, (event.t - running.start - event.seconds) / 2.0)
        start, end = running.start + trip, event.t - trip
        self.times.trips[event.client].append(trip)
        self.times.steps[event.client].append(event.seconds / max(1, event.steps))
        self._records.append(Job(*key, event.version, event.steps, min(start, end), end, "ended"))
        if not self._engine.policy.hold_until_requested:
            self._records.append(Uploaded(*key, end, event.t))

    def _client_acted(self, acted: ClientActed) -> None:
        key = (acted.client, acted.action.index)
        if isinstance(acted.action, Start):
            self._running[key] = _RunningJob(acted.action.version, acted.at)
        elif isinstance(acted.action, Upload):
            if key in self._running:  # a background job without a reported end: the upload interrupted it
                self._stop(key, acted.at, acted.steps, "interrupted")
            if self._engine.policy.hold_until_requested:
                self._records.append(Uploaded(*key, acted.at, self._now))
        elif isinstance(acted.action, Drop) and key in self._running:
            running = self._running.pop(key)
            self._records.append(Job(*key, running.version, 0, running.start, acted.at, "lost"))

    def _stop(self, key: tuple[int, int], at: float, steps: int, outcome: JobOutcome) -> None:
        running = self._running.pop(key)
        if steps:
            self.times.steps[key[0]].append((at - running.start) / steps)
        self._records.append(Job(*key, running.version, steps, running.start, at, outcome))

    def _disconnected(self, change: Disconnected) -> None:
        self._sent.pop(change.client, None)
        if not change.back:
            self._absent[change.client] = (len(self._records), self._now)
            self._records.append(Absence(change.client, self._now, math.inf))
        elif change.client in self._absent:
            position, since = self._absent.pop(change.client)
            self._records[position] = Absence(change.client, since, self._now)

    def plan(self, seed: int) -> Plan:
        """Return the records in order of time, followed by the jobs that are still running."""
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
