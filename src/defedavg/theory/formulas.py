"""The two convergence theorems as formulas: rates, conditions, bounds, and the rounds that they ask for.

Theorem 1 speaks of DeFedAvg-nIID and clients that differ, Theorem 2 of DeFedAvg-IID and clients that are alike. Both
bound (1/T) Σ_{t<T} E‖∇F(w^t)‖², for rates that depend on T. A bound is written here as the proof's last inequality
gives it with the rates put in; ``printed`` is what the paper states instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

from ..errors import UserError, unknown

MOST_ROUNDS: Final = 10**30


@dataclass(frozen=True, slots=True)
class Constants:
    """What the theorems assume of a problem, and the size of the run.

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
class Rates:
    """The learning rates of a theorem."""

    global_lr: float
    local_lr: float

    @property
    def product(self) -> float:
        """η η̄, of which the conditions speak."""
        return self.global_lr * self.local_lr


@dataclass(frozen=True, slots=True)
class Condition:
    """``left`` must be at most ``right``."""

    name: str
    left: float
    right: float

    @property
    def holds(self) -> bool:
        """Whether it is."""
        return self.left <= self.right


@dataclass(frozen=True, slots=True)
class Bound:
    """``first`` falls as 1/sqrt(nKT), ``second`` as 1/(KT)."""

    first: float
    second: float

    @property
    def total(self) -> float:
        """The bound itself."""
        return self.first + self.second


class Theorem(Protocol):
    """What a theorem says of an algorithm."""

    number: int
    algorithm: str
    uses: tuple[str, ...]

    def rates(self, c: Constants) -> Rates:
        """The learning rates that it prescribes for T rounds."""

    def conditions(self, c: Constants) -> tuple[Condition, ...]:
        """What must hold for it to apply."""

    def bound(self, c: Constants) -> Bound:
        """The bound that its proof gives."""

    def printed(self, c: Constants) -> Bound:
        """The bound that the paper states."""


class NonIID:
    """Theorem 1: DeFedAvg-nIID, where the clients' objectives differ."""

    number = 1
    algorithm = "defedavg-niid"
    uses: tuple[str, ...] = ("smoothness", "noise", "gradient", "heterogeneity", "gap")

    def weight(self, c: Constants) -> float:
        """A = 4σ²L + 2LKG²."""
        value = 4 * c.noise * c.smoothness + 2 * c.smoothness * c.local_steps * c.gradient
        if value <= 0:
            raise UserError("noise and gradient are both zero, so the rates of Theorem 1 are infinite; give one above")
        return value

    def rates(self, c: Constants) -> Rates:
        """η = sqrt(4nKΔF), η̄ = 1/(K sqrt(AT))."""
        eta = math.sqrt(4 * c.updates_per_round * c.local_steps * c.gap)
        return Rates(eta, 1 / (c.local_steps * math.sqrt(self.weight(c) * c.rounds)))

    def conditions(self, c: Constants) -> tuple[Condition, ...]:
        """One on η̄ and two on ηη̄, of which the last grows with λ² where gradients outweigh noise."""
        rates, reach = self.rates(c), c.smoothness * c.local_steps * c.max_staleness
        power = 2 * c.noise + c.gradient * c.local_steps
        drift = 8 * c.noise * reach + 4 * c.gradient * c.local_steps * c.max_staleness * reach
        return (
            Condition("η̄ ≤ 1/(8LK)", rates.local_lr, 1 / (8 * c.smoothness * c.local_steps)),
            Condition("ηη̄ ≤ 1/(4LKλ)", rates.product, 1 / (4 * reach)),
            Condition("ηη̄ ≤ (2σ²+G²K)/(8σ²LKλ+4LG²K²λ²)", rates.product, power / drift),
        )

    def bound(self, c: Constants) -> Bound:
        """10 sqrt(AΔF/(nKT)) + 8L²(σ²+8Kν²)/(AKT)."""
        return Bound(10 * self._root(c), self._second(c))

    def printed(self, c: Constants) -> Bound:
        """The first constant is stated as sqrt(256 · 4) = 32: true, but loose."""
        return Bound(32 * self._root(c), self._second(c))

    def _root(self, c: Constants) -> float:
        return math.sqrt(self.weight(c) * c.gap / (c.updates_per_round * c.local_steps * c.rounds))

    def _second(self, c: Constants) -> float:
        spread = c.noise + 8 * c.local_steps * c.heterogeneity
        return 8 * c.smoothness**2 * spread / (self.weight(c) * c.local_steps * c.rounds)


class IID:
    """Theorem 2: DeFedAvg-IID, where all clients have the same objective."""

    number = 2
    algorithm = "defedavg-iid"
    uses: tuple[str, ...] = ("smoothness", "noise", "gap")

    def rates(self, c: Constants) -> Rates:
        """η = sqrt(nKΔF/2), η̄ = 1/(K sqrt(σ²LT))."""
        if c.noise <= 0:
            raise UserError("noise is zero, so the local rate of Theorem 2 is infinite; give a variance above zero")
        eta = math.sqrt(c.updates_per_round * c.local_steps * c.gap / 2)
        return Rates(eta, 1 / (c.local_steps * math.sqrt(c.noise * c.smoothness * c.rounds)))

    def conditions(self, c: Constants) -> tuple[Condition, ...]:
        """One on η̄ and one on ηη̄."""
        rates, reach = self.rates(c), c.smoothness * c.local_steps
        return (
            Condition("η̄ ≤ 1/(4√3LK)", rates.local_lr, 1 / (4 * math.sqrt(3) * reach)),
            Condition("ηη̄ ≤ 1/(4LKλ)", rates.product, 1 / (4 * reach * c.max_staleness)),
        )

    def bound(self, c: Constants) -> Bound:
        """sqrt(128Lσ²ΔF/(nKT)) + 8L/(KT)."""
        return Bound(self._root(c.smoothness * c.noise, c), self._second(c))

    def printed(self, c: Constants) -> Bound:
        """The paper's text drops Lσ² under the root, which makes it wrong in general."""
        return Bound(self._root(1.0, c), self._second(c))

    def _root(self, factor: float, c: Constants) -> float:
        return math.sqrt(128 * factor * c.gap / (c.updates_per_round * c.local_steps * c.rounds))

    def _second(self, c: Constants) -> float:
        return 8 * c.smoothness / (c.local_steps * c.rounds)


THEOREMS: Final[Mapping[str, Theorem]] = {"defedavg-iid": IID(), "defedavg-niid": NonIID()}


def theorem(algorithm: str) -> Theorem:
    """The theorem that speaks of an algorithm."""
    if algorithm not in THEOREMS:
        raise unknown("theorem for the algorithm", algorithm, THEOREMS)
    return THEOREMS[algorithm]


# Rounds.


def rounds_to_apply(what: Theorem, c: Constants) -> int:
    """The smallest T for which every condition holds; they all get easier as T grows."""
    return _smallest(lambda t: all(each.holds for each in what.conditions(replace(c, rounds=t))))


def rounds_to_reach(what: Theorem, c: Constants, epsilon: float) -> int:
    """The smallest T for which the bound is at most ε, whether or not the theorem applies there."""
    if not 0 < epsilon < math.inf:
        raise UserError(f"epsilon is {epsilon:g}; it must be a number above zero")
    return _smallest(lambda t: what.bound(replace(c, rounds=t)).total <= epsilon)


def rounds_needed(what: Theorem, c: Constants, epsilon: float) -> int:
    """The smallest T for which the theorem applies and promises ε."""
    return max(rounds_to_apply(what, c), rounds_to_reach(what, c, epsilon))


def _smallest(good: Callable[[int], bool]) -> int:
    """The first number from 1 on that is good, where all after a good one are good."""
    high = 1
    while not good(high):
        high *= 2
        if high > MOST_ROUNDS:
            raise UserError(f"more than {MOST_ROUNDS:g} rounds would be needed; check the constants")
    low = high // 2  # not good, or zero
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle, high)
    return high


# How long a client of DeFedAvg-nIID may go undrawn.


def draw_probability(num_clients: int, updates_per_round: int) -> float:
    """p = 1 − ((N−1)/N)^n: a client is among the n drawn, with replacement, in one round."""
    if num_clients == 1:
        return 1.0
    return -math.expm1(updates_per_round * math.log1p(-1 / num_clients))


def log_union_bound(staleness: int, num_clients: int, updates_per_round: int, rounds: int) -> float:
    """log of N·T·(1−p)^λ, which is at least P(some client is not drawn in some λ rounds on end)."""
    if num_clients == 1:
        return -math.inf
    return math.log(num_clients * rounds) + staleness * updates_per_round * math.log1p(-1 / num_clients)


def probable_staleness(num_clients: int, updates_per_round: int, rounds: int, delta: float) -> int:
    """The smallest λ ≥ 1 with N·T·(1−p)^λ ≤ δ: with probability 1 − δ every client is drawn in any λ rounds on end."""
    _check_draw(num_clients, updates_per_round, rounds, delta)
    return _smallest(lambda s: log_union_bound(s, num_clients, updates_per_round, rounds) <= math.log(delta))


def rounds_needed_drawn(what: Theorem, c: Constants, epsilon: float, delta: float) -> int:
    """``rounds_needed`` with the ``probable_staleness`` of these very rounds, which grows with them."""
    rounds, before = 1, 0
    while rounds != before:  # both sides only grow, the staleness like a logarithm
        stale = probable_staleness(c.num_clients, c.updates_per_round, rounds, delta)
        rounds, before = rounds_needed(what, replace(c, max_staleness=stale), epsilon), rounds
    return rounds


def stated_staleness(num_clients: int, updates_per_round: int, rounds: int, delta: float) -> float:
    """(1/p)(1 + log(NT/δ)), the paper's O-form with constant one; never below ``probable_staleness``."""
    _check_draw(num_clients, updates_per_round, rounds, delta)
    chance = draw_probability(num_clients, updates_per_round)
    return (1 + math.log(num_clients * rounds / delta)) / chance


def _check_draw(num_clients: int, updates_per_round: int, rounds: int, delta: float) -> None:
    if not 0 < delta < 1:
        raise UserError(f"delta is {delta:g}; it is a probability between 0 and 1")
    for name, value in (
        ("num_clients", num_clients), ("updates_per_round", updates_per_round), ("rounds", rounds)
    ):  # fmt: skip
        if value < 1:
            raise UserError(f"{name} is {value}; it must be at least 1")
