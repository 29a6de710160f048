"""Simulators for very many clients: they neither simulate nor record what no merge depends on.

Their rounds are those of ``Simulator``, and so are their jobs and uploads, except for jobs that the server never sees.
A job is recorded when it is uploaded. Three client policies allow three ways to skip work:

* Clients that send unrequested all start with a job from version 0. The ends of these jobs are sorted at once, and a
  client is created when its first job ends.
* Clients that pause until they are requested have at most one job to replay at the request.
* Clients that keep training are advanced when they are requested (``lazy_clients.py``).

Clients that can fail tell the server when they return, so only ``Simulator`` handles such a fleet.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from ..algorithms import ServerMachine
from ..algorithms.protocol import ClientMachine, Phase, Request, Send, ServerAction, Update
from ..errors import UserError
from .action_checks import check_result, refuse
from .devices import Fleet
from .eager_simulator import EagerSimulator, plans_without_events
from .event_queue import EventKind
from .lazy_clients import LazyClients
from .records import Job, Sent
from .running_job import RunningJob
from .simulator import Simulator

SPARSE_FROM_CLIENTS = 20_000
"""The number of clients from which ``plan_detail = "auto"`` omits jobs that no merge uses."""

PLAN_DETAIL = ("auto", "all", "used")


def make_simulator_for(server: ServerMachine, fleet: Fleet, plan_detail: str = "all") -> Simulator:
    """Return the simulator that records ``all`` jobs, only the ``used`` ones, or, by fleet size, either (``auto``)."""
    policy = server.policy_with(fleet.upload)
    eager = policy.hold_until_requested and not policy.pause_when_full
    possible = not fleet.fails and (server.broadcasts or not eager)
    if plan_detail == "used" and not possible:
        _refuse_used(server, fleet)
    if plan_detail == "all" or not possible or (plan_detail == "auto" and fleet.num_clients < SPARSE_FROM_CLIENTS):
        return EagerSimulator(server, fleet) if plans_without_events(server, fleet) else Simulator(server, fleet)
    if not policy.hold_until_requested:
        return SparseSimulator(server, fleet)
    return EagerClientsSimulator(server, fleet) if eager else PausingClientsSimulator(server, fleet)


def _refuse_used(server: ServerMachine, fleet: Fleet) -> NoReturn:
    if fleet.fails:
        raise UserError("clients.plan_detail is 'used', but clients can be lost, so all jobs matter; set it to 'all'")
    refuse(
        server.name,
        "clients.plan_detail is 'used', which needs broadcasts if clients keep training between requests; set it to "
        "'all', or broadcast versions and set the class attribute broadcasts to True",
    )


class SparseSimulator(Simulator):
    """Simulate clients that send unrequested; jobs that run at the end are not recorded."""

    sparse = True

    def __init__(self, server: ServerMachine, fleet: Fleet) -> None:
        super().__init__(server, fleet)
        self._all_start_together = fleet.schedule is None  # all first jobs are known from the start
        self._all_started = False  # every client that does not exist yet is in its first job

    def unfinished(self) -> list[Job]:
        """Return no job: no merge uses them."""
        return []

    def _begin(self, actions: list[ServerAction]) -> None:
        """Handle the first actions; a version 0 sent to every client is one record and no event."""
        sends = [action for action in actions if isinstance(action, Send)]
        clients = {action.client for action in sends if action.version == 0}
        everyone = len(sends) == len(clients) == self.fleet.num_clients == max(clients) + 1 and min(clients) == 0
        if everyone and self._all_start_together:
            self._out.append(Sent(0, None, self.now))
            self._start_all()
            actions = [action for action in actions if not isinstance(action, Send)]
        super()._begin(actions)

    def _broadcast(self, version: int) -> None:
        if version == 0 and self._all_start_together:
            self._broadcasts.add(version, self.now)
            self._out.append(Sent(version, None, self.now))
            self._start_all()
        else:
            super()._broadcast(version)

    def _start_all(self) -> None:
        """Schedule the end of every client's first job."""
        fleet = self.fleet
        self._all_started = True
        self._versions.hold(0, fleet.num_clients)
        steps = fleet.step_times
        if fleet.jitter:
            steps = steps * np.array([fleet.pace(client, 0) for client in range(fleet.num_clients)])
        ends = (self.now + fleet.down_times) + steps * self.steps
        self._sequence += 1
        self._queue.schedule(ends, np.arange(fleet.num_clients), self._sequence, EventKind.FIRST_ENDED)

    def _client(self, client: int) -> ClientMachine:
        """Return a client; create it lazily, replaying its first job."""
        machine = self._clients.get(client)
        if machine is None:
            machine = super()._client(client)
            if self._all_started:
                self._replay_first_job(client, machine)
        return machine

    def _replay_first_job(self, client: int, machine: ClientMachine) -> None:
        """Put a client into its first job, which it started when version 0 arrived and which may not have ended."""
        machine.model(0)
        machine.go()
        step = self._step_times[client] * self.fleet.pace(client, 0)
        start = 0.0 + self._down[client]
        self._running[client] = RunningJob(0, 0, start, start + step * self.steps, step)

    def _handle(self, event: int, client: int, detail: int) -> None:
        if event == EventKind.FIRST_ENDED:
            self._client(client)
            self._ended(client, 0)
        else:
            super()._handle(event, client, detail)


class PausingClientsSimulator(SparseSimulator):
    """Simulate clients that train one job and hold its update until it is requested."""

    def __init__(self, server: ServerMachine, fleet: Fleet) -> None:
        super().__init__(server, fleet)
        self._held: dict[int, Job] = {}  # finished, not yet uploaded, so not yet recorded

    def _start_all(self) -> None:
        self._all_started = True
        self._versions.hold(0, self.fleet.num_clients)

    def _replay_first_job(self, client: int, machine: ClientMachine) -> None:
        """Start the first job of a client if version 0 has reached it; otherwise deliver version 0 later."""
        arrival = self._down[client]
        if arrival < self.now:
            super()._replay_first_job(client, machine)
        else:
            self._push(arrival, EventKind.GO if self.server.broadcasts else EventKind.MODEL, client)

    def _schedule_end(self, client: int) -> None:
        """Schedule the end of a job only if its update has been requested."""
        job = self._running[client]
        if job.index == 0 and self._all_start_together and self.server.broadcasts:  # ``_start_all`` holds it already
            self._versions.release(job.version)
        if self._clients[client].wanted:
            super()._schedule_end(client)

    def _request(self, client: int) -> None:
        if self._defer_until_open(client, EventKind.REQUEST):
            return
        machine = self._client(client)
        if machine.phase is Phase.TRAINING and self._running[client].end <= self.now:
            job = self._running[client]
            self._finished[client, job.index] = Update(client, job.index, job.version, self.steps)
            self._held[client] = Job(client, job.index, job.version, self.steps, job.start, job.end, "ended")
            machine.ended()
        self._act(client, machine.request())
        if machine.wanted and machine.phase is Phase.TRAINING:
            super()._schedule_end(client)
        elif self.server.broadcasts or machine.receive_buffer is not None:
            self._push(self.now, EventKind.GO, client)

    def _upload(self, client: int, index: int) -> None:
        held = self._held.pop(client, None)
        if held is not None:
            self._out.append(held)
        super()._upload(client, index)


class EagerClientsSimulator(SparseSimulator):
    """Simulate clients that keep training between requests."""

    def __init__(self, server: ServerMachine, fleet: Fleet) -> None:
        super().__init__(server, fleet)
        self._all_start_together = True
        self._lazy = LazyClients(fleet, self.steps)
        self._requests: list[list[int]] = []  # the clients of each batch of requests
        self._wanted: dict[int, None] = {}
        # A client started the update it holds at most two jobs and two closed windows ago.
        self._slack = 2.0 * (fleet.longest_job(self.steps) + fleet.longest_closed) * (1.0 + 1e-9)

    def _start_all(self) -> None:
        self._lazy.broadcast(self.now)

    def _broadcast(self, version: int) -> None:
        super()._broadcast(version)
        if version:
            self._lazy.broadcast(self.now)

    def _send(self, action: Send) -> None:
        refuse(
            self.server.name,
            f"it broadcasts, and sends version {action.version} to client {action.client} alone after round "
            f"{self._newest}; set clients.plan_detail to 'all'",
        )

    def _serve(self, actions: list[ServerAction]) -> None:
        """Handle all requests of one instant in one event."""
        check_result(self.server, actions, self._newest)
        requested = [action.client for action in actions if isinstance(action, Request)]
        if requested:
            self._push(self.now + self.fleet.latency_seconds, EventKind.REQUEST, -1, len(self._requests))
            self._requests.append(requested)
            actions = [action for action in actions if not isinstance(action, Request)]
        super()._serve(actions)

    def _handle(self, event: int, client: int, detail: int) -> None:
        if event != EventKind.REQUEST:
            super()._handle(event, client, detail)
        elif client < 0:
            clients, self._requests[detail] = self._requests[detail], []
            self._request_all([client for client in clients if not self._defer_until_open(client, event)])
        elif not self._defer_until_open(client, event):
            self._request_all([client])

    def _request_all(self, clients: list[int]) -> None:
        fresh = [client for client in clients if client not in self._wanted]
        self._lazy.advance(np.array(fresh, np.int64), self.now)
        for client in fresh:
            held = self._lazy.send_buffer(client, self.now)
            if held is not None:
                self._upload_held(client, *held)
                continue
            self._wanted[client] = None
            if self._lazy.end[client] > self.now:
                self._push(float(self._lazy.end[client]), EventKind.ENDED, client)
            else:
                self._push(self.now, EventKind.GO, client)

    def _upload_held(self, client: int, index: int, version: int, start: float, end: float) -> None:
        self._versions.hold(version)
        self._finished[client, index] = Update(client, index, version, self.steps)
        self._lazy.uploaded(client, index)
        self._out.append(Job(client, index, version, self.steps, start, end, "ended"))
        self._upload(client, index)

    def _ended(self, client: int, index: int) -> None:  # noqa: ARG002 (``LazyClients`` knows the index)
        del self._wanted[client]
        held = self._lazy.send_buffer(client, self.now)
        assert held is not None
        self._upload_held(client, *held)

    def _go(self, client: int) -> None:
        """Start a job of a client that was requested with an empty send buffer, once it has a new version."""
        if client not in self._wanted or self._defer_until_open(client, EventKind.GO):
            return
        newest = self._broadcasts.newest(client, self.now)
        arrival = self._broadcasts.next_arrival(client, self.now)
        if newest > self._lazy.trained(client):
            self._push(self._lazy.start_job(client, newest, self.now), EventKind.ENDED, client)
        elif arrival is not None:
            self._push(arrival, EventKind.GO, client)
        else:
            self._idle[client] = None

    def _arrived(self, client: int, index: int) -> None:
        self._serve(self.server.arrived(self._finished.pop((client, index))))
