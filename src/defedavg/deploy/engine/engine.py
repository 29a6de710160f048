"""The engine: one server machine and its clients' machines on a real clock, events in, orders out.

No socket, no clock, no tensor: times come with events. Clients of most algorithms have nothing to decide between two
messages, so their machine lives here, beside the connection: a train message goes out when it says ``Start``, and its
reply is the job's end and its upload at once. Where clients train on between messages (``background``), the machine
lives with the client, and the engine follows it with a machine of its own, from what the client reports.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ...algorithms import ServerMachine
from ...algorithms.protocol import (
    Broadcast,
    ClientMachine,
    ClientPolicy,
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
from .client_tracker import follow
from .events import (
    Began,
    ClientActed,
    Combine,
    DiscardUpdate,
    Disconnected,
    Ended,
    Event,
    Exchange,
    Exchanged,
    Failed,
    Joined,
    Left,
    ModelSent,
    Order,
    Quarantined,
    Refused,
    Replaced,
    Resumed,
    Settled,
    TimerExpired,
    Train,
    Trained,
)

STRIKES = 3
"""So many bad updates in all, or failures in a row, and a client is given nothing more."""


VAIN_SECONDS = 1.0
"""A wait lasts so long at least, even if it is in vain: whoever is gone may be back."""


def in_background(policy: ClientPolicy) -> bool:
    """Whether clients train on between messages: they can be interrupted, or overwrite an update nobody asked for."""
    return policy.hold_until_requested and (policy.interruptible or not policy.pause_when_full)


@dataclass(slots=True)
class Link:
    """What the server knows of the way to a client."""

    node: str | None = None  # None: not here
    busy: bool = False  # a message is out
    mail: int | None = None  # the version to send next
    wanted: bool = False  # the update is asked for
    handed: list[int] = field(default_factory=list)  # versions that a background client may still start from
    epoch: int = 0
    strikes: int = 0
    failures: int = 0
    banned: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """A timer: when it is due, and for whose answers it waits (None: for anybody's)."""

    since: float
    due: float
    waits_for: frozenset[int] | None


class Engine:
    """Give it events in the order in which they happened; it answers with orders.

    When version ``last`` is made it is ``over``: nothing more follows from anything.
    """

    def __init__(self, server: ServerMachine, last: int) -> None:
        self.server = server
        self.last = last
        self.over = False
        self.policy = server.client_policy(server.settings)
        self.background = in_background(self.policy)
        self.steps = server.steps_per_job(server.setup.local_steps)
        total = server.setup.num_clients
        self.clients = [ClientMachine(number, self.policy) for number in range(total)]
        self.links = [Link() for _ in range(total)]
        self.begun = False
        self.unsettled = False
        self.versions = {0}
        self.received: dict[tuple[int, int], Update] = {}  # updates here that are neither merged nor dropped
        self._waits: dict[int, Wait] = {}
        self._newest = 0
        self._started: list[dict[int, int]] = [{} for _ in range(total)]  # jobs not yet handed over: index -> version
        self._uploads: deque[Update] = deque()
        self._ready: set[int] = set()
        self._orders: list[Order] = []
        self._now = 0.0

    @property
    def present(self) -> list[int]:
        """The clients that are here."""
        return [client for client, link in enumerate(self.links) if link.node is not None]

    # What the clock must ask.

    def due(self, now: float, early: bool = True) -> list[int]:
        """The timers that are over: it is time or, with ``early``, nobody they wait for can answer any more."""
        here = set(self.present) if early else set()
        idle = bool(here) and not any(self.links[client].busy for client in here) and not self.background
        found = []
        for token, wait in sorted(self._waits.items()):
            if wait.waits_for is None:
                in_vain = idle
            else:
                in_vain = bool(here) and bool(wait.waits_for) and not any(map(self._can_answer, wait.waits_for))
            if (in_vain and now >= wait.since + VAIN_SECONDS) or now >= wait.due:
                found.append(token)
        return found

    def _can_answer(self, client: int) -> bool:
        """Whether an update of the client is here, or on its way, or may come without a newer version than it has."""
        link, machine = self.links[client], self.clients[client]
        if machine.send_buffer is not None or link.node is None or not self.background:
            return machine.send_buffer is not None or link.busy
        waits = machine.receive_buffer is not None or any(version > machine.trained for version in link.handed)
        return waits or machine.phase is Phase.TRAINING

    # What a reply must be, before it is an event.

    def fault(self, event: Trained | Exchanged) -> str | None:
        """Why this cannot be what the client was asked for, or None."""
        link = self.links[event.client]
        if link.node is None or not link.busy:
            return "it was not asked for anything"
        if isinstance(event, Trained):
            [(index, version)] = self._started[event.client].items()
            if event.index != index:
                return f"it answers job {event.index}, but was given job {index}"
            if event.version != version:
                return f"it started from version {event.version}, but was given version {version}"
            if event.steps != self.steps:
                return f"it did {event.steps} steps of {self.steps}"
            return None
        try:
            self._follow(event)
        except ProtocolError as error:
            return f"its reports make no sense: {error}"
        return None

    # Events.

    def handle(self, event: Event) -> list[Order]:
        """What follows from an event."""
        if self.over:
            return []
        self._now = event.t
        if isinstance(event, Trained):
            self._trained(event)
        elif isinstance(event, Exchanged):
            self._exchanged(event)
        elif isinstance(event, TimerExpired):
            self._waits.pop(event.token, None)
            self._serve(self.server.timer(event.token))
        elif isinstance(event, Settled):
            self.unsettled = False
            self._serve(self.server.end_of_instant())
        elif isinstance(event, Joined):
            self._joined(event.client, event.node)
        elif isinstance(event, Began):
            self._began()
        elif isinstance(event, Left):
            self._lose(event.client)
        elif isinstance(event, Resumed):
            for client in self.present:
                self._lose(client)
        else:
            self._bad(event)
        self._drain()
        orders, self._orders = self._orders, []
        return orders

    def _drain(self) -> None:
        """Bring uploads to the server machine, then give work to those that can take it."""
        while self._uploads and not self.over:
            update = self._uploads.popleft()
            for token, wait in self._waits.items():
                if wait.waits_for and update.client in wait.waits_for:
                    self._waits[token] = replace(wait, waits_for=wait.waits_for - {update.client})
            self._serve(self.server.arrived(update))
        for client in () if self.over else sorted(self._ready):
            self._offer(client)
        self._ready.clear()

    def _joined(self, client: int, node: str) -> None:
        link, machine = self.links[client], self.clients[client]
        if link.banned or link.node is not None:
            raise ProtocolError(f"client {client} cannot join: it is {'banned' if link.banned else 'here'}")
        link.node = node
        link.epoch += 1
        if not self.begun:
            return
        if machine.phase is Phase.GONE:
            machine.returned()
            self._orders.append(Disconnected(client, back=True))
        self._serve(self.server.returned(client))
        self._ready.add(client)

    def _began(self) -> None:
        self.begun = True
        for client, link in enumerate(self.links):
            if link.node is None:
                self.clients[client].died()
                self._orders.append(Disconnected(client, back=False))
        self._serve(self.server.start())

    def _lose(self, client: int) -> None:
        """The way to a client is cut. What the server already has of it stays."""
        link, machine = self.links[client], self.clients[client]
        link.node, link.busy, link.mail, link.wanted = None, False, None, False
        link.handed.clear()
        if not self.begun or machine.phase is Phase.GONE:
            return
        if self.background or machine.phase is Phase.TRAINING:
            for action in machine.died():
                self._orders.append(ClientActed(client, action, self._now))
            self._started[client].clear()
            self._orders.append(Disconnected(client, back=False))

    def _bad(self, event: Refused | Failed) -> None:
        link = self.links[event.client]
        node = link.node
        if isinstance(event, Refused):
            link.strikes += 1
        else:
            link.failures += 1
        self._lose(event.client)
        if max(link.strikes, link.failures) >= STRIKES:
            link.banned = True
            self._orders.append(Quarantined(event.client))
        elif node is not None:
            self._joined(event.client, node)

    def _trained(self, event: Trained) -> None:
        client, machine = event.client, self.clients[event.client]
        link = self.links[client]
        link.busy, link.failures = False, 0
        self._started[client].clear()
        self._receive(Update(client, event.index, event.version, event.steps))
        for action in machine.ended():
            self._orders.append(ClientActed(client, action, event.t, event.steps))
            if isinstance(action, Upload):
                self._upload(client, action.index)
        if machine.phase is Phase.SENDING:
            machine.sent()
        self._ready.add(client)

    def _exchanged(self, event: Exchanged) -> None:
        client, link = event.client, self.links[event.client]
        machine, self._started[client], followed = self._follow(event)
        self.clients[client] = machine
        link.busy, link.failures = False, 0
        self._orders.extend(followed)
        if event.update is not None:
            link.wanted = False
            update = event.update
            self._receive(Update(client, update.index, update.version, update.steps))
            self._upload(client, update.index)
        oldest = min(self._started[client].values(), default=machine.trained)
        link.handed = [version for version in link.handed if version >= oldest]
        self._ready.add(client)

    def _follow(self, event: Exchanged) -> tuple[ClientMachine, dict[int, int], list[ClientActed | Ended]]:
        client = event.client
        handed = self.links[client].handed
        return follow(self.clients[client], self._started[client], handed, self.steps, event)

    # Uploads and what the server answers.

    def _receive(self, update: Update) -> None:
        self.received[update.client, update.index] = update

    def _upload(self, client: int, index: int) -> None:
        self._uploads.append(self.received[client, index])

    def _serve(self, actions: Iterable[ServerAction]) -> None:
        invited: list[int] = []
        for action in actions:
            if isinstance(action, Merge):
                self._merge(action)
                if self.over:
                    return
            elif isinstance(action, Broadcast):
                self._newest = action.version
                self._orders.append(ModelSent(action.version, None))
                self._ready.update(self.present)
            elif isinstance(action, Send):
                self.links[action.client].mail = action.version
                self._orders.append(ModelSent(action.version, action.client))
                self._ready.add(action.client)
                invited.append(action.client)
            elif isinstance(action, Request):
                self._request(action.client)
                invited.append(action.client)
            elif isinstance(action, SetTimer):
                self._waits[action.token] = Wait(
                    self._now, self._now + action.seconds, frozenset(invited) if invited else None
                )
                invited = []
            elif isinstance(action, EndOfInstant):
                self.unsettled = True
            elif isinstance(action, Discard):
                self._forget(action.update)
            else:
                self._orders.append(Replaced(action.missing, action.drawn))

    def _forget(self, update: Update) -> None:
        self.received.pop((update.client, update.index), None)
        self._orders.append(DiscardUpdate(update))

    def _request(self, client: int) -> None:
        if self.background:
            self.links[client].wanted = True
            self._ready.add(client)
            return
        machine = self.clients[client]
        if machine.phase is not Phase.GONE:
            for action in machine.request():
                self._orders.append(ClientActed(client, action, self._now, self.steps))
                if isinstance(action, Upload):
                    self._upload(client, action.index)
            self._ready.add(client)

    def _merge(self, merge: Merge) -> None:
        for update, _ in merge.updates:
            del self.received[update.client, update.index]
        self.versions.add(merge.version)
        self.over = merge.version >= self.last
        needed = self._needed() | {merge.version}
        freed = tuple(sorted(self.versions - needed))
        self.versions -= set(freed)
        self._orders.append(Combine(merge, freed))

    # Work for clients.

    def _offer(self, client: int) -> None:
        link = self.links[client]
        if not self.begun or link.node is None or link.busy:
            return
        version = self._newest if self.server.broadcasts else link.mail
        if self.background:
            self._exchange(client, link, version)
            return
        machine = self.clients[client]
        if machine.phase is not Phase.IDLE:
            return
        if version is not None and machine.model(version):
            link.mail = None
        for action in machine.go():
            assert isinstance(action, Start)
            link.busy = True
            self._started[client][action.index] = action.version
            self._orders.append(ClientActed(client, action, self._now))
            self._orders.append(Train(client, action.index, action.version))

    def _exchange(self, client: int, link: Link, version: int | None) -> None:
        machine = self.clients[client]
        newest = max(link.handed, default=machine.trained)
        fresh = version if version is not None and version > newest else None
        if fresh is None and not link.wanted:
            return
        link.busy, link.mail = True, None
        if fresh is not None:
            link.handed.append(fresh)
        self._orders.append(Exchange(client, fresh, link.wanted, link.epoch, machine.jobs, machine.trained))

    # Versions that somebody may still need.

    def _needed(self) -> set[int]:
        needed = {self._newest} | {update.version for update in self.received.values()}
        for started, link in zip(self._started, self.links, strict=True):
            needed.update(started.values())
            needed.update(link.handed)
            if link.mail is not None:
                needed.add(link.mail)
        return needed
