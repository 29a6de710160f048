"""Sequences of layers, stacked one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from torch import Tensor, nn

from ..kernels.deferred import LEAST_WEIGHTS
from ..kernels.plain import LayerKernels
from .layer_registry import LayerSite, StackedLayer, StackedPass, StackingError, build_layer

NamedLayer = tuple[nn.Module, str]
"""A layer and the prefix of its parameters' names."""


def is_sequence(module: nn.Module) -> bool:
    """Return whether a module calls its layers one after the other."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and not _hooked(module)


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _leaves(module: nn.Module, name: str) -> Iterator[NamedLayer]:
    if not is_sequence(module):
        yield module, name
        return
    for child, inner in module._modules.items():  # a layer that occurs twice counts twice
        assert inner is not None
        yield from _leaves(inner, f"{name}{child}.")


def stack_first(leaves: Sequence[NamedLayer], kernels: LayerKernels) -> StackedLayer:
    """Stack the first of these layers, with those after it that it absorbs."""
    (first, name), *rest = leaves
    if _hooked(first):
        raise StackingError(f"{name}: a layer with hooks")
    following = tuple(takewhile(lambda inner: not _hooked(inner), (inner for inner, _ in rest)))
    return build_layer(first, LayerSite(name, kernels, following))


def stack_sequence(module: nn.Module, name: str, kernels: LayerKernels) -> list[StackedLayer]:
    """Stack all layers of a module whose parameters have the prefix ``name``."""
    leaves, stacked = list(_leaves(module, name)), list[StackedLayer]()
    while leaves:
        stacked.append(stack_first(leaves, kernels))
        leaves = leaves[1 + stacked[-1].absorbs :]
    return stacked


def deferrable_weights(module: nn.Module) -> tuple[str, ...]:
    """Return the names of large fully connected weights whose inputs have one row per sample.

    They come after a layer that makes one row of every sample. All parameters of such a layer are trained.
    """
    names, one_row = [], False
    for layer, name in _leaves(module, ""):
        if isinstance(layer, nn.Flatten | nn.Unflatten):
            one_row = isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) == (1, -1)
        trained = all(parameter.requires_grad for parameter in layer.parameters())
        if one_row and trained and type(layer) is nn.Linear and layer.weight.numel() >= LEAST_WEIGHTS:
            names.append(f"{name}weight")
    return tuple(names)


def run_sequence(layers: Sequence[StackedLayer], context: StackedPass, x: Tensor) -> Tensor:
    """Return the outputs of stacked layers, one after the other."""
    for layer in layers:
        x = layer.run(context, x)
    return x
