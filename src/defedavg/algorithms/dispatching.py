"""Server machines that keep a constant number of clients training: FedBuff, and algorithms that merge every arrival.

Whenever a client has answered, an idle client, drawn uniformly, starts from the newest version. If all clients train
concurrently, it is the client that answered.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ..errors import UserError
from ..rng import below, key
from .base import Actions, BufferedRound
from .client_pool import ClientPool
from .protocol import ClientPolicy, Discard, EndOfInstant, Resample, Send, SetTimer, Update
from .setup import Setup


class ConcurrentClients(BufferedRound):
    """Start an idle client whenever another finishes; the settings have a field ``concurrency``, 0 for all clients."""

    policy: ClassVar[ClientPolicy] = ClientPolicy(allow_same_version=True)
    state_attributes: ClassVar[tuple[str, ...]] = ("active", "dispatches", "timed")

    def __init__(self, setup: Setup, settings: Any = None) -> None:
        super().__init__(setup, settings)
        self.active: dict[int, int] = {}  # client -> number of its dispatch
        self.dispatches = 0
        self.timed: dict[int, int] = {}  # dispatch -> client, where a timer runs

    def check_setup(self) -> None:
        """Also refuse a concurrency above the number of clients."""
        super().check_setup()
        limit, total = self.settings.concurrency, self.setup.num_clients
        if limit > total:
            raise UserError(f"{self.name}: concurrency is {limit} but there are {total} clients")

    @property
    def concurrency(self) -> int:
        """How many clients train concurrently."""
        return int(self.settings.concurrency) or self.setup.num_clients

    def invite(self, client: int) -> Actions:
        """Return the messages that start a client (hook)."""
        return [Send(client, self.version)]

    def accepts(self, update: Update) -> bool:  # noqa: ARG002 (a hook: subclasses use it)
        """Return whether an update is merged; otherwise it is discarded (hook)."""
        return True

    def start(self) -> Actions:
        """Start as many clients as may train concurrently."""
        return self.end_of_instant()

    def end_of_instant(self) -> Actions:
        """Start clients up to the concurrency, after all arrivals of an instant, from the newest version."""
        actions: Actions = []
        while len(self.active) < self.concurrency and len(self.pool):
            client = self.pool[below(key(self.setup.seed, "dispatch", self.dispatches), len(self.pool))]
            self.pool.remove(client)
            self.active[client] = self.dispatches
            actions += self.invite(client)
            if self.setup.timeout_seconds is not None:
                self.timed[self.dispatches] = client
                actions.append(SetTimer(self.dispatches, self.setup.timeout_seconds))
            self.dispatches += 1
        return actions

    def timer(self, token: int) -> Actions:
        """After a timeout, start another client instead of the one that did not answer."""
        client = self.timed.pop(token, -1)
        if self.active.get(client) != token:
            return []
        del self.active[client]
        if not len(self.pool) and not self.active:
            self.include_all()
        fresh = self.end_of_instant()
        return [Resample((client,), tuple(a.client for a in fresh if isinstance(a, Send))), *fresh]

    def include_all(self) -> None:
        """Make every client idle after the last one has timed out (hook)."""
        self.pool = ClientPool(self.setup.num_clients)

    def returned(self, client: int) -> Actions:
        """Mark a client that returned as idle: it has lost its job."""
        self.check_client(client)
        self.active.pop(client, None)
        self.pool.add(client)
        return [EndOfInstant()]

    def on_update(self, update: Update) -> Actions:
        """Buffer or discard the update; its client is idle again."""
        self.active.pop(update.client, None)
        handled = super().on_update(update) if self.accepts(update) else [Discard(update)]
        return [*handled, EndOfInstant()]


class EveryArrival(ConcurrentClients):
    """Merge every update when it arrives, with weight 1: nothing to weight it against by samples."""

    uses_updates_per_round: ClassVar[bool] = False
    weightings: ClassVar[tuple[str, ...]] = ("uniform",)

    def staleness(self, update: Update) -> int:
        """Return the number of merges since the start version of an update."""
        return self.version - update.version
