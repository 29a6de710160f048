"""Layers one by one, and chains of them: those with parameters together with the ReLU and the pooling behind them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from ..kernels.plain import LayerKernels
from . import layers
from .attention import KeyedAttention, attention
from .dropout import KeyedDropout, dropout
from .layers import CannotStack, Stacked, StackedLayer, Step

WEIGHTLESS = (
    nn.ReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.ReLU6, nn.SELU, nn.Mish, nn.Hardswish,
    nn.Softplus, nn.Softmax, nn.LogSoftmax, nn.Identity, nn.Flatten, nn.Unflatten, nn.MaxPool1d, nn.MaxPool2d,
    nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.ZeroPad2d,
    nn.InstanceNorm1d, nn.InstanceNorm2d,
)  # fmt: skip

Named = tuple[nn.Module, str]
"""A layer and how the names of its parameters begin."""


def is_sequence(module: nn.Module) -> bool:
    """Whether this calls its children one after the other, and does nothing else."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and not _hooked(module)


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _leaves(module: nn.Module, name: str) -> Iterator[Named]:
    if not is_sequence(module):
        yield module, name
        return
    for child, inner in module._modules.items():  # a layer that stands there twice counts twice
        assert inner is not None
        yield from _leaves(inner, f"{name}{child}.")


def part_of(module: nn.Module, name: str, products: LayerKernels) -> StackedLayer:
    """A single layer, stacked."""
    if _hooked(module):
        raise CannotStack(f"{name}: a layer with hooks")
    if type(module) is nn.Linear:
        return layers.linear(module, name, products)
    if type(module) is nn.Conv2d:
        return layers.conv(module, name, products)
    if type(module) is nn.LayerNorm:
        return layers.layer_norm(module, name)
    if type(module) is nn.GroupNorm:
        return layers.group_norm(module, name)
    if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        assert isinstance(module, nn.modules.batchnorm._BatchNorm)
        return layers.batch_norm(module, name)
    if type(module) is nn.Embedding:
        return layers.embedding(module, name)
    if isinstance(module, KeyedDropout):
        return dropout(module)
    if type(module) in (nn.MultiheadAttention, KeyedAttention):
        assert isinstance(module, nn.MultiheadAttention)
        return attention(module, name, products)
    if type(module) in WEIGHTLESS and next(module.parameters(), None) is None:
        return StackedLayer(lambda step, x: module(x))
    raise CannotStack(f"{type(module).__name__}")


def _is_halving(module: nn.Module) -> bool:
    """Whether this is a plain 2×2 maximum."""
    if type(module) is not nn.MaxPool2d or module.return_indices or module.ceil_mode:
        return False
    return all(given in (want, (want, want)) for given, want in (
        (module.kernel_size, 2), (module.stride, 2), (module.padding, 0), (module.dilation, 1),
    ))  # fmt: skip


def fused(leaves: Sequence[Named], products: LayerKernels) -> tuple[StackedLayer, int]:
    """The first of these layers, with those behind it that it can take in, and how many these are together."""
    (first, name), behind = leaves[0], [inner for inner, _ in leaves[1:3]]
    relu = bool(behind) and type(behind[0]) is nn.ReLU and not _hooked(first) and not _hooked(behind[0])
    pool = relu and len(behind) == 2 and _is_halving(behind[1]) and not _hooked(behind[1])
    if relu and type(first) is nn.Conv2d:
        return layers.conv(first, name, products, relu=True, pool=pool), 3 if pool else 2
    if relu and type(first) is nn.Linear:
        return layers.linear(first, name, products, relu=True), 2
    return part_of(first, name, products), 1


def chain(module: nn.Module, products: LayerKernels) -> Stacked:
    """A chain of known layers, stacked."""
    leaves, parts = list(_leaves(module, "")), list[StackedLayer]()
    while leaves:
        part, taken = fused(leaves, products)
        parts.append(part)
        leaves = leaves[taken:]

    def run(step: Step, x: Tensor) -> Tensor:
        for part in parts:
            x = part.run(step, x)
        return x

    return Stacked(
        run,
        frozenset(name for part in parts for name in part.moved),
        frozenset(name for part in parts for name in part.turned),
    )
