"""FAVANO (also FAVAS): at fixed intervals the server interrupts sampled clients and merges their partial work.

Leconte, Nguyen, Moulines: FAVAS: Federated AVeraging with ASynchronous clients (2023).

    after a fixed wait, draw s = n clients without replacement and interrupt them; client i, stopped after q ≤ K steps,
    returns w[τ_i] − Δ_i/α_i;   w[t+1] = (w[t] + Σ returned) / (s + 1);   only drawn clients receive w[t+1]

This is anchor = "start", the paper's form: it averages models, so an old w[τ_i] pulls the new model back. The other
form, anchor = "newest", adds the progress alone: w[t+1] = w[t] − Σ Δ_i/α_i / (s + 1). They are equal if all τ_i = t.

With send = "draw" a drawn client receives w[t] with the interruption, instead of w[t+1] after the merge: its download
then takes place during its upload, and it starts again from a version without its own progress.

A late client receives the newest version, even if it has already trained from it. α_i is E[q ∧ K] (deterministic) or
P(q > 0)·(q ∧ K) (stochastic), with means over its answers, this one included, or K (none: not its paper's form).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..errors import unknown
from .interrupting import InterruptedRound
from .protocol import Merge, Update
from .setting_checks import check_wait
from .setup import Setup

REWEIGHT, ANCHORS = ("stochastic", "deterministic", "none"), ("start", "newest")
SENDS = ("merge", "draw")


@dataclass(frozen=True, slots=True)
class FavanoSettings:
    """When the server merges, and how it corrects for unequal numbers of local steps."""

    wait_seconds: float = field(default=0.1, metadata={"help": "seconds from a merge to the next draw"})
    reweight: str = field(default="stochastic", metadata={"help": "α: stochastic P(q>0)·q, deterministic E[q], none K"})
    anchor: str = field(default="start", metadata={"help": "Δ/α is subtracted from w[τ] (start) or w[t] (newest)"})
    send: str = field(default="merge", metadata={"help": "drawn clients receive w[t+1] (merge) or w[t] at once (draw)"})

    def __post_init__(self) -> None:
        if self.send not in SENDS:
            raise unknown("send of favano", self.send, SENDS)
        if self.anchor not in ANCHORS:
            raise unknown("anchor of favano", self.anchor, ANCHORS)
        if self.reweight not in REWEIGHT:
            raise unknown("reweighting of favano", self.reweight, REWEIGHT)
        check_wait("favano", self.wait_seconds)


class Favano(InterruptedRound):
    """Clients train up to K steps from the last version they received, until they are drawn."""

    name = "favano"
    summary = "at fixed intervals the server interrupts n sampled clients and averages their models with its own"
    citation = "Leconte et al., 2023"
    equation = "w[t+1] = (w[t] + Σ (w[τ_i] − Δ_i/α_i)) / (n+1)"
    settings_type: ClassVar[type[Any]] = FavanoSettings
    state_attributes = ("answers",)
    uses_global_lr = False
    weightings = ("uniform",)

    def __init__(self, setup: Setup, settings: Any = None) -> None:
        super().__init__(setup, settings)
        self.answers: dict[int, tuple[int, int, int]] = {}  # client -> answers, answers with q > 0, total steps

    @property
    def sends_at_draw(self) -> bool:
        """Whether drawn clients receive the newest version with the interruption."""
        return bool(self.settings.send == "draw")

    def alpha(self, update: Update) -> float:
        """Count an answer and return its α."""
        answers, busy, steps = self.answers.get(update.client, (0, 0, 0))
        answers, busy, steps = answers + 1, busy + (update.steps > 0), steps + update.steps
        self.answers[update.client] = (answers, busy, steps)
        if update.steps == 0:
            return 1.0  # Δ is zero
        means = {"stochastic": busy / answers * update.steps, "deterministic": steps / answers}
        return means.get(self.settings.reweight, float(self.setup.local_steps))

    def combine(self, received: list[tuple[Update, int]]) -> Merge:
        """Average the server's model with the reweighted models of the clients, or add their progress to it."""
        share = 1.0 / (1 + sum(count for _, count in received))
        models = [(self.version, share), *((update.version, count * share) for update, count in received)]
        past = models if self.settings.anchor == "start" else None
        return self.merge([(update, -count * share / self.alpha(update)) for update, count in received], past)
