"""FAVANO (also FAVAS): the server interrupts drawn clients at fixed intervals and takes what they have.

Leconte, Nguyen, Moulines: FAVAS: Federated AVeraging with ASynchronous clients (2023).

    after a fixed wait, draw s = n clients without replacement and interrupt them; client i, stopped after q ≤ K steps,
    returns w_init − Δ/α_i;   w[t+1] = (w[t] + Σ returned) / (s + 1);   only drawn clients are given w[t+1]

A client whose answer comes too late is given the newest version, even if it has trained from that already.

α_i is E[q ∧ K] (deterministic) or P(q > 0)·(q ∧ K) (stochastic). Both expectations are running means over what the
server has seen of client i, the present answer included.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..errors import UserError, unknown
from .base import Actions, SampledRound, Setup
from .protocol import ClientPolicy, Discard, Merge, Request, Send, ServerAction, SetTimer, Update

REWEIGHT = ("stochastic", "deterministic")


@dataclass(frozen=True, slots=True)
class FavanoSettings:
    """When the server steps, and how it evens out unequal numbers of steps."""

    wait_seconds: float = field(default=0.1, metadata={"help": "from a merge to the next draw"})
    reweight: str = field(default="stochastic", metadata={"help": "α: stochastic P(q>0)·q, or deterministic E[q]"})

    def __post_init__(self) -> None:
        if self.reweight not in REWEIGHT:
            raise unknown("reweighting of favano", self.reweight, REWEIGHT)
        if not 0.0 < self.wait_seconds < float("inf"):
            raise UserError(f"favano: wait_seconds is {self.wait_seconds}; give a finite number above zero")


class Favano(SampledRound):
    """Clients train up to K steps from what they were last given, until they are drawn."""

    name = "favano"
    summary = "the server interrupts n drawn clients at fixed intervals and averages their models with its own"
    citation = "Leconte et al., 2023"
    equation = "w[t+1] = (w[t] + Σ (w[τ_i] − Δ_i/α_i)) / (n+1)"
    policy = ClientPolicy(hold_until_requested=True, pause_when_full=True, interruptible=True, allow_same_version=True)
    settings_type = FavanoSettings
    uses_global_lr = False

    def __init__(self, setup: Setup, settings: Any = None) -> None:
        super().__init__(setup, settings)
        self.answers: dict[int, tuple[int, int, int]] = {}  # client -> answers, answers with q > 0, steps in all

    def start(self) -> Actions:
        """Give every client the first version, and wait."""
        return [*(Send(client, self.version) for client in range(self.setup.num_clients)), *self.pause()]

    def timer(self, token: int) -> Actions:
        """The pause is over, so draw; or a drawn client did not answer, so draw another."""
        if token == self.timer_token and not self.waiting:
            return self.open_round()
        return super().timer(token)

    def returned(self, client: int) -> Actions:
        """Give a client that is back something to train from."""
        return [Send(client, self.version), *super().returned(client)]

    def with_replacement(self) -> bool:
        return False

    def invite(self, client: int) -> ServerAction:
        return Request(client)

    def pause(self) -> Actions:
        self.timer_token += 1
        return [SetTimer(self.timer_token, self.settings.wait_seconds)]

    def on_update(self, update: Update) -> Actions:
        if not self.waiting:  # too late, in the pause: its client needs something to train from all the same
            return [Discard(update), Send(update.client, self.version)]
        return super().on_update(update)

    def close_round(self) -> Actions:
        answered = sorted({*self.received, *self.late})
        return [*(Send(client, self.version) for client in answered), *self.pause()]

    def alpha(self, update: Update) -> float:
        answers, busy, steps = self.answers.get(update.client, (0, 0, 0))
        answers, busy, steps = answers + 1, busy + (update.steps > 0), steps + update.steps
        self.answers[update.client] = (answers, busy, steps)
        if update.steps == 0:
            return 1.0  # no step, no Δ to scale
        return steps / answers if self.settings.reweight == "deterministic" else busy / answers * update.steps

    def combine(self, got: list[tuple[Update, int]]) -> Merge:
        share = 1.0 / (1 + sum(count for _, count in got))
        past = [(self.version, share), *((update.version, count * share) for update, count in got)]
        return self.merge([(update, -count * share / self.alpha(update)) for update, count in got], past)
