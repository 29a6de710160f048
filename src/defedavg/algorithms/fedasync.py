"""FedAsync: the server mixes every client's model into its own when it arrives.

Xie, Koyejo, Gupta: Asynchronous Federated Optimization (2019).

    w[t+1] = (1 − a)·w[t] + a·(w[t−τ] − Δ),   a = alpha · s(τ),   τ the merges since the client's start version
    s = 1 (constant),   (1 + τ)^−exponent (polynomial),
    or (hinge) 1 if τ ≤ hinge_bound, else 1 / (hinge_slope · (τ − hinge_bound) + 1)

The paper writes a for the exponent and for the slope, and b for the bound. It draws idle clients at random to train,
as the setting ``concurrency`` does. Left out: the proximal term of its local problem, and staleness that is drawn at
random instead of simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import UserError, unknown
from .dispatching import EveryArrival
from .protocol import Merge, Update
from .setting_checks import check_concurrency


@dataclass(frozen=True, slots=True)
class FedAsyncSettings:
    """The share of the server's model that an update replaces, and how it decreases with staleness."""

    concurrency: int = field(default=0, metadata={"help": "clients that train concurrently; 0: all"})
    alpha: float = field(default=0.6, metadata={"help": "share of an update without staleness, above 0 and at most 1"})
    staleness: str = field(default="polynomial", metadata={"help": "factor s(τ) of alpha: constant, polynomial, hinge"})
    exponent: float = field(default=0.5, metadata={"help": "polynomial: s = (1 + τ)^−exponent"})
    hinge_bound: int = field(default=4, metadata={"help": "hinge: s = 1 up to this staleness"})
    hinge_slope: float = field(default=10.0, metadata={"help": "hinge: s = 1/(hinge_slope·(τ − hinge_bound) + 1)"})

    def __post_init__(self) -> None:
        check_concurrency("fedasync", self.concurrency)
        if self.staleness not in FACTORS:
            raise unknown("staleness factor of fedasync", self.staleness, FACTORS)
        if not 0.0 < self.alpha <= 1.0:
            raise UserError(f"fedasync: alpha is {self.alpha}; give a number above zero, at most 1")
        for name in ("exponent", "hinge_bound", "hinge_slope"):
            if not 0.0 <= (value := getattr(self, name)) < math.inf:
                raise UserError(f"fedasync: {name} is {value}; give a finite number of zero or more")


def _hinge(settings: FedAsyncSettings, staleness: int) -> float:
    return 1.0 / (settings.hinge_slope * max(0, staleness - settings.hinge_bound) + 1.0)


FACTORS: dict[str, Callable[[FedAsyncSettings, int], float]] = {
    "constant": lambda settings, staleness: 1.0,  # noqa: ARG005 (all factors have one signature)
    "polynomial": lambda settings, staleness: (1.0 + staleness) ** -settings.exponent,
    "hinge": _hinge,
}


class FedAsync(EveryArrival):
    """Every update is a round; a staler one replaces a smaller share of the server's model."""

    name = "fedasync"
    summary = "asynchronous: every arrival is averaged into the server's model, with less weight if it is stale"
    citation = "Xie, Koyejo, Gupta, 2019"
    equation = "w[t+1] = (1 − a)·w[t] + a·(w[t−τ] − Δ), a = α·s(τ)"
    settings_type = FedAsyncSettings
    uses_global_lr = False

    def combine(self, buffer: list[Update]) -> Merge:
        """Average the model of the client that answered with the server's."""
        [update] = buffer
        share = self.settings.alpha * FACTORS[self.settings.staleness](self.settings, self.staleness(update))
        past = ((self.version, 1.0 - share), (update.version, share))
        return self.merge([(update, -share)], [(version, a) for version, a in past if a])
