"""Why nothing of a candidate was trained: its first merge is too late, or the search ended before its turn."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping

from ..jsonio import three_digits
from .candidates import GridCell
from .exploring import first_merge
from .search_state import SearchState


def trained(search: SearchState, candidate: GridCell) -> bool:
    """Return whether something of a candidate was trained on the first seed."""
    run = search.run(candidate)
    return run is not None and run.seconds > 0.0


def not_trained(search: SearchState) -> Iterator[tuple[GridCell, str]]:
    """Yield the candidates of which nothing was trained although the search came to them or let them wait, and why."""
    first: dict[Hashable, str] = {}  # by their first merge, those that were trained
    for each in search.tried:
        if trained(search, each):
            first.setdefault(first_merge(search, each), search.label(each))
    for each in search.tried | search.postponed:
        if not trained(search, each):
            yield each, _why(search, each, first)


def _why(search: SearchState, candidate: GridCell, first: Mapping[Hashable, str]) -> str:
    """Return the reason, from the plan of a candidate, the budget and the order of the search."""
    plan, best = search.planned(candidate), search.best_time
    if plan.first_round > best:
        reached = f"the target was reached at {three_digits(best)} s"
        return f"its first round is planned at {three_digits(plan.first_round)} s, and {reached}"
    needed, left = plan.steps_until(plan.first_round), max(0.0, search.race.steps_left(1.0))
    if needed > left:
        return f"not started: its first round trains {needed:,.0f} local steps, and the budget had {left:,.0f} left"
    ended = f"the search ended before its turn ({search.ended})"
    other = first.get(first_merge(search, candidate))
    if other is None:
        return f"not started: {ended}"
    return f"not started: {other}, which has the same first merge, was trained before it, and {ended}"
