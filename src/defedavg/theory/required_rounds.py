"""The rounds that a theorem requires, and the staleness that DeFedAvg-nIID has with high probability."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from ..errors import UserError
from .formulas import Constants, Theorem

MAX_ROUNDS: Final = 10**30


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


# Staleness under DeFedAvg-nIID: the longest time for which a client is not drawn.


def draw_probability(num_clients: int, updates_per_round: int) -> float:
    """Return p = 1 − ((N−1)/N)^n: the probability that a client is among the n drawn with replacement in a round."""
    if num_clients == 1:
        return 1.0
    return -math.expm1(updates_per_round * math.log1p(-1 / num_clients))


def log_union_bound(staleness: int, num_clients: int, updates_per_round: int, rounds: int) -> float:
    """Return log(N·T·(1−p)^λ), which bounds log P(some client is not drawn in λ consecutive rounds)."""
    if num_clients == 1:
        return -math.inf
    return math.log(num_clients * rounds) + staleness * updates_per_round * math.log1p(-1 / num_clients)


def probable_staleness(num_clients: int, updates_per_round: int, rounds: int, delta: float) -> int:
    """Return the smallest λ ≥ 1 with N·T·(1−p)^λ ≤ δ.

    With probability 1 − δ every client is then drawn at least once in any λ consecutive rounds.
    """
    _check_draw(num_clients, updates_per_round, rounds, delta)
    return _smallest(lambda s: log_union_bound(s, num_clients, updates_per_round, rounds) <= math.log(delta))


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
    chance = draw_probability(num_clients, updates_per_round)
    return (1 + math.log(num_clients * rounds / delta)) / chance


def _check_draw(num_clients: int, updates_per_round: int, rounds: int, delta: float) -> None:
    if not 0 < delta < 1:
        raise UserError(f"delta is {delta:g}; it must be a probability between 0 and 1")
    for name, value in (
        ("num_clients", num_clients), ("updates_per_round", updates_per_round), ("rounds", rounds)
    ):  # fmt: skip
        if value < 1:
            raise UserError(f"{name} is {value}; it must be at least 1")
