"""Group normalisation of stacked models with Triton, and blocks of normalised convolutions.

Steps with TF32 have 16-bit operands of convolutions. Inside a sequence of blocks, normalisation stores these operands
itself, in both passes (``triton_norm.py``), adds the shortcut of a residual block, and applies its ReLU. The gradients
of both branches are added where the second one is computed. So float32 values are neither written nor read between
layers, except where two of them are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import triton_norm
from .plain import Block, Gradient, LayerWeights, NormalisedConv, Saved
from .triton_configs import filled, power_of_two, tile_for
from .triton_convolutions import Epilogue, Operand, TritonConvolutions, aligned, aligned_channels, conv_programs, dense

NORM_VALUES = 16384  # of one sample: plain operations normalise larger ones

_Sizes = tuple[int, int, int]
"""Height, width and channels of images."""


@dataclass(frozen=True, slots=True)
class Images:
    """Outputs of a normalisation, (C·B, H, W, channels): float32, 16-bit numbers, or both."""

    full: Tensor | None = None
    half: Operand | None = None
    bounds: Tensor | None = None  # (C,): no magnitude of a client is above its bound

    @property
    def mask(self) -> Tensor:
        """The values that tell where ReLU passes a gradient; a 16-bit zero is one in the next layer, too."""
        values = self.full if self.half is None or self.full is not None else self.half.values
        assert values is not None
        return values


@dataclass(frozen=True, slots=True)
class KeptConv:
    """What the backward pass of a normalised convolution needs."""

    x: Operand
    weight: Operand
    values: Tensor  # before normalisation
    moments: Tensor


@dataclass(frozen=True, slots=True)
class KeptBlock:
    """What the backward pass of a block needs; ``between`` is the mask of the ReLU between both convolutions."""

    out: Tensor
    first: KeptConv
    second: KeptConv | None = None
    between: Tensor | None = None
    shortcut: KeptConv | None = None


@dataclass(frozen=True, slots=True)
class Slopes:
    """The gradient of images, (C·B, H, W, channels)."""

    values: Tensor
    maxima: Tensor  # (C, parts): the bits of the largest magnitudes; or of larger ones

    def before_relu(self, out: Tensor) -> Epilogue:
        """Return how a convolution adds this gradient, of outputs with ReLU, to its own result."""
        return Epilogue(self.values, out)


class TritonNormalised(TritonConvolutions):
    """Group normalisation; in steps with TF32 also blocks of normalised convolutions."""

    def __init__(self, precision: str) -> None:
        super().__init__(precision)
        self.fuses_blocks = precision == "tf32"

    def group_norm(self, x: Tensor, params: LayerWeights, groups: int, eps: float, relu: bool) -> tuple[Tensor, Saved]:
        """Do what ``LayerKernels.group_norm`` does."""
        if not _norm_fits(x, groups):
            return super().group_norm(x, params, groups, eps, relu)
        out = torch.empty_like(x)
        moments = self._normalise(x.permute(0, 2, 3, 1), params, groups, eps, relu, Images(out))
        return out, (x, out if relu else x, moments)

    def group_norm_backward(
        self, grad: Tensor, saved: Saved, params: LayerWeights, groups: int, relu: bool, needs_x: bool
    ) -> Gradient:
        """Do what ``LayerKernels.group_norm_backward`` does."""
        if not _norm_fits(saved[0], groups):
            return super().group_norm_backward(grad, saved, params, groups, relu, needs_x)
        x, out, moments = saved
        grad = grad.contiguous(memory_format=torch.channels_last)
        grad_x = torch.empty_like(x) if needs_x else None
        images = x.permute(0, 2, 3, 1)
        self._normalise_backward(grad, images, out if relu else None, moments, params, groups, grad_x)
        return grad_x

    def _normalise(
        self, x: Tensor, params: LayerWeights, groups: int, eps: float, relu: bool, out: Images,
        added: Images | None = None,
    ) -> Tensor:  # fmt: skip
        """Store the normalised images (C·B, H, W, channels), and return means and inverse deviations."""
        samples, height, width, channels = x.shape
        moments, added = x.new_empty((samples, 2, groups)), added or Images()
        half = out.half or Operand(x)
        triton_norm.group_norm[samples,](
            x, params.weight, *filled(x, params.bias, params.rates, added.full, added.bounds, out.full), half.values,
            *filled(x, half.scales, out.bounds), moments, samples // len(params), height * width, eps, G=groups,
            CG=channels // groups, RELU=relu, BIAS=params.bias is not None, SKIP=params.rates is not None,
            ADD=added.full is not None, FULL=out.full is not None, BOUND=out.bounds is not None,
            HALF=out.half is not None, **_norm_config(x),
        )  # fmt: skip
        return moments

    def _normalise_backward(
        self, grad: Tensor, x: Tensor, mask: Tensor | None, moments: Tensor, params: LayerWeights, groups: int,
        grad_x: Tensor | None, half: tuple[Tensor, Tensor, int] | None = None,
    ) -> None:  # fmt: skip
        """Store the gradient of the images and update the parameters; ``half``: maxima, factors and dilation."""
        samples, height, width, channels = x.shape
        size, sums = samples // len(params), x.new_empty((samples, 2, channels))
        maxima, scales, dilation = half or (x, x, 1)
        bias, rates = filled(x, params.updated_bias, params.rates)
        triton_norm.group_norm_backward[samples,](
            grad, x, *filled(x, mask), moments, params.weight, rates, maxima, *filled(x, grad_x), scales, sums, size,
            height * width, maxima.shape[1], G=groups, CG=channels // groups, RELU=mask is not None,
            INPUTS=grad_x is not None, HALF=half is not None, WIDTH=width, D=dilation, BB=power_of_two(size),
            BT=power_of_two(maxima.shape[1]), **_norm_config(x),
        )  # fmt: skip
        triton_norm.norm_step[len(params),](
            sums, params.updated_weight, bias, rates, size, CHANNELS=channels, WEIGHT=params.trainable[0],
            BIAS=params.trainable[1],
        )  # fmt: skip

    def blocks(self, x: Tensor, blocks: Sequence[Block]) -> tuple[Tensor, list[Any]] | None:
        """Do what ``LayerKernels.blocks`` says."""
        if not _blocks_fit(x.shape, blocks):
            return None
        images, kept = self._first_images(x, blocks[0]), []
        for number, block in enumerate(blocks):
            following = blocks[number + 1] if number + 1 < len(blocks) else None
            images, saved = self._block(images, block, following)
            kept.append(saved)
        assert images.full is not None
        return images.full, [x.shape, kept]

    def _first_images(self, x: Tensor, block: Block) -> Images:
        params, images = block.first.conv, aligned(x)
        maxima, _, _ = found = self._maxima(images, params)
        bounds = maxima.amax(1).view(torch.float32) if block.adds_inputs else None
        return Images(images if block.adds_inputs else None, self._stored(images, params, *found), bounds)

    def _block(self, x: Images, block: Block, following: Block | None) -> tuple[Images, KeptBlock]:
        half, full = following is not None, following is None or following.adds_inputs
        assert x.half is not None
        if block.second is None:
            out, first = self._unit(x.half, block.first, True, full, half)
            return out, KeptBlock(out.mask, first)
        between, first = self._unit(x.half, block.first, True, False, True)
        assert between.half is not None
        shortcut, added = None, x
        if block.shortcut is not None:
            added, shortcut = self._unit(x.half, block.shortcut, False, True, False)
        out, second = self._unit(between.half, block.second, True, full, half, added)
        return out, KeptBlock(out.mask, first, second, between.mask, shortcut)

    def _unit(
        self, x: Operand, unit: NormalisedConv, relu: bool, full: bool, half: bool, added: Images | None = None
    ) -> tuple[Images, KeptConv]:
        """Return the normalised convolution of images: float32, 16-bit numbers, or both."""
        weight, window, clients = self._operand(unit.conv.weight, unit.conv), unit.window, len(unit.conv)
        shape = len(x.values), *window.out(*x.values.shape[1:3]), unit.conv.weight.shape[1]
        values = unit.conv.weight.new_empty(shape)
        edges = window.padding != (0, 0)
        self._conv(x, weight, None, unit.conv.rates, values, values, window, edges)
        operand = Operand(torch.empty_like(values, dtype=torch.float16), values.new_empty(clients)) if half else None
        out = Images(torch.empty_like(values) if full else None, operand, values.new_empty(clients))
        moments = self._normalise(values, unit.norm, unit.groups, unit.eps, relu, out, added)
        return out, KeptConv(x, weight, values, moments)

    def blocks_backward(self, grad: Tensor, saved: list[Any], blocks: Sequence[Block], needs_x: bool) -> Gradient:
        """Do what ``LayerKernels.blocks_backward`` says."""
        shape, kept = saved
        grad = grad.contiguous()
        maxima, _, _ = self._maxima(grad, blocks[-1].first.conv)
        slopes: Slopes | None = Slopes(grad, maxima)
        for number in range(len(blocks) - 1, -1, -1):
            assert slopes is not None
            of_x = kept[number - 1].out.shape if number else shape
            slopes = self._block_backward(slopes, kept.pop(), blocks[number], of_x if number or needs_x else None)
        return None if slopes is None else slopes.values

    def _block_backward(self, slopes: Slopes, kept: KeptBlock, block: Block, shape: torch.Size | None) -> Slopes | None:
        """Update a block, and return the gradient of its images, if ``shape`` is that of the images."""
        after, mask = slopes, kept.out
        if block.second is not None and kept.second is not None and kept.between is not None:
            grad = self._unit_gradient(slopes, mask, kept.second, block.second)
            after, mask = self._images_gradient([(grad, kept.second, block.second)], kept.between.shape), kept.between
            self._conv_step(grad, kept.second.x, block.second.conv, kept.second.x.values.shape, block.second.window)
        stride = block.first.window.stride[0] if shape is not None else 1
        parts = [(self._unit_gradient(after, mask, kept.first, block.first, stride), kept.first, block.first)]
        if block.shortcut is not None and kept.shortcut is not None:
            parts.append((self._unit_gradient(slopes, kept.out, kept.shortcut, block.shortcut), kept.shortcut,
                          block.shortcut))  # fmt: skip
        result = None
        if shape is not None:
            result = self._images_gradient(parts, shape, slopes.before_relu(kept.out) if block.adds_inputs else None)
        for number, (grad, of_conv, unit) in enumerate(parts):
            dilated = number == 0 and shape is not None
            self._conv_step(grad, of_conv.x, unit.conv, of_conv.x.values.shape, unit.window, dilated)
        return result

    def _unit_gradient(
        self, slopes: Slopes, mask: Tensor, kept: KeptConv, unit: NormalisedConv, dilation: int = 1
    ) -> Operand:
        """Return the gradient of a convolution's outputs, dilated with zeros, and update the normalisation."""
        samples, height, width, channels = kept.values.shape
        size = (samples, (height - 1) * dilation + 1, (width - 1) * dilation + 1, channels)
        values, scales = kept.values.new_empty(size, dtype=torch.float16), kept.values.new_empty(len(unit.conv))
        half = slopes.maxima, scales, dilation
        self._normalise_backward(slopes.values, kept.values, mask, kept.moments, unit.norm, unit.groups, values, half)
        return Operand(values, scales)

    def _images_gradient(
        self, parts: Sequence[tuple[Operand, KeptConv, NormalisedConv]], shape: torch.Size,
        added: Epilogue | None = None,
    ) -> Slopes:  # fmt: skip
        """Return the gradient of the images of a convolution, or of two: the second one has 1×1 kernels, no padding.

        The gradient of the second one's outputs is not dilated: a result is added to every so many lines and columns.
        """
        values = parts[0][1].values.new_empty(shape)
        spreads = [1 if number == 0 else unit.window.stride[0] for number, (_, _, unit) in enumerate(parts)]
        edges = [number == 0 for number in range(len(parts))]
        programs = [
            conv_programs(grad, dense(unit.window), edge, shape, unit.conv, spread)
            for (grad, _, unit), edge, spread in zip(parts, edges, spreads, strict=True)
        ]
        maxima = values.new_empty((len(parts[0][2].conv), sum(programs)), dtype=torch.int32)
        for number, (grad, kept, unit) in enumerate(parts):
            onto = added or Epilogue() if number == 0 else Epilogue(values)
            also = Epilogue(onto.added, onto.mask_of, maxima, sum(programs[:number]), spreads[number])
            self._conv(grad, kept.weight, None, unit.conv.rates, values, values, dense(unit.window), edges[number],
                       flipped=True, also=also)  # fmt: skip
        return Slopes(values, maxima)


def _norm_fits(x: Tensor, groups: int) -> bool:
    """Return whether one program can normalise a sample, stored channels last, at once."""
    last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return last and _sizes_fit(x.shape[1], x[0, 0].numel(), groups)


def _sizes_fit(channels: int, pixels: int, groups: int) -> bool:
    powers = all(number & (number - 1) == 0 for number in (groups, channels))
    return powers and 0 < pixels * channels <= NORM_VALUES


def _blocks_fit(shape: torch.Size, blocks: Sequence[Block]) -> bool:
    """Return whether one program can normalise a sample at once, everywhere in these blocks, and no sum broadcasts."""
    sizes: _Sizes = (shape[1], shape[2], shape[3])
    if blocks[0].adds_inputs and aligned_channels(sizes[2]) != sizes[2]:
        return False
    for block in blocks:
        inputs = sizes
        for unit in (block.first, block.second):
            if unit is not None and not _unit_fits(sizes := _unit_sizes(sizes, unit), unit):
                return False
        shortcut = inputs if block.shortcut is None else _unit_sizes(inputs, block.shortcut)
        if block.shortcut is not None and not _unit_fits(shortcut, block.shortcut):
            return False
        if block.second is not None and shortcut != sizes:
            return False
    return True


def _unit_sizes(sizes: _Sizes, unit: NormalisedConv) -> _Sizes:
    return (*unit.window.out(*sizes[:2]), unit.conv.weight.shape[1])


def _unit_fits(sizes: _Sizes, unit: NormalisedConv) -> bool:
    height, width, channels = sizes
    return min(height, width) >= 1 and _sizes_fit(channels, height * width, unit.groups)


def _norm_config(x: Tensor) -> dict[str, int]:
    pixels = tile_for(x.shape[1] * x.shape[2], NORM_VALUES)
    return {"BP": pixels, "num_warps": max(1, min(16, pixels * x.shape[3] // 1024))}
