"""Triton kernels of group normalisation with ReLU: the SGD update of scale and shift follows the backward pass.

In steps with 16-bit operands (``triton_half.py``), the forward pass also adds the shortcut of a residual block, and
both passes store their results as the operand of a convolution. The power of two of a client then comes from a bound
of its largest magnitude, because a program knows one sample only. No normalised value of a group of n is above √n, and
no gradient of its inputs is above √n · the largest gradient · the largest weight · the largest inverse deviation. The
bounds exceed the maxima by some powers of two, while 16-bit numbers have eleven binary digits over 28 powers of two.
Where a sample without gradients is flat, the largest inverse deviation is 1/√eps. Beside samples with deviations above
10⁵ or so, whose gradients it does not concern, this bound is too large: few digits of these gradients remain.

Values are (C·B, pixels, channels), one C for each client. One program computes one sample, whose values are read once.
The results of a client depend on its own numbers only. Kernels skip clients with learning rate zero.
"""

# Triton's language has no types that a checker knows, and its arguments are named as in the formulas.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from .triton_half import _powers_of
from .triton_kernels import _magnitude_bits, _output_gradient


@triton.jit
def _sums(values, P: tl.constexpr, G: tl.constexpr, CG: tl.constexpr):
    """Return the sum of every group of channels, in a shape that broadcasts with (pixels, groups, channels)."""
    return tl.sum(tl.sum(tl.reshape(values, (P, G, CG)), 2), 0)[None, :, None]


@triton.jit
def _by_channel(values, BP: tl.constexpr, G: tl.constexpr, CG: tl.constexpr):
    return tl.reshape(tl.broadcast_to(values, (BP, G, CG)), (BP, G * CG))


@triton.jit
def _largest(magnitudes):
    """Return the largest of one-dimensional magnitudes, and NaN if there is one."""
    return tl.max(_magnitude_bits(magnitudes), 0).to(tl.float32, bitcast=True)


@triton.jit
def _store_half(values, at, inside, c, first, bound, half, scales):
    """Store values below a bound as 16-bit numbers; the first program of a client stores what to multiply them by."""
    power, inverse = _powers_of(_magnitude_bits(bound))
    tl.store(half + at, (values * power).to(tl.float16), mask=inside)
    if first:
        tl.store(scales + c, inverse)


@triton.jit(do_not_specialize=["B", "P"])
def group_norm(x, weight, bias, rates, added, bounds_added, out, half, scales, bounds, moments, B, P, eps,
               G: tl.constexpr, CG: tl.constexpr, RELU: tl.constexpr, BIAS: tl.constexpr, SKIP: tl.constexpr,
               ADD: tl.constexpr, FULL: tl.constexpr, BOUND: tl.constexpr, HALF: tl.constexpr,
               BP: tl.constexpr):  # fmt: skip
    """Compute normalised values times weight plus bias, and store mean and inverse deviation of every group.

    With ADD, other values are added before ReLU. FULL stores float32, BOUND a bound of every client's magnitudes, and
    HALF, which needs BOUND, 16-bit numbers.
    """
    sample = tl.program_id(0).to(tl.int64)
    c = sample // B
    if SKIP:
        if tl.load(rates + c) == 0.0:
            return
    CHANNELS: tl.constexpr = G * CG
    pixel = tl.arange(0, BP)
    channel = tl.arange(0, CHANNELS)
    at = sample * P * CHANNELS + pixel[:, None] * CHANNELS + channel[None, :]
    inside = (pixel < P)[:, None] & (channel < CHANNELS)[None, :]
    values = tl.load(x + at, mask=inside, other=0.0)
    count = (P * CG).to(tl.float32)
    mean = _sums(values, BP, G, CG) / count
    centred = tl.where(inside, values - _by_channel(mean, BP, G, CG), 0.0)
    inverse = tl.rsqrt(_sums(centred * centred, BP, G, CG) / count + eps)
    scale = tl.load(weight + c * CHANNELS + channel)
    result = centred * _by_channel(inverse, BP, G, CG) * scale[None, :]
    if BIAS:
        result += tl.load(bias + c * CHANNELS + channel)[None, :]
    if ADD:
        result += tl.load(added + at, mask=inside, other=0.0)
    if RELU:
        result = tl.where(result <= 0, 0.0, result)
    if FULL:
        tl.store(out + at, result, mask=inside)
    if BOUND:
        bound = tl.abs(scale) * tl.sqrt(count)
        if BIAS:
            bound += tl.abs(tl.load(bias + c * CHANNELS + channel))
        bound = _largest(bound)
        if ADD:
            bound += tl.load(bounds_added + c)
        if sample % B == 0:
            tl.store(bounds + c, bound)
        if HALF:
            _store_half(result, at, inside, c, sample % B == 0, bound, half, scales)
    group = tl.arange(0, G)
    tl.store(moments + sample * (2 * G) + group, tl.reshape(mean, (G,)))
    tl.store(moments + sample * (2 * G) + G + group, tl.reshape(inverse, (G,)))


@triton.jit
def _gradient_bound(maxima, moments, weights, count, c, B, tiles, G: tl.constexpr, BB: tl.constexpr,
                    BT: tl.constexpr):  # fmt: skip
    """Return a bound of the gradients of a client's inputs; ``maxima`` are the bits of those of its outputs."""
    tile = tl.arange(0, BT)
    largest = tl.max(tl.load(maxima + c * tiles + tile, mask=tile < tiles, other=0), 0).to(tl.float32, bitcast=True)
    at = tl.arange(0, BB * G)
    inverses = moments + c * B * (2 * G) + at // G * (2 * G) + G + at % G
    steepest = _largest(tl.load(inverses, mask=at < B * G, other=0.0))
    return largest * _largest(weights) * steepest * tl.sqrt(count)


@triton.jit
def _store_dilated(values, pixel, channel, sample, P, bound, c, first, half, scales, CHANNELS: tl.constexpr,
                   WIDTH: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Store values below a bound as 16-bit numbers, with zeros between the lines and columns of an image."""
    WIDE: tl.constexpr = (WIDTH - 1) * D + 1
    high = (P // WIDTH - 1) * D + 1
    for number in tl.static_range(D * D):
        y = pixel // WIDTH * D + number // D
        x = pixel % WIDTH * D + number % D
        inside = ((pixel < P) & (y < high) & (x < WIDE))[:, None] & (channel < CHANNELS)[None, :]
        at = ((sample * high + y) * WIDE + x)[:, None] * CHANNELS + channel[None, :]
        if number == 0:
            _store_half(values, at, inside, c, first, bound, half, scales)
        else:
            tl.store(half + at, tl.zeros_like(values).to(tl.float16), mask=inside)


@triton.jit(do_not_specialize=["B", "P", "tiles"])
def group_norm_backward(grad, x, out, moments, weight, rates, maxima, grad_x, scales, sums, B, P, tiles,
                        G: tl.constexpr, CG: tl.constexpr, RELU: tl.constexpr, INPUTS: tl.constexpr,
                        HALF: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, BB: tl.constexpr, BT: tl.constexpr,
                        BP: tl.constexpr):  # fmt: skip
    """Compute the gradient of the inputs, and the sums over pixels that the gradients of weight and bias are.

    With HALF, the former are 16-bit numbers, in images that are WIDTH pixels wide and dilated by D.
    """
    sample = tl.program_id(0).to(tl.int64)
    c = sample // B
    if tl.load(rates + c) == 0.0:
        return
    CHANNELS: tl.constexpr = G * CG
    pixel = tl.arange(0, BP)
    channel = tl.arange(0, CHANNELS)
    group = tl.arange(0, G)
    at = sample * P * CHANNELS + pixel[:, None] * CHANNELS + channel[None, :]
    inside = (pixel < P)[:, None] & (channel < CHANNELS)[None, :]
    g = _output_gradient(grad, out, at, inside, RELU)
    mean = tl.load(moments + sample * (2 * G) + group)[None, :, None]
    inverse = _by_channel(tl.load(moments + sample * (2 * G) + G + group)[None, :, None], BP, G, CG)
    values = tl.load(x + at, mask=inside, other=0.0)
    normal = tl.where(inside, (values - _by_channel(mean, BP, G, CG)) * inverse, 0.0)
    tl.store(sums + sample * (2 * CHANNELS) + channel, tl.sum(g * normal, 0))
    tl.store(sums + sample * (2 * CHANNELS) + CHANNELS + channel, tl.sum(g, 0))
    if INPUTS:
        weights = tl.load(weight + c * CHANNELS + channel)
        scaled = g * weights[None, :]
        count = (P * CG).to(tl.float32)
        along = _sums(scaled * normal, BP, G, CG) / count
        level = _sums(scaled, BP, G, CG) / count
        result = (scaled - _by_channel(level, BP, G, CG) - normal * _by_channel(along, BP, G, CG)) * inverse
        if HALF:
            bound = _gradient_bound(maxima, moments, weights, count, c, B, tiles, G, BB, BT)
            first = sample % B == 0
            _store_dilated(result, pixel, channel, sample, P, bound, c, first, grad_x, scales, CHANNELS, WIDTH, D)
        else:
            tl.store(grad_x + at, result, mask=inside)


@triton.jit(do_not_specialize=["B"])
def norm_step(sums, weight, bias, rates, B, CHANNELS: tl.constexpr, WEIGHT: tl.constexpr,
              BIAS: tl.constexpr):  # fmt: skip
    """Update weight and bias by the sums of all samples of a client, added in their order."""
    c = tl.program_id(0).to(tl.int64)
    rate = tl.load(rates + c)
    if rate == 0.0:
        return
    channel = tl.arange(0, CHANNELS)
    along = tl.zeros((CHANNELS,), dtype=tl.float32)
    level = tl.zeros((CHANNELS,), dtype=tl.float32)
    for sample in range(B):
        at = sums + (c * B + sample) * (2 * CHANNELS) + channel
        along += tl.load(at)
        level += tl.load(at + CHANNELS)
    to = c * CHANNELS + channel
    if WEIGHT:
        tl.store(weight + to, tl.load(weight + to) - rate * along)
    if BIAS:
        tl.store(bias + to, tl.load(bias + to) - rate * level)
