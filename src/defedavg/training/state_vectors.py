"""The vectors that a run keeps from merge to merge, and linear combinations of vectors.

An executor knows of them what a plan declares: names, numbers and initial values. A vector that was never assigned has
its initial value and takes no memory of its own. Tensors are never changed in place, so that a checkpoint can refer to
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..algorithms.protocol import FROM_VERSION, VERSION, Assignment, StateSpec, StateVector, Update
from ..planning.transforms import parse_transform
from ..rng import key
from . import tensor_rng

Term = tuple[Tensor | None, float]
"""A vector, None for zero, and its coefficient."""


@dataclass(frozen=True, slots=True)
class StateLayout:
    """What a plan declares: its state vectors, from what jobs start, and what is added to the gradients of jobs."""

    specs: tuple[StateSpec, ...] = ()
    job_start: tuple[tuple[str, float], ...] = FROM_VERSION
    correction: tuple[tuple[str, float], ...] = ()

    @property
    def vectors(self) -> int:
        """The number of state vectors, at most."""
        return sum(spec.count for spec in self.specs)


NO_STATE = StateLayout()


class StateVectors:
    """The values of a run's state vectors."""

    def __init__(self, layout: StateLayout, model: Tensor) -> None:
        self.layout = layout
        self._model = model
        self._initial = {spec.name: model for spec in layout.specs if spec.initial == "model"}
        self._values: dict[StateVector, Tensor] = {}

    def __getitem__(self, vector: StateVector) -> Tensor | None:
        """Return the value of a vector, None if it is zero."""
        return self._values.get(vector, self._initial.get(vector.name))

    def __setitem__(self, vector: StateVector, value: Tensor | None) -> None:
        if value is not None:
            self._values[vector] = own_memory(value)
        elif vector.name in self._initial:
            self._values[vector] = torch.zeros_like(self._model)
        else:
            self._values.pop(vector, None)

    def assigned(self) -> dict[StateVector, Tensor]:
        """Return the vectors that were assigned: all that a checkpoint needs."""
        return dict(self._values)

    def restore(self, values: Mapping[StateVector, Tensor]) -> None:
        """Replace all assigned vectors."""
        self._values = dict(values)

    def of_client(self, terms: Iterable[tuple[str, float]], client: int, version: Tensor) -> Tensor | None:
        """Return Σ c·x of a client, where x is its state vector of that name or, for ``VERSION``, the version."""
        vectors = ((version if name == VERSION else self[StateVector(name, client)], c) for name, c in terms)
        return combined(vectors)


def own_memory(value: Tensor) -> Tensor:
    """Return the value in memory of its own: a view would keep the memory of a whole batch."""
    return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value


def combined(terms: Iterable[Term]) -> Tensor | None:
    """Return Σ c·x, None if there is no vector other than zero; a single vector times one is returned itself."""
    found = [(vector, c) for vector, c in terms if vector is not None and c != 0.0]
    if not found:
        return None
    if len(found) == 1 and found[0][1] == 1.0:
        return found[0][0]
    total = torch.zeros_like(found[0][0])
    for vector, c in found:
        total.add_(vector, alpha=c)
    return total


def assign(
    state: StateVectors, assignments: Iterable[Assignment], versions: Mapping[int, Tensor],
    deltas: Mapping[Update, Tensor], key_parts: tuple[int, int],
) -> None:  # fmt: skip
    """Carry out assignments in order; ``key_parts`` are the seed of the run and the version of the merge."""
    for assignment in assignments:
        value = combined(_terms(assignment, state, versions, deltas))
        bits = parse_transform(assignment.transform)
        target = assignment.target
        if value is not None and bits is not None:
            value = quantised(value, bits, key(key_parts[0], f"quantise {target.name}", target.index, key_parts[1]))
        state[target] = value


def _terms(
    assignment: Assignment, state: StateVectors, versions: Mapping[int, Tensor], deltas: Mapping[Update, Tensor]
) -> Iterator[Term]:
    yield from ((deltas.get(update), b) for update, b in assignment.updates)  # one without steps is zero
    yield from ((state[vector], c) for vector, c in assignment.states)
    yield from ((versions[version], a) for version, a in assignment.past)


def quantised(values: Tensor, bits: int, start: int) -> Tensor:
    """Round every value up or down at random to a multiple of the largest over 2^(bits − 1) − 1, without bias."""
    levels = (1 << (bits - 1)) - 1
    largest = values.abs().max()
    unit = torch.where(largest > 0, largest / levels, torch.ones_like(largest))
    elements = torch.arange(values.numel(), device=values.device)
    keys = tensor_rng.extend_all(torch.tensor(tensor_rng.signed(start), device=values.device), elements)
    return torch.floor(values / unit + tensor_rng.uniform(keys).to(values.dtype)) * unit
