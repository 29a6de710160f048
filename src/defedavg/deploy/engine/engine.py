"""The engine: one server machine and its clients' machines on a real clock. It handles events and returns commands.

The engine uses no socket, no clock and no tensor: times come with events. In most algorithms a client decides nothing
between two messages, so the engine runs its machine: a train message is sent when the machine says ``Start``, and the
reply is the end of the job and its upload. Where clients train between messages (``background``), the client runs its
own machine, and the engine drives a copy of it with the events that the client reports.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from ...algorithms import ServerMachine
from ...algorithms.protocol import (
    Broadcast,
    ClientAction,
    ClientMachine,
    Discard,
    EndOfInstant,
    Merge,
    Phase,
    ProtocolError,
    Request,
    Send,
    ServerAction,
    SetTimer,
    Start,
    Update,
    Upload,
)
from .client_link import MAX_FAULTS, ClientLink, PendingTimer, trains_in_background
from .client_tracker import apply_reports
from .events import (
    Began,
    ClientActed,
    Combine,
    Command,
    DiscardUpdate,
    Disconnected,
    Ended,
    Event,
    Exchange,
    Exchanged,
    Failed,
    InstantEnded,
    Joined,
    Left,
    ModelSent,
    Quarantined,
    Refused,
    Replaced,
    Resumed,
    TimerExpired,
    Train,
    Trained,
)


class Engine:
    """Handles events in the order in which they happened. It is ``finished`` after version ``max_rounds``."""

    def __init__(self, server: ServerMachine, max_rounds: int) -> None:
        self.server = server
        self.max_rounds = max_rounds
        self.finished = False
        self.policy = server.client_policy(server.settings)
        self.background = trains_in_background(self.policy)
        self.steps = server.steps_per_job(server.setup.local_steps)
        total = server.setup.num_clients
        self.clients = [ClientMachine(number, self.policy) for number in range(total)]
        self.links = [ClientLink() for _ in range(total)]
        self.begun = False
        self.end_of_instant_pending = False
        self.versions = {0}
        self.received: dict[tuple[int, int], Update] = {}  # updates that are neither merged nor discarded yet
        self._timers: dict[int, PendingTimer] = {}
        self._newest = 0
        self._open_jobs: list[dict[int, int]] = [{} for _ in range(total)]  # jobs not yet delivered: index -> version
        self._uploads: deque[Update] = deque()
        self._ready: set[int] = set()  # clients that may be able to take work
        self._commands: list[Command] = []
        self._now = 0.0

    @property
    def connected(self) -> list[int]:
        """The clients that are connected."""
        return [client for client, link in enumerate(self.links) if link.node is not None]

    # Questions of the coordinator.

    def expired_timers(self, now: float, early: bool = True) -> list[int]:
        """Return the timers whose time is over or, with ``early``, for which no client can answer any more."""
        connected = set(self.connected) if early else set()
        idle = bool(connected) and not any(self.links[client].busy for client in connected) and not self.background
        expired = []
        for token, timer in sorted(self._timers.items()):
            if timer.waits_for is None:
                in_vain = idle
            else:
                in_vain = bool(connected and timer.waits_for) and not any(map(self._can_answer, timer.waits_for))
            if timer.has_expired(now, in_vain):
                expired.append(token)
        return expired

    def _can_answer(self, client: int) -> bool:
        """Return whether an update of the client has arrived, is in flight, or needs no newer version to be trained."""
        link, machine = self.links[client], self.clients[client]
        if machine.send_buffer is not None or link.node is None or not self.background:
            return machine.send_buffer is not None or link.busy
        has_version = machine.receive_buffer is not None or any(v > machine.trained for v in link.versions_sent)
        return has_version or machine.phase is Phase.TRAINING

    def fault(self, event: Trained | Exchanged) -> str | None:
        """Return why a reply cannot be the answer to what the client was sent, or None if it can."""
        link = self.links[event.client]
        if link.node is None or not link.busy:
            return "no message to it is unanswered"
        if isinstance(event, Exchanged):
            try:
                self._apply_reports(event)
            except ProtocolError as error:
                return f"its reports are inconsistent: {error}"
            return None
        [(index, version)] = self._open_jobs[event.client].items()
        if event.index != index:
            return f"it answers job {event.index}, but was sent job {index}"
        if event.version != version:
            return f"it started from version {event.version}, but was sent version {version}"
        if event.steps != self.steps:
            return f"it did {event.steps} steps of {self.steps}"
        return None

    # Events.

    def handle(self, event: Event) -> list[Command]:
        """Handle an event and return the commands that follow from it."""
        if self.finished:
            return []
        self._now = event.t
        if isinstance(event, Trained):
            self._trained(event)
        elif isinstance(event, Exchanged):
            self._exchanged(event)
        elif isinstance(event, TimerExpired):
            self._timers.pop(event.token, None)
            self._apply_actions(self.server.timer(event.token))
        elif isinstance(event, InstantEnded):
            self.end_of_instant_pending = False
            self._apply_actions(self.server.end_of_instant())
        elif isinstance(event, Joined):
            self._joined(event.client, event.node)
        elif isinstance(event, Began):
            self._began()
        elif isinstance(event, Left):
            self._disconnect(event.client)
        elif isinstance(event, Resumed):
            for client in self.connected:
                self._disconnect(client)
        else:
            self._at_fault(event)
        self._process_uploads()
        commands, self._commands = self._commands, []
        return commands

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
            self._open_jobs[client].clear()
            self._commands.append(Disconnected(client, back=False))

    def _at_fault(self, event: Refused | Failed) -> None:
        """Restart a client that sent a bad reply or failed; quarantine it after too many faults."""
        link = self.links[event.client]
        node = link.node
        if isinstance(event, Refused):
            link.rejections += 1
        else:
            link.failures += 1
        self._disconnect(event.client)
        if max(link.rejections, link.failures) >= MAX_FAULTS:
            link.quarantined = True
            self._commands.append(Quarantined(event.client))
        elif node is not None:
            self._joined(event.client, node)

    def _trained(self, event: Trained) -> None:
        client, machine = event.client, self.clients[event.client]
        link = self.links[client]
        link.busy, link.failures = False, 0
        self._open_jobs[client].clear()
        self._receive(Update(client, event.index, event.version, event.steps))
        self._client_acted(client, machine.ended(), event.steps)
        if machine.phase is Phase.SENDING:
            machine.sent()
        self._ready.add(client)

    def _exchanged(self, event: Exchanged) -> None:
        client, link = event.client, self.links[event.client]
        machine, self._open_jobs[client], commands = self._apply_reports(event)
        self.clients[client] = machine
        link.busy, link.failures = False, 0
        self._commands.extend(commands)
        if event.update is not None:
            link.wanted = False
            update = event.update
            self._receive(Update(client, update.index, update.version, update.steps))
            self._upload(client, update.index)
        oldest = min(self._open_jobs[client].values(), default=machine.trained)
        link.versions_sent = [version for version in link.versions_sent if version >= oldest]
        self._ready.add(client)

    def _apply_reports(self, event: Exchanged) -> tuple[ClientMachine, dict[int, int], list[ClientActed | Ended]]:
        client = event.client
        versions_sent = self.links[client].versions_sent
        return apply_reports(self.clients[client], self._open_jobs[client], versions_sent, self.steps, event)

    def _client_acted(self, client: int, actions: Iterable[ClientAction], steps: int = 0) -> None:
        """Record actions of a client's machine that the engine runs, and pass on what it uploads."""
        for action in actions:
            self._commands.append(ClientActed(client, action, self._now, steps))
            if isinstance(action, Upload):
                self._upload(client, action.index)

    # Uploads, and actions of the server machine.

    def _receive(self, update: Update) -> None:
        self.received[update.client, update.index] = update

    def _upload(self, client: int, index: int) -> None:
        self._uploads.append(self.received[client, index])

    def _apply_actions(self, actions: Iterable[ServerAction]) -> None:
        invited: list[int] = []
        for action in actions:
            if isinstance(action, Merge):
                self._merge(action)
                if self.finished:
                    return
            elif isinstance(action, Broadcast):
                self._newest = action.version
                self._commands.append(ModelSent(action.version, None))
                self._ready.update(self.connected)
            elif isinstance(action, Send):
                self.links[action.client].next_version = action.version
                self._commands.append(ModelSent(action.version, action.client))
                self._ready.add(action.client)
                invited.append(action.client)
            elif isinstance(action, Request):
                self._request(action.client)
                invited.append(action.client)
            elif isinstance(action, SetTimer):
                waits_for = frozenset(invited) if invited else None
                self._timers[action.token] = PendingTimer(self._now, self._now + action.seconds, waits_for)
                invited = []
            elif isinstance(action, EndOfInstant):
                self.end_of_instant_pending = True
            elif isinstance(action, Discard):
                self.received.pop((action.update.client, action.update.index), None)
                self._commands.append(DiscardUpdate(action.update))
            else:
                self._commands.append(Replaced(action.missing, action.drawn))

    def _request(self, client: int) -> None:
        if self.background:
            self.links[client].wanted = True
            self._ready.add(client)
            return
        machine = self.clients[client]
        if machine.phase is not Phase.GONE:
            self._client_acted(client, machine.request(), self.steps)
            self._ready.add(client)

    def _merge(self, merge: Merge) -> None:
        for update, _ in merge.updates:
            del self.received[update.client, update.index]
        self.versions.add(merge.version)
        self.finished = merge.version >= self.max_rounds
        freed = tuple(sorted(self.versions - self._needed_versions() - {merge.version}))
        self.versions -= set(freed)
        self._commands.append(Combine(merge, freed))

    # Work for clients.

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
            assert isinstance(action, Start)
            link.busy = True
            self._open_jobs[client][action.index] = action.version
            self._commands.append(ClientActed(client, action, self._now))
            self._commands.append(Train(client, action.index, action.version))

    def _exchange(self, client: int, link: ClientLink, version: int | None) -> None:
        machine = self.clients[client]
        newest_sent = max(link.versions_sent, default=machine.trained)
        newer = version if version is not None and version > newest_sent else None
        if newer is None and not link.wanted:
            return
        link.busy, link.next_version = True, None
        if newer is not None:
            link.versions_sent.append(newer)
        self._commands.append(Exchange(client, newer, link.wanted, link.epoch, machine.jobs, machine.trained))

    def _needed_versions(self) -> set[int]:
        """Return the versions that a job or an update may still start from."""
        needed = {self._newest} | {update.version for update in self.received.values()}
        for open_jobs, link in zip(self._open_jobs, self.links, strict=True):
            needed.update(open_jobs.values())
            needed.update(link.versions_sent)
            if link.next_version is not None:
                needed.add(link.next_version)
        return needed
