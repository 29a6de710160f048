"""A theorem applied to one setting, as data for a table or for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .formulas import Constants, theorem
from .required_rounds import (
    probable_staleness,
    rounds_needed,
    rounds_needed_drawn,
    rounds_to_apply,
    rounds_to_reach,
    stated_staleness,
)


def theorem_report(algorithm: str, c: Constants, *, epsilon: float, delta: float) -> dict[str, Any]:
    """Return rates, conditions, bounds, rounds and λ."""
    kind = theorem(algorithm)
    bound, printed = kind.bound(c), kind.printed(c)
    drawn = algorithm == "defedavg-niid"  # otherwise λ depends only on the speeds of the clients
    draw = (c.num_clients, c.updates_per_round, c.rounds, delta)
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
            "needed_drawn": rounds_needed_drawn(kind, c, epsilon, delta) if drawn else None,
        },
        "staleness": {
            "used": c.max_staleness,
            "delta": delta,
            "probable": probable_staleness(*draw) if drawn else None,
            "stated": stated_staleness(*draw) if drawn else None,
        },
    }
