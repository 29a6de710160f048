"""Why a candidate loses, in words: facts of its plan, of the split and of its runs, compared with the leader's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..jsonio import three_digits
from .candidates import GridCell
from .screening import Holders, PlannedShape
from .search import AdviceSearch

NOTABLE = 1.25
"""A figure that differs by less than this factor is no reason."""
MOST_FACTS = 2


def why(search: AdviceSearch, candidate: GridCell, leader: GridCell, holders: Holders, metric: str) -> str:
    """Return why a raced candidate is not the leader; ``metric`` is the name of what the target is a value of."""
    parts = [_outcome(search, candidate, leader, metric)]
    plan, best = search.planned(candidate), search.planned(leader)
    facts = sorted(_facts(plan, best, holders), reverse=True)[:MOST_FACTS]
    if facts:
        parts.append("its plan: " + ", and ".join(text for _, text in facts))
    elif plan.shape == best.shape:
        parts.append("the plan is the leader's, so the rates make the difference")
    return "; ".join(parts)


def _outcome(search: AdviceSearch, candidate: GridCell, leader: GridCell, metric: str) -> str:
    if candidate in search.lost:
        return search.lost[candidate]
    if search.run(candidate) is None:
        return "was not started"
    for missed in search.missed_runs(candidate):
        where = "" if missed.seed == search.first else f"on seed {missed.seed} "
        return where + missed.reason(metric)
    found = search.ratio(candidate, leader)
    if found is None:
        return "shares no seed with the leader"
    if found.low is None or found.high is None:
        return f"takes {found.mean:.2f} times as long on one seed"
    text = f"takes {found.mean:.2f} times as long [{found.low:.2f}, {found.high:.2f}]"
    return text if found.low > 1.0 else f"{text}, not separated"


def _facts(plan: PlannedShape, best: PlannedShape, holders: Holders) -> Iterator[tuple[float, str]]:
    """Yield the size of a disadvantage in the plan, as a factor, and its description."""
    if plan.shape == best.shape:
        return
    unheard = _classes_unheard(plan, best, holders)
    if unheard is not None:
        yield unheard
    slow, other = plan.stats.participation[-1], best.stats.participation[-1]
    if unheard is None and other > NOTABLE * slow:
        share = f"{slow:.2f} of an equal share (the leader {other:.2f})"
        yield other / max(slow, 1e-3), f"its slowest quarter of clients is heard {share}"
    if best.steps_per_second > NOTABLE * plan.steps_per_second:
        mine, leaders = three_digits(plan.steps_per_second), three_digits(best.steps_per_second)
        yield (
            best.steps_per_second / plan.steps_per_second,
            f"it merges {mine} local steps a second (the leader {leaders})",
        )
    stale, fresh = plan.stats.staleness_mean, best.stats.staleness_mean
    if stale + 1 > NOTABLE * (fresh + 1):
        yield (stale + 1) / (fresh + 1), f"its updates are {stale:.1f} versions old (the leader's {fresh:.1f})"
    first, then = plan.stats.seconds_per_round, best.stats.seconds_per_round
    if first > NOTABLE * then:
        yield first / then, f"a round takes {three_digits(first)} s (the leader's {three_digits(then)} s)"


def _classes_unheard(plan: PlannedShape, best: PlannedShape, holders: Holders) -> tuple[float, str] | None:
    """Return the classes that are heard much less often than by the leader, and who holds them."""
    mine, other = holders.heard(plan.merged), holders.heard(best.merged)
    if mine is None or other is None or holders.counts is None:
        return None
    factors = other / np.maximum(mine, 1e-3)
    classes = np.flatnonzero(factors > NOTABLE)
    if not len(classes):
        return None
    order = classes[np.argsort(-factors[classes], kind="stable")][:3]
    names = ", ".join(str(c) for c in sorted(order.tolist()))
    heard = float(mine[order].mean() / max(float(other[order].mean()), 1e-12))
    word = "class" if len(order) == 1 else "classes"
    return float(factors[order].max()), (
        f"the clients that hold {word} {names} are heard {heard:.2f} times as often as by the leader"
    )
