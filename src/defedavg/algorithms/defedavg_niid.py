"""DeFedAvg-nIID: clients train on at their own pace; every round collects from n clients drawn uniformly.

Wang, Li, Jin, Zhang: Achieving Linear Speedup in Asynchronous Federated Learning with Heterogeneous Clients, Alg. 1.

    draw a multiset I of n clients with replacement;  each hands over its send buffer, or its running job when it ends;
    w[t+1] = w[t] − η · (1/n) Σ_{i ∈ I} Δ_i;  broadcast w[t+1] to all N

Uniform draws whatever the speed: fast clients get no bonus, so data that differ between clients do no harm.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..errors import unknown
from .base import Actions, SampledRound
from .protocol import Broadcast, ClientPolicy, Request, Send, ServerAction

MODES = {
    "eager": ClientPolicy(hold_until_requested=True),
    "thrifty": ClientPolicy(hold_until_requested=True, pause_when_full=True),
}


@dataclass(frozen=True, slots=True)
class DeFedAvgNIIDSettings:
    """How clients spend the time between two requests."""

    mode: str = field(
        default="eager",
        metadata={"help": "eager: train on, a newer update overwrites; thrifty: rest until the update is collected"},
    )

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise unknown("mode of defedavg-niid", self.mode, MODES)


class DeFedAvgNIID(SampledRound):
    """Delayed updates of uniformly drawn clients, each from the send buffer."""

    name = "defedavg-niid"
    summary = "asynchronous, for data that differ: uniform draws collect delayed updates from send buffers"
    citation = "Wang, Li, Jin, Zhang: DeFedAvg, Algorithm 1"
    equation = "w[t+1] = w[t] − η/n Σ_{i∈I} Δ_i, I drawn with replacement"
    policy = MODES["eager"]
    settings_type = DeFedAvgNIIDSettings
    broadcasts = True

    @classmethod
    def client_policy(cls, settings: Any) -> ClientPolicy:
        """Eager or thrifty."""
        return MODES[settings.mode]

    def start(self) -> Actions:
        """Give everyone the first version, then open the first round."""
        return self.close_round()

    def returned(self, client: int) -> Actions:
        """Give a client that is back something to train from."""
        return [Send(client, self.version), *super().returned(client)]

    def invite(self, client: int) -> ServerAction:
        return Request(client)

    def close_round(self) -> Actions:
        return [Broadcast(self.version), *self.open_round()]
