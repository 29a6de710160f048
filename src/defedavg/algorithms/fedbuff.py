"""FedBuff: a constant number of clients train concurrently; a full buffer of n updates is merged.

Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba: Federated Learning with Buffered Asynchronous Aggregation
(AISTATS 2022).

    after each arrival another uniformly drawn idle client starts from the newest version;
    after n arrivals:  w[t+1] = w[t] − η · (1/n) Σ s(staleness) Δ,   s = 1  or  1/sqrt(1 + staleness)

With distinct_clients, which is not its paper's form, the n updates of a round come from n clients: one that has
answered is not drawn again before the merge.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..errors import unknown
from .base import Actions
from .dispatching import ConcurrentClients
from .protocol import Merge, Update
from .setting_checks import check_concurrency

STALENESS: dict[str, Callable[[int], float]] = {"constant": lambda _: 1.0, "sqrt": lambda s: 1.0 / math.sqrt(1.0 + s)}


@dataclass(frozen=True, slots=True)
class FedBuffSettings:
    """How many clients train concurrently, and the weight of a stale update."""

    concurrency: int = field(default=0, metadata={"help": "clients that train concurrently; 0: all"})
    distinct_clients: bool = field(
        default=False, metadata={"help": "a client that has answered waits for the merge: a round has n clients"}
    )
    staleness: str = field(default="constant", metadata={"help": "weight: constant, or sqrt: 1/sqrt(1 + staleness)"})

    def __post_init__(self) -> None:
        if self.staleness not in STALENESS:
            raise unknown("staleness weight of fedbuff", self.staleness, STALENESS)
        check_concurrency("fedbuff", self.concurrency)


class FedBuff(ConcurrentClients):
    """Draw an idle client whenever another finishes; fast clients finish, and so participate, more often."""

    name = "fedbuff"
    summary = "buffered asynchronous: a fixed number of clients train concurrently, every n arrivals are merged"
    citation = "Nguyen et al., AISTATS 2022"
    equation = "w[t+1] = w[t] − η/n Σ s(staleness)·Δ"
    settings_type: ClassVar[type[Any]] = FedBuffSettings

    def check_setup(self) -> None:
        """Also require n clients where those of a round are distinct."""
        super().check_setup()
        if self.settings.distinct_clients:
            self.require_enough_clients("with distinct_clients each has one update in a round, so lower it")

    def weight(self, update: Update) -> float:
        """Return the weight that the setting gives to the staleness."""
        return STALENESS[self.settings.staleness](self.version - update.version)

    def on_update(self, update: Update) -> Actions:
        """Buffer the update; its client is idle again, at once or after the merge."""
        if self.settings.distinct_clients:
            self.pool.remove(update.client)
        return super().on_update(update)

    def combine(self, buffer: list[Update]) -> Merge:
        """Merge the buffer; clients that waited for it are idle again."""
        if self.settings.distinct_clients:
            for update in buffer:
                self.pool.add(update.client)
        return super().combine(buffer)

    def end_of_instant(self) -> Actions:
        """Merge what has arrived if all clients that are left wait for the merge; then start clients."""
        stuck = self.settings.distinct_clients and self.buffer and not (len(self.pool) or self.active)
        return [*(self.finish_round() if stuck else ()), *super().end_of_instant()]

    def include_all(self) -> None:
        """Make every client idle, unless some wait for a merge and can continue."""
        if not (self.settings.distinct_clients and self.buffer):
            super().include_all()

    def returned(self, client: int) -> Actions:
        """Mark a client that returned as idle, unless it waits for the merge."""
        actions = super().returned(client)
        if self.settings.distinct_clients and any(update.client == client for update in self.buffer):
            self.pool.remove(client)
        return actions
