"""The virtual clock: it drives one server machine and N client machines on a fleet and yields the records of a plan.

Events are handled in the total order (time, priority, client, sequence), arrivals before dispatches at equal times.
Durations are drawn when something begins. Nothing depends on the order of clients in memory. A broadcast costs the same
at any N: the simulator looks up the version a client has when the client becomes free, and wakes only clients that wait
with an empty receive buffer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

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
from . import action_checks
from .devices import Fleet, StepTimes
from .event_queue import EventKind, EventQueue
from .intervals import as_list
from .records import Absence, Header, Job, JobOutcome, Record, Round, Sent, Stall, Timeout, Uploaded
from .running_job import RunningJob
from .version_tracker import Broadcasts, Versions

MAX_EVENTS_WITHOUT_MERGE = 1_000_000
"""And a hundred for each client and each update of a round: a round that needs more events never ends in practice."""


class Simulator:
    """Iterate to plan: yields records in order, without end or until every client is lost and no update is in flight.

    An action that breaks a rule of ``action_checks`` raises ``UserError``, and so does a server without further actions
    while no client is lost for good.
    """

    sparse = False  # whether jobs that no merge uses are omitted

    def __init__(self, server: ServerMachine, fleet: Fleet) -> None:
        if fleet.num_clients != server.setup.num_clients:
            raise ValueError("the server and the fleet have different numbers of clients")
        self.server, self.fleet = server, fleet
        self.policy = server.policy_with(fleet.upload)
        self.steps = server.steps_per_job(server.setup.local_steps)
        self.now = 0.0
        # The time span of a bucket has a few hundred events if every client is busy.
        self._queue = EventQueue(fleet.step_range[2] * self.steps * 100.0 / fleet.num_clients)
        self._sequence = 0
        self._clients: dict[int, ClientMachine] = {}
        self._running: dict[int, RunningJob] = {}
        self._finished: dict[tuple[int, int], Update] = {}  # not yet arrived
        self._idle: dict[int, None] = {}
        self._out: list[Record] = []
        self._step_times = StepTimes(fleet)
        self._up, self._down = as_list(fleet.up_times), as_list(fleet.down_times)
        self._broadcasts = Broadcasts(self._down)
        self._versions = Versions(self._broadcasts, server.broadcasts, server.past_versions)
        self._newest = 0
        self._received_in_vain = False  # whether some client received a version that it could not use
        self._slack = 0.0  # seconds after its arrival in which a client may still start from a version
        self._lost_for_good = 0
        self._last_arrival = fleet.last_arrival(self.steps)
        self._absent_until: dict[int, float] = {}
        # Without these, no client receives a second model before it has answered, or a request.
        has_timeout, policy = server.setup.timeout_seconds is not None, self.policy
        several = policy.hold_until_requested or policy.restart_on_model or policy.background_upload
        self._one_message = not (server.broadcasts or several or fleet.lossy or has_timeout)
        self._started_iteration = False
        self.horizon = math.inf  # seconds after which no event is handled
        self.handled = 0  # events so far
        setup = server.setup
        self._events_per_round = MAX_EVENTS_WITHOUT_MERGE + 100 * (setup.num_clients + setup.updates_per_round)
        self._deadline = self._events_per_round  # the number of events by which a merge must have happened
        self.on_start: Callable[[int, RunningJob], None] | None = None

    @property
    def header(self) -> Header:
        """The header of the plan."""
        setup = self.server.setup
        n = self.server.updates_per_merge(setup.updates_per_round)
        sizes = (setup.num_clients, n, self.steps, setup.seed)
        return Header(
            self.server.name,
            *sizes,
            self.policy.allow_same_version,
            self.policy.interruptible,
            self.sparse,
            self.server.state_vectors(setup, self.server.settings),
            self.server.job_start,
            self.server.correction,
        )

    def __iter__(self) -> Iterator[Record]:
        if self._started_iteration:
            raise ValueError("a simulator runs once; create another one to plan again")
        self._started_iteration = True
        for client, (leaves, _) in sorted(self.fleet.absences.items()):
            self._push(leaves, EventKind.DIED, client)
        try:
            yield from self._records()
        except Exception as error:
            action_checks.refuse_failure(self.server, error, self._newest)
            raise

    def _records(self) -> Iterator[Record]:
        self._begin(self.server.start())
        yield from self._out
        self._out.clear()
        while self._queue:
            time, priority, client, _, event, detail = self._queue.pop()
            if self._lost_for_good == self.fleet.num_clients and self._nothing_follows(time, priority):
                break
            if time > self.horizon:
                yield from self._rest(self.horizon)
                return
            self.now, self.handled = time, self.handled + 1
            if time > self._last_arrival:
                break
            if self.handled > self._deadline:
                action_checks.refuse_endless_round(self.server, self._newest, self._events_per_round)
            self._handle(event, client, detail)
            if self._out:
                yield from self._out
                self._out.clear()
        yield from self._rest(self.horizon)
        if not self._lost_for_good and math.isinf(self.fleet.reachable_until[0]):
            faults = {"failed": self.fleet.lossy, "repeated": self._received_in_vain}
            action_checks.refuse_stall(self.server, self.policy, self._newest, **faults)
        yield Stall(self.now)

    def _begin(self, actions: list[ServerAction]) -> None:
        self._serve(actions)

    def _nothing_follows(self, time: float, priority: int) -> bool:
        """Return whether no update is in flight and the next event is a timer or of a later instant.

        It is asked when every client is lost: their other updates were dropped, so what is finished is in flight.
        """
        return not self._finished and (priority == EventKind.TIMER // 10 or time > self.now)

    def _rest(self, until: float) -> list[Record]:  # noqa: ARG002 (a hook: subclasses use it)
        """Return the records up to a time that no event creates."""
        return []

    def unfinished(self) -> list[Job]:
        """Return the jobs that are running now."""
        return [
            Job(client, job.index, job.version, self.steps, job.start, job.end, "running")
            for client, job in sorted(self._running.items())
            if self._clients[client].phase is Phase.TRAINING
        ]

    # The clock.

    def _push(self, time: float, event: int, client: int, detail: int = 0) -> None:
        self._sequence += 1
        self._queue.push((time, event // 10, client, self._sequence, event, detail))

    def _client(self, client: int) -> ClientMachine:
        found = self._clients.get(client)
        if found is None:
            found = self._clients[client] = ClientMachine(client, self.policy)
        return found

    def _handle(self, event: int, client: int, detail: int) -> None:
        if event == EventKind.ENDED:
            self._ended(client, detail)
        elif event == EventKind.ARRIVED:
            self._arrived(client, detail)
        elif event == EventKind.GO:
            self._go(client)
        elif event == EventKind.MODEL:
            self._model(client, detail)
        elif event == EventKind.REQUEST:
            self._request(client)
        elif event == EventKind.TIMER:
            self._serve(self.server.timer(detail))
        elif event == EventKind.END_OF_INSTANT:
            self._serve(self.server.end_of_instant())
        elif event == EventKind.DIED:
            self._died(client, detail)
        else:
            self._returned(client)

    def _defer_until_open(self, client: int, event: int) -> bool:
        """Return whether the client is unreachable now; if so, repeat the event when it is reachable, if ever."""
        opens = self.fleet.opens(client, self.now)
        if self.now < opens < math.inf:
            self._push(opens, event, client)
        return opens > self.now

    # Client events.

    def _go(self, client: int) -> None:
        """Start a job if the client can; otherwise wake it when the next version arrives."""
        machine = self._client(client)
        if machine.phase is not Phase.IDLE and not machine.restarts:
            return
        if self._defer_until_open(client, EventKind.GO):
            return
        newest = self._broadcasts.newest(client, self.now)
        if newest >= 0:
            machine.model(newest)
        actions = machine.go()
        if actions:
            self._act(client, actions)
        elif machine.receive_buffer is None:
            arrival = self._broadcasts.next_arrival(client, self.now)
            if arrival is None:
                self._idle[client] = None
            else:
                self._push(arrival, EventKind.GO, client)

    def _model(self, client: int, version: int) -> None:
        """Deliver a version that was sent to this client alone."""
        machine = self._client(client)
        if machine.phase is Phase.GONE or not machine.model(version):
            self._received_in_vain = True
            self._versions.release(version)
            return
        self._versions.received(client, version)
        if self._one_message and machine.phase is Phase.IDLE:
            self._go(client)  # no other event of this instant concerns it
        else:
            self._push(self.now, EventKind.GO, client)

    def _ended(self, client: int, index: int) -> None:
        machine, job = self._clients[client], self._running[client]
        if machine.phase is not Phase.TRAINING or job.index != index:
            return  # the job was interrupted or lost before
        self._finish(client, job, self.steps, "ended")
        self._act(client, machine.ended())
        if self.policy.hold_until_requested or self.policy.background_upload:  # otherwise the upload occupies it
            self._push(self.now, EventKind.GO, client)

    def _arrived(self, client: int, index: int) -> None:
        update = self._finished.pop((client, index), None)
        if update is None:
            return  # its client failed during the upload
        machine = self._clients[client]
        if machine.phase is Phase.SENDING:
            machine.sent()
            if self.server.broadcasts or machine.receive_buffer is not None:
                self._push(self.now, EventKind.GO, client)
        self._serve(self.server.arrived(update))

    def _request(self, client: int) -> None:
        machine = self._client(client)
        if machine.phase is Phase.GONE or self._defer_until_open(client, EventKind.REQUEST):
            return
        self._act(client, machine.request())
        self._push(self.now, EventKind.GO, client)

    def _died(self, client: int, detail: int) -> None:
        """Lose a client: at a time from its trace (detail 0), or by chance during job ``detail − 1``."""
        machine = self._client(client)
        by_chance = detail > 0
        if by_chance and (machine.phase is not Phase.TRAINING or self._running[client].index != detail - 1):
            return  # the job was interrupted before
        if machine.phase is not Phase.GONE:
            self._act(client, machine.died())
            self._versions.clear_buffer(client)
            self._idle.pop(client, None)
        elif math.isinf(self._absent_until[client]):
            return
        back = self.now + self.fleet.return_seconds if by_chance else self.fleet.absences[client][1]
        back = self._absent_until[client] = max(back, self._absent_until.get(client, 0.0))
        self._out.append(Absence(client, self.now, back))
        if math.isinf(back):
            self._lost_for_good += 1
        else:
            self._push(back, EventKind.RETURNED, client)

    def _returned(self, client: int) -> None:
        if self.now < self._absent_until[client] or self._client(client).phase is not Phase.GONE:
            return  # it left again for longer
        self._client(client).returned()
        self._broadcasts.returned(client, self.now)
        self._serve(self.server.returned(client))
        self._push(self.now, EventKind.GO, client)

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
        step = self._step_times[client] * self.fleet.pace(client, action.index)
        length = step * self.steps
        job = self._running[client] = RunningJob(action.index, action.version, self.now, self.now + length, step)
        if self.on_start is not None:
            self.on_start(client, job)
        death = self.fleet.dies_after(client, action.index)
        if death is not None:
            self._push(self.now + death * length, EventKind.DIED, client, action.index + 1)
        self._schedule_end(client)

    def _schedule_end(self, client: int) -> None:
        self._push(self._running[client].end, EventKind.ENDED, client, self._running[client].index)

    def _finish(self, client: int, job: RunningJob, steps: int, outcome: JobOutcome) -> None:
        self._finished[client, job.index] = Update(client, job.index, job.version, steps)
        self._out.append(Job(client, job.index, job.version, steps, job.start, self.now, outcome))

    def _upload(self, client: int, index: int) -> None:
        if (client, index) not in self._finished:
            job = self._running[client]
            steps = int((self.now - job.start) / job.step + 1e-9)  # counts a step that ends now, despite rounding
            self._finish(client, job, min(steps, self.steps), "interrupted")
        arrival = self.now + self._up[client]
        self._out.append(Uploaded(client, index, self.now, arrival))
        self._push(arrival, EventKind.ARRIVED, client, index)

    def _drop(self, client: int, action: Drop) -> None:
        update = self._finished.pop((client, action.index), None)
        if update is not None:
            self._versions.release(update.version)
            return
        job = self._running[client]
        self._versions.release(job.version)
        self._out.append(Job(client, job.index, job.version, 0, job.start, self.now, "lost"))

    # Server actions.

    def _serve(self, actions: list[ServerAction]) -> None:
        action_checks.check_result(self.server, actions, self._newest)
        for action in actions:
            if isinstance(action, Merge):
                self._merge(action)
            elif isinstance(action, Broadcast):
                action_checks.check_broadcast(self.server, action.version, len(self._broadcasts), self._newest)
                self._broadcast(action.version)
            elif isinstance(action, Send):
                self._send(action)
            elif isinstance(action, Request):
                if type(action.client) is not int or not 0 <= action.client < self.fleet.num_clients:
                    action_checks.refuse_action(self.server, action, self._newest)
                self._push(self.now + self.fleet.latency_seconds, EventKind.REQUEST, action.client)
            elif isinstance(action, SetTimer):
                if action_checks.expires(self.server, action):
                    self._push(self.now + action.seconds, EventKind.TIMER, -1, action.token)
            elif isinstance(action, EndOfInstant):
                self._push(self.now, EventKind.END_OF_INSTANT, -1)
            elif isinstance(action, Discard):
                self._release(action_checks.discarded(self.server, action), action)
            else:
                draws = action_checks.resampled(self.server, action)
                self._out.append(Timeout(self.now, draws.missing, draws.drawn))

    def _send(self, action: Send) -> None:
        client, version = action.client, action.version
        plain = type(client) is int and type(version) is int  # numbers of NumPy cannot be hashed as keys or written
        if not plain or version not in self._versions or not 0 <= client < self.fleet.num_clients:
            action_checks.refuse_action(self.server, action, self._newest)
        self._versions.hold(version)
        self._out.append(Sent(version, client, self.now))
        self._push(self.now + self._down[client], EventKind.MODEL, client, version)

    def _release(self, update: Update, action: Merge | Discard) -> None:
        """Drop the reference of an update that is merged or discarded."""
        if update.version not in self._versions:
            action_checks.refuse_action(self.server, action, self._newest)
        self._versions.release(update.version)

    def _broadcast(self, version: int) -> None:
        self._broadcasts.add(version, self.now)
        self._out.append(Sent(version, None, self.now))
        woken = range(self.fleet.num_clients) if version == 0 else list(self._idle)
        self._idle.clear()
        for client in woken:
            self._push(self.now + self._down[client], EventKind.GO, client)

    def _merge(self, merge: Merge) -> None:
        action_checks.check_merge(self.server, merge, self._newest)
        for update, _ in merge.updates:
            self._release(update, merge)
        self._newest = merge.version
        self._deadline = self.handled + self._events_per_round
        self._out.append(Round(self.now, merge, self._versions.add(merge.version, self.now - self._slack)))
