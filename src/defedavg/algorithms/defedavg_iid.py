"""DeFedAvg-IID: a round merges any n updates, from any clients and any start versions.

Wang, Li, Jin, Zhang: Achieving Linear Speedup in Asynchronous Federated Learning with Heterogeneous Clients, Alg. 2.

    as soon as n updates have arrived:  w[t+1] = w[t] − η · (1/n) Σ Δ;  broadcast w[t+1] to all N

Fast clients participate more often. That does no harm if all clients have the same data distribution. The buffers of a
client separate training from communication, so a client starts its next job while its update is being sent.
"""

from __future__ import annotations

from .base import Actions, BufferedRound
from .protocol import Broadcast, ClientPolicy, Resample, Send


class DeFedAvgIID(BufferedRound):
    """Merge the first n updates that arrive, then broadcast."""

    name = "defedavg-iid"
    summary = "asynchronous, for IID data: merges the first n updates; no client blocks another"
    citation = "Wang, Li, Jin, Zhang: DeFedAvg, Algorithm 2"
    equation = "w[t+1] = w[t] − η/n Σ_{first n} Δ"
    policy = ClientPolicy(background_upload=True)
    broadcasts = True

    def check_setup(self) -> None:
        """Also require n clients: each trains once per version."""
        super().check_setup()
        self.require_enough_clients("each trains once per version, so lower it")

    def start(self) -> Actions:
        """Broadcast version 0."""
        return self.after_merge()

    def returned(self, client: int) -> Actions:
        """Send the newest version to a client that returned."""
        super().returned(client)
        return [Send(client, self.version)]

    def timer(self, token: int) -> Actions:
        """After a timeout, merge the updates that have arrived, if any."""
        if token != self.timer_token:
            return []
        return [Resample((), ()), *self.finish_round()] if self.buffer else self.start_timeout()

    def after_merge(self) -> Actions:
        """Broadcast the new version."""
        return [Broadcast(self.version), *self.start_timeout()]
