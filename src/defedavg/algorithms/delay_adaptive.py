"""Delay-adaptive asynchronous SGD: every arrival is a step, and the rate of a stale one is lowered.

Koloskova, Stich, Jaggi: Sharper Convergence Guarantees for Asynchronous SGD for Distributed and Federated Learning
(NeurIPS 2022); Mishchenko, Bach, Even, Woodworth: Asynchronous SGD Beats Minibatch SGD Under Arbitrary Delays
(NeurIPS 2022).

    w[t+1] = w[t] − η · γ(τ) · Δ,   τ the merges since the client's start version
    scale:  γ = min(1, c/τ);        discard:  γ = 1 if τ ≤ c, otherwise the update is discarded

Both papers bound the rate itself, as min(η, constant/(L·τ)), with the smoothness L of the objective. Plans hold no
rates, so c is relative to η: c·η stands for constant/L. In the first paper the bound applies to delays above the
concurrency, and a rate of zero is allowed there, which is the rule "discard". The default of c is twice the
concurrency: as the mean delay is below the concurrency, at least half of all updates keep the rate η. Left out: rates
that follow from L and the noise. The papers have one gradient per message; here a job has local steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import UserError, unknown
from .dispatching import EveryArrival
from .protocol import Merge, Update
from .setting_checks import check_concurrency

RULES = ("scale", "discard")


@dataclass(frozen=True, slots=True)
class DelayAdaptiveSettings:
    """What happens to updates with a staleness above the threshold."""

    concurrency: int = field(default=0, metadata={"help": "clients that train concurrently; 0: all"})
    rule: str = field(default="scale", metadata={"help": "above the threshold: scale the rate by c/τ, or discard"})
    threshold: int = field(default=0, metadata={"help": "staleness c up to which the rate is η; 0: 2·concurrency"})

    def __post_init__(self) -> None:
        check_concurrency("delay-adaptive-sgd", self.concurrency)
        if self.rule not in RULES:
            raise unknown("rule of delay-adaptive-sgd", self.rule, RULES)
        if self.threshold < 0:
            fault = f"delay-adaptive-sgd: threshold is {self.threshold}"
            raise UserError(f"{fault}; give a number of merges, or 0 for twice the concurrency")


class DelayAdaptiveSGD(EveryArrival):
    """Asynchronous SGD whose rate depends on the staleness of the update at hand."""

    name = "delay-adaptive-sgd"
    summary = "asynchronous: every arrival is merged; the rate of a stale one is lowered, or it is discarded"
    citation = "Koloskova et al., NeurIPS 2022; Mishchenko et al., NeurIPS 2022"
    equation = "w[t+1] = w[t] − η·min(1, c/τ)·Δ"
    settings_type = DelayAdaptiveSettings

    @property
    def threshold(self) -> int:
        """The staleness c up to which the rate is not changed."""
        return int(self.settings.threshold) or 2 * self.concurrency

    def accepts(self, update: Update) -> bool:
        """Return whether the rule lets the update be merged."""
        return self.settings.rule == "scale" or self.staleness(update) <= self.threshold

    def combine(self, buffer: list[Update]) -> Merge:
        """Step along the update with a rate that decreases with its staleness."""
        [update] = buffer
        scale = min(1.0, self.threshold / max(1, self.staleness(update)))
        return self.merge([(update, -1.0)], rate_scale=scale)
