"""Clocks for very many clients: what no merge depends on is neither followed nor recorded.

The law of this file: the rounds are those of ``Simulator``, and so are the jobs and uploads, but for those that the
server never sees. A job is recorded when it is uploaded. Three kinds of clients are left alone in three ways:

* those that send unasked all begin with a job from version 0: the ends of these are sorted at once, and a client enters
  the books when its first job ends;
* those that rest until they are asked have one job at most to catch up with, when they are;
* those that train on by themselves are brought up to date when they are asked (``sleepers.py``).

Clients that can be lost tell the server when they are back, so a fleet of them is followed by ``Simulator`` alone.
"""

from __future__ import annotations

import math

import numpy as np

from ..algorithms import ServerMachine
from ..algorithms.protocol import ClientMachine, Phase, Request, Send, ServerAction, Update
from ..errors import UserError
from .devices import Fleet
from .lazy_clients import LazyClients
from .plan import Job, Sent
from .simulator import Happens, Running, Simulator

FROM = 20_000
"""So many clients are planned in this way if nothing is said."""

MOST_SIGMAS = 8.6
"""A keyed normal deviate is never farther from zero."""


PLAN_DETAIL = ("auto", "all", "used")


def choose(server: ServerMachine, fleet: Fleet, plan_detail: str = "all") -> Simulator:
    """The clock that records ``all`` jobs, only the ``used`` ones, or as many as is fit (``auto``)."""
    if plan_detail == "used" and fleet.lossy:
        raise UserError("clients.plan_detail is 'used', but clients can be lost, so all are followed; make it 'all'")
    if plan_detail == "all" or fleet.lossy or (plan_detail == "auto" and fleet.num_clients < FROM):
        return Simulator(server, fleet)
    policy = server.client_policy(server.settings)
    if not policy.hold_until_requested:
        return SparseSimulator(server, fleet)
    return Resting(server, fleet) if policy.pause_when_full else Eager(server, fleet)


class SparseSimulator(Simulator):
    """Clients that send unasked; what is still running at the end is not recorded."""

    lean = True

    def __init__(self, server: ServerMachine, fleet: Fleet) -> None:
        super().__init__(server, fleet)
        self._all_began = False  # whoever is not in the books is in its first job

    def unfinished(self) -> list[Job]:
        """None: no merge uses them."""
        return []

    @property
    def _together(self) -> bool:
        """Whether all first jobs can be known from the beginning."""
        return self.fleet.availability is None

    def _begin(self, actions: list[ServerAction]) -> None:
        """One record and no event for a first version that is sent to every client by itself."""
        sends = sum(isinstance(action, Send) for action in actions)
        if sends == self.fleet.num_clients and self._together:
            self._out.append(Sent(0, None, self.now))
            self._everyone()
            actions = [action for action in actions if not isinstance(action, Send)]
        super()._begin(actions)

    def _broadcast(self, version: int) -> None:
        if version == 0 and self._together:
            self._broadcasts.add(version, self.now)
            self._out.append(Sent(version, None, self.now))
            self._everyone()
        else:
            super()._broadcast(version)

    def _everyone(self) -> None:
        """Everybody is about to train from version 0."""
        fleet = self.fleet
        self._all_began = True
        self._versions.hold(0, fleet.num_clients)
        steps = fleet.step_times
        if fleet.jitter:
            steps = steps * np.array([fleet.pace(client, 0) for client in range(fleet.num_clients)])
        ends = (self.now + fleet.down_times) + steps * self.steps
        self._sequence += 1
        self._agenda.schedule(ends, np.arange(fleet.num_clients), self._sequence, Happens.FIRST)

    def _client(self, client: int) -> ClientMachine:
        """One that is not in the books yet enters them with what it has done."""
        found = self._clients.get(client)
        if found is None:
            found = super()._client(client)
            if self._all_began:
                self._catch_up(client, found)
        return found

    def _catch_up(self, client: int, machine: ClientMachine) -> None:
        """It is in its first job, but may be given another version before that ends."""
        self._enter(client, machine)

    def _handle(self, event: int, client: int, detail: int) -> None:
        if event == Happens.FIRST:
            self._client(client)
            self._ended(client, 0)
        else:
            super()._handle(event, client, detail)

    def _enter(self, client: int, machine: ClientMachine) -> None:
        """A client is in its first job, which it began when version 0 reached it."""
        machine.model(0)
        machine.go()
        step = self._steps_of[client] * self.fleet.pace(client, 0)
        start = 0.0 + self._down[client]
        self._running[client] = Running(0, 0, start, start + step * self.steps, step)


class Resting(SparseSimulator):
    """Clients that do one job and hold it until they are asked."""

    def __init__(self, server: ServerMachine, fleet: Fleet) -> None:
        super().__init__(server, fleet)
        self._held: dict[int, Job] = {}  # finished, not yet uploaded, so not yet recorded

    def _everyone(self) -> None:
        self._all_began = True
        self._versions.hold(0, self.fleet.num_clients)

    def _catch_up(self, client: int, machine: ClientMachine) -> None:
        """What a client has done that is heard of for the first time."""
        reached = self._down[client]
        if reached < self.now:
            self._enter(client, machine)
        elif self.server.broadcasts:
            self._push(reached, Happens.GO, client)
        else:
            self._push(reached, Happens.MODEL, client)

    def _started(self, client: int) -> None:
        """Its end concerns nobody until somebody asks."""
        job = self._running[client]
        if job.index == 0 and self._together and self.server.broadcasts:  # it was counted at the beginning
            self._versions.release(job.version)
        if self._clients[client].wanted:
            super()._started(client)

    def _request(self, client: int) -> None:
        if self._later(client, Happens.REQUEST):
            return
        machine = self._client(client)
        if machine.phase is Phase.TRAINING and self._running[client].end <= self.now:
            job = self._running[client]
            self._done[client, job.index] = Update(client, job.index, job.version, self.steps)
            self._held[client] = Job(client, job.index, job.version, self.steps, job.start, job.end, "ended")
            machine.ended()
        self._act(client, machine.request())
        if machine.wanted and machine.phase is Phase.TRAINING:
            super()._started(client)
        elif self.server.broadcasts or machine.receive_buffer is not None:
            self._push(self.now, Happens.GO, client)

    def _upload(self, client: int, index: int) -> None:
        held = self._held.pop(client, None)
        if held is not None:
            self._out.append(held)
        super()._upload(client, index)


class Eager(SparseSimulator):
    """Clients that train on by themselves."""

    def __init__(self, server: ServerMachine, fleet: Fleet) -> None:
        super().__init__(server, fleet)
        self._sleepers = LazyClients(fleet, self.steps)
        self._asked: list[list[int]] = []
        self._wanted: dict[int, None] = {}
        # What a client holds it began at most two jobs and two closed windows ago.
        longest = fleet.step_range[1] * self.steps * math.exp(fleet.jitter * MOST_SIGMAS)
        closed = fleet.availability.off if fleet.availability else 0.0
        self._slack = 2.0 * (longest + closed) * (1.0 + 1e-9)

    def _everyone(self) -> None:
        self._sleepers.broadcast(self.now)

    def _broadcast(self, version: int) -> None:
        super()._broadcast(version)
        if version:
            self._sleepers.broadcast(self.now)

    @property
    def _together(self) -> bool:
        return True

    def _serve(self, actions: list[ServerAction]) -> None:
        """All requests of one moment are seen to together."""
        asked = [action.client for action in actions if isinstance(action, Request)]
        if asked:
            self._push(self.now + self.fleet.latency_seconds, Happens.REQUEST, -1, len(self._asked))
            self._asked.append(asked)
            actions = [action for action in actions if not isinstance(action, Request)]
        super()._serve(actions)

    def _handle(self, event: int, client: int, detail: int) -> None:
        if event != Happens.REQUEST:
            super()._handle(event, client, detail)
        elif client < 0:
            clients, self._asked[detail] = self._asked[detail], []
            here = [client for client in clients if not self._later(client, event)]
            self._ask(here)
        elif not self._later(client, event):
            self._ask([client])

    def _ask(self, clients: list[int]) -> None:
        fresh = [client for client in clients if client not in self._wanted]
        self._sleepers.advance(np.array(fresh, np.int64), self.now)
        for client in fresh:
            ready = self._sleepers.outbox(client, self.now)
            if ready is not None:
                self._hand_over(client, *ready)
                continue
            self._wanted[client] = None
            if self._sleepers.end[client] > self.now:
                self._push(float(self._sleepers.end[client]), Happens.ENDED, client)
            else:
                self._push(self.now, Happens.GO, client)

    def _hand_over(self, client: int, index: int, version: int, start: float, end: float) -> None:
        self._versions.hold(version)
        self._done[client, index] = Update(client, index, version, self.steps)
        self._sleepers.sent(client, index)
        self._out.append(Job(client, index, version, self.steps, start, end, "ended"))
        self._upload(client, index)

    def _ended(self, client: int, index: int) -> None:
        del self._wanted[client]
        ready = self._sleepers.outbox(client, self.now)
        assert ready is not None
        self._hand_over(client, *ready)

    def _go(self, client: int) -> None:
        """One that is asked for, and has nothing to give, starts as soon as there is something new."""
        if client not in self._wanted or self._later(client, Happens.GO):
            return
        newest = self._broadcasts.newest(client, self.now)
        coming = self._broadcasts.coming(client, self.now)
        if newest > self._sleepers.trained(client):
            self._push(self._sleepers.begin(client, newest, self.now), Happens.ENDED, client)
        elif coming is not None:
            self._push(coming, Happens.GO, client)
        else:
            self._idle[client] = None

    def _arrived(self, client: int, index: int) -> None:
        self._serve(self.server.arrived(self._done.pop((client, index))))
