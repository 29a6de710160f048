"""The engine: one server machine and its clients' machines on a real clock. It handles events and returns commands.

The engine uses no socket, no clock and no tensor: times come with events. In most algorithms a client decides nothing
between two messages, so the engine runs its machine: a train message is sent when the machine says ``Start``, and the
reply is the end of the job and its upload. Where clients train between messages (``background``), the client runs its
own machine, and the engine drives a copy of it with the events that the client reports.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ...algorithms import ServerMachine
from ...algorithms import protocol as actions
from ...algorithms.protocol import ClientMachine, Phase, ProtocolError, Update
from ...planning import action_checks
from ...planning.records import Round, Sent, Timeout
from . import events
from .client_tracker import MAX_FAULTS, ClientLink, Tracker
from .events import ClientActed, Command, Disconnected, Event

MIN_WAIT_SECONDS = 1.0
"""A timer runs at least this long, even if no client can answer: a client that disconnected may return."""


@dataclass(frozen=True, slots=True)
class PendingTimer:
    """A timer: when it was set, when it expires, and the clients whose answers it waits for (None: any client's)."""

    since: float
    expires: float
    waits_for: frozenset[int] | None


class Engine:
    """Handles events in the order in which they happened. It is ``finished`` after version ``max_rounds``."""

    def __init__(self, server: ServerMachine, max_rounds: int) -> None:
        self.server = server
        self.max_rounds = max_rounds
        self.finished = False
        self.policy = server.policy_with("blocking")  # a reply is the end of a job and of its upload
        # Clients train between messages if a request can interrupt a job, a new update replaces an old one, or a newer
        # version restarts a job.
        self.background = self.policy.restart_on_model or (
            self.policy.hold_until_requested and (self.policy.interruptible or not self.policy.pause_when_full)
        )
        self.steps = server.steps_per_job(server.setup.local_steps)
        total = server.setup.num_clients
        self.clients = [ClientMachine(number, self.policy) for number in range(total)]
        self.links = [ClientLink() for _ in range(total)]
        self.begun = False
        self.end_of_instant_pending = False
        self.versions = {0}
        self.received: dict[tuple[int, int], Update] = {}  # updates that are neither merged nor discarded yet
        self._timers: dict[int, PendingTimer] = {}
        self._newest = 0  # of the broadcast versions
        self._merges = self._broadcasts = 0
        self._uploads: deque[Update] = deque()
        self._ready: set[int] = set()  # clients that may be able to take work
        self._commands: list[Command] = []
        self._now = 0.0

    @property
    def connected(self) -> list[int]:
        """The clients that are connected."""
        return [client for client, link in enumerate(self.links) if link.node is not None]

    def check_stall(self) -> None:
        """Raise ``UserError`` if nothing can happen: all clients are connected, none has work, and no timer is set."""
        pending = self.finished or self._timers or self.end_of_instant_pending or not self.begun
        if not pending and all(link.node is not None and not link.busy for link in self.links):
            action_checks.refuse_stall(self.server, self.policy, self._merges)

    def expired_timers(self, now: float, early: bool = True) -> list[int]:
        """Return the timers whose time is over or, with ``early``, for which no client can answer any more."""
        connected = self.connected if early else []
        idle = bool(connected) and not any(self.links[client].busy for client in connected) and not self.background
        expired = []
        for token, timer in sorted(self._timers.items()):
            in_vain = idle
            if timer.waits_for is not None:
                in_vain = bool(connected and timer.waits_for) and not any(map(self._can_answer, timer.waits_for))
            if now >= timer.expires or (in_vain and now >= timer.since + MIN_WAIT_SECONDS):
                expired.append(token)
        return expired

    def seconds_to_timer(self, now: float) -> float:
        """Return how long no timer expires."""
        return max(0.0, min((timer.expires for timer in self._timers.values()), default=math.inf) - now)

    def _can_answer(self, client: int) -> bool:
        """Return whether an update of the client has arrived, is in flight, or needs no newer version to be trained."""
        link, machine = self.links[client], self.clients[client]
        if machine.send_buffer is not None or link.node is None or not self.background:
            return machine.send_buffer is not None or link.busy
        has_version = machine.receive_buffer is not None or any(v > machine.trained for v in link.versions_sent)
        return has_version or machine.phase is Phase.TRAINING

    def fault(self, event: events.Trained | events.Exchanged) -> str | None:
        """Return why a reply cannot be the answer to what the client was sent, or None if it can."""
        link = self.links[event.client]
        if link.node is None or not link.busy:
            return "no message to it is unanswered"
        if isinstance(event, events.Exchanged):
            try:
                self._track(event)
            except ProtocolError as error:
                return f"its reports are inconsistent: {error}"
            return None
        [(index, version)] = link.open_jobs.items()
        if event.index != index:
            return f"it answers job {event.index}, but was sent job {index}"
        if event.version != version:
            return f"it started from version {event.version}, but was sent version {version}"
        if event.steps != self.steps:
            return f"it did {event.steps} steps of {self.steps}"
        return None

    def handle(self, event: Event) -> list[Command]:
        """Handle an event and return the commands that follow from it."""
        if self.finished:
            return []
        self._now = event.t
        try:
            self._dispatch(event)
            self._process_uploads()
        except Exception as error:
            action_checks.refuse_failure(self.server, error, self._merges)
            raise
        commands, self._commands = self._commands, []
        return commands

    def _dispatch(self, event: Event) -> None:
        if isinstance(event, events.Trained):
            self._trained(event)
        elif isinstance(event, events.Exchanged):
            self._exchanged(event)
        elif isinstance(event, events.TimerExpired):
            self._timers.pop(event.token, None)
            self._apply_actions(self.server.timer(event.token))
        elif isinstance(event, events.InstantEnded):
            self.end_of_instant_pending = False
            self._apply_actions(self.server.end_of_instant())
        elif isinstance(event, events.Joined):
            self._joined(event.client, event.node)
        elif isinstance(event, events.Began):
            self._began()
        elif isinstance(event, events.Left):
            self._disconnect(event.client)
        elif isinstance(event, events.Resumed):
            for client in self.connected:
                self._disconnect(client)
        else:
            self._at_fault(event)

    def _process_uploads(self) -> None:
        """Pass uploads to the server machine, then send work to the clients that can take it."""
        while self._uploads and not self.finished:
            update = self._uploads.popleft()
            for token, timer in self._timers.items():
                if timer.waits_for and update.client in timer.waits_for:
                    self._timers[token] = replace(timer, waits_for=timer.waits_for - {update.client})
            self._apply_actions(self.server.arrived(update))
        for client in () if self.finished else sorted(self._ready):
            self._send_work(client)
        self._ready.clear()

    def _joined(self, client: int, node: str) -> None:
        link, machine = self.links[client], self.clients[client]
        if link.quarantined or link.node is not None:
            state = "quarantined" if link.quarantined else "already connected"
            raise ProtocolError(f"client {client} cannot join: it is {state}")
        link.node = node
        link.epoch += 1
        if not self.begun:
            return
        if machine.phase is Phase.GONE:
            machine.returned()
            self._commands.append(Disconnected(client, back=True))
        self._apply_actions(self.server.returned(client))
        self._ready.add(client)

    def _began(self) -> None:
        self.begun = True
        for client, link in enumerate(self.links):
            if link.node is None:
                self.clients[client].died()
                self._commands.append(Disconnected(client, back=False))
        self._apply_actions(self.server.start())

    def _disconnect(self, client: int) -> None:
        """Drop the connection to a client. Updates that have arrived stay."""
        machine = self.clients[client]
        self.links[client].disconnect()
        if not self.begun or machine.phase is Phase.GONE:
            return
        if self.background or machine.phase is Phase.TRAINING:
            self._client_acted(client, machine.died())
            self.links[client].open_jobs.clear()
            self._commands.append(Disconnected(client, back=False))

    def _at_fault(self, event: events.Refused | events.Failed) -> None:
        """Restart a client that sent a bad reply or failed; quarantine it after too many faults."""
        link = self.links[event.client]
        node = link.node
        if isinstance(event, events.Refused):
            link.rejections += 1
        else:
            link.failures += 1
        self._disconnect(event.client)
        if max(link.rejections, link.failures) >= MAX_FAULTS:
            link.quarantined = True
            self._commands.append(events.Quarantined(event.client))
        elif node is not None:
            self._joined(event.client, node)

    def _trained(self, event: events.Trained) -> None:
        client, machine, link = event.client, self.clients[event.client], self.links[event.client]
        link.busy, link.failures = False, 0
        link.open_jobs.clear()
        self.received[client, event.index] = Update(client, event.index, event.version, event.steps)
        self._client_acted(client, machine.ended(), event.steps)
        if machine.phase is Phase.SENDING:
            machine.sent()
        self._ready.add(client)

    def _exchanged(self, event: events.Exchanged) -> None:
        client, link, update = event.client, self.links[event.client], event.update
        tracker = self._track(event)
        machine = self.clients[client] = tracker.machine
        link.open_jobs, link.busy, link.failures = tracker.open_jobs, False, 0
        self._commands.extend(tracker.commands)
        if update is not None:
            link.wanted = False
            received = self.received[client, update.index] = Update(client, update.index, update.version, update.steps)
            self._uploads.append(received)
        oldest = min(link.open_jobs.values(), default=machine.trained)
        link.versions_sent = [version for version in link.versions_sent if version >= oldest]
        self._ready.add(client)

    def _track(self, event: events.Exchanged) -> Tracker:
        return Tracker(self.clients[event.client], self.links[event.client], self.steps, event)

    def _client_acted(self, client: int, acted: Iterable[actions.ClientAction], steps: int = 0) -> None:
        """Record actions of a client's machine that the engine runs, and pass on what it uploads."""
        for action in acted:
            self._commands.append(ClientActed(client, action, self._now, steps))
            if isinstance(action, actions.Upload):
                self._uploads.append(self.received[client, action.index])

    def _apply_actions(self, returned: Iterable[actions.ServerAction]) -> None:
        invited: list[int] = []
        action_checks.check_result(self.server, returned, self._merges)
        for action in returned:
            if isinstance(action, actions.Merge):
                self._merge(action)
                if self.finished:
                    return
            elif isinstance(action, actions.Broadcast):
                action_checks.check_broadcast(self.server, action.version, self._broadcasts, self._merges)
                self._broadcasts += 1
                self._newest = action.version
                self._commands.append(Sent(action.version, None, self._now))
                self._ready.update(self.connected)
            elif isinstance(action, actions.Send):
                if action.version not in self.versions or not 0 <= action.client < len(self.links):
                    action_checks.refuse_action(self.server, action, self._merges)
                self.links[action.client].next_version = action.version
                self._commands.append(Sent(action.version, action.client, self._now))
                self._ready.add(action.client)
                invited.append(action.client)
            elif isinstance(action, actions.Request):
                self._request(action)
                invited.append(action.client)
            elif isinstance(action, actions.SetTimer):
                action_checks.expires(self.server, action)
                waits_for = frozenset(invited) if invited else None
                self._timers[action.token] = PendingTimer(self._now, self._now + action.seconds, waits_for)
                invited = []
            elif isinstance(action, actions.EndOfInstant):
                self.end_of_instant_pending = True
            elif isinstance(action, actions.Discard):
                update = action_checks.discarded(self.server, action)
                self.received.pop((update.client, update.index), None)
                self._commands.append(action)
            else:
                draws = action_checks.resampled(self.server, action)
                self._commands.append(Timeout(self._now, draws.missing, draws.drawn))

    def _request(self, action: actions.Request) -> None:
        client = action.client
        if not 0 <= client < len(self.clients):
            action_checks.refuse_action(self.server, action, self._merges)
        machine = self.clients[client]
        if self.background:
            self.links[client].wanted = True
        elif machine.phase is not Phase.GONE:
            self._client_acted(client, machine.request(), self.steps)
        self._ready.add(client)  # has no effect on a client that is not connected

    def _merge(self, merge: actions.Merge) -> None:
        action_checks.check_merge(self.server, merge, self._merges)
        for update, _ in merge.updates:
            if self.received.pop((update.client, update.index), None) is None:
                action_checks.refuse_action(self.server, merge, self._merges)
        self._merges = merge.version
        self.versions.add(merge.version)
        self.finished = merge.version >= self.max_rounds
        freed = tuple(sorted(self.versions - self._needed_versions() - {merge.version}))
        self.versions -= set(freed)
        self._commands.append(Round(self._now, merge, freed))

    def _send_work(self, client: int) -> None:
        link = self.links[client]
        if not self.begun or link.node is None or link.busy:
            return
        version = self._newest if self.server.broadcasts else link.next_version
        if self.background:
            self._exchange(client, link, version)
            return
        machine = self.clients[client]
        if machine.phase is not Phase.IDLE:
            return
        if version is not None and machine.model(version):
            link.next_version = None
        for action in machine.go():
            assert isinstance(action, actions.Start)
            link.busy = True
            link.open_jobs[action.index] = action.version
            self._commands.append(ClientActed(client, action, self._now))
            self._commands.append(events.Train(client, action.index, action.version))

    def _exchange(self, client: int, link: ClientLink, version: int | None) -> None:
        machine = self.clients[client]
        newest_sent = max(link.versions_sent, default=machine.trained)
        newer = version if version is not None and version > newest_sent else None
        if newer is None and not link.wanted:
            return
        link.busy, link.next_version = True, None
        if newer is not None:
            link.versions_sent.append(newer)
        self._commands.append(events.Exchange(client, newer, link.wanted, link.epoch, machine.jobs, machine.trained))

    def _needed_versions(self) -> set[int]:
        needed = {self._newest, *range(self._merges - self.server.past_versions, self._merges)}
        needed |= {update.version for update in self.received.values()}
        for link in self.links:
            needed.update(link.open_jobs.values(), link.versions_sent)
            if link.next_version is not None:
                needed.add(link.next_version)
        return needed
