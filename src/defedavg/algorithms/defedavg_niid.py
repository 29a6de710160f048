"""DeFedAvg-nIID: clients train at their own pace; every round collects updates of n uniformly drawn clients.

Wang, Li, Jin, Zhang: Achieving Linear Speedup in Asynchronous Federated Learning with Heterogeneous Clients, Alg. 1.

    draw a multiset I of n clients with replacement;  each uploads its send buffer, or its running job when that ends;
    w[t+1] = w[t] − η · (1/n) Σ_{i ∈ I} Δ_i;  broadcast w[t+1] to all N

The draw is uniform whatever the speed of a client, so fast clients do not bias the model toward their data.
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
    """What clients do between two requests."""

    mode: str = field(
        default="eager",
        metadata={"help": "eager: keep training and overwrite; thrifty: pause until the update is collected"},
    )

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise unknown("mode of defedavg-niid", self.mode, MODES)


class DeFedAvgNIID(SampledRound):
    """Merge delayed updates from the send buffers of uniformly drawn clients."""

    name = "defedavg-niid"
    summary = "asynchronous, for non-IID data: uniform draws collect delayed updates from send buffers"
    citation = "Wang, Li, Jin, Zhang: DeFedAvg, Algorithm 1"
    equation = "w[t+1] = w[t] − η/n Σ_{i∈I} Δ_i, I drawn with replacement"
    policy = MODES["eager"]
    settings_type = DeFedAvgNIIDSettings
    broadcasts = True
    requests_once = True

    @classmethod
    def client_policy(cls, settings: Any) -> ClientPolicy:
        """Return the policy of the mode: eager or thrifty."""
        return MODES[settings.mode]

    def start(self) -> Actions:
        """Broadcast version 0, then open the first round."""
        return self.close_round()

    def returned(self, client: int) -> Actions:
        """Send the newest version to a client that returned."""
        return [Send(client, self.version), *super().returned(client)]

    def invite(self, client: int) -> ServerAction:
        """Request the update in the send buffer."""
        return Request(client)

    def close_round(self) -> Actions:
        """Broadcast the new version, then open the next round."""
        return [Broadcast(self.version), *self.open_round()]
