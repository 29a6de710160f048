"""The vectors that a run keeps from merge to merge, and linear combinations of vectors.

An executor knows of them what a plan declares: names, numbers and initial values. A vector that was never assigned has
its initial value and takes no memory of its own. Vectors of clients that do not fit on the device are in host memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..algorithms.protocol import FROM_VERSION, VERSION, Assignment, StateSpec, StateVector, Update
from ..planning.transforms import parse_transform
from ..rng import key
from . import tensor_rng
from .placed_vectors import PlacedVectors
from .state_memory import VectorMemory
from .threads import in_parallel

GROUP_SIZE = 64  # assignments that are computed together
PARALLEL_SIZE = 1 << 21  # products of a sum; fewer are not worth a second core
PART = 1 << 15  # values; PyTorch computes so few in the calling thread

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


def weighted_sum(terms: Sequence[tuple[Tensor, float]]) -> Tensor:
    """Return Σ c·x in memory of its own, added in this order; a first coefficient of one needs no product.

    On the CPU, all cores compute large sums. The order of additions to a value is the same for any number of them.
    """
    first = terms[0][0]
    if first.device.type != "cpu":
        return _sum_in_order(terms)
    cores = torch.get_num_threads() if first.numel() * len(terms) >= PARALLEL_SIZE else 1
    if cores == 1:
        return in_parallel([partial(_sum_in_order, terms)], 1)[0]
    total, size = torch.empty_like(first), -(-first.numel() // cores)
    parts = zip(torch.split(total, size), *(torch.split(vector, size) for vector, _ in terms), strict=True)
    coefficients = [c for _, c in terms]
    in_parallel(
        [partial(_sum_in_order, list(zip(vectors, coefficients, strict=True)), out) for out, *vectors in parts], cores
    )
    return total


def _sum_in_order(terms: Sequence[tuple[Tensor, float]], out: Tensor | None = None) -> Tensor:
    (first, factor), *others = terms
    if factor != 1.0 or not others:
        total = torch.mul(first, factor, out=out)
    else:
        (second, c), *others = others
        total = torch.add(first, second, alpha=c, out=out)
    for vector, c in others:
        total.add_(vector, alpha=c)
    return total


def all_finite(vector: Tensor) -> bool:
    """Return whether every value is finite: then, and only then, the norms of the parts are."""
    # NumPy sums in this thread alone: where other processes use the cores, PyTorch's threads wait for each other.
    if vector.device.type == "cpu" and vector.dtype != torch.bfloat16:  # which NumPy lacks
        with np.errstate(over="ignore", invalid="ignore"):
            total = float(np.add.reduce(vector.detach().numpy()))
        if math.isfinite(total):
            return True  # several times faster; a sum that overflows proves nothing
    return bool(torch.stack(torch._foreach_norm(torch.split(vector, PART), math.inf)).isfinite().all())


def combined(terms: Iterable[Term]) -> Tensor | None:
    """Return Σ c·x, None if there is no vector other than zero; a single vector times one is returned itself."""
    return _combined_together([_nonzero(terms)])[0]


def _nonzero(terms: Iterable[Term]) -> list[tuple[Tensor, float]]:
    return [(vector, c) for vector, c in terms if vector is not None and c != 0.0]


def _combined_together(sums: Sequence[Sequence[tuple[Tensor, float]]]) -> list[Tensor | None]:
    """Return every Σ c·x; those with the same coefficients are computed together, which takes fewer kernels."""
    found: list[Tensor | None] = [None] * len(sums)
    alike: dict[tuple[float, ...], list[int]] = {}
    for number, terms in enumerate(sums):
        alike.setdefault(tuple(c for _, c in terms), []).append(number)
    for coefficients, numbers in alike.items():
        if coefficients == (1.0,):
            values = [sums[number][0][0] for number in numbers]
        elif coefficients:
            values = _weighted_sums([sums[number] for number in numbers])
        else:
            continue
        for number, value in zip(numbers, values, strict=True):
            found[number] = value
    return found


def _weighted_sums(sums: Sequence[Sequence[tuple[Tensor, float]]]) -> list[Tensor]:
    """Return ``weighted_sum`` for many sums with the same coefficients, on a device in few kernels."""
    if len(sums) == 1 or sums[0][0][0].device.type == "cpu":
        return [weighted_sum(terms) for terms in sums]
    coefficients = [c for _, c in sums[0]]
    columns = [list(column) for column in zip(*([x for x, _ in terms] for terms in sums), strict=True)]
    done = 1 if coefficients[0] != 1.0 or len(columns) == 1 else 2
    if done == 1:
        totals = list(torch._foreach_mul(columns[0], coefficients[0]))
    else:
        totals = list(torch._foreach_add(columns[0], columns[1], alpha=coefficients[1]))
    for column, c in zip(columns[done:], coefficients[done:], strict=True):
        torch._foreach_add_(totals, column, alpha=c)
    return totals


def assign(
    state: StateVectors, assignments: Iterable[Assignment], versions: Mapping[int, Tensor],
    deltas: Mapping[Update, Tensor], key_parts: tuple[int, int],
) -> None:  # fmt: skip
    """Carry out assignments in order; ``key_parts`` are the seed of the run and the version of the merge."""
    for group in _independent(assignments):
        values = _combined_together([_nonzero(_terms(each, state, versions, deltas)) for each in group])
        bits = parse_transform(group[0].transform)
        if bits is not None:
            values = _quantised_together([each.target for each in group], values, key_parts, bits)
        for assignment, value in zip(group, values, strict=True):
            state[assignment.target] = value


def _independent(assignments: Iterable[Assignment]) -> Iterator[list[Assignment]]:
    """Yield groups of assignments with one transform, none of which uses or assigns a target of its group again."""
    group: list[Assignment] = []
    targets: set[StateVector] = set()
    for assignment in assignments:
        again = assignment.target in targets or any(vector in targets for vector, _ in assignment.states)
        if group and (again or assignment.transform != group[0].transform or len(group) == GROUP_SIZE):
            yield group
            group, targets = [], set()
        group.append(assignment)
        targets.add(assignment.target)
    if group:
        yield group


def _quantised_together(
    targets: Sequence[StateVector], values: Sequence[Tensor | None], key_parts: tuple[int, int], bits: int
) -> list[Tensor | None]:
    """Return the vectors quantised, each in memory of its own."""
    (seed, version), quantised_values = key_parts, list(values)
    found = [number for number, value in enumerate(values) if value is not None]
    if found:
        chosen = [targets[number] for number in found]
        keys = [key(seed, f"quantise {target.name}", target.index, version) for target in chosen]
        rounded = quantised(torch.stack([value for value in values if value is not None]), bits, keys).unbind()
        own = [torch.empty_like(value) for value in rounded]
        torch._foreach_copy_(own, list(rounded))
        for number, value in zip(found, own, strict=True):
            quantised_values[number] = value
    return quantised_values


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
