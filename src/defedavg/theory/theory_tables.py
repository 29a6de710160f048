"""Tables of theorem reports and of speedup measurements for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rich.table import Table

from ..report.tables import make
from .formulas import theorem

SYMBOLS: Final = {"smoothness": "L", "noise": "σ²", "gradient": "G²", "heterogeneity": "ν²", "gap": "ΔF"}
SIZES: Final = {
    "updates_per_round": "n", "local_steps": "K", "rounds": "T", "max_staleness": "λ", "num_clients": "N"
}  # fmt: skip


def theorem_table(report: Mapping[str, Any]) -> Table:
    """Return a theorem report as a table."""
    constants, uses = report["constants"], theorem(report["algorithm"]).uses
    values = [f"{symbol} = {constants[name]:.4g}" for name, symbol in SYMBOLS.items() if name in uses]
    sizes = [f"{symbol} = {constants[name]}" for name, symbol in SIZES.items()]
    rows = [
        ("constants", ", ".join(values)),
        ("size", ", ".join(sizes)),
        ("η, η̄", f"{report['rates']['global_lr']:.4g}, {report['rates']['local_lr']:.4g}"),
    ]
    for condition in report["conditions"]:
        outcome = "ok" if condition["holds"] else "fails"
        rows.append((condition["name"], f"{outcome}: {condition['left']:.4g} vs {condition['right']:.4g}"))
    for name, key in (("bound, corrected", "bound"), ("bound, as printed", "printed_bound")):
        bound = report[key]
        rows.append((name, f"{bound['total']:.4g} = {bound['first']:.4g} + {bound['second']:.4g}"))
    rows += _round_rows(report) + _staleness_rows(report)
    return make(f"{report['label']}: Theorem {report['theorem']}", ("", ""), rows, report.get("note"))


def _round_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    rounds = report["rounds"]
    rows = [
        ("T for the conditions", f"{rounds['to_apply']:,}"),
        (f"T for a bound of {report['epsilon']:g}", f"{rounds['to_reach']:,}"),
        ("T for both", f"{rounds['needed']:,}"),
    ]
    if rounds["needed_drawn"] is not None:
        probability = 1 - report["staleness"]["delta"]
        rows.append((f"T for both, λ growing with T (probability {probability:g})", f"{rounds['needed_drawn']:,}"))
    return rows


def _staleness_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    staleness, rows = report["staleness"], []
    if staleness["probable"] is not None:
        rows.append((f"λ for this T (probability {1 - staleness['delta']:g})", f"{staleness['probable']}"))
        rows.append(("λ as the paper states it, with constant 1", f"{staleness['stated']:.4g}"))
    if report.get("observed_staleness") is not None:
        rows.append(("λ in a plan of these clients", f"{report['observed_staleness']}"))
    return rows


def speedup_table(speedup: Mapping[str, Any]) -> Table:
    """Return the speedup of one task and algorithm as a table."""
    rows = [
        (
            str(point["n"]),
            f"{point['mean_rounds']:.0f}",
            ", ".join(map(str, point["rounds"])),
            str(point["max_staleness"]),
            "hold" if point["conditions_hold"] else "fail",
            f"{point['promised_rounds']:,}",
            f"{100 * point['first_share']:.1f} %",
        )
        for point in speedup["points"]
    ]
    columns = ("n", "rounds", "per seed", "λ", "conditions", "rounds by bound", "first term")
    title = (
        f"{speedup['task']}, {speedup['algorithm']}, ε = {speedup['epsilon']:g}: slope {speedup['slope']:.3f} "
        f"[{speedup['slope_low']:.3f}, {speedup['slope_high']:.3f}]"
    )
    caption = (
        "rounds: geometric mean over seeds. λ: largest staleness of the runs. rounds by bound: rounds for which the "
        "corrected bound is ε. first term: share of the bound's first term at the rounds needed."
    )
    return make(title, columns, rows, caption)
