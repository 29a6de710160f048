"""DeFedAvg-IID: any n updates make a round, whoever they come from and whatever version they started from.

Wang, Li, Jin, Zhang: Achieving Linear Speedup in Asynchronous Federated Learning with Heterogeneous Clients, Alg. 2.

    as soon as n updates have arrived:  w[t+1] = w[t] − η · (1/n) Σ Δ;  broadcast w[t+1] to all N

Fast clients take part more often, which is harmless where all clients' data are alike.
"""

from __future__ import annotations

from ..protocol import Broadcast, Redraw, Rule, Send
from .server import Actions, OpenRound


class DeFedAvgIID(OpenRound):
    """The first n updates to arrive are merged, and everyone is told."""

    name = "defedavg-iid"
    summary = "asynchronous, for data that are alike: merges the first n updates, no client ever waits for another"
    citation = "Wang, Li, Jin, Zhang: DeFedAvg, Algorithm 2"
    equation = "w[t+1] = w[t] − η/n Σ_{first n} Δ"
    rule = Rule()
    broadcasts = True

    def _check_setup(self) -> None:
        super()._check_setup()
        self._need_enough_clients("each gives one update per version, so lower it")

    def start(self) -> Actions:
        """Give everyone the first version."""
        return self._opened()

    def returned(self, client: int) -> Actions:
        """Give a client that is back something to train from."""
        super().returned(client)
        return [Send(client, self.version)]

    def timer(self, token: int) -> Actions:
        """Too few clients are left to fill the round: merge what there is, or wait on."""
        if token != self._token:
            return []
        return [Redraw((), ()), *self._finish()] if self._buffer else self._arm()

    def _opened(self) -> Actions:
        return [Broadcast(self.version), *self._arm()]
