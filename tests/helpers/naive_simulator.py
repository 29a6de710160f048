"""A naive simulator, the correctness oracle of ``Simulator``: every broadcast is N deliveries to N clients.

It shares the machines, the fleet and the event order with ``Simulator``, and nothing else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from heapq import heappop, heappush

from defedavg.algorithms import ServerMachine
from defedavg.algorithms.protocol import (
    Broadcast,
    ClientAction,
    ClientMachine,
    Drop,
    EndOfInstant,
    Merge,
    Phase,
    Request,
    Send,
    ServerAction,
    SetTimer,
    Start,
    Update,
    Upload,
)
from defedavg.planning.devices import Fleet
from defedavg.planning.plan import Plan
from defedavg.planning.records import Job, JobOutcome
from helpers.strategies import Case

ARRIVAL, DELIVERY, DISPATCH, TIMER = range(4)


class NaiveSimulator:
    """Call ``run``, then read ``rounds`` and ``jobs``."""

    def __init__(self, server: ServerMachine, fleet: Fleet) -> None:
        self.server, self.fleet = server, fleet
        self.policy = server.policy_with(fleet.upload)
        self.steps = server.steps_per_job(server.setup.local_steps)
        self.clients = [ClientMachine(i, self.policy) for i in range(fleet.num_clients)]
        self.now = 0.0
        self.rounds: list[tuple[float, Merge]] = []
        self.jobs: list[Job] = []  # stopped jobs
        self._events: list[tuple[float, int, int, int, Callable[[], None]]] = []
        self._sequence = itertools.count()
        self._running: dict[int, tuple[Start, float, float]] = {}  # client -> job, its start, its time per step
        self._finished: dict[tuple[int, int], Update] = {}
        self._returned_at = [0.0] * fleet.num_clients
        self._absent_until = [0.0] * fleet.num_clients
        self._lost = 0

    def run(self, rounds: int) -> None:
        """Simulate that many merges, or until every client is lost and no update is in flight."""
        for client, (leaves, _) in self.fleet.absences.items():
            self._at(leaves, ARRIVAL, client, lambda c=client: self._die(c, self.fleet.absences[c][1]))  # type: ignore[misc]
        self._serve(self.server.start())
        while len(self.rounds) < rounds and (self._lost < len(self.clients) or self._more_follows()):
            self.now, _, _, _, handle = heappop(self._events)
            handle()

    def _more_follows(self) -> bool:
        """Return whether an update is in flight, or this instant has another event that is no timer."""
        return bool(self._finished) or (bool(self._events) and self._events[0][:2] < (self.now, TIMER))

    def _at(self, time: float, priority: int, client: int, handle: Callable[[], None]) -> None:
        heappush(self._events, (time, priority, client, next(self._sequence), handle))

    # Actions of the server.

    def _serve(self, actions: list[ServerAction]) -> None:
        for action in actions:
            if isinstance(action, Merge):
                self.rounds.append((self.now, action))
            elif isinstance(action, Broadcast):
                for client in range(len(self.clients)):
                    self._send(client, action.version, broadcast=True)
            elif isinstance(action, Send):
                self._send(action.client, action.version, broadcast=False)
            elif isinstance(action, Request):
                c = action.client
                self._at(self.now + self.fleet.latency_seconds, DELIVERY, c, lambda c=c: self._request(c))  # type: ignore[misc]
            elif isinstance(action, SetTimer):
                t = action.token
                self._at(self.now + action.seconds, TIMER, -1, lambda t=t: self._serve(self.server.timer(t)))  # type: ignore[misc]
            elif isinstance(action, EndOfInstant):
                self._at(self.now, DISPATCH, -1, lambda: self._serve(self.server.end_of_instant()))

    def _send(self, client: int, version: int, *, broadcast: bool) -> None:
        left = self.now
        arrival = self.now + float(self.fleet.down_times[client])
        self._at(arrival, DELIVERY, client, lambda: self._model(client, version, left if broadcast else math.inf))

    # Events of a client.

    def _model(self, client: int, version: int, left: float) -> None:
        machine = self.clients[client]
        if machine.phase is Phase.GONE or left < self._returned_at[client]:
            return  # a broadcast from before its return does not reach it
        machine.model(version)
        self._at(self.now, DISPATCH, client, lambda: self._go(client))

    def _go(self, client: int) -> None:
        machine = self.clients[client]
        stops = self.policy.restart_on_model and machine.phase is Phase.TRAINING and machine.receive_buffer is not None
        if (machine.phase is Phase.IDLE or stops) and not self._closed(client, self._go, DISPATCH):
            self._act(client, machine.go())

    def _request(self, client: int) -> None:
        if self.clients[client].phase is not Phase.GONE and not self._closed(client, self._request, DELIVERY):
            self._act(client, self.clients[client].request())
            self._at(self.now, DISPATCH, client, lambda: self._go(client))

    def _closed(self, client: int, again: Callable[[int], None], priority: int) -> bool:
        """Return whether the client is unreachable now; if so, repeat the event when it is reachable."""
        opens = self.fleet.opens(client, self.now)
        if opens > self.now:
            self._at(opens, priority, client, lambda: again(client))
        return opens > self.now

    def _end(self, client: int, start: Start) -> None:
        machine = self.clients[client]
        if machine.phase is Phase.TRAINING and self._running[client][0] is start:
            self._stop(client, self.steps, "ended")
            self._act(client, machine.ended())
            self._at(self.now, DISPATCH, client, lambda: self._go(client))

    def _arrive(self, client: int, index: int) -> None:
        update = self._finished.pop((client, index), None)
        if update is None:
            return  # its client failed
        if self.clients[client].phase is Phase.SENDING:
            self.clients[client].sent()
            self._at(self.now, DISPATCH, client, lambda: self._go(client))
        self._serve(self.server.arrived(update))

    def _die(self, client: int, back: float, start: Start | None = None) -> None:
        machine = self.clients[client]
        if start is not None and not (machine.phase is Phase.TRAINING and self._running[client][0] is start):
            return
        if machine.phase is not Phase.GONE:
            self._act(client, machine.died())
        elif math.isinf(self._absent_until[client]):
            return
        until = self._absent_until[client] = max(back, self._absent_until[client])
        self._lost += math.isinf(until)
        if math.isfinite(until):
            self._at(until, ARRIVAL, client, lambda: self._return(client))

    def _return(self, client: int) -> None:
        if self.now < self._absent_until[client] or self.clients[client].phase is not Phase.GONE:
            return
        self.clients[client].returned()
        self._returned_at[client] = self.now
        self._serve(self.server.returned(client))
        self._at(self.now, DISPATCH, client, lambda: self._go(client))

    # Actions of a client.

    def _act(self, client: int, actions: tuple[ClientAction, ...]) -> None:
        for action in actions:
            if isinstance(action, Start):
                self._start(client, action)
            elif isinstance(action, Drop):
                if self._finished.pop((client, action.index), None) is None:
                    self._stop(client, 0, "lost")
            else:
                self._upload(client, action)

    def _start(self, client: int, start: Start) -> None:
        step = float(self.fleet.step_times[client]) * self.fleet.pace(client, start.index)
        length = step * self.steps
        self._running[client] = (start, self.now, step)
        share = self.fleet.dies_after(client, start.index)
        if share is not None:
            time = self.now + share * length
            self._at(time, ARRIVAL, client, lambda: self._die(client, self.now + self.fleet.return_seconds, start))
        self._at(self.now + length, ARRIVAL, client, lambda: self._end(client, start))

    def _upload(self, client: int, upload: Upload) -> None:
        if (client, upload.index) not in self._finished:
            _, start_time, step = self._running[client]
            self._stop(client, min(self.steps, int((self.now - start_time) / step + 1e-9)), "interrupted")
        arrival = self.now + float(self.fleet.up_times[client])
        self._at(arrival, ARRIVAL, client, lambda: self._arrive(client, upload.index))

    def _stop(self, client: int, steps: int, outcome: JobOutcome) -> None:
        start, start_time, _ = self._running[client]
        if outcome != "lost":
            self._finished[client, start.index] = Update(client, start.index, start.version, steps)
        self.jobs.append(Job(client, start.index, start.version, steps, start_time, self.now, outcome))


def finished(plan: Plan) -> list[Job]:
    return sorted((job for job in plan.jobs if job.outcome != "running"), key=lambda job: (job.client, job.index))


def agrees_with_naive(found: Case, rounds: int) -> Plan:
    """Plan, compare with the naive simulator, and return the plan."""
    plan = found.plan(rounds)
    naive = NaiveSimulator(found.server(), found.fleet)
    naive.run(rounds)
    assert [(record.time, record.merge) for record in plan.rounds] == naive.rounds
    assert finished(plan) == sorted(naive.jobs, key=lambda job: (job.client, job.index))
    return plan
