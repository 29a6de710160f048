"""The two convergence theorems as formulas: rates, conditions, bounds, required rounds and staleness.

Theorem 1 is about DeFedAvg-nIID with clients whose data differ, Theorem 2 about DeFedAvg-IID with identically
distributed clients. Both bound (1/T) Σ_{t<T} E‖∇F(w^t)‖² for rates that depend on T. ``bound`` is the last inequality
of the proof with the rates inserted; ``printed`` is the bound that the paper states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from ..errors import UserError, unknown

MAX_ROUNDS: Final = 10**30
LARGEST: Final = 1e30  # of a constant, so that no formula overflows
PRACTICAL_ROUNDS: Final = 10**6
"""The horizon beyond which a number of rounds is no practical guidance: ten times the longest runs of this field."""


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
            if not 1 / LARGEST <= value <= LARGEST:
                raise UserError(f"{name} is {value:g}; it must be a number above zero, {1 / LARGEST:g} to {LARGEST:g}")
        for name in ("noise", "gradient", "heterogeneity"):
            value = getattr(self, name)
            if not 0 <= value <= LARGEST:
                raise UserError(f"{name} is {value:g}; it must be zero or more, at most {LARGEST:g}")
        for name in ("updates_per_round", "local_steps", "rounds", "max_staleness", "num_clients"):
            value = getattr(self, name)
            if not 1 <= value <= MAX_ROUNDS:
                raise UserError(f"{name} is {value}; it must be at least 1, at most {MAX_ROUNDS:g}")
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


class NonIIDTheorem:
    """Theorem 1: DeFedAvg-nIID, where the clients' objectives differ."""

    number = 1
    needs_identical_clients = False
    uses: tuple[str, ...] = ("smoothness", "noise", "gradient", "heterogeneity", "gap")  # of Constants

    def _weight(self, c: Constants) -> float:
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
        return TheoremRates(eta, 1 / (c.local_steps * math.sqrt(self._weight(c) * c.rounds)))

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
        return self._bound(10, c)

    def printed(self, c: Constants) -> Bound:
        """Return the paper's bound, whose first constant is sqrt(256 · 4) = 32: correct, but loose."""
        return self._bound(32, c)

    def _bound(self, factor: float, c: Constants) -> Bound:
        root = math.sqrt(self._weight(c) * c.gap / (c.updates_per_round * c.local_steps * c.rounds))
        spread = c.noise + 8 * c.local_steps * c.heterogeneity
        return Bound(factor * root, 8 * c.smoothness**2 * spread / (self._weight(c) * c.local_steps * c.rounds))


class IIDTheorem:
    """Theorem 2: DeFedAvg-IID, where all clients have the same objective."""

    number = 2
    needs_identical_clients = True
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
        return self._bound(c.smoothness * c.noise, c)

    def printed(self, c: Constants) -> Bound:
        """Return the paper's bound, which omits Lσ² under the root and is therefore wrong in general."""
        return self._bound(1.0, c)

    def _bound(self, factor: float, c: Constants) -> Bound:
        root = math.sqrt(128 * factor * c.gap / (c.updates_per_round * c.local_steps * c.rounds))
        return Bound(root, 8 * c.smoothness / (c.local_steps * c.rounds))


Theorem = NonIIDTheorem | IIDTheorem
THEOREMS: Final[Mapping[str, Theorem]] = {"defedavg-iid": IIDTheorem(), "defedavg-niid": NonIIDTheorem()}


def theorem(algorithm: str) -> Theorem:
    """Return the theorem about an algorithm."""
    if algorithm not in THEOREMS:
        raise unknown("theorem for the algorithm", algorithm, THEOREMS)
    return THEOREMS[algorithm]


def guidance(kind: Theorem, c: Constants, epsilon: float) -> str:
    """Return why the rounds needed are no practical guidance, or an empty string if they are at most the horizon."""
    apply, reach = rounds_to_apply(kind, c), rounds_to_reach(kind, c, epsilon)
    if max(apply, reach) <= PRACTICAL_ROUNDS:
        return ""
    if apply >= reach:
        conditions = range(len(kind.conditions(c)))
        last = max(conditions, key=lambda i: _smallest(lambda t: kind.conditions(replace(c, rounds=t))[i].holds))
        return f"the condition {kind.conditions(c)[last].name} needs most of them"
    bound = kind.bound(replace(c, rounds=reach))
    term = "first term, which decreases as 1/√(nKT)," if bound.first >= bound.second else "second term"
    return f"the {term} of the bound dominates"


def rounds_to_apply(kind: Theorem, c: Constants) -> int:
    """Return the smallest T for which all conditions hold; every condition relaxes as T grows."""
    return _smallest(lambda t: all(each.holds for each in kind.conditions(replace(c, rounds=t))))


def rounds_to_reach(kind: Theorem, c: Constants, epsilon: float) -> int:
    """Return the smallest T for which the bound is at most ε, whether or not the conditions hold."""
    if not 0 < epsilon < math.inf:
        raise UserError(f"epsilon is {epsilon:g}; it must be a number above zero")
    return _smallest(lambda t: kind.bound(replace(c, rounds=t)).total <= epsilon)


def rounds_needed(kind: Theorem, c: Constants, epsilon: float) -> int:
    """Return the smallest T for which the conditions hold and the bound is at most ε."""
    return max(rounds_to_apply(kind, c), rounds_to_reach(kind, c, epsilon))


def _smallest(holds: Callable[[int], bool]) -> int:
    """Return the smallest positive integer for which a monotone predicate holds."""
    high = 1
    while not holds(high):
        high *= 2
        if high > MAX_ROUNDS:
            raise UserError(f"more than {MAX_ROUNDS:g} rounds would be needed; check the constants")
    low = high // 2  # zero, or a number for which it does not hold
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def draw_probability(num_clients: int, updates_per_round: int) -> float:
    """Return p = 1 − ((N−1)/N)^n: the probability that a client is among the n drawn with replacement in a round."""
    if num_clients == 1:
        return 1.0
    return -math.expm1(updates_per_round * math.log1p(-1 / num_clients))


def probable_staleness(num_clients: int, updates_per_round: int, rounds: int, delta: float) -> int:
    """Return the smallest λ ≥ 1 with N·T·(1−p)^λ ≤ δ, which bounds P(some client is not drawn in λ rounds in a row)."""
    _check_draw(num_clients, updates_per_round, rounds, delta)
    if num_clients == 1:
        return 1
    log_start, log_missed, limit = math.log(num_clients * rounds), math.log1p(-1 / num_clients), math.log(delta)
    return _smallest(lambda staleness: log_start + staleness * updates_per_round * log_missed <= limit)


def rounds_needed_drawn(kind: Theorem, c: Constants, epsilon: float, delta: float) -> int:
    """Return ``rounds_needed`` for the ``probable_staleness`` of that number of rounds, a fixed point."""
    rounds, before = 1, 0
    while rounds != before:  # both sides only grow, the staleness logarithmically
        stale = probable_staleness(c.num_clients, c.updates_per_round, rounds, delta)
        rounds, before = rounds_needed(kind, replace(c, max_staleness=stale), epsilon), rounds
    return rounds


def stated_staleness(num_clients: int, updates_per_round: int, rounds: int, delta: float) -> float:
    """Return (1/p)(1 + log(NT/δ)), the paper's O-form with constant 1; it is at least ``probable_staleness``."""
    _check_draw(num_clients, updates_per_round, rounds, delta)
    return (1 + math.log(num_clients * rounds / delta)) / draw_probability(num_clients, updates_per_round)


def _check_draw(num_clients: int, updates_per_round: int, rounds: int, delta: float) -> None:
    if not 0 < delta < 1:
        raise UserError(f"delta is {delta:g}; it must be a probability between 0 and 1")
    sizes = {"num_clients": num_clients, "updates_per_round": updates_per_round, "rounds": rounds}
    for name, value in sizes.items():
        if value < 1:
            raise UserError(f"{name} is {value}; it must be at least 1")


def theorem_report(algorithm: str, c: Constants, *, epsilon: float, delta: float) -> dict[str, Any]:
    """Return rates, conditions, bounds, rounds and λ."""
    kind = theorem(algorithm)
    bound, printed = kind.bound(c), kind.printed(c)
    why = guidance(kind, c, epsilon)
    drawn = algorithm == "defedavg-niid"  # otherwise λ depends only on the speeds of the clients
    draw = (c.num_clients, c.updates_per_round, c.rounds, delta)
    needed_drawn = rounds_needed_drawn(kind, c, epsilon, delta) if drawn else None
    if not why and (needed_drawn or 0) > PRACTICAL_ROUNDS:
        why = "the conditions need most of them, because λ grows with T"
    return {
        "algorithm": algorithm,
        "theorem": kind.number,
        "constants": asdict(c),
        "rates": asdict(kind.rates(c)),
        "conditions": [{**asdict(each), "holds": each.holds} for each in kind.conditions(c)],
        "bound": {**asdict(bound), "total": bound.total},
        "printed_bound": {**asdict(printed), "total": printed.total},
        "epsilon": epsilon,
        "rounds": {
            "to_apply": rounds_to_apply(kind, c),
            "to_reach": rounds_to_reach(kind, c, epsilon),
            "needed": rounds_needed(kind, c, epsilon),
            "needed_drawn": needed_drawn,
        },
        "horizon": PRACTICAL_ROUNDS,
        "no_practical_guidance": why or None,
        "staleness": {
            "used": c.max_staleness,
            "delta": delta,
            "probable": probable_staleness(*draw) if drawn else None,
            "stated": stated_staleness(*draw) if drawn else None,
        },
    }
