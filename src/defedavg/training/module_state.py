"""What a module holds besides its parameters: layers that draw, buffers that move, and constants."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .stacking.attention import KeyedAttention, is_usual
from .stacking.dropout import KEYED, Draws, KeyedDropout


def keyed_copy(module: nn.Module) -> tuple[nn.Module, Draws]:
    """A copy whose layers with dropout take their masks from keys, and the place to put these keys."""
    module, draws = copy.deepcopy(module), Draws()
    number = 0
    for inner in module.modules():
        kind: type[nn.Module] | None = KEYED.get(type(inner))
        if type(inner) is nn.MultiheadAttention and inner.dropout > 0 and is_usual(inner):
            kind = KeyedAttention
        if kind is not None:
            inner.__class__ = kind  # in place, since several modules may hold this one
        if isinstance(inner, KeyedDropout | KeyedAttention):
            inner.number, inner.draws = number, draws
            number += 1
    draws.used = number > 0
    return module, draws


def moving_buffers(module: nn.Module, inputs: Tensor) -> frozenset[str]:
    """The buffers that a training pass over these inputs changes, with all others of the same layer."""
    before = dict(module.named_buffers())
    if not before:
        return frozenset()
    trial, draws = keyed_copy(module)
    draws.key = torch.zeros((), dtype=torch.int64, device=inputs.device)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            trial.train()(inputs)
    except Exception:  # what cannot be seen to stand still may move
        return frozenset(before)
    after = dict(trial.named_buffers())
    moved = {name.rpartition(".")[0] for name, value in before.items() if not _same(value, after.get(name))}
    return frozenset(name for name in before if name.rpartition(".")[0] in moved)


def same_constants(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules of one kind agree in all tensors but their parameters, so that they can share a batch."""
    first, second = dict(_constants(one)), dict(_constants(other))
    return first.keys() == second.keys() and all(_same(value, second[name]) for name, value in first.items())


def _constants(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_buffers()
    for name, inner in module.named_modules():
        for own, value in vars(inner).items():
            if isinstance(value, Tensor) and value.grad_fn is None:  # else it was kept from a pass
                yield f"{name}.{own}", value


def _same(one: Tensor, other: Tensor | None) -> bool:
    if other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())
