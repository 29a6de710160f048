"""AREA (asynchronous exact averaging): a client sends how its model changed since it last sent one.

Iakovidou, Kim: Asynchronous Federated Stochastic Optimization for Heterogeneous Objectives Under Arbitrary Delays
(arXiv 2405.10123, 2024).

    clients start as in FedBuff;  client i sends x_i⁺ − y_i, where x_i⁺ = w[v_i] − Δ_i, and sets y_i ← x_i⁺;
    after n arrivals:  w[t+1] = w[t] + (1/N) Σ_{arrived} (w[v_i] − Δ_i − y_i),   y_i = w[0] before the first answer

The server's model is thus the mean of all clients' last models, however often each of them answers. There is no global
rate. In the paper y_i is the memory of client i; here the server keeps it, which is the same arithmetic. If a client
answers twice in one round, its two messages sum to x_i⁺ − y_i of the second. The paper lets the server step at its own
times; here it steps after n arrivals. Its decreasing local rates are left to the settings of [training].
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from .dispatching import ConcurrentClients
from .protocol import Assignment, Merge, StateSpec, StateVector, Update
from .setting_checks import check_concurrency
from .setup import Setup


@dataclass(frozen=True, slots=True)
class AreaSettings:
    """How many clients train concurrently."""

    concurrency: int = field(default=0, metadata={"help": "clients that train concurrently; 0: all"})

    def __post_init__(self) -> None:
        check_concurrency("area", self.concurrency)


class Area(ConcurrentClients):
    """Average the last models of all clients, of which those that arrived are new."""

    name = "area"
    summary = "buffered asynchronous: the model is the mean of the last models of all clients, fast or slow"
    citation = "Iakovidou, Kim, 2024"
    equation = "w[t+1] = w[t] + 1/N Σ (w[v_i] − Δ_i − y_i), y_i = last w[v_i] − Δ_i"
    settings_type: ClassVar[type[Any]] = AreaSettings
    uses_global_lr = False
    weightings: ClassVar[tuple[str, ...]] = ("uniform",)

    @classmethod
    def state_vectors(cls, setup: Setup, settings: Any) -> tuple[StateSpec, ...]:  # noqa: ARG003 (overrides a hook)
        """Return the last model of every client."""
        return (StateSpec("model", setup.num_clients, "model", per_client=True),)

    def combine(self, buffer: list[Update]) -> Merge:
        """Replace the models of the clients that answered in the mean of all."""
        newest = {update.client: update for update in buffer}  # in order of arrival
        shares = [(update, self.share_of(client)) for client, update in sorted(newest.items())]
        kept = (Assignment(StateVector("model", u.client), ((u.version, 1.0),), ((u, -1.0),)) for u in buffer)
        merged = [(u, -self.share_of(u.client) if newest[u.client] is u else 0.0) for u in buffer]
        past = ((self.version, 1.0), *((update.version, share) for update, share in shares))
        states = ((StateVector("model", update.client), -share) for update, share in shares)
        return self.merge(merged, past, states=states, after=kept)
