"""Algorithms for tests of deployments: one whose jobs start from clients' models, one that restarts stale clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from defedavg.algorithms import ALGORITHMS, BufferedRound, ServerMachine, Setup, register
from defedavg.algorithms.base import Actions
from defedavg.algorithms.protocol import (
    VERSION,
    Assignment,
    ClientPolicy,
    Discard,
    Merge,
    Request,
    Send,
    StateSpec,
    StateVector,
    Update,
)


class OwnModels(BufferedRound):
    """Every client has a model on the server, quantised, and starts from its mean with the newest version."""

    name = "own-models"
    summary = citation = equation = "for tests"
    policy = ClientPolicy()
    job_start = (("model", 0.5), (VERSION, 0.5))

    @classmethod
    def state_vectors(cls, setup: Setup, settings: Any) -> tuple[StateSpec, ...]:
        return (StateSpec("model", setup.num_clients, "model", per_client=True), StateSpec("sum"))

    def start(self) -> Actions:
        return [Send(client, 0) for client in range(self.setup.num_clients)]

    def returned(self, client: int) -> Actions:
        super().returned(client)
        waits = any(update.client == client for update in self.buffer)  # for the merge, which assigns its model
        return [] if waits else [Send(client, self.version)]

    def finish_round(self) -> Actions:
        senders = [update.client for update in self.buffer]
        merged = super().finish_round()
        return [*merged, *(Send(client, self.version) for client in senders)]

    def combine(self, buffer: list[Update]) -> Merge:
        new, total = self.version + 1, StateVector("sum")
        models = [(StateVector("model", update.client), update) for update in buffer]
        after = [
            Assignment(model, ((new, 0.5),), ((update, -0.5),), ((model, 0.5),), "quantise(8)")
            for model, update in models
        ]
        summed = Assignment(total, (), tuple((update, 1.0) for update in buffer), ((total, 0.5),))
        mean = [(update, -0.5 / len(buffer)) for update in buffer]
        return self.merge(mean, states=((total, -0.1),), before=(summed,), after=after, rate_scale=0.9)


class MergesOneByOne(OwnModels):
    """Merges the updates of a full buffer one after the other, all after one event."""

    name = "one-by-one"

    def finish_round(self) -> Actions:
        buffer, self.buffer = self.buffer, []
        return [*(self.combine([update]) for update in buffer), *(Send(u.client, self.version) for u in buffer)]


class RestartsStale(ServerMachine):
    """Merges every update; a client whose job is ``MAX_DELAY`` versions behind restarts from the newest."""

    name = "restarts-stale"
    summary = citation = equation = "for tests"
    policy = ClientPolicy(hold_until_requested=True, restart_on_model=True)
    uses_updates_per_round = False
    state_attributes: ClassVar[tuple[str, ...]] = ("sent",)
    MAX_DELAY: ClassVar[int] = 3

    def __init__(self, setup: Setup, settings: Any = None) -> None:
        super().__init__(setup, settings)
        self.sent: dict[int, int] = {}

    def invite(self, client: int) -> Actions:
        self.sent[client] = self.version
        return [Send(client, self.version), Request(client)]

    def start(self) -> Actions:
        return [action for client in range(self.setup.num_clients) for action in self.invite(client)]

    def returned(self, client: int) -> Actions:
        super().returned(client)
        return self.invite(client)

    def on_update(self, update: Update) -> Actions:
        if self.version - update.version >= self.MAX_DELAY:  # arrived before the newer version reached its client
            return [Discard(update), *self.invite(update.client)]
        actions: Actions = [self.merge([(update, -1.0)]), *self.invite(update.client)]
        for client, version in sorted(self.sent.items()):
            if self.version - version >= self.MAX_DELAY:
                self.sent[client] = self.version
                actions.append(Send(client, self.version))
        return actions


@contextmanager
def registered(*kinds: type[ServerMachine]) -> Iterator[None]:
    """Register algorithms for the block."""
    for kind in kinds:
        register(kind)
    try:
        yield
    finally:
        for kind in kinds:
            del ALGORITHMS._known[kind.name], ALGORITHMS._sources[kind.name]
