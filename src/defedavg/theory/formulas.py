"""The two convergence theorems as formulas: rates, conditions and bounds.

Theorem 1 is about DeFedAvg-nIID with clients whose data differ, Theorem 2 about DeFedAvg-IID with identically
distributed clients. Both bound (1/T) Σ_{t<T} E‖∇F(w^t)‖² for rates that depend on T. ``bound`` is the last inequality
of the proof with the rates inserted; ``printed`` is the bound that the paper states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from ..errors import UserError, unknown


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants of the theorems' assumptions, and the size of the run.

    ``smoothness`` L, ``noise`` σ², ``gradient`` G², ``heterogeneity`` ν², ``gap`` F(w⁰) − F*; n, K, T, λ and N.
    """

    smoothness: float
    noise: float
    gap: float
    gradient: float = 0.0
    heterogeneity: float = 0.0
    updates_per_round: int = 1
    local_steps: int = 1
    rounds: int = 1
    max_staleness: int = 1
    num_clients: int = 1

    def __post_init__(self) -> None:
        for name in ("smoothness", "gap"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise UserError(f"{name} is {value:g}; it must be a number above zero")
        for name in ("noise", "gradient", "heterogeneity"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise UserError(f"{name} is {value:g}; it must be zero or more")
        for name in ("updates_per_round", "local_steps", "rounds", "max_staleness", "num_clients"):
            value = getattr(self, name)
            if value < 1:
                raise UserError(f"{name} is {value}; it must be at least 1")
        if self.updates_per_round > self.num_clients:
            raise UserError(
                f"updates_per_round is {self.updates_per_round}, but there are only {self.num_clients} clients; "
                "the theorems need n ≤ N"
            )


@dataclass(frozen=True, slots=True)
class TheoremRates:
    """The learning rates that a theorem prescribes."""

    global_lr: float
    local_lr: float

    @property
    def product(self) -> float:
        """The product ηη̄, which the conditions bound."""
        return self.global_lr * self.local_lr


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition of a theorem: ``left`` must be at most ``right``."""

    name: str
    left: float
    right: float

    @property
    def holds(self) -> bool:
        """Whether the condition holds."""
        return self.left <= self.right


@dataclass(frozen=True, slots=True)
class Bound:
    """The two terms of a bound: ``first`` decreases as 1/sqrt(nKT), ``second`` as 1/(KT)."""

    first: float
    second: float

    @property
    def total(self) -> float:
        """The sum of both terms."""
        return self.first + self.second


class Theorem(Protocol):
    """A convergence theorem about one algorithm; ``uses`` names the constants that it needs."""

    number: int
    algorithm: str
    uses: tuple[str, ...]

    def rates(self, c: Constants) -> TheoremRates:
        """Return the learning rates that the theorem prescribes for T rounds."""

    def conditions(self, c: Constants) -> tuple[Condition, ...]:
        """Return the conditions under which the theorem applies."""

    def bound(self, c: Constants) -> Bound:
        """Return the bound that the proof yields."""

    def printed(self, c: Constants) -> Bound:
        """Return the bound that the paper states."""


class NonIIDTheorem:
    """Theorem 1: DeFedAvg-nIID, where the clients' objectives differ."""

    number = 1
    algorithm = "defedavg-niid"
    uses: tuple[str, ...] = ("smoothness", "noise", "gradient", "heterogeneity", "gap")

    def weight(self, c: Constants) -> float:
        """Return A = 4σ²L + 2LKG²."""
        value = 4 * c.noise * c.smoothness + 2 * c.smoothness * c.local_steps * c.gradient
        if value <= 0:
            raise UserError(
                "noise and gradient are both zero, so the rates of Theorem 1 are infinite; set one of them above zero"
            )
        return value

    def rates(self, c: Constants) -> TheoremRates:
        """Return η = sqrt(4nKΔF) and η̄ = 1/(K sqrt(AT))."""
        eta = math.sqrt(4 * c.updates_per_round * c.local_steps * c.gap)
        return TheoremRates(eta, 1 / (c.local_steps * math.sqrt(self.weight(c) * c.rounds)))

    def conditions(self, c: Constants) -> tuple[Condition, ...]:
        """Return one condition on η̄ and two on ηη̄; the last one tightens with λ² where gradients outweigh noise."""
        rates, reach = self.rates(c), c.smoothness * c.local_steps * c.max_staleness
        power = 2 * c.noise + c.gradient * c.local_steps
        drift = 8 * c.noise * reach + 4 * c.gradient * c.local_steps * c.max_staleness * reach
        return (
            Condition("η̄ ≤ 1/(8LK)", rates.local_lr, 1 / (8 * c.smoothness * c.local_steps)),
            Condition("ηη̄ ≤ 1/(4LKλ)", rates.product, 1 / (4 * reach)),
            Condition("ηη̄ ≤ (2σ²+G²K)/(8σ²LKλ+4LG²K²λ²)", rates.product, power / drift),
        )

    def bound(self, c: Constants) -> Bound:
        """Return 10 sqrt(AΔF/(nKT)) + 8L²(σ²+8Kν²)/(AKT)."""
        return Bound(10 * self._root(c), self._second(c))

    def printed(self, c: Constants) -> Bound:
        """Return the paper's bound, whose first constant is sqrt(256 · 4) = 32: correct, but loose."""
        return Bound(32 * self._root(c), self._second(c))

    def _root(self, c: Constants) -> float:
        return math.sqrt(self.weight(c) * c.gap / (c.updates_per_round * c.local_steps * c.rounds))

    def _second(self, c: Constants) -> float:
        spread = c.noise + 8 * c.local_steps * c.heterogeneity
        return 8 * c.smoothness**2 * spread / (self.weight(c) * c.local_steps * c.rounds)


class IIDTheorem:
    """Theorem 2: DeFedAvg-IID, where all clients have the same objective."""

    number = 2
    algorithm = "defedavg-iid"
    uses: tuple[str, ...] = ("smoothness", "noise", "gap")

    def rates(self, c: Constants) -> TheoremRates:
        """Return η = sqrt(nKΔF/2) and η̄ = 1/(K sqrt(σ²LT))."""
        if c.noise <= 0:
            raise UserError("noise is zero, so the local rate of Theorem 2 is infinite; set a variance above zero")
        eta = math.sqrt(c.updates_per_round * c.local_steps * c.gap / 2)
        return TheoremRates(eta, 1 / (c.local_steps * math.sqrt(c.noise * c.smoothness * c.rounds)))

    def conditions(self, c: Constants) -> tuple[Condition, ...]:
        """Return one condition on η̄ and one on ηη̄."""
        rates, reach = self.rates(c), c.smoothness * c.local_steps
        return (
            Condition("η̄ ≤ 1/(4√3LK)", rates.local_lr, 1 / (4 * math.sqrt(3) * reach)),
            Condition("ηη̄ ≤ 1/(4LKλ)", rates.product, 1 / (4 * reach * c.max_staleness)),
        )

    def bound(self, c: Constants) -> Bound:
        """Return sqrt(128Lσ²ΔF/(nKT)) + 8L/(KT)."""
        return Bound(self._root(c.smoothness * c.noise, c), self._second(c))

    def printed(self, c: Constants) -> Bound:
        """Return the paper's bound, which omits Lσ² under the root and is therefore wrong in general."""
        return Bound(self._root(1.0, c), self._second(c))

    def _root(self, factor: float, c: Constants) -> float:
        return math.sqrt(128 * factor * c.gap / (c.updates_per_round * c.local_steps * c.rounds))

    def _second(self, c: Constants) -> float:
        return 8 * c.smoothness / (c.local_steps * c.rounds)


THEOREMS: Final[Mapping[str, Theorem]] = {"defedavg-iid": IIDTheorem(), "defedavg-niid": NonIIDTheorem()}


def theorem(algorithm: str) -> Theorem:
    """Return the theorem about an algorithm."""
    if algorithm not in THEOREMS:
        raise unknown("theorem for the algorithm", algorithm, THEOREMS)
    return THEOREMS[algorithm]
