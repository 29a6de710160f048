"""Replay: rebuild the plan of a deployment from its log.

The same engine handles the logged events again, and its commands become the records of a plan. The replay compares its
decisions with those that the log notes, merge by merge. The plan can then be checked, drawn and computed by an
executor, and the measured clients can be simulated with other settings.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from ..algorithms.protocol import Drop, ProtocolError, Start, Upload
from ..errors import UserError
from ..planning.action_checks import SUM_TOLERANCE
from ..planning.devices import Fleet, Trace
from ..planning.plan import Plan
from ..planning.records import Absence, Header, Job, JobOutcome, Record, Round, Sent, Timeout, Uploaded, moment
from .deploy_config import DeployConfig, make_engine, read_deploy_config
from .engine.engine import Engine
from .engine.event_log import EventLog, LogNote, notes_for, read_number
from .engine.events import ClientActed, Command, Disconnected, Ended, Event, Exchange, Exchanged, Refused, Trained

_COMPARED = ("merge", "redrawn", "quarantined", "dropped")
"""Names of the notes that a replay must reproduce."""


@dataclass(frozen=True)
class Replay:
    """The result of a replay."""

    config: DeployConfig
    plan: Plan
    fleet: Fleet  # the clients with their measured speeds
    measured_clients: tuple[int, ...]  # the fleet gives all other clients the median speed
    refused: tuple[Refused, ...]
    quarantined: tuple[int, ...]
    shares: tuple[float, ...] | None = None  # of the clients in the samples, if updates were weighted by them


def replay(log: EventLog) -> Replay:
    """Replay a log; raise ``UserError`` if it is inconsistent."""
    config = read_deploy_config(log.settings, stored=True)
    engine = make_engine(config, _shares(log, config))
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
    step_seconds, trips = (_medians(times, len(engine.clients)) for times in (recorder.steps, recorder.trips))
    mbps = size * 8e-6 / np.maximum(trips, 1e-6)
    trace = Trace(np.maximum(step_seconds, 1e-6), mbps, mbps)
    return Replay(
        config,
        recorder.plan(config.seed),
        Fleet(len(engine.clients), config.seed, model_megabytes=size * 1e-6, trace=trace, upload="blocking"),
        tuple(sorted(recorder.steps)),
        tuple(event for event in log.events if isinstance(event, Refused)),
        tuple(client for client, link in enumerate(engine.links) if link.quarantined),
        engine.server.setup.shares,
    )


def _shares(log: EventLog, config: DeployConfig) -> tuple[float, ...] | None:
    """Return the clients' shares of the samples that the log contains if updates were weighted by them."""
    if config.settings.training.weighting != "samples":
        return None
    shares, total = log.head.get("shares"), config.settings.clients.num_clients
    try:
        found = tuple(map(read_number, shares if isinstance(shares, list) else ()))
    except TypeError as error:
        raise UserError(f"the log has a share of samples that is {error}; it cannot be used") from None
    if len(found) != total or not abs(math.fsum(found) - 1.0) <= SUM_TOLERANCE:
        raise UserError(f"the log does not contain the shares of {total} clients in the samples; it cannot be used")
    return found


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


def _medians(measured: dict[int, list[float]], clients: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the median of every client; a client without measurements gets the median of the others."""
    medians = {client: median(values) for client, values in measured.items()}
    default = median(medians.values()) if medians else 0.01
    return np.array([medians.get(client, default) for client in range(clients)])


class _PlanRecorder:
    """Turns commands of an engine into records of a plan, which are sorted by time at the end."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._records: list[Record] = []
        # (client, index) -> version, and when the server sent the job or the client reports that it started
        self._running: dict[tuple[int, int], tuple[int, float]] = {}
        self._absent: dict[int, tuple[int, float]] = {}  # client -> position of its record, since when
        self._sent: dict[int, float] = {}  # client -> when an exchange was sent that the client answers at once
        self._now = 0.0
        self.steps: dict[int, list[float]] = defaultdict(list)  # measured seconds per step of every client
        self.trips: dict[int, list[float]] = defaultdict(list)  # measured seconds one way

    def record(self, event: Event, commands: list[Command]) -> None:
        """Record an event and the commands that followed from it."""
        self._now = event.t
        if isinstance(event, Trained):
            self._trained(event)
        elif isinstance(event, Exchanged) and event.client in self._sent:
            self.trips[event.client].append((event.t - self._sent.pop(event.client)) / 2.0)
        for command in commands:
            self._command(command)

    def _command(self, command: Command) -> None:
        if isinstance(command, ClientActed):
            self._client_acted(command)
        elif isinstance(command, Ended):
            self._stop((command.client, command.index), command.at, self._engine.steps, "ended")
        elif isinstance(command, Round | Sent | Timeout):
            self._records.append(command)
        elif isinstance(command, Disconnected):
            self._disconnected(command)
        elif isinstance(command, Exchange) and not command.wanted:
            self._sent[command.client] = self._now

    def _trained(self, event: Trained) -> None:
        """Record a job, assuming that the message and its reply took equally long."""
        key = (event.client, event.index)
        _, sent = self._running.pop(key)
        trip = max(0.0, (event.t - sent - event.seconds) / 2.0)
        start, end = sent + trip, event.t - trip
        self.trips[event.client].append(trip)
        self.steps[event.client].append(event.seconds / max(1, event.steps))
        self._records.append(Job(*key, event.version, event.steps, min(start, end), end, "ended"))
        if not self._engine.policy.hold_until_requested:
            self._records.append(Uploaded(*key, end, event.t))

    def _client_acted(self, acted: ClientActed) -> None:
        key = (acted.client, acted.action.index)
        if isinstance(acted.action, Start):
            self._running[key] = (acted.action.version, acted.at)
        elif isinstance(acted.action, Upload):
            if key in self._running:  # a background job without a reported end: the upload interrupted it
                self._stop(key, acted.at, acted.steps, "interrupted")
            if self._engine.policy.hold_until_requested:
                self._records.append(Uploaded(*key, acted.at, self._now))
        elif isinstance(acted.action, Drop) and key in self._running:
            self._stop(key, acted.at, 0, "lost")

    def _stop(self, key: tuple[int, int], at: float, steps: int, outcome: JobOutcome) -> None:
        version, start = self._running.pop(key)
        if steps:
            self.steps[key[0]].append((at - start) / steps)
        self._records.append(Job(*key, version, steps, start, at, outcome))

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
            state=engine.server.state_vectors(setup, engine.server.settings),
            job_start=engine.server.job_start,
        )
        running = [
            Job(*key, version, engine.steps, start, max(start, self._now), "running")
            for key, (version, start) in sorted(self._running.items())
        ]
        return Plan(header, (*sorted(self._records, key=moment), *running))
