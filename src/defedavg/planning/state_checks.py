"""Checks of what a merge does with state vectors: every vector that it names is declared, every number is finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from ..algorithms.protocol import Assignment, Merge, StateSpec, StateVector, Update
from ..errors import UserError, first_line
from .transforms import parse_transform


class DeclaredState:
    """The state vectors that an algorithm declares, and the fault of a merge that does not keep to them."""

    def __init__(self, specs: Iterable[StateSpec]) -> None:
        self._counts = {spec.name: spec.count for spec in specs}

    def fault(self, merge: Merge, may_use: Callable[[int], bool]) -> str | None:
        """Return what is wrong with the state vectors of a merge; ``may_use`` says which past versions exist."""
        if not (merge.states or merge.before or merge.after) and merge.rate_scale == 1.0:
            return None
        if not (math.isfinite(merge.rate_scale) and merge.rate_scale > 0.0):
            return f"its rate_scale is {merge.rate_scale}; it must be a number above zero"
        named = (self._vector_fault(vector, c) for vector, c in merge.states)
        merged = {update for update, _ in merge.updates}
        assigned = (self._assignment_fault(assignment, merged) for assignment in merge.assignments)
        used = (_version_fault(merge, may_use),)
        return next((fault for faults in (named, assigned, used) for fault in faults if fault), None)

    def _assignment_fault(self, assignment: Assignment, merged: set[Update]) -> str | None:
        for update, b in assignment.updates:
            if update not in merged or not math.isfinite(b):
                return f"{_name(assignment.target)} uses {update}, which the merge does not name, or times {b}"
        if not all(math.isfinite(a) for _, a in assignment.past):
            return f"{_name(assignment.target)} uses a version times a number that is not finite"
        for vector, c in (*assignment.states, (assignment.target, 1.0)):
            if fault := self._vector_fault(vector, c):
                return fault
        try:
            parse_transform(assignment.transform)
        except UserError as error:
            return first_line(error)
        return None

    def _vector_fault(self, vector: StateVector, c: float) -> str | None:
        if not 0 <= vector.index < self._counts.get(vector.name, 0):
            return f"it names the state vector {_name(vector)}; declare it in state_vectors()"
        return None if math.isfinite(c) else f"the coefficient of {_name(vector)} is {c}"


def _version_fault(merge: Merge, may_use: Callable[[int], bool]) -> str | None:
    """Return the fault of assignments that use a version; those after the step may use the new version, too."""
    newest = merge.version
    for assignments, usable in ((merge.before, (newest - 1,)), (merge.after, (newest - 1, newest))):
        for version in (version for assignment in assignments for version, _ in assignment.past):
            if version not in usable and not may_use(version):
                return f"an assignment uses version {version}, which does not exist or was freed"
    return None


def _name(vector: StateVector) -> str:
    return f"{vector.name}[{vector.index}]"
