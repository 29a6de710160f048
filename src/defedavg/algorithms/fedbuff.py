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

from ..errors import unknown
from .dispatching import ConcurrentClients
from .protocol import Update
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


class FedBuff(ConcurrentClients):
    """Draw an idle client whenever another finishes; fast clients finish, and so participate, more often."""

    name = "fedbuff"
    summary = "buffered asynchronous: a fixed number of clients train concurrently, every n arrivals are merged"
    citation = "Nguyen et al., AISTATS 2022"
    equation = "w[t+1] = w[t] − η/n Σ s(staleness)·Δ"
    settings_type: ClassVar[type[Any]] = FedBuffSettings

    def weight(self, update: Update) -> float:
        """Return the weight that the setting gives to the staleness."""
        return STALENESS[self.settings.staleness](self.version - update.version)
