"""The virtual clock: one server machine, N client machines and a fleet become a stream of records, the plan.

Laws: events are handled in the total order (time, priority, client, sequence), arrivals before dispatches at equal
times; durations are drawn when something begins; nothing depends on the order in which clients lie in memory. A
broadcast costs the same at any N: which version a client has is looked up when it becomes free, and only clients that
wait with an empty receive buffer are woken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..algorithms import ServerMachine
from ..algorithms.protocol import (
    Broadcast,
    ClientAction,
    ClientMachine,
    Discard,
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
from .devices import Fleet, Floats, StepTimes
from .event_queue import EventQueue
from .plan import Absence, Header, Job, JobOutcome, Record, Replacement, Round, Sent, Stall, Uploaded
from .version_tracker import Broadcasts, Versions


class Happens:
    """What can happen; the tens are the priority: arrivals, deliveries, dispatches, timers."""

    ENDED = 0
    ARRIVED = 1
    DIED = 2
    RETURNED = 3
    FIRST = 4
    MODEL = 10
    REQUEST = 11
    GO = 20
    SETTLED = 21
    TIMER = 30


@dataclass(slots=True)
class Running:
    """The job a client is at, or last was at."""

    index: int
    version: int
    start: float
    end: float
    step: float


def _seconds(times: Floats) -> list[float]:
    """As a list; where all are the same value it is there once."""
    return [float(times[0])] * len(times) if times.strides == (0,) else times.tolist()


class Simulator:
    """Iterate to plan: yields records in the order of events, for ever, or until every client is lost."""

    lean = False  # whether jobs that no merge uses are left out

    def __init__(self, server: ServerMachine, fleet: Fleet) -> None:
        if fleet.num_clients != server.setup.num_clients:
            raise ValueError("the server and the fleet speak of different numbers of clients")
        self.server = server
        self.fleet = fleet
        self.policy = server.client_policy(server.settings)
        self.steps = server.steps_per_job(server.setup.local_steps)
        self.now = 0.0
        self._agenda = EventQueue(self._span(fleet))
        self._sequence = 0
        self._clients: dict[int, ClientMachine] = {}
        self._running: dict[int, Running] = {}
        self._done: dict[tuple[int, int], Update] = {}  # finished, not yet arrived
        self._idle: dict[int, None] = {}
        self._out: list[Record] = []
        self._steps_of = StepTimes(fleet)
        self._up = _seconds(fleet.up_times)
        self._down = _seconds(fleet.down_times)
        self._broadcasts = Broadcasts(self._down)
        self._versions = Versions(self._broadcasts, server.broadcasts)
        self._slack = 0.0  # how much longer than it takes to receive it a version may be started from
        self._lost_for_good = 0
        self._away: dict[int, float] = {}  # until when clients are gone
        # Nobody is sent a second model before it has answered, and nobody is asked.
        waits_end = server.setup.timeout_seconds is not None
        self._quiet = not (server.broadcasts or self.policy.hold_until_requested or fleet.lossy or waits_end)
        self._begun = False
        self.handled = 0  # events so far

    @property
    def header(self) -> Header:
        """What a plan made here says of itself."""
        setup = self.server.setup
        return Header(
            algorithm=self.server.name,
            num_clients=setup.num_clients,
            updates_per_round=setup.updates_per_round,
            local_steps=self.steps,
            seed=setup.seed,
            repeats=self.policy.allow_same_version,
            interruptible=self.policy.interruptible,
            lean=self.lean,
        )

    def __iter__(self) -> Iterator[Record]:
        if self._begun:
            raise ValueError("a timeline runs once; make another to plan again")
        self._begun = True
        for client, (leaves, _) in sorted(self.fleet.absences.items()):
            self._push(leaves, Happens.DIED, client)
        self._begin(self.server.start())
        while self._agenda and self._lost_for_good < self.fleet.num_clients:
            self.now, _, client, _, event, detail = self._agenda.pop()
            self.handled += 1
            self._handle(event, client, detail)
            if self._out:
                yield from self._out
                self._out.clear()
        yield Stall(self.now)

    def _begin(self, actions: list[ServerAction]) -> None:
        self._serve(actions)

    def unfinished(self) -> list[Job]:
        """The jobs that are running now."""
        return [
            Job(client, job.index, job.version, self.steps, job.start, job.end, "running")
            for client, job in sorted(self._running.items())
            if self._clients[client].phase is Phase.TRAINING
        ]

    # The clock.

    def _span(self, fleet: Fleet) -> float:
        """The span of an agenda's bucket: a few hundred events, if every client is busy."""
        return fleet.step_range[2] * self.steps * 100.0 / fleet.num_clients

    def _push(self, time: float, event: int, client: int, detail: int = 0) -> None:
        self._sequence += 1
        self._agenda.push((time, event // 10, client, self._sequence, event, detail))

    def _client(self, client: int) -> ClientMachine:
        found = self._clients.get(client)
        if found is None:
            found = self._clients[client] = ClientMachine(client, self.policy)
        return found

    def _handle(self, event: int, client: int, detail: int) -> None:
        if event == Happens.ENDED:
            self._ended(client, detail)
        elif event == Happens.ARRIVED:
            self._arrived(client, detail)
        elif event == Happens.GO:
            self._go(client)
        elif event == Happens.MODEL:
            self._model(client, detail)
        elif event == Happens.REQUEST:
            self._request(client)
        elif event == Happens.TIMER:
            self._serve(self.server.timer(detail))
        elif event == Happens.SETTLED:
            self._serve(self.server.end_of_instant())
        elif event == Happens.DIED:
            self._died(client, detail)
        else:
            self._returned(client)

    def _later(self, client: int, event: int) -> bool:
        """Whether the client cannot be reached now; then the event comes again when it can."""
        opens = self.fleet.opens(client, self.now)
        if opens > self.now:
            self._push(opens, event, client)
            return True
        return False

    # Client events.

    def _go(self, client: int) -> None:
        """Let a client start if it can; otherwise see to it that it is woken."""
        machine = self._client(client)
        if machine.phase is not Phase.IDLE or self._later(client, Happens.GO):
            return
        newest = self._broadcasts.newest(client, self.now)
        if newest >= 0:
            machine.model(newest)
        actions = machine.go()
        if actions:
            self._act(client, actions)
        elif machine.receive_buffer is None:
            coming = self._broadcasts.coming(client, self.now)
            if coming is None:
                self._idle[client] = None
            else:
                self._push(coming, Happens.GO, client)

    def _model(self, client: int, version: int) -> None:
        """A version sent to this client alone arrives."""
        machine = self._client(client)
        if machine.phase is Phase.GONE or not machine.model(version):
            self._versions.release(version)
            return
        self._versions.mailed(client, version)
        if self._quiet and machine.phase is Phase.IDLE:
            self._go(client)  # nothing else of this moment can concern it
        else:
            self._push(self.now, Happens.GO, client)

    def _ended(self, client: int, index: int) -> None:
        machine, job = self._clients[client], self._running[client]
        if machine.phase is not Phase.TRAINING or job.index != index:
            return  # it was interrupted, or died, before
        self._finish(client, job, self.steps, "ended")
        self._act(client, machine.ended())
        if self.policy.hold_until_requested:
            self._push(self.now, Happens.GO, client)

    def _arrived(self, client: int, index: int) -> None:
        update = self._done.pop((client, index), None)
        if update is None:
            return  # its client died while sending
        machine = self._clients[client]
        if machine.phase is Phase.SENDING:
            machine.sent()
            if self.server.broadcasts or machine.receive_buffer is not None:
                self._push(self.now, Happens.GO, client)
        self._serve(self.server.arrived(update))

    def _request(self, client: int) -> None:
        machine = self._client(client)
        if machine.phase is Phase.GONE or self._later(client, Happens.REQUEST):
            return
        self._act(client, machine.request())
        self._push(self.now, Happens.GO, client)

    def _died(self, client: int, detail: int) -> None:
        """A client is lost: at a time given for it (detail 0), or by chance in the middle of job ``detail − 1``."""
        machine = self._client(client)
        by_chance = detail > 0
        if by_chance and (machine.phase is not Phase.TRAINING or self._running[client].index != detail - 1):
            return  # the job was interrupted before it could die
        if machine.phase is not Phase.GONE:
            self._act(client, machine.died())
            self._versions.lost(client)
            self._idle.pop(client, None)
        elif math.isinf(self._away[client]):
            return
        back = self.now + self.fleet.return_seconds if by_chance else self.fleet.absences[client][1]
        back = self._away[client] = max(back, self._away.get(client, 0.0))
        self._out.append(Absence(client, self.now, back))
        if math.isinf(back):
            self._lost_for_good += 1
        else:
            self._push(back, Happens.RETURNED, client)

    def _returned(self, client: int) -> None:
        if self.now < self._away[client] or self._client(client).phase is not Phase.GONE:
            return  # it left for longer meanwhile
        self._client(client).returned()
        self._broadcasts.joined(client, self.now)
        self._serve(self.server.returned(client))
        self._push(self.now, Happens.GO, client)

    # Client actions.

    def _act(self, client: int, actions: tuple[ClientAction, ...]) -> None:
        for action in actions:
            if isinstance(action, Start):
                self._start(client, action)
            elif isinstance(action, Upload):
                self._upload(client, action.index)
            else:
                self._drop(client, action)

    def _start(self, client: int, action: Start) -> None:
        self._versions.started(client, action.version)
        step = self._steps_of[client] * self.fleet.pace(client, action.index)
        length = step * self.steps
        self._running[client] = Running(action.index, action.version, self.now, self.now + length, step)
        death = self.fleet.dies_after(client, action.index)
        if death is not None:
            self._push(self.now + death * length, Happens.DIED, client, action.index + 1)
        self._started(client)

    def _started(self, client: int) -> None:
        self._push(self._running[client].end, Happens.ENDED, client, self._running[client].index)

    def _finish(self, client: int, job: Running, steps: int, fate: JobOutcome) -> None:
        self._done[client, job.index] = Update(client, job.index, job.version, steps)
        self._out.append(Job(client, job.index, job.version, steps, job.start, self.now, fate))

    def _upload(self, client: int, index: int) -> None:
        if (client, index) not in self._done:
            job = self._running[client]
            done = int((self.now - job.start) / job.step + 1e-9)  # a step that ends now is done, whatever the rounding
            self._finish(client, job, min(done, self.steps), "interrupted")
        arrival = self.now + self._up[client]
        self._out.append(Uploaded(client, index, self.now, arrival))
        self._push(arrival, Happens.ARRIVED, client, index)

    def _drop(self, client: int, action: Drop) -> None:
        update = self._done.pop((client, action.index), None)
        if update is not None:
            self._versions.release(update.version)
            return
        job = self._running[client]
        self._versions.release(job.version)
        self._out.append(Job(client, job.index, job.version, 0, job.start, self.now, "lost"))

    # Server actions.

    def _serve(self, actions: list[ServerAction]) -> None:
        for action in actions:
            if isinstance(action, Merge):
                self._merge(action)
            elif isinstance(action, Broadcast):
                self._broadcast(action.version)
            elif isinstance(action, Send):
                self._versions.hold(action.version)
                self._out.append(Sent(action.version, action.client, self.now))
                self._push(self.now + self._down[action.client], Happens.MODEL, action.client, action.version)
            elif isinstance(action, Request):
                self._push(self.now + self.fleet.latency_seconds, Happens.REQUEST, action.client)
            elif isinstance(action, SetTimer):
                if math.isfinite(action.seconds):  # otherwise it never fires
                    self._push(self.now + action.seconds, Happens.TIMER, -1, action.token)
            elif isinstance(action, EndOfInstant):
                self._push(self.now, Happens.SETTLED, -1)
            elif isinstance(action, Discard):
                self._versions.release(action.update.version)
            else:
                self._out.append(Replacement(self.now, action.missing, action.drawn))

    def _broadcast(self, version: int) -> None:
        self._broadcasts.add(version, self.now)
        self._out.append(Sent(version, None, self.now))
        woken = range(self.fleet.num_clients) if version == 0 else list(self._idle)
        self._idle.clear()
        for client in woken:
            self._push(self.now + self._down[client], Happens.GO, client)

    def _merge(self, merge: Merge) -> None:
        for update, _ in merge.updates:
            self._versions.release(update.version)
        self._out.append(Round(self.now, merge, self._versions.merged(merge.version, self.now - self._slack)))
