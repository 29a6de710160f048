"""FedBuff: a constant number of clients train at any time; a buffer of n updates makes a round.

Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba: Federated Learning with Buffered Asynchronous Aggregation
(AISTATS 2022).

    each arrival lets another uniformly drawn free client start from the newest version;
    after n arrivals:  w[t+1] = w[t] − η · (1/n) Σ s(staleness) Δ,   s = 1  or  1/sqrt(1 + staleness)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ..errors import UserError, unknown
from ..rng import below, key
from .base import Actions, BufferedRound, Setup
from .client_pool import ClientPool
from .protocol import ClientPolicy, EndOfInstant, Resample, Send, SetTimer, Update

STALENESS = {"constant": lambda delay: 1.0, "sqrt": lambda delay: 1.0 / math.sqrt(1.0 + delay)}


@dataclass(frozen=True, slots=True)
class FedBuffSettings:
    """How many train at once, and what a late update is worth."""

    concurrency: int = field(default=0, metadata={"help": "clients training at once; 0: all of them"})
    staleness: str = field(default="constant", metadata={"help": "weight of a late update: constant or sqrt"})

    def __post_init__(self) -> None:
        if self.staleness not in STALENESS:
            raise unknown("staleness weight of fedbuff", self.staleness, STALENESS)
        if self.concurrency < 0:
            raise UserError(f"fedbuff: concurrency is {self.concurrency}; give a number of clients, or 0 for all")


class FedBuff(BufferedRound):
    """Free clients are drawn as others finish; fast ones finish, and so count, more often."""

    name = "fedbuff"
    summary = "buffered asynchronous: a fixed number train at once, every n arrivals are merged"
    citation = "Nguyen et al., AISTATS 2022"
    equation = "w[t+1] = w[t] − η/n Σ s(staleness)·Δ"
    policy = ClientPolicy(allow_same_version=True)
    settings_type = FedBuffSettings

    def __init__(self, setup: Setup, settings: Any = None) -> None:
        super().__init__(setup, settings)
        self.active: dict[int, int] = {}  # client -> number of its dispatch
        self.dispatches = 0
        self.timed: dict[int, int] = {}  # dispatch -> client, where a timer runs

    def check_setup(self) -> None:
        super().check_setup()
        if self.settings.concurrency > self.setup.num_clients:
            raise UserError(
                f"fedbuff: concurrency is {self.settings.concurrency} but there are {self.setup.num_clients} clients"
            )

    @property
    def concurrency(self) -> int:
        """How many clients train at once."""
        return int(self.settings.concurrency) or self.setup.num_clients

    def start(self) -> Actions:
        """Fill every place."""
        return self.end_of_instant()

    def end_of_instant(self) -> Actions:
        """Fill the free places: after all arrivals of a moment, so that they start from the newest version."""
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
        """A client did not come back in time: its place goes to another."""
        client = self.timed.pop(token, -1)
        if self.active.get(client) != token:
            return []
        del self.active[client]
        if not len(self.pool) and not self.active:
            self.pool = ClientPool(self.setup.num_clients)  # nobody is left to trust: try everybody again
        fresh = self.end_of_instant()
        return [Resample((client,), tuple(a.client for a in fresh if isinstance(a, Send))), *fresh]

    def returned(self, client: int) -> Actions:
        """A client that is back has lost its job: it is free."""
        self.check_client(client)
        self.active.pop(client, None)
        self.pool.add(client)
        return [EndOfInstant()]

    def weight(self, update: Update) -> float:
        return STALENESS[self.settings.staleness](self.version - update.version)

    def on_update(self, update: Update) -> Actions:
        self.active.pop(update.client, None)
        return [*super().on_update(update), EndOfInstant()]

    def after_merge(self) -> Actions:
        return []
