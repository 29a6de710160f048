"""MIFA: the server keeps the last update of every client and steps along the mean of all of them.

Gu, Huang, Zhang, Huang: Fast Federated Learning in the Presence of Arbitrary Device Unavailability (NeurIPS 2021).

    draw n clients;  each starts from w[t];  when all have answered:  G_i ← Δ_i for them,
    w[t+1] = w[t] − η · (1/N) Σ_{all i} G_i,   G_i = 0 before the first answer of client i

The server keeps the sum of all G_i, so a merge costs O(n) and not O(N). In the paper the clients that answer are those
that are available; here they are drawn without replacement.
"""

from __future__ import annotations

from typing import Any

from .fedavg import FedAvg
from .protocol import Assignment, Merge, StateSpec, StateVector, Update
from .setup import NoSettings, Setup

SUM = StateVector("sum")


class Mifa(FedAvg):
    """FedAvg with remembered updates of the clients that do not take part in a round."""

    name = "mifa"
    summary = "synchronous: every round steps along the mean of the last updates of all clients"
    citation = "Gu et al., NeurIPS 2021"
    equation = "w[t+1] = w[t] − η/N Σ_{all i} G_i, G_i = last Δ_i"
    settings_type = NoSettings
    weightings = ("uniform",)

    @classmethod
    def state_vectors(cls, setup: Setup, settings: Any) -> tuple[StateSpec, ...]:  # noqa: ARG003 (overrides a hook)
        """Return the sum, and the last update of every client."""
        return StateSpec("sum"), StateSpec("last", setup.num_clients, per_client=True)

    def with_replacement(self) -> bool:
        """Return False: a client answers once in a round."""
        return False

    def combine(self, received: list[tuple[Update, int]]) -> Merge:
        """Replace the last updates of the clients that answered, and step along the mean of all."""
        share = 1.0 / self.setup.num_clients
        updates = [update for update, _ in received]
        last = [StateVector("last", update.client) for update in updates]
        change = Assignment(
            SUM, (), tuple((u, 1.0) for u in updates), ((SUM, 1.0), *((vector, -1.0) for vector in last))
        )
        kept = (Assignment(vector, (), ((u, 1.0),)) for u, vector in zip(updates, last, strict=True))
        return self.merge([(u, 0.0) for u in updates], states=((SUM, -share),), before=(change, *kept))
