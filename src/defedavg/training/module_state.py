"""The state of a module besides its parameters: random layers, buffers that training updates, and constants.

Here is described once which values a version contains, and in which order.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..tasks.samples import Inputs, tensors_of
from .stacking.attention import KeyedAttention, is_standard
from .stacking.dropout import DRAWN_DIMENSIONS, Draws, KeyedDropout
from .stacking.recurrent import KEYED, KeyedRecurrent


def keyed_copy(module: nn.Module) -> tuple[nn.Module, Draws]:
    """Return a copy whose dropout layers draw their masks from keys, and the object that holds the key."""
    module, draws = copy.deepcopy(module), Draws()
    number = 0
    for inner in module.modules():
        # The class changes in place, because several modules may hold this one.
        if drawn := DRAWN_DIMENSIONS.get(type(inner)):
            inner.__class__ = KeyedDropout
            vars(inner)["drawn_dimensions"] = drawn
        elif type(inner) is nn.MultiheadAttention and inner.dropout > 0 and is_standard(inner):
            inner.__class__ = KeyedAttention
        elif isinstance(inner, nn.RNNBase) and type(inner) in KEYED and inner.dropout > 0 and inner.num_layers > 1:
            inner.__class__ = KEYED[type(inner)]
        if isinstance(inner, KeyedDropout | KeyedAttention | KeyedRecurrent):
            inner.number, inner.draws = number, draws
            number += inner.num_layers - 1 if isinstance(inner, KeyedRecurrent) else 1
    draws.used = number > 0
    return module, draws


@dataclass(frozen=True, slots=True)
class UpdatedBuffers:
    """The buffers that training changes, by name.

    ``statistics`` are of floating point: versions contain them. ``counters`` are of other types: every job starts with
    their initial values. ``assigned`` are the buffers of both kinds that ``forward`` replaces by new tensors.
    """

    statistics: frozenset[str] = frozenset()
    counters: frozenset[str] = frozenset()
    assigned: frozenset[str] = frozenset()


def updated_buffers(module: nn.Module, inputs: Inputs) -> UpdatedBuffers:
    """Return the buffers that a forward pass in training mode changes, with all finite buffers of the same layers."""
    before = dict(module.named_buffers())
    if not before:
        return UpdatedBuffers()
    copied, draws = keyed_copy(module)
    draws.key = torch.zeros((), dtype=torch.int64, device=tensors_of(inputs)[0].device)
    own = dict(copied.named_buffers())
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        copied.train()(inputs)
    after = dict(copied.named_buffers())
    changed = {name for name, value in before.items() if not _same(value, after.get(name))}
    layers = {name.rpartition(".")[0] for name in changed}
    # A statistic may keep its value in one pass, as a mean of zeros does. An infinite mask is a constant.
    updated = {name for name in before if name.rpartition(".")[0] in layers and bool(before[name].isfinite().all())}
    updated |= changed
    statistics = frozenset(name for name in updated if before[name].is_floating_point())
    return UpdatedBuffers(
        statistics, frozenset(changed - statistics), frozenset(n for n in changed if own[n] is not after.get(n))
    )


@dataclass(frozen=True, slots=True)
class VersionLayout:
    """A version is one vector: first the parameters of the model, then its running statistics, by name and shape.

    An update has the same layout. It contains the difference start − end of the parameters, and the statistics at the
    end of the job.
    """

    parameters: Mapping[str, torch.Size]
    statistics: Mapping[str, torch.Size]

    @classmethod
    def of(cls, module: nn.Module, statistics: Collection[str]) -> VersionLayout:
        """Return the layout of a module's versions."""
        buffers = {name: buffer.shape for name, buffer in module.named_buffers() if name in statistics}
        return cls({name: parameter.shape for name, parameter in module.named_parameters()}, buffers)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shapes of all parts, in their order."""
        return {**self.parameters, **self.statistics}

    @property
    def first_statistic(self) -> int:
        """The number of values in the parameters, which is the position of the first statistic."""
        return sum(shape.numel() for shape in self.parameters.values())

    @property
    def variances(self) -> dict[str, slice]:
        """The positions of the variances, which cannot be negative."""
        position, found = self.first_statistic, {}
        for name, shape in self.statistics.items():
            if name.rpartition(".")[2] == "running_var":
                found[name] = slice(position, position + shape.numel())
            position += shape.numel()
        return found

    def tensors(self, module: nn.Module) -> list[Tensor]:
        """Return the parts of a module's version."""
        buffers = dict(module.named_buffers())
        return [*module.parameters(), *(buffers[name] for name in self.statistics)]

    def update(self, starts: Tensor, ends: Tensor) -> Tensor:
        """Return the updates of jobs, (…, values)."""
        updates = starts - ends
        if self.statistics:
            updates[..., self.first_statistic :] = ends[..., self.first_statistic :]
        return updates


def weighted_mean(weighted: Iterable[tuple[Tensor, float]], default: Tensor) -> Tensor:
    """Return Σ p·s with p = |b| / Σ|b|, for pairs (s, b); the default if every b is zero.

    The mean is updated pair by pair, in a way that keeps equal values exactly and never rounds below zero.
    """
    mean, total = default, 0.0
    for values, weight in weighted:
        if weight != 0.0:
            mean = values if total == 0.0 else mean + (values - mean) * (abs(weight) / (total + abs(weight)))
            total += abs(weight)
    return mean


def same_constants(one: nn.Module, other: nn.Module, statistics: Collection[str] = ()) -> bool:
    """Return whether two modules agree in all tensors that no version contains, so that they can share a batch."""
    first, second = (
        {name: value for name, value in _constants(module) if name not in statistics} for module in (one, other)
    )
    return first.keys() == second.keys() and all(_same(value, second[name]) for name, value in first.items())


def _constants(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_buffers()
    for name, inner in module.named_modules():
        for attribute, value in vars(inner).items():
            if isinstance(value, Tensor) and value.grad_fn is None:  # otherwise it is a cached activation
                yield f"{name}.{attribute}", value


def _same(one: Tensor, other: Tensor | None) -> bool:
    if other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())
