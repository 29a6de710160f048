"""Correct algorithms for tests, which a broken algorithm changes in one place."""

from __future__ import annotations

from typing import Any, ClassVar

from defedavg.algorithms import ServerMachine, Setup
from defedavg.algorithms.base import Actions
from defedavg.algorithms.protocol import Broadcast, ClientPolicy, Merge, Send, Update

SETUP = Setup(100, 2, 50)


class Correct(ServerMachine):
    """Merges any n updates; sends the newest version to the clients whose updates it merged."""

    name = "mine"
    summary = "an algorithm for tests"
    citation = "none"
    equation = "w[t+1] = w[t] − η/n Σ Δ"
    policy = ClientPolicy()
    state_attributes: ClassVar[tuple[str, ...]] = ("buffer",)

    def __init__(self, setup: Setup, settings: Any = None) -> None:
        super().__init__(setup, settings)
        self.buffer: list[Update] = []

    def start(self) -> Actions:
        return [Send(client, 0) for client in range(self.setup.num_clients)]

    def returned(self, client: int) -> Actions:
        super().returned(client)
        return [Send(client, self.version)]

    def on_update(self, update: Update) -> Actions:
        self.buffer.append(update)
        if len(self.buffer) < self.setup.updates_per_round:
            return []
        merged, self.buffer = self.buffer, []
        return [self.merge_of(merged), *self.after(merged)]

    def merge_of(self, merged: list[Update]) -> Merge:
        return self.merge([(update, -1.0 / len(merged)) for update in merged])

    def after(self, merged: list[Update]) -> Actions:
        return [Send(update.client, self.version) for update in merged]


class CorrectBroadcast(Correct):
    """The same, with broadcasts."""

    broadcasts = True

    def start(self) -> Actions:
        return [Broadcast(0)]

    def after(self, merged: list[Update]) -> Actions:
        return [Broadcast(self.version)]
