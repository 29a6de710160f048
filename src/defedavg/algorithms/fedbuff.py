"""FedBuff: a constant number of clients train concurrently; a full buffer of n updates is merged.

Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba: Federated Learning with Buffered Asynchronous Aggregation
(AISTATS 2022).

    after each arrival another uniformly drawn idle client starts from the newest version;
    after n arrivals:  w[t+1] = w[t] − η · (1/n) Σ s(staleness) Δ,   s = 1  or  1/sqrt(1 + staleness)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..errors import UserError, unknown
from ..rng import below, key
from .base import Actions, BufferedRound, Setup
from .client_pool import ClientPool
from .protocol import ClientPolicy, EndOfInstant, Resample, Send, SetTimer, Update
from .setting_checks import check_concurrency

STALENESS: dict[str, Callable[[int], float]] = {"constant": lambda _: 1.0, "sqrt": lambda s: 1.0 / math.sqrt(1.0 + s)}


@dataclass(frozen=True, slots=True)
class FedBuffSettings:
    """How many clients train concurrently, and the weight of a stale update."""

    concurrency: int = field(default=0, metadata={"help": "clients that train concurrently; 0: all"})
    staleness: str = field(default="constant", metadata={"help": "weight: constant, or sqrt: 1/sqrt(1 + staleness)"})

    def __post_init__(self) -> None:
        if self.staleness not in STALENESS:
            raise unknown("staleness weight of fedbuff", self.staleness, STALENESS)
        check_concurrency("fedbuff", self.concurrency)


class FedBuff(BufferedRound):
    """Draw an idle client whenever another finishes; fast clients finish, and so participate, more often."""

    name = "fedbuff"
    summary = "buffered asynchronous: a fixed number of clients train concurrently, every n arrivals are merged"
    citation = "Nguyen et al., AISTATS 2022"
    equation = "w[t+1] = w[t] − η/n Σ s(staleness)·Δ"
    policy = ClientPolicy(allow_same_version=True)
    settings_type: ClassVar[type[Any]] = FedBuffSettings
    state_attributes = ("active", "dispatches", "timed")

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
            actions.append(Send(client, self.version))
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
            self.pool = ClientPool(self.setup.num_clients)  # every client timed out: include all again
        fresh = self.end_of_instant()
        return [Resample((client,), tuple(a.client for a in fresh if isinstance(a, Send))), *fresh]

    def returned(self, client: int) -> Actions:
        """Mark a client that returned as idle: it has lost its job."""
        self.check_client(client)
        self.active.pop(client, None)
        self.pool.add(client)
        return [EndOfInstant()]

    def weight(self, update: Update) -> float:
        """Return the weight that the setting gives to the staleness."""
        return STALENESS[self.settings.staleness](self.version - update.version)

    def on_update(self, update: Update) -> Actions:
        """Buffer the update; its client is idle again."""
        self.active.pop(update.client, None)
        return [*super().on_update(update), EndOfInstant()]
