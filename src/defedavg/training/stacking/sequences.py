"""Sequences of layers, stacked one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any

from torch import Tensor, nn

from ..kernels.deferred import LEAST_WEIGHTS
from ..kernels.plain import LayerKernels
from .layer_registry import LayerSite, StackedLayer, StackedPass, StackingError, build_layer

NamedLayer = tuple[nn.Module, str]
"""A layer and the prefix of its parameters' names."""

StackFirst = Callable[[Sequence[NamedLayer], LayerKernels], StackedLayer]
"""A function that stacks the first of some layers, with those after it that it absorbs."""


def is_sequence(module: nn.Module) -> bool:
    """Return whether a module calls its layers one after the other."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and not hooked(module)


def hooked(module: nn.Module) -> bool:
    """Return whether a module has hooks, which a stacked form would not call."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def leaves_of(module: nn.Module, name: str) -> Iterator[NamedLayer]:
    """Yield the layers of nested sequences in their order."""
    if not is_sequence(module):
        yield module, name
        return
    for child, inner in module._modules.items():  # a layer that occurs twice counts twice
        assert inner is not None
        yield from leaves_of(inner, f"{name}{child}.")


def stack_first(leaves: Sequence[NamedLayer], kernels: LayerKernels) -> StackedLayer:
    """Stack the first of these layers, with those after it that it absorbs."""
    (first, name), *rest = leaves
    if hooked(first):
        raise StackingError(f"{name}: a layer with hooks")
    following = tuple(takewhile(lambda inner: not hooked(inner), (inner for inner, _ in rest)))
    return build_layer(first, LayerSite(name, kernels, following))


def stack_leaves(leaves: Sequence[NamedLayer], kernels: LayerKernels, first: StackFirst) -> list[StackedLayer]:
    """Stack all of these layers; ``first`` stacks the first of those that are left."""
    stacked = list[StackedLayer]()
    while leaves:
        stacked.append(first(leaves, kernels))
        leaves = leaves[1 + stacked[-1].absorbs :]
    return stacked


def stack_sequence(
    module: nn.Module, name: str, kernels: LayerKernels, first: StackFirst = stack_first
) -> list[StackedLayer]:
    """Stack all layers of a module whose parameters have the prefix ``name``."""
    return stack_leaves(list(leaves_of(module, name)), kernels, first)


def joined(layers: Sequence[StackedLayer], run: Callable[..., Any]) -> StackedLayer:
    """Return one layer that computes ``run`` with the parameters of several."""
    return StackedLayer(
        run,
        tuple(name for layer in layers for name in layer.self_updating),
        tuple(name for layer in layers for name in layer.channels_last),
        batch_invariant=all(layer.batch_invariant for layer in layers),
    )


def deferrable_weights(module: nn.Module) -> tuple[str, ...]:
    """Return the names of large fully connected weights whose inputs have one row per sample.

    They come after a layer that makes one row of every sample. All parameters of such a layer are trained.
    """
    names, one_row = [], False
    for layer, name in leaves_of(module, ""):
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
