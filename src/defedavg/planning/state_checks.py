"""Checks of state vectors: how they are declared, and what merges do with them.

Every vector that a merge, the start of jobs or their correction names is declared, and every number is finite.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable

from ..algorithms.protocol import VERSION, Assignment, Merge, StateSpec, StateVector, Update
from ..errors import UserError, first_line
from .transforms import parse_transform

NAME = re.compile(r"[a-z][a-z0-9_-]{0,49}")
INITIAL = ("zero", "model")

Terms = Iterable[tuple[str, float]]


def declaration_fault(specs: Iterable[StateSpec], num_clients: int, start: Terms, correction: Terms) -> str | None:
    """Return what is wrong with the state vectors that are declared, or with the start and the correction of jobs."""
    seen: dict[str, StateSpec] = {}
    for spec in specs:
        if fault := _spec_fault(spec, num_clients):
            return fault
        if spec.name in seen:
            return f"the state vectors {spec.name!r} are declared twice"
        seen[spec.name] = spec
    for what, terms, others in (("job_start", start, {VERSION}), ("correction", correction, set())):
        for name, c in terms:
            if name not in others and not (name in seen and seen[name].per_client):
                return f"{what} names {name!r}; declare it in state_vectors(), with per_client=True"
            if not math.isfinite(c):
                return f"the coefficient of {name!r} in {what} is {c}"
    return None


def _spec_fault(spec: StateSpec, num_clients: int) -> str | None:
    if NAME.fullmatch(spec.name) is None or spec.name == VERSION:
        return f"the state vector {spec.name[:50]!r} needs another name: lower-case letters, digits, '-' and '_'"
    if spec.initial not in INITIAL:
        return f"the initial value of {spec.name!r} is {spec.initial[:40]!r}; write {' or '.join(map(repr, INITIAL))}"
    if spec.count < 1 or (spec.per_client and spec.count != num_clients):
        return f"{spec.count} state vectors {spec.name!r} are declared for {num_clients} clients; correct the count"
    return None


class DeclaredState:
    """The state vectors that an algorithm declares, and the fault of a merge that does not keep to them."""

    def __init__(self, specs: Iterable[StateSpec]) -> None:
        declared = {spec.name: spec for spec in specs}
        self._counts = {name: spec.count for name, spec in declared.items()}
        self._models = {name for name, spec in declared.items() if spec.initial == "model"}

    def affine_sum(self, merge: Merge) -> float:
        """Return the sum of the coefficients of models: past versions, and state vectors that are models at first."""
        states = (c for vector, c in merge.states if vector.name in self._models)
        return math.fsum((*(a for _, a in merge.past), *states))

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
