"""QuAFL: at fixed intervals the server mixes its model with those of sampled clients, in quantised messages.

Zakerinia, Talaei, Nadiradze, Alistarh: QuAFL: Federated Averaging Made Asynchronous and Communication-Efficient
(arXiv 2206.10032, 2022).

    after a fixed wait, draw s = n clients without replacement and interrupt them after q ≤ K steps;  x_i ← x_i − Δ_i,
    w[t+1] = (w[t] + Σ x_i) / (s + 1);   x_i ← (w[t] + s·x_i) / (s + 1) for them;  they continue from their own x_i

x_i is w[0] at first; the server's copy of it says from what client i starts. The messages are Q(x_i − w[t]) to the
server and Q(w[t] − x_i) to the client, with unbiased stochastic rounding to `bits` bits as a stand-in for the lattice
quantiser of the paper, which needs no common reference. They take bits/32 of the bytes and of the time of a model
in a simulation; a deployment sends full models, and the server rounds them. A client that fails, or answers after its
round has ended, loses its steps since it was last contacted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..errors import UserError
from .base import Actions
from .favano import Favano
from .protocol import Assignment, Discard, Merge, Request, StateSpec, StateVector, Update
from .setting_checks import check_wait
from .setup import Setup

MAX_BITS = 52
MESSAGES = ("to_server", "to_client")


@dataclass(frozen=True, slots=True)
class QuaflSettings:
    """When the server contacts clients, and how finely messages are quantised."""

    wait_seconds: float = field(default=0.1, metadata={"help": "seconds from a merge to the next draw"})
    bits: int = field(default=8, metadata={"help": f"bits per value in messages, 2 to {MAX_BITS}; 32: not quantised"})

    def __post_init__(self) -> None:
        check_wait("quafl", self.wait_seconds)
        if not 2 <= self.bits <= MAX_BITS:
            raise UserError(f"quafl: bits is {self.bits}; give 2 to {MAX_BITS}, or 32 for no quantisation")


class Quafl(Favano):
    """Clients train up to K steps from their own models, until they are drawn."""

    name = "quafl"
    summary = "at fixed intervals the server and n interrupted clients mix their models, in quantised messages"
    citation = "Zakerinia et al., 2022"
    equation = "w[t+1] = (w[t] + Σ x_i) / (n+1), x_i ← (w[t] + n·x_i) / (n+1)"
    settings_type = QuaflSettings
    job_start = (("model", 1.0),)
    state_attributes = ("mixed",)
    sends_at_draw = False

    def __init__(self, setup: Setup, settings: Any = None) -> None:
        super().__init__(setup, settings)
        self.mixed: dict[int, int] = {}  # client -> the version whose merge mixed its model

    @classmethod
    def state_vectors(cls, setup: Setup, settings: Any) -> tuple[StateSpec, ...]:  # noqa: ARG003 (overrides a hook)
        """Return the model of every client, and the messages of a round, which are zero between merges."""
        messages = (StateSpec(name, setup.updates_per_round) for name in MESSAGES)
        return StateSpec("model", setup.num_clients, "model", per_client=True), *messages

    @classmethod
    def message_bits(cls, settings: Any) -> int:
        """Return the setting."""
        return int(settings.bits)

    def on_update(self, update: Update) -> Actions:
        """Discard an update that began before its client's model was mixed: the client has the new model by now."""
        if update.version < self.mixed.get(update.client, 0):
            return [Discard(update), *([Request(update.client)] if update.client in self.waiting else ())]
        return super().on_update(update)

    def combine(self, received: list[tuple[Update, int]]) -> Merge:
        """Mix the server's model with those of the clients, and theirs with the server's."""
        newest, share = self.version, 1.0 / (1 + sum(count for _, count in received))
        transform = "" if self.settings.bits == 32 else f"quantise({self.settings.bits})"
        ups, downs, mixed, states = [], [], [], []
        for slot, (update, count) in enumerate(sorted(received, key=lambda pair: pair[0].client)):
            own, up, down = (StateVector("model", update.client), *(StateVector(n, slot) for n in MESSAGES))
            ups.append(Assignment(up, ((newest, -1.0),), ((update, -1.0),), ((own, 1.0),), transform))
            downs.append(Assignment(down, ((newest, 1.0),), ((update, 1.0),), ((own, -1.0),), transform))
            mixed.append(Assignment(own, (), ((update, -1.0),), ((own, 1.0), (down, share))))
            states.append((up, count * share))
            self.mixed[update.client] = newest + 1
        sent = (Assignment(assignment.target) for assignment in (*ups, *downs))
        merged = ((update, 0.0) for update, _ in received)
        return self.merge(merged, states=states, before=ups, after=(*downs, *mixed, *sent))
