"""Sequences of normalised convolutions and residual blocks, for kernels that have passes for all of them together.

A normalised convolution is a convolution without bias, group normalisation and ReLU. Without autograd, a step computes
as many of them as follow each other at once. Where that is not possible, the layers are computed one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...tasks.models import Residual
from ..kernels.plain import Block, Gradient, LayerKernels, NormalisedConv, Window
from .direct import backward_pass, forward_pass, is_direct
from .layer_registry import Passes, StackedLayer, StackedPass
from .layers import layer_weights
from .sequences import NamedLayer, hooked, joined, leaves_of, run_sequence, stack_first, stack_leaves


@dataclass(frozen=True, slots=True)
class _Pair:
    """A convolution and the normalisation that follows it."""

    conv: nn.Conv2d
    conv_name: str
    norm: nn.GroupNorm
    norm_name: str

    def bind(self, context: StackedPass) -> NormalisedConv:
        assert not isinstance(self.conv.padding, str)
        (kh, kw), (sh, sw), (down, across) = self.conv.kernel_size, self.conv.stride, self.conv.padding
        window = Window((kh, kw), (sh, sw), (down, across))
        weights = layer_weights(self.conv, self.conv_name, context), layer_weights(self.norm, self.norm_name, context)
        return NormalisedConv(weights[0], window, weights[1], self.norm.num_groups, self.norm.eps)


_Pairs = tuple[_Pair, _Pair | None, _Pair | None]
"""The normalised convolutions of a block, in the order of the fields of ``Block``."""


def stack_blocks(leaves: Sequence[NamedLayer], kernels: LayerKernels) -> StackedLayer:
    """Stack the first of these layers, together with all that follow it in one sequence of blocks, if it begins one."""
    found, count = _find_blocks(leaves) if kernels.fuses_blocks else ([], 0)
    if not found:
        return stack_first(leaves, kernels)
    layers = stack_leaves(leaves[:count], kernels, stack_first)
    layer = replace(joined(layers, partial(run_sequence, layers)), absorbs=count - 1)
    return replace(layer, passes=partial(_passes, layers, found, kernels)) if is_direct(layers) else layer


def _passes(
    layers: Sequence[StackedLayer], found: Sequence[_Pairs], kernels: LayerKernels, context: StackedPass
) -> Passes:
    one_by_one = [layer.passes(context) for layer in layers if layer.passes is not None]
    blocks = [
        Block(first.bind(context), *(None if pair is None else pair.bind(context) for pair in others))
        for first, *others in found
    ]

    def forward(x: Tensor) -> tuple[Tensor, Any]:
        result = kernels.blocks(x.permute(0, 2, 3, 1), blocks)
        if result is None:
            out, saved = forward_pass(one_by_one, x)
            return out, (False, saved)
        return result[0].permute(0, 3, 1, 2), (True, result[1])

    def backward(grad: Tensor, kept: Any, needs_x: bool) -> Gradient:
        fused, saved = kept
        if not fused:
            return backward_pass(one_by_one, grad, saved, 0, needs_x)
        grad_x = kernels.blocks_backward(grad.permute(0, 2, 3, 1), saved, blocks, needs_x)
        return None if grad_x is None else grad_x.permute(0, 3, 1, 2)

    return forward, backward


def _find_blocks(leaves: Sequence[NamedLayer]) -> tuple[list[_Pairs], int]:
    """Return the blocks with which these layers begin, and the number of their layers."""
    found, count = list[_Pairs](), 0
    while count < len(leaves):
        pairs, taken = _residual_pairs(leaves[count]), 1
        if pairs is None and (pair := _pair(leaves[count : count + 3], relu=True)) is not None:
            pairs, taken = (pair, None, None), 3
        if pairs is None:
            break
        found.append(pairs)
        count += taken
    return found, count


def _residual_pairs(leaf: NamedLayer) -> _Pairs | None:
    """Return the normalised convolutions of a residual block that kernels may fuse."""
    module, name = leaf
    if type(module) is not Residual or hooked(module):
        return None
    body, shortcut = (list(leaves_of(part, f"{name}{key}.")) for key, part in _branches(module))
    first, second = _pair(body[:3], relu=True), _pair(body[3:], relu=False)
    if first is None or second is None or tuple(second.conv.stride) != (1, 1):
        return None
    if len(shortcut) == 1 and type(shortcut[0][0]) is nn.Identity and not hooked(shortcut[0][0]):
        return first, second, None
    third = _pair(shortcut, relu=False)
    small = third is not None and tuple(third.conv.kernel_size) == (1, 1) and tuple(third.conv.padding) == (0, 0)
    return (first, second, third) if small else None


def _branches(module: Residual) -> tuple[tuple[str, nn.Module], ...]:
    return ("body", module.body), ("shortcut", module.shortcut)


def _pair(leaves: Sequence[NamedLayer], relu: bool) -> _Pair | None:
    """Return a convolution and its normalisation, if these layers are such a pair, and ReLU if there must be one."""
    kinds = [nn.Conv2d, nn.GroupNorm, nn.ReLU][: 2 + relu]
    if [type(layer) for layer, _ in leaves] != kinds or any(hooked(layer) for layer, _ in leaves):
        return None
    (conv, conv_name), (norm, norm_name) = leaves[:2]
    assert isinstance(conv, nn.Conv2d)
    assert isinstance(norm, nn.GroupNorm)
    return _Pair(conv, conv_name, norm, norm_name) if norm.affine and _is_plain(conv) else None


def _is_plain(conv: nn.Conv2d) -> bool:
    """Return whether a convolution has no options that passes of blocks do not support."""
    if conv.bias is not None or conv.groups != 1 or tuple(conv.dilation) != (1, 1) or conv.padding_mode != "zeros":
        return False
    if conv.stride[0] != conv.stride[1] or isinstance(conv.padding, str):
        return False
    return all(padding < size for padding, size in zip(conv.padding, conv.kernel_size, strict=True))
