"""ACE and ACED: every arrival is a step along the mean of the latest updates of all clients.

Chang, Yao, Krishnamurthy, Shelton, Chakraborty, Swami, Oymak, Roy-Chowdhury: Mitigating Participation Imbalance Bias in
Asynchronous Federated Learning (2025).

    the update of client i arrives:  G_i ← Δ_i,   w[t+1] = w[t] − η · mean of G_j over the clients j in A
    ACE:   A = all clients that have answered;
    ACED:  A = those of them whose latest update started at most max_staleness merges ago

At the start the mean is over the clients that have answered so far: the first merge is a step along one update. After
one answer of each client it is over all N. In ACED an arrival that is itself older than the bound is discarded, without
a step along the others; its client's earlier update is older still, so it is outside A, too. The paper has one gradient
per message; here a job has local steps. The server keeps the sum over A, so a merge costs O(1) and not O(N).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..errors import UserError
from .dispatching import EveryArrival
from .protocol import Assignment, Merge, StateSpec, StateVector, Update
from .setting_checks import check_concurrency
from .setup import Setup

SUM = StateVector("sum")


@dataclass(frozen=True, slots=True)
class AceSettings:
    """Which of the latest updates count."""

    concurrency: int = field(default=0, metadata={"help": "clients that train concurrently; 0: all"})
    max_staleness: int = field(default=0, metadata={"help": "ACED: leave out updates staler than this; 0: none (ACE)"})

    def __post_init__(self) -> None:
        check_concurrency("ace", self.concurrency)
        if self.max_staleness < 0:
            raise UserError(f"ace: max_staleness is {self.max_staleness}; give a number of merges, or 0 for no bound")


class Ace(EveryArrival):
    """Fast clients send more updates, but every client counts once."""

    name = "ace"
    summary = "asynchronous: every arrival is a step along the mean of the latest updates of all clients"
    citation = "Chang et al., 2025"
    equation = "w[t+1] = w[t] − η · mean_{j∈A} G_j, G_j = latest Δ_j"
    settings_type = AceSettings
    state_attributes = ("latest", "started")

    def __init__(self, setup: Setup, settings: Any = None) -> None:
        super().__init__(setup, settings)
        self.latest: dict[int, int] = {}  # client in A -> start version of its latest update
        self.started: dict[int, list[int]] = {}  # start version -> clients whose update may have to leave A

    @classmethod
    def state_vectors(cls, setup: Setup, settings: Any) -> tuple[StateSpec, ...]:  # noqa: ARG003 (overrides a hook)
        """Return the sum, and the latest update of every client in A."""
        return StateSpec("sum"), StateSpec("last", setup.num_clients, per_client=True)

    def accepts(self, update: Update) -> bool:
        """Return whether the update is within the bound."""
        return not self.settings.max_staleness or self.staleness(update) <= self.settings.max_staleness

    def expired(self) -> list[int]:
        """Remove the clients from A whose latest update has just become too stale; return them in order."""
        oldest = self.version - self.settings.max_staleness - 1
        found = sorted({client for client in self.started.pop(oldest, ()) if self.latest[client] == oldest})
        for client in found:
            del self.latest[client]
        return found

    def combine(self, buffer: list[Update]) -> Merge:
        """Replace the latest update of the client that answered, and step along the mean over A."""
        [update] = buffer
        self.latest[update.client] = update.version
        removed: list[int] = []
        if self.settings.max_staleness:
            self.started.setdefault(update.version, []).append(update.client)
            removed = self.expired()
        last, left = StateVector("last", update.client), [StateVector("last", client) for client in removed]
        share = 1.0 / len(self.latest)
        change = Assignment(SUM, (), ((update, 1.0),), ((SUM, 1.0), *((vector, -1.0) for vector in (last, *left))))
        kept = (Assignment(last, (), ((update, 1.0),)), *(Assignment(vector) for vector in left))
        return self.merge([(update, 0.0)], states=((SUM, -share),), before=(change, *kept))
