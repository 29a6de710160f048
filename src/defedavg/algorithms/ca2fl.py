"""CA²FL: buffered asynchronous merges, calibrated with the last update of every client.

Wang, Cao, Wu, Chen, Chen: Tackling the Data Heterogeneity in Asynchronous Federated Learning with Cached Update
Calibration (ICLR 2024).

    clients are started as in FedBuff;  h_i is the last merged update of client i, 0 before its first;  after n arrivals
    v = (1/N) Σ_{all i} h_i + (1/n) Σ (Δ_i − h_i);   w[t+1] = w[t] − η · v;   then h_i ← Δ_i for the clients of the n

If one client sent several of the n updates, each is compared with the h_i before the merge, and the latest one becomes
h_i. The server keeps Σ h_i, so a merge costs O(n) and not O(N). Left out: CA²FL's variants with adaptive server steps;
set training.server_optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .dispatching import ConcurrentClients
from .protocol import Assignment, Merge, StateSpec, StateVector, Update
from .setting_checks import check_concurrency
from .setup import Setup

SUM, CHANGE = StateVector("sum"), StateVector("change")


@dataclass(frozen=True, slots=True)
class CA2FLSettings:
    """How many clients train concurrently."""

    concurrency: int = field(default=0, metadata={"help": "clients that train concurrently; 0: all"})

    def __post_init__(self) -> None:
        check_concurrency("ca2fl", self.concurrency)


class CA2FL(ConcurrentClients):
    """FedBuff whose merges also move along the last updates of the clients that are not in the buffer."""

    name = "ca2fl"
    summary = "buffered asynchronous: every n arrivals are merged, calibrated with the last update of every client"
    citation = "Wang et al., ICLR 2024"
    equation = "w[t+1] = w[t] − η·(1/N Σ_{all i} h_i + 1/n Σ (Δ_i − h_i)), h_i = last Δ_i"
    settings_type = CA2FLSettings
    weightings = ("uniform",)

    @classmethod
    def state_vectors(cls, setup: Setup, settings: Any) -> tuple[StateSpec, ...]:  # noqa: ARG003 (overrides a hook)
        """Return the sum, the last update of every client, and Σ (Δ_i − h_i), which is zero between merges."""
        return StateSpec("sum"), StateSpec("change"), StateSpec("last", setup.num_clients, per_client=True)

    def combine(self, buffer: list[Update]) -> Merge:
        """Step along the calibrated mean, then replace the last updates of the clients in the buffer."""
        n = len(buffer)
        latest = {update.client: update for update in buffer}  # in the order of arrival, so of their indices
        last = {client: StateVector("last", client) for client in latest}
        share, replaced = 1.0 / self.setup.num_clients, [u for u in buffer if latest[u.client] is not u]
        change = Assignment(
            CHANGE, (), tuple((u, 1.0) for u in buffer), tuple((last[update.client], -1.0) for update in buffer)
        )
        # An update that a later one of its client replaces is in the change, but not in the sum of the last ones.
        sums = Assignment(
            SUM,
            (),
            tuple((update, -1.0) for update in replaced),
            ((SUM, 1.0), (CHANGE, 1.0), *((last[update.client], 1.0) for update in replaced)),
        )
        kept = (Assignment(last[client], (), ((update, 1.0),)) for client, update in latest.items())
        states, after = ((SUM, -share), (CHANGE, -1.0 / n)), (sums, *kept, Assignment(CHANGE))
        return self.merge([(u, 0.0) for u in buffer], states=states, before=(change,), after=after)
