"""Everything a theorem says of one setting, as data for a table or for JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.table import Table

from ..report.tables import make
from .formulas import (
    Constants,
    probable_staleness,
    rounds_needed,
    rounds_needed_drawn,
    rounds_to_apply,
    rounds_to_reach,
    stated_staleness,
    theorem,
)

SYMBOLS = {"smoothness": "L", "noise": "σ²", "gradient": "G²", "heterogeneity": "ν²", "gap": "ΔF"}
SIZES = {
    "updates_per_round": "n", "local_steps": "K", "rounds": "T", "max_staleness": "λ", "num_clients": "N"
}  # fmt: skip


def sheet(algorithm: str, c: Constants, *, epsilon: float, delta: float) -> dict[str, Any]:
    """Rates, conditions, bounds, rounds and λ."""
    kind = theorem(algorithm)
    rates, bound, printed = kind.rates(c), kind.bound(c), kind.printed(c)
    drawn = algorithm == "defedavg-niid"  # elsewhere λ is a matter of the fleet alone
    draw = (c.num_clients, c.updates_per_round, c.rounds, delta)
    return {
        "algorithm": algorithm,
        "theorem": kind.number,
        "constants": asdict(c),
        "rates": {"global_lr": rates.global_lr, "local_lr": rates.local_lr},
        "conditions": [
            {"name": each.name, "left": each.left, "right": each.right, "holds": each.holds}
            for each in kind.conditions(c)
        ],
        "bound": {"first": bound.first, "second": bound.second, "total": bound.total},
        "printed_bound": {"first": printed.first, "second": printed.second, "total": printed.total},
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


def sheet_table(found: Mapping[str, Any]) -> Table:
    """The sheet for a terminal."""
    constants, uses = found["constants"], theorem(found["algorithm"]).uses
    values = [f"{SYMBOLS[name]} = {constants[name]:.4g}" for name in SYMBOLS if name in uses]
    sizes = [f"{symbol} = {constants[name]}" for name, symbol in SIZES.items()]
    rows = [
        ("constants", ", ".join(values)),
        ("size", ", ".join(sizes)),
        ("η, η̄", f"{found['rates']['global_lr']:.4g}, {found['rates']['local_lr']:.4g}"),
    ]
    for each in found["conditions"]:
        verdict = "ok" if each["holds"] else "fails"
        rows.append((each["name"], f"{verdict}: {each['left']:.4g} vs {each['right']:.4g}"))
    for name, key in (("bound, corrected", "bound"), ("bound, as printed", "printed_bound")):
        bound = found[key]
        rows.append((name, f"{bound['total']:.4g} = {bound['first']:.4g} + {bound['second']:.4g}"))
    rounds, stale = found["rounds"], found["staleness"]
    rows.append(("T for the conditions", f"{rounds['to_apply']:,}"))
    rows.append((f"T for a bound of {found['epsilon']:g}", f"{rounds['to_reach']:,}"))
    rows.append(("T for both", f"{rounds['needed']:,}"))
    if rounds["needed_drawn"] is not None:
        rows.append(
            (f"T for both, λ growing with T (probability {1 - stale['delta']:g})", f"{rounds['needed_drawn']:,}")
        )
    if stale["probable"] is not None:
        rows.append((f"λ for this T (probability {1 - stale['delta']:g})", f"{stale['probable']}"))
        rows.append(("λ as the paper states it, constant 1", f"{stale['stated']:.4g}"))
    if found.get("observed_staleness") is not None:
        rows.append(("λ in a plan of this fleet", f"{found['observed_staleness']}"))
    note = found.get("note")
    return make(f"{found['label']}: Theorem {found['theorem']}", ("", ""), rows, note)
