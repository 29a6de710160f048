"""The simulator of servers that only request, merge and broadcast, with clients that keep training between requests.

Its plans are those of ``Simulator``, record by record. Most jobs of such a plan are never requested, and events decide
nothing about them, so ``EagerClients`` computes all that end between two acts of the server together. Only requests,
the ends of requested jobs and arrivals are events.
"""

from __future__ import annotations

import math
from itertools import repeat

import numpy as np

from ..algorithms import ServerMachine
from ..algorithms.protocol import Broadcast, Discard, Merge, Request, ServerAction, Update
from . import action_checks
from .devices import Fleet
from .eager_clients import EagerClients
from .event_queue import EventKind
from .records import Job, Record, Sent, Uploaded
from .running_job import RunningJob
from .simulator import Simulator


def plans_without_events(server: ServerMachine, fleet: Fleet) -> bool:
    """Return whether ``EagerSimulator`` can plan a run.

    A subclass may answer with other actions than the class that declares ``requests_once``, so it must declare it, too.
    """
    declared = vars(type(server)).get("requests_once", False)
    policy = server.policy_with(fleet.upload)
    eager = policy.hold_until_requested and not (policy.pause_when_full or policy.interruptible)
    others = policy.restart_on_model or policy.allow_same_version or server.setup.timeout_seconds is not None
    return bool(declared and server.broadcasts and eager and not (others or fleet.fails or fleet.schedule is not None))


class EagerSimulator(Simulator):
    """Simulate clients that keep training; see ``plans_without_events``."""

    def __init__(self, server: ServerMachine, fleet: Fleet) -> None:
        super().__init__(server, fleet)
        self._eager = EagerClients(fleet, self.steps)
        self._requests: list[list[int]] = []  # the clients of each batch of requests
        self._requested: dict[int, Uploaded | None] = {}  # client -> the upload at the end of its job, once it started
        self._uploaded_at: dict[int, float] = {}  # client -> when the upload in flight started
        self._waiting: list[int] = []  # requested clients that wait for a version which was not broadcast yet

    def unfinished(self) -> list[Job]:
        """Return the jobs that are running now."""
        return [self._running_job(client) for client in np.flatnonzero(np.isfinite(self._eager.ends)).tolist()]

    def _running_job(self, client: int) -> Job:
        found = self._eager
        numbers = int(found.jobs[client]) - 1, int(found.versions[client]), self.steps
        return Job(client, *numbers, float(found.starts[client]), float(found.ends[client]), "running")

    # Jobs between two acts of the server.

    def _advance(self, now: float, first_client: int) -> None:
        """Record the jobs that ended before ``now``, or at ``now`` on clients below the first one."""
        clients = self._eager
        before = clients.jobs.copy() if self.on_start is not None else None
        ended = clients.advance(now, first_client)
        for version, change in clients.take_users():
            self._versions.hold(version, change) if change > 0 else self._versions.release(version, -change)
        if before is not None:
            self._report_starts(before)
        if ended is None:
            return
        lists = (column.tolist() for column in ended[:3])
        times = (column.tolist() for column in ended[3:5])
        jobs = list(map(Job._make, zip(*lists, repeat(self.steps), *times, repeat("ended"))))
        first = 0
        for position in np.flatnonzero(ended.requested).tolist():
            upload = self._requested.pop(jobs[position].client)
            assert upload is not None
            self._out += jobs[first : position + 1]
            self._out.append(upload)
            first = position + 1
        self._out += jobs[first:] if first else jobs

    def _report_starts(self, before: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        """Report the jobs that started and are running."""
        assert self.on_start is not None
        found = self._eager
        for client in np.flatnonzero((found.jobs > before) & np.isfinite(found.ends)).tolist():
            job = self._running_job(client)
            self.on_start(client, RunningJob(job.index, job.version, job.start, job.end, math.nan))

    def _rest(self, until: float) -> list[Record]:
        self._advance(math.nextafter(until, math.inf), 0)
        return self._out

    # Events.

    def _handle(self, event: int, client: int, detail: int) -> None:
        if event == EventKind.REQUEST:
            clients, self._requests[detail] = self._requests[detail], []
            self._request_all(sorted(clients))
        else:
            super()._handle(event, client, detail)

    def _request_all(self, clients: list[int]) -> None:
        self._advance(self.now, self.fleet.num_clients)  # ends come before requests, and starts after them
        eager, ids = self._eager, np.array(clients)
        held = eager.held[ids]
        last = eager.jobs[ids] - np.where(np.isinf(eager.ends[ids]), 1, 2)
        eager.held[ids] = -1
        for client, version, index in zip(clients, held.tolist(), last.tolist(), strict=True):
            if client in self._uploaded_at or client in self._requested:
                self._refuse(f"it requests client {client} again before its update has arrived,")
            if version >= 0:
                self._finished[client, index] = Update(client, index, version, self.steps)
                self._uploaded_at[client] = self.now
                self._upload(client, index)
            else:
                eager.requested[client] = True
                self._requested[client] = None
                self._await_end(client)

    def _await_end(self, client: int) -> None:
        index, end = self._eager.next_end(client)
        if math.isinf(end):
            self._waiting.append(client)
        else:
            self._push(end, EventKind.ENDED, client, index)

    def _ended(self, client: int, index: int) -> None:
        """Upload the update of a requested job; the job itself is recorded with all others."""
        self._finished[client, index] = Update(client, index, self._eager.version_of(client, index), self.steps)
        self._uploaded_at[client] = self.now
        arrival = self.now + self._up[client]
        self._requested[client] = Uploaded(client, index, self.now, arrival)
        self._push(arrival, EventKind.ARRIVED, client, index)

    def _arrived(self, client: int, index: int) -> None:
        began = self._uploaded_at.pop(client)
        actions = self.server.arrived(self._finished.pop((client, index)))
        if actions:
            self._advance(self.now, client)
            # A job of this client that ends now, too, ends first if it started before the upload did.
            if self._eager.ends[client] == self.now and self._eager.starts[client] < began:
                self._advance(self.now, client + 1)
        self._serve(actions)

    # Server actions.

    def _refuse(self, fault: str) -> None:
        action_checks.refuse(self.server.name, f"{fault} after round {self._newest}; set requests_once to False")

    def _serve(self, actions: list[ServerAction]) -> None:
        """Handle all requests of one instant in one event."""
        action_checks.check_result(self.server, actions, self._newest)
        requested = []
        for action in actions:
            if isinstance(action, Request):
                if type(action.client) is not int or not 0 <= action.client < self.fleet.num_clients:
                    action_checks.refuse_action(self.server, action, self._newest)
                requested.append(action.client)
            elif not isinstance(action, Merge | Broadcast | Discard):
                self._refuse(f"it returns {type(action).__name__}, which is no merge, broadcast or request,")
        super()._serve([action for action in actions if not isinstance(action, Request)])
        if requested:
            self._push(self.now + self.fleet.latency_seconds, EventKind.REQUEST, -1, len(self._requests))
            self._requests.append(requested)

    def _broadcast(self, version: int) -> None:
        self._broadcasts.add(version, self.now)
        self._out.append(Sent(version, None, self.now))
        self._eager.broadcast(self.now)
        waiting, self._waiting = self._waiting, []
        for client in waiting:
            self._await_end(client)
