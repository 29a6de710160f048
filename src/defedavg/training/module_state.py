"""The state of a module besides its parameters: random layers, buffers that training updates, and constants."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..tasks.samples import Inputs, tensors_of
from .stacking.attention import KeyedAttention, is_standard
from .stacking.dropout import DRAWN_DIMENSIONS, Draws, KeyedDropout


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
        if isinstance(inner, KeyedDropout | KeyedAttention):
            inner.number, inner.draws = number, draws
            number += 1
    draws.used = number > 0
    return module, draws


def updated_buffers(module: nn.Module, inputs: Inputs) -> frozenset[str]:
    """Return the buffers that a forward pass in training mode changes, with all other buffers of the same layer."""
    before = dict(module.named_buffers())
    if not before:
        return frozenset()
    copied, draws = keyed_copy(module)
    draws.key = torch.zeros((), dtype=torch.int64, device=tensors_of(inputs)[0].device)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            copied.train()(inputs)
    except Exception:  # without a forward pass, any buffer may be one that training updates
        return frozenset(before)
    after = dict(copied.named_buffers())
    layers = {name.rpartition(".")[0] for name, value in before.items() if not _same(value, after.get(name))}
    return frozenset(name for name in before if name.rpartition(".")[0] in layers)


def same_constants(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two modules agree in all tensors except their parameters, so that they can share a batch."""
    first, second = dict(_constants(one)), dict(_constants(other))
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
