"""The vectors that a run keeps from merge to merge, and linear combinations of vectors.

An executor knows of them what a plan declares: names, numbers and initial values. A vector that was never assigned has
its initial value and takes no memory of its own. Vectors of clients that do not fit on the device are in host memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from ..algorithms.protocol import FROM_VERSION, VERSION, Assignment, StateSpec, StateVector, Update
from ..planning.transforms import parse_transform
from ..rng import key
from . import tensor_rng
from .placed_vectors import PlacedVectors
from .state_memory import VectorMemory

Term = tuple[Tensor | None, float]
"""A vector, None for zero, and its coefficient."""


@dataclass(frozen=True, slots=True)
class StateLayout:
    """What a plan declares: its state vectors, from what jobs start, and what is added to the gradients of jobs."""

    specs: tuple[StateSpec, ...] = ()
    job_start: tuple[tuple[str, float], ...] = FROM_VERSION
    correction: tuple[tuple[str, float], ...] = ()
    owner: str = "the plan"  # in messages
    updates_per_merge: int = 0

    def vectors(self, rounds: int) -> int:
        """Return the number of state vectors after that many rounds, at most: a merge has vectors of few clients."""
        clients = rounds * self.updates_per_merge
        return sum(min(spec.count, clients) if spec.per_client else spec.count for spec in self.specs)


NO_STATE = StateLayout()


class StateVectors:
    """The values of a run's state vectors."""

    def __init__(self, layout: StateLayout, model: Tensor) -> None:
        self.layout = layout
        self._model = model
        self._initial = {spec.name: model for spec in layout.specs if spec.initial == "model"}
        of_clients = {spec.name for spec in layout.specs if spec.per_client}
        self._values = PlacedVectors[StateVector](model.device, lambda vector: vector.name not in of_clients)

    def place(self, memory: VectorMemory) -> None:
        """Use this memory from now on."""
        self._values.place(memory)

    def release(self) -> None:
        """Free the copies on the device of vectors in host memory."""
        self._values.release()

    def __getitem__(self, vector: StateVector) -> Tensor | None:
        """Return the value of a vector on the device, None if it is zero."""
        value = self._values.get(vector)
        return self._initial.get(vector.name) if value is None else value

    def __setitem__(self, vector: StateVector, value: Tensor | None) -> None:
        if value is None and vector.name in self._initial:
            value = torch.zeros_like(self._model)
        if value is None:
            self._values.remove(vector)
        else:
            self._values.put(vector, value)

    def assigned(self) -> dict[StateVector, Tensor]:
        """Return the vectors that were assigned, all that a checkpoint needs; the next merge changes those in rows."""
        return self._values.stored()

    def restore(self, values: Mapping[StateVector, Tensor]) -> None:
        """Replace all assigned vectors; without a memory, they stay where they are until one is given."""
        self._values.restore(values)

    def clear(self) -> None:
        """Give all vectors their initial values, and free their memory."""
        self._values.clear()

    def of_client(self, terms: Iterable[tuple[str, float]], client: int, version: Tensor) -> Tensor | None:
        """Return Σ c·x of a client, where x is its state vector of that name or, for ``VERSION``, the version."""
        vectors = ((version if name == VERSION else self[StateVector(name, client)], c) for name, c in terms)
        return combined(vectors)


def combined(terms: Iterable[Term]) -> Tensor | None:
    """Return Σ c·x, None if there is no vector other than zero; a single vector times one is returned itself."""
    found = [(vector, c) for vector, c in terms if vector is not None and c != 0.0]
    if not found:
        return None
    if len(found) == 1 and found[0][1] == 1.0:
        return found[0][0]
    first, factor = found[0]
    total = first * factor if factor != 1.0 else torch.add(first, found[1][0], alpha=found[1][1])
    for vector, c in found[1 if factor != 1.0 else 2 :]:
        total.add_(vector, alpha=c)
    return total


def assign(
    state: StateVectors, assignments: Iterable[Assignment], versions: Mapping[int, Tensor],
    deltas: Mapping[Update, Tensor], key_parts: tuple[int, int],
) -> None:  # fmt: skip
    """Carry out assignments in order; ``key_parts`` are the seed of the run and the version of the merge."""
    for transform, group in groupby(assignments, key=lambda assignment: assignment.transform):
        bits = parse_transform(transform)
        if bits is None:
            for assignment in group:
                state[assignment.target] = combined(_terms(assignment, state, versions, deltas))
        else:
            _assign_quantised(state, list(group), versions, deltas, key_parts, bits)


def _assign_quantised(
    state: StateVectors, group: Sequence[Assignment], versions: Mapping[int, Tensor], deltas: Mapping[Update, Tensor],
    key_parts: tuple[int, int], bits: int,
) -> None:  # fmt: skip
    """Quantise vectors together, which is faster, as far as none of them uses one that is assigned before it."""
    targets: list[StateVector] = []
    values: list[Tensor | None] = []
    for assignment in group:
        if not {vector for vector, _ in assignment.states}.isdisjoint(targets) or assignment.target in targets:
            break
        targets.append(assignment.target)
        values.append(combined(_terms(assignment, state, versions, deltas)))
    found = [(target, value) for target, value in zip(targets, values, strict=True) if value is not None]
    for target in targets:
        state[target] = None
    if found:
        seed, version = key_parts
        keys = [key(seed, f"quantise {target.name}", target.index, version) for target, _ in found]
        rounded = quantised(torch.stack([value for _, value in found]), bits, keys)
        for (target, _), value in zip(found, rounded.unbind(), strict=True):
            state[target] = value
    if len(targets) < len(group):
        _assign_quantised(state, group[len(targets) :], versions, deltas, key_parts, bits)


def _terms(
    assignment: Assignment, state: StateVectors, versions: Mapping[int, Tensor], deltas: Mapping[Update, Tensor]
) -> Iterator[Term]:
    # Vectors whose coefficient is often one are first: they need no product.
    yield from ((versions[version], a) for version, a in assignment.past)
    yield from ((state[vector], c) for vector, c in assignment.states)
    yield from ((deltas.get(update), b) for update, b in assignment.updates)  # one without steps is zero


def quantised(values: Tensor, bits: int, keys: Sequence[int]) -> Tensor:
    """Round vectors (V, values) at random up or down to multiples of the largest over 2^(bits − 1) − 1, without bias.

    The draws of every vector depend on its key alone.
    """
    levels = (1 << (bits - 1)) - 1
    largest = values.abs().amax(dim=1, keepdim=True)
    unit = torch.where(largest > 0, largest / levels, torch.ones_like(largest))
    starts = torch.tensor([tensor_rng.signed(start) for start in keys])
    if values.is_cuda:  # neither the host nor the device waits
        starts = starts.pin_memory()
    elements = torch.arange(values.shape[1], device=values.device)
    drawn = tensor_rng.extend_all(starts.to(values.device, non_blocking=True).unsqueeze(1), elements)
    return torch.floor(values / unit + tensor_rng.uniform(drawn).to(values.dtype)) * unit
