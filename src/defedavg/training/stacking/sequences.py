"""Sequences of layers, stacked one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from torch import Tensor, nn

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


def run_sequence(layers: Sequence[StackedLayer], context: StackedPass, x: Tensor) -> Tensor:
    """Return the outputs of stacked layers, one after the other."""
    for layer in layers:
        x = layer.run(context, x)
    return x
