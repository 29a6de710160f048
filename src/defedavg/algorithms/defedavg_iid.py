"""DeFedAvg-IID: any n updates make a round, whoever they come from and whatever version they started from.

Wang, Li, Jin, Zhang: Achieving Linear Speedup in Asynchronous Federated Learning with Heterogeneous Clients, Alg. 2.

    as soon as n updates have arrived:  w[t+1] = w[t] − η · (1/n) Σ Δ;  broadcast w[t+1] to all N

Fast clients take part more often, which is harmless where all clients' data are alike.
"""

from __future__ import annotations

from .base import Actions, BufferedRound
from .protocol import Broadcast, ClientPolicy, Resample, Send


class DeFedAvgIID(BufferedRound):
    """The first n updates to arrive are merged, and everyone is told."""

    name = "defedavg-iid"
    summary = "asynchronous, for data that are alike: merges the first n updates, no client ever waits for another"
    citation = "Wang, Li, Jin, Zhang: DeFedAvg, Algorithm 2"
    equation = "w[t+1] = w[t] − η/n Σ_{first n} Δ"
    policy = ClientPolicy()
    broadcasts = True

    def check_setup(self) -> None:
        super().check_setup()
        self.require_enough_clients("each gives one update per version, so lower it")

    def start(self) -> Actions:
        """Give everyone the first version."""
        return self.after_merge()

    def returned(self, client: int) -> Actions:
        """Give a client that is back something to train from."""
        super().returned(client)
        return [Send(client, self.version)]

    def timer(self, token: int) -> Actions:
        """Too few clients are left to fill the round: merge what there is, or wait on."""
        if token != self.timer_token:
            return []
        return [Resample((), ()), *self.finish_round()] if self.buffer else self.start_timeout()

    def after_merge(self) -> Actions:
        return [Broadcast(self.version), *self.start_timeout()]
